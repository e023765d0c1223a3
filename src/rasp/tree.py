"""The tree of module calls, each with the work it does itself by rasp's convention."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rasp.counting import Count, PricedOp, count_call, own_costs
from rasp.measuring import NOTHING, Measured

if TYPE_CHECKING:
    from edge_opt import ModelProfile
    from edge_opt.records import ModuleCall, ModuleMemory, OpCall, Trace

Shapes = tuple[Any, ...]
"""One tensor's shape, or a tuple of shapes where there are several tensors."""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of one module. `own` and `params` leave out its children, which have nodes of their own.

    `params` stand with the first call of their module, and are those the run reads: a head that is only used in
    training is not among them. `dtype` is that of most of the call's arithmetic; None where there is none. What was
    measured: its own seconds, when it ended since the start of the forward, and device memory around it.
    """

    index: int
    name: str
    type: str
    in_shape: Shapes
    out_shape: Shapes
    params: int
    own: Count
    dtype: str | None
    children: tuple[Node, ...]
    own_s: float = math.nan
    end_s: float = math.nan
    memory: ModuleMemory | None = None

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def total(self) -> Count:
        """The call with everything beneath it."""
        return sum((node.own for node in self.walk()), Count())

    def walk(self) -> Iterator[Node]:
        """This node and all beneath it, in the order in which the calls began."""
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(profile: ModelProfile, measured: Measured = NOTHING) -> Node:
    """The module calls of a profile, counted and measured; the root is the model itself."""
    return _Builder(profile, measured).node(0)[0]


class _Builder:
    """A profile's operators and calls, sorted by the module call they belong to."""

    def __init__(self, profile: ModelProfile, measured: Measured) -> None:
        self.profile = profile
        self.measured = measured
        self.ops: dict[int, list[OpCall]] = defaultdict(list)
        for op in profile.trace.ops:
            self.ops[op.module].append(op)
        self.children: dict[int, list[int]] = defaultdict(list)
        for call in profile.trace.modules:
            if call.parent is not None:
                self.children[call.parent].append(call.index)

    def node(self, index: int) -> tuple[Node, dict[int, int]]:
        """The node of one call, and the parameters read in it: elements by storage."""
        call = self.profile.trace.modules[index]
        below = [self.node(child) for child in self.children[index]]
        children = tuple(child for child, _ in below)
        reads = _parameters_read(self.profile.trace, self.ops[index])
        for _, more in below:
            reads.update(more)
        operators = self._priced(index)
        # With a parametrized weight the layer itself is no leaf, and still the layer it was.
        is_layer = call.is_leaf or call.kind.startswith("Parametrized")
        return Node(
            index,
            f".{call.path}",
            call.kind,
            _joined(call.input_shapes),
            _joined(call.output_shapes),
            _params(call, children, reads),
            count_call(operators) if is_layer else own_costs(operators),
            _main_dtype(operators),
            children,
            self.measured.own_s.get(index, math.nan),
            self.measured.end_s.get(index, math.nan),
            self.measured.memory.get(index),
        ), reads

    def _priced(self, index: int) -> list[PricedOp]:
        signatures, prices = self.profile.trace.signatures, self.profile.prices
        return [PricedOp(signatures[op.signature], prices[op.signature]) for op in self.ops[index]]


def _joined(shapes: tuple[tuple[int, ...], ...]) -> Shapes:
    return shapes[0] if len(shapes) == 1 else shapes


def _parameters_read(trace: Trace, ops: Sequence[OpCall]) -> dict[int, int]:
    return {
        storage: tensor.elements
        for op in ops
        for storage, tensor in zip(op.reads, trace.signatures[op.signature].inputs, strict=True)
        if trace.storages[storage].role == "parameter"
    }


def _params(call: ModuleCall, children: tuple[Node, ...], reads: dict[int, int]) -> int:
    """The parameters that stand with this call and are read.

    edge_opt gives a call its own parameters and those of children that never ran; reads tell the two apart.
    """
    if call.is_leaf or not call.params:
        return call.params
    below = sum(node.params for child in children for node in child.walk())
    return max(0, min(call.params, sum(reads.values()) - below))


def _main_dtype(operators: Sequence[PricedOp]) -> str | None:
    computing = [op for op in operators if op.price.cost.flops and op.signature.inputs]
    if not computing:
        return None
    return max(computing, key=lambda op: op.price.cost.flops).signature.inputs[0].dtype
