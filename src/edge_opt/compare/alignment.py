"""Alignment: which layer of one model is which layer of another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise

from edge_opt.records import LayerFigures

Pair = tuple[int | None, int | None]
_Key = Callable[[LayerFigures], Hashable]

# Below this share of layers found by name or by figures, "the third convolution" says nothing about which one is meant.
_RELATED = 0.25


def align(old: Sequence[LayerFigures], new: Sequence[LayerFigures]) -> list[Pair]:
    """Positions in both models side by side, every layer exactly once; None where the other has no such layer.

    The same path and type come first, also below another root (`module.conv1` is `conv1`); then layers that only
    changed their name; then, between those, layers of a type in order; at last those that changed their type.
    """
    found = _same(old, new, {}, lambda layer: (layer.path, layer.call_number, layer.kind))
    found |= _below_another_root(old, new, found)
    found |= _in_order(old, new, found, _figures)
    if len(found) >= _RELATED * min(len(old), len(new)):
        found |= _between(old, new, found)
        found |= _same(old, new, found, lambda layer: (layer.path, layer.call_number))
    else:
        found |= _same(old, new, found, _named)
    return list(_merged(found, len(old), len(new)))


def _figures(layer: LayerFigures) -> Hashable:
    """What identifies a layer whatever its name; without parameters one looks like the other."""
    return (layer.kind, layer.params, layer.output_shapes) if layer.params else None


def _named(layer: LayerFigures) -> Hashable:
    """Its path, unless that is the model itself or a mere position in a sequence."""
    step = layer.path.rpartition(".")[2]
    return None if not step or step.isdigit() else (layer.path, layer.call_number)


def _rest(layers: Sequence[LayerFigures], taken: set[int]) -> list[int]:
    return [position for position in range(len(layers)) if position not in taken]


def _same(old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int], key: _Key) -> dict[int, int]:
    """Layers not found yet whose key is the same; None is no key."""
    places = {key(new[position]): position for position in _rest(new, set(found.values()))}
    pairs = ((position, key(old[position])) for position in _rest(old, set(found)))
    return {position: places[name] for position, name in pairs if name is not None and name in places}


def _below_another_root(
    old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int]
) -> dict[int, int]:
    """Layers whose paths are the same once what all of a model's have in front is taken away."""
    left, right = _rest(old, set(found)), _rest(new, set(found.values()))
    ours, theirs = _root([old[position].path for position in left]), _root([new[position].path for position in right])
    if ours == theirs:
        return {}
    places = {(new[j].path[theirs:], new[j].call_number, new[j].kind): j for j in right}
    keys = ((i, (old[i].path[ours:], old[i].call_number, old[i].kind)) for i in left)
    return {i: places[key] for i, key in keys if key in places}


def _root(paths: Sequence[str]) -> int:
    """Length of the steps that all paths begin with; their last step is never one of them."""
    if not paths:
        return 0
    first, last = min(paths).split("."), max(paths).split(".")
    length = 0
    for ours, theirs in zip(first[:-1], last[:-1], strict=False):
        if ours != theirs:
            break
        length += len(ours) + 1
    return length


def _in_order(
    old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int], key: _Key
) -> dict[int, int]:
    """The longest run of layers not found yet that stand in the same order in both."""
    left = [i for i in _rest(old, set(found)) if key(old[i]) is not None]
    right = [j for j in _rest(new, set(found.values())) if key(new[j]) is not None]
    return _longest_common(left, right, [key(old[i]) for i in left], [key(new[j]) for j in right])


def _between(old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int]) -> dict[int, int]:
    """Layers of the same type, in order, between two neighbours that are aligned."""
    more: dict[int, int] = {}
    anchors = [(-1, -1), *_rising(sorted(found.items())), (len(old), len(new))]
    taken = set(found.values())
    for (left, left_new), (right, right_new) in pairwise(anchors):
        ours = [i for i in range(left + 1, right) if i not in found]
        theirs = [j for j in range(left_new + 1, right_new) if j not in taken]
        more |= _longest_common(ours, theirs, [old[i].kind for i in ours], [new[j].kind for j in theirs])
    return more


def _rising(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pairs without those that would cross an earlier one."""
    highest = -1
    for i, j in pairs:
        if j > highest:
            highest = j
            yield i, j


def _longest_common(
    left: Sequence[int], right: Sequence[int], left_keys: Sequence[Hashable], right_keys: Sequence[Hashable]
) -> dict[int, int]:
    """The longest common subsequence of two lists of keys, as pairs of the positions that belong to them."""
    lengths = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            lengths[i][j] = (
                lengths[i + 1][j + 1] + 1
                if left_keys[i] == right_keys[j]
                else max(lengths[i + 1][j], lengths[i][j + 1])
            )
    pairs: dict[int, int] = {}
    i = j = 0
    while i < len(left) and j < len(right):
        if left_keys[i] == right_keys[j]:
            pairs[left[i]] = right[j]
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def _merged(found: dict[int, int], old_count: int, new_count: int) -> Iterator[Pair]:
    """Every layer once: the old ones in their order, each new one behind what it follows in its own model."""
    partner = {j: i for i, j in found.items()}
    following: dict[int, list[int]] = {}
    place = -1
    for j in range(new_count):
        place = partner.get(j, place)
        if j not in partner:
            following.setdefault(place, []).append(j)
    for i in range(-1, old_count):
        if i >= 0:
            yield i, found.get(i)
        yield from ((None, j) for j in following.get(i, ()))
