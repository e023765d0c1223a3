"""Indexing: elements taken from, put into, or added to places that an index names."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.complex_numbers import complex_ops, is_complex
from edge_opt.cost.rules import Work, aten, cost_rule
from edge_opt.records import Shape, TensorInfo

_MASKS = ("bool", "uint8")


def _nbytes(values: tuple[Any, ...]) -> int:
    return sum(
        item.nbytes
        for value in values
        for item in (value if isinstance(value, tuple) else (value,))
        if isinstance(item, TensorInfo)
    )


def _size(target: TensorInfo, elements: int) -> int:
    """Bytes of so many elements of the target's type."""
    return elements * (target.nbytes // target.elements) if target.elements else 0


@cost_rule(
    aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.take_along_dim,
    "aten::_unsafe_masked_index", kind="movement",
)  # fmt: skip
def gathered(out: TensorInfo, source: TensorInfo, *indices: Any, **_: Any) -> Work:
    """Only the elements taken are read, and the indices."""
    return Work(bytes_read=out.nbytes + _nbytes(indices))


class _Written:
    """How many elements an operator writes, and what it computes for each."""

    def __init__(self, elements: int, ops: int, is_accumulating: bool) -> None:
        self.elements = elements
        self.ops = ops
        self.is_accumulating = is_accumulating

    def work(self, target: TensorInfo, others: tuple[Any, ...], is_in_place: bool) -> Work:
        """In place only the named elements move; otherwise the target is copied first, and every operand read once."""
        if not is_in_place:
            return Work(other_ops=self.ops)
        moved = min(_size(target, self.elements), target.nbytes)
        return Work(
            other_ops=self.ops,
            bytes_read=_nbytes(others) + (moved if self.is_accumulating else 0),
            bytes_written=moved,
        )


def _added(target: TensorInfo, elements: int, per_element: int = 1) -> _Written:
    """Each element is added to the target, or multiplied with it, or compared."""
    ops = complex_ops("aten.add", 1) if is_complex(target) else 1
    return _Written(elements, elements * ops * per_element, True)


def _reduced(target: TensorInfo, elements: int, reduce: Any) -> _Written:
    """One operation for each element put in; a mean also counts them, and divides each element of the target."""
    if reduce is None:
        return _Written(elements, 0, False)
    if reduce == "mean":
        return _Written(elements, 2 * elements + target.elements, True)
    if is_complex(target) and reduce in ("prod", "multiply"):
        return _Written(elements, elements * complex_ops("aten.mul", 1), True)
    return _added(target, elements)


def _scatter(target: TensorInfo, dim: Any, index: TensorInfo, *rest: Any, **options: Any) -> _Written:
    reduce = options.get("reduce") or next((value for value in rest if isinstance(value, str)), None)
    return _reduced(target, index.elements, reduce)


def _scatter_add(target: TensorInfo, dim: Any, index: TensorInfo, *_: Any, **__: Any) -> _Written:
    return _added(target, index.elements)


def _index_add(
    target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo, alpha: Any = 1, **_: Any
) -> _Written:
    """A factor `alpha` is one multiplication more."""
    return _added(target, source.elements, 1 if alpha == 1 else 2)


def _index_reduce(
    target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo, reduce: str, **_: Any
) -> _Written:
    return _reduced(target, source.elements, reduce)


def _index_fill(target: TensorInfo, dim: int, index: TensorInfo, value: Any) -> _Written:
    lines = target.elements // max(target.shape[dim], 1) if target.shape else 1
    return _Written(lines * index.elements, 0, False)


def _index_copy(target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo) -> _Written:
    return _Written(source.elements, 0, False)


def _masked_scatter(target: TensorInfo, mask: TensorInfo, source: TensorInfo) -> _Written:
    """As many as the mask may let through."""
    return _Written(min(target.elements, source.elements), 0, False)


def _put(target: TensorInfo, index: TensorInfo, source: TensorInfo, accumulate: bool = False) -> _Written:
    return _added(target, index.elements) if accumulate else _Written(index.elements, 0, False)


def _index_put(
    target: TensorInfo, indices: tuple[Any, ...], values: TensorInfo, accumulate: bool = False, *_: Any
) -> _Written:
    elements = _places(target, indices, values)
    return _added(target, elements) if accumulate else _Written(elements, 0, False)


def _masked_put_accumulate(target: TensorInfo, mask: Any, indices: tuple[Any, ...], values: TensorInfo) -> _Written:
    return _added(target, _places(target, indices, values))


def _places(target: TensorInfo, indices: tuple[Any, ...], values: TensorInfo) -> int:
    """How many elements an index names: one for each of its own, times the dimensions it leaves whole.

    A mask names as many as there are values for it; as many as it has elements, where one value goes everywhere.
    """
    taken: list[Shape] = []
    kept: list[int] = []
    axis = 0
    has_mask = False
    for index in indices:
        if not isinstance(index, TensorInfo):
            kept.append(target.shape[axis])
            axis += 1
        elif index.dtype in _MASKS:
            has_mask = True
            taken.append((index.elements,))
            axis += max(len(index.shape), 1)
        else:
            taken.append(index.shape)
            axis += 1
    kept += target.shape[axis:]
    if has_mask and len(values.shape) == 1 + len(kept):
        return values.elements
    return prod(_broadcast(taken)) * prod(kept)


def _broadcast(shapes: list[Shape]) -> Shape:
    longest = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _values(target: TensorInfo, source: TensorInfo, *_: Any, **__: Any) -> _Written:
    return _Written(source.elements, 0, False)


for _operator, _count in {
    "scatter": _scatter, "scatter_add": _scatter_add, "scatter_reduce": _scatter, "index_add": _index_add,
    "index_reduce": _index_reduce, "index_fill": _index_fill, "index_copy": _index_copy,
    "masked_scatter": _masked_scatter, "put": _put, "index_put": _index_put, "_unsafe_index_put": _index_put,
    "_index_put_impl": _index_put, "_unsafe_masked_index_put_accumulate": _masked_put_accumulate,
    "slice_scatter": _values, "select_scatter": _values, "diagonal_scatter": _values, "as_strided_scatter": _values,
}.items():  # fmt: skip

    def _rule(count: Any, is_in_place: bool) -> Any:
        def rule(out: TensorInfo, target: TensorInfo, *args: Any, **kwargs: Any) -> Work:
            written: _Written = count(target, *args, **kwargs)
            return written.work(target, (*args, *kwargs.values()), is_in_place)

        return rule

    cost_rule(f"aten::{_operator}", kind="movement")(_rule(_count, is_in_place=False))
    cost_rule(f"aten::{_operator}_", kind="movement")(_rule(_count, is_in_place=True))
