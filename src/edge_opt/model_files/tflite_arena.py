"""The arena of TFLite's interpreter: where its planner places each tensor, by lifetime and size.

The planner of the interpreter goes through the tensors from large to small and gives each the smallest gap that it
fits between those that live at the same time (Pisarchyk and Lee, 2020, "greedy by size"). Inputs and results live
from the first operator to the last. Some operators write over their input if nothing else reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from edge_opt.model_files.file_graph import FileNode

ALIGNMENT = 64
_FOREVER = 1 << 60
# Which inputs may share their memory with the result, and whether their values stay what they are.
_IN_PLACE = {"ADD": (0, 1), "SUB": (0, 1), "MUL": (0, 1), "DIV": (0, 1), "SOFTMAX": (0,), "DYNAMIC_UPDATE_SLICE": (0,)}
_SAME_VALUES = {"RESHAPE": (0,), "EXPAND_DIMS": (0,), "SQUEEZE": (0,), "BITCAST": (0,)}
_SCALAR_BYTES = 4


@dataclass(frozen=True, slots=True)
class Arena:
    """Memory that the interpreter takes for tensors between operators; scratch of kernels comes on top."""

    nbytes: int  # of the whole arena
    offsets: Mapping[str, int]  # where each tensor begins, by name; tensors may have the same memory in turn
    persistent_bytes: int  # beside it: weights that are widened once, and kept


class _Life(NamedTuple):
    name: str
    nbytes: int
    first: int
    last: int

    def order(self) -> tuple[bool, int, int]:
        """Sort what lives through the whole run first, in the order of the file; then large before small."""
        is_whole = self.first == 0 and self.last == _FOREVER
        return (False, 0, 0) if is_whole else (True, -self.nbytes, self.first)


def plan_arena(
    nodes: Sequence[FileNode], inputs: Sequence[str], outputs: Sequence[str], nbytes: Mapping[str, int],
    persistent: Mapping[str, int],
) -> Arena:  # fmt: skip
    """Place every tensor that the nodes make.

    Args:
        nodes: The operators in the order of execution; constant ones left out.
        inputs: Names of the model's inputs.
        outputs: Names of its results.
        nbytes: Bytes of each tensor that lies in the arena, by name; in the order of the file.
        persistent: Bytes of tensors that are made once and kept, by name.
    """
    shared = _shared(nodes, inputs, outputs, nbytes)
    lives = _lives(nodes, inputs, outputs, nbytes, shared)
    ordered = sorted(lives, key=_Life.order)
    firsts, lasts = (np.array([getattr(life, end) for life in ordered], np.int64) for end in ("first", "last"))
    placements: list[tuple[int, _Life]] = []
    for count, life in enumerate(ordered):
        # Few of thousands of tensors live at the same time: only these are searched.
        beside = np.flatnonzero((lasts[:count] >= life.first) & (firsts[:count] <= life.last)).tolist()
        placements.append((_gap(life, sorted((placements[index] for index in beside), key=itemgetter(0))), life))
    offsets = {life.name: offset for offset, life in placements}
    offsets |= {name: offsets[root] for name, root in shared.items() if root in offsets}
    whole = max((offset + life.nbytes for offset, life in placements), default=0)
    kept = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in persistent.values())
    return Arena(whole, offsets, kept)


def _gap(life: _Life, beside: Sequence[tuple[int, _Life]]) -> int:
    """Return the start of the smallest gap among tensors that live at the same time; else the end behind them."""
    best, best_size, end = None, _FOREVER, 0
    for offset, other in beside:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if start + life.nbytes <= offset and offset - start < best_size:
            best, best_size = start, offset - start
        end = max(end, offset + other.nbytes)
    return -(-end // ALIGNMENT) * ALIGNMENT if best is None else best


def _shared(
    nodes: Sequence[FileNode], inputs: Sequence[str], outputs: Sequence[str], nbytes: Mapping[str, int]
) -> dict[str, str]:
    """Return results that are written over an input, with the tensor whose memory they take."""
    readers = Counter({*inputs, *outputs})
    readers.update(name for node in nodes for name in node.inputs)
    shared: dict[str, str] = {}
    for node in nodes:
        keeps_values = node.op in _SAME_VALUES
        indices = _SAME_VALUES.get(node.op) or _IN_PLACE.get(node.op, ())
        result = node.outputs[0] if node.outputs else ""
        if result in outputs or result not in nbytes:
            continue
        for index in indices:
            source = node.inputs[index] if index < len(node.inputs) else ""
            if source not in nbytes or source in inputs or nbytes[source] != nbytes[result]:
                continue
            root = shared.get(source, source)
            is_free = readers[source] <= 1 and readers[root] <= 1 and nbytes[source] > _SCALAR_BYTES
            if keeps_values or is_free:
                shared[result] = root
                break
    return shared


def _lives(
    nodes: Sequence[FileNode], inputs: Sequence[str], outputs: Sequence[str], nbytes: Mapping[str, int],
    shared: Mapping[str, str],
) -> list[_Life]:  # fmt: skip
    first = dict.fromkeys((name for name in inputs if name in nbytes), 0)
    last: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for name in node.outputs:
            first.setdefault(name, number)
        for name in node.inputs:
            last[shared.get(name, name)] = number
    # Tensors that nothing reads are never released; neither are inputs and results.
    for name in (*inputs, *outputs):
        last[shared.get(name, name)] = _FOREVER
    return [
        _Life(name, size, first[name], last.get(name, _FOREVER))
        for name, size in nbytes.items()
        if name in first and name not in shared and size
    ]
