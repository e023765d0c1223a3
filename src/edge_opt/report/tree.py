"""The tree of called modules: what each does itself, and with all below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edge_opt.records import ModelProfile
from edge_opt.report.rows import Row, call_rows, combined


@dataclass(frozen=True, slots=True)
class Node:
    """One module, all its calls together. `own` is its own work; `row` adds everything below it."""

    own: Row
    row: Row
    children: tuple[Node, ...]


def module_tree(profile: ModelProfile) -> Node:
    """The modules that were called, by path; children stand in the order of their first call.

    A module belongs under the path that defines it, also when a module elsewhere calls it: so a row is its own work
    plus its children's, whoever shares what. Containers that are never called, such as a ModuleList, have no row.
    """
    calls: dict[str, list[Row]] = {}
    for row in call_rows(profile):
        calls.setdefault(row.path, []).append(row)
    children: dict[str, list[str]] = {path: [] for path in calls}
    root = profile.layers[0].call.path
    for path in calls:
        if path != root:
            children[_nearest_above(path, children)].append(path)
    return _node(root, 0, calls, children)


def _nearest_above(path: str, called: dict[str, list[str]]) -> str:
    above = path.rpartition(".")[0]
    while above and above not in called:
        above = above.rpartition(".")[0]
    return above


def _node(path: str, depth: int, calls: dict[str, list[Row]], children: dict[str, list[str]]) -> Node:
    below = tuple(_node(child, depth + 1, calls, children) for child in children[path])
    first = combined(calls[path])
    own = replace(first, depth=depth, calls=len(calls[path]), is_leaf=not below)
    return Node(own, combined([own, *(node.row for node in below)]), below)


def walk(node: Node, depth: int | None = None) -> Iterator[Node]:
    """The node and all below it, parents first, down to `depth` levels under the root."""
    yield node
    if depth is None or node.row.depth < depth:
        for child in node.children:
            yield from walk(child, depth)


def module_rows(profile: ModelProfile) -> list[Row]:
    """One row per module, inclusive of everything below it."""
    return [node.row for node in walk(module_tree(profile))]


def cut(node: Node, depth: int | None = None) -> list[Row]:
    """Rows that add up to the whole: modules at `depth` with all below them, and the own work of those above.

    A module that is folded here counts as a leaf; a row that is not one holds own work only.
    """
    rows = []
    for found in walk(node, depth):
        if found.row.depth == depth or not found.children:
            rows.append(replace(found.row, is_leaf=True))
        elif found.own.operators or found.own.params:
            rows.append(found.own)
    return rows


def deepest_that_fits(node: Node, limit: int) -> int:
    """The depth at which the tree has at most `limit` rows; at least 1."""
    depths = [found.row.depth for found in walk(node)]
    return next((depth for depth in range(max(depths), 1, -1) if sum(d <= depth for d in depths) <= limit), 1)
