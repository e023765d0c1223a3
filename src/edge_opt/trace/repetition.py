"""Rounds of a loop that are like the one before them: recorded without being run.

The reader of a file knows when the rounds of a loop differ in nothing but numbers that grow evenly, such as the place
of an element. Here the records of its last round are repeated: operators, storages, and when each of them dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from edge_opt.records.costs import OpCall, OpSignature
from edge_opt.trace.tape import Tape

# Rounds after which it is asked whether they are alike: the first ones meet weights that are new.
_ASKED_AFTER = frozenset((4, 5, 8, 16))
# Floats beyond it do not hold every whole number.
_LARGEST_EXACT = 1 << 24


class _Pattern(NamedTuple):
    """What each further round repeats.

    Attributes:
        ops: The operators of the last round.
        moves: For each operator, how far each of its reads is from that of the round before: nothing where all rounds
            read the same storage, else as many storages as a round makes.
        steps: What the numbers among an operator's arguments grow by in each round, by its place.
        storages: Storages that a round makes.
        grown: Bytes by which more are alive after each round.
        ends: For each storage, how many operators after the start of its round it dies; None where it stays.
    """

    ops: list[OpCall]
    moves: list[tuple[int, ...]]
    steps: dict[int, tuple[int, ...]]
    storages: int
    grown: int
    ends: list[int | None]


class Repetition:
    """Watches the rounds of one loop on the tape that records them."""

    def __init__(self) -> None:
        mode = _get_current_dispatch_mode()
        self.tape = mode if isinstance(mode, Tape) and not mode.is_real else None
        self.marks: list[tuple[int, int]] = []  # operators and storages when each round began
        self.carried: list[list[int]] = []  # storages that each round began with

    def is_asked(self, state: Sequence[torch.Tensor]) -> bool:
        """Note that a round begins with these tensors; whether the rounds before it may be compared now."""
        if self.tape is None:
            return False
        self.carried.append([self.tape.lifetimes.number_of(one) for one in state])
        self.marks.append((len(self.tape.ops), len(self.tape.lifetimes.roles)))
        return len(self.marks) - 1 in _ASKED_AFTER

    def repeated(
        self, copies: int, state: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]] | None:
        """Record more rounds like the last: what they carry on, and for each of `kept` what they add to it.

        None, and nothing is recorded, where the last rounds differ.
        """
        tape = self.tape
        pattern = None if tape is None else self._pattern(tape, copies)
        if tape is None or pattern is None:
            return None
        lifetimes, first = tape.lifetimes, self.marks[-2][1]
        numbers = [lifetimes.number_of(one) for one in kept]
        fresh = [number - first for number in numbers if number >= first]
        staying = [place for place, end in enumerate(pattern.ends)
                   if end is None and lifetimes.roles[first + place] == "activation"]  # fmt: skip
        # What is kept is new in each round, or older than these rounds.
        is_whole = all(number < self.marks[-4][1] or (number >= first and one.untyped_storage().nbytes() == one.nbytes)
                       for one, number in zip(kept, numbers, strict=True))  # fmt: skip
        others = [one for one in state if all(one is not other for other in kept)]
        is_apart = all(lifetimes.number_of(one) - first not in fresh for one in others)
        if sorted(fresh) != staying or not is_whole or not is_apart or pattern.grown != _bytes(tape, first, fresh):
            return None
        self._record(tape, pattern, copies)
        with _disable_current_modes():
            made = [
                [one] * copies if number < first
                else [lifetimes.stand_for(one, number + copy * pattern.storages) for copy in range(1, copies + 1)]
                for one, number in zip(kept, numbers, strict=True)
            ]  # fmt: skip
        last = {id(one): more[-1] for one, more in zip(kept, made, strict=True)}
        self.marks.clear()
        return [last.get(id(one), one) for one in state], made

    def _pattern(self, tape: Tape, copies: int) -> _Pattern | None:
        """What the last three rounds have in common; None where they differ."""
        (start, _), (second, middle), (third, last), (end, until) = self.marks[-4:]
        bounds = [number for _, number in self.marks[-4:]]
        length, count = end - third, until - last
        if not length or third - second != length or second - start != length:
            return None
        if middle - bounds[0] != count or last - middle != count:
            return None
        rounds = [tape.ops[at : at + length] for at in (start, second, third)]
        moves, steps = [], {}
        grown = rounds[2][0].live_bytes - rounds[1][0].live_bytes
        for place, (old, before, now) in enumerate(zip(*rounds, strict=True)):
            step = _step([tape.signatures[one.signature] for one in (old, before, now)], copies)
            move = _moved(before.reads, now.reads, count, bounds[0])
            is_alike = before.module == now.module and _moved(before.creates, now.creates, count, middle) is not None
            if step is None or move is None or not is_alike or now.live_bytes - before.live_bytes != grown:
                return None
            if any(step):
                steps[place] = step
            moves.append(move)
        if _moved(self.carried[-2], self.carried[-1], count, bounds[0]) is None:
            return None
        ends = _ends(tape, [start, second, third, end], bounds)
        return None if ends is None else _Pattern(rounds[2], moves, steps, count, grown, ends)

    def _record(self, tape: Tape, pattern: _Pattern, copies: int) -> None:
        """Add operators and storages of more rounds; what is alive now belongs to the last of them."""
        (second, middle), (third, _), (end, until) = self.marks[-3:]
        length, count = end - third, pattern.storages
        spelled = [(index, text) for index, text in tape.spelled if index >= third]
        for copy in range(1, copies + 1):
            for place, (call, moves) in enumerate(zip(pattern.ops, pattern.moves, strict=True)):
                signature = call.signature
                if place in pattern.steps:
                    signature = len(tape.signatures)
                    tape.signatures.append(_grown(tape.signatures[call.signature], pattern.steps[place], copy))
                reads = tuple([number + copy * move for number, move in zip(call.reads, moves, strict=True)])
                creates = tuple([number + copy * count for number in call.creates])
                live = call.live_bytes + copy * pattern.grown
                tape.ops.append(OpCall(call.index + copy * length, call.module, signature, reads, creates, live))
            tape.spelled += [(index + copy * length, text) for index, text in spelled]
        starts = [second, third, *(end + copy * length for copy in range(copies))]
        tape.lifetimes.repeat(range(middle, until), count, starts, pattern.ends)


def _bytes(tape: Tape, first: int, places: Sequence[int]) -> int:
    return sum(tape.lifetimes.nbytes(first + place) for place in places)


def _moved(before: Sequence[int], now: Sequence[int], count: int, first: int) -> tuple[int, ...] | None:
    """How far storages are from those of the round before; None where that is not the same in each round.

    A storage is the same in each round if it is older than these rounds, which begin with the `first`; else each round
    has its own.
    """
    if len(before) != len(now):
        return None
    moves = tuple([new - old for old, new in zip(before, now, strict=True)])
    is_even = all(move == (count if old >= first else 0) for old, move in zip(before, moves, strict=True))
    return moves if is_even else None


def _step(signatures: Sequence[OpSignature], copies: int) -> tuple[int, ...] | None:
    """What each argument grows by from round to round; None where the operators differ in anything else."""
    old, before, now = signatures
    if old == before == now:
        return ()
    if not replace(old, args=()) == replace(before, args=()) == replace(now, args=()):
        return None
    if not len(old.args) == len(before.args) == len(now.args):
        return None
    steps = []
    for values in zip(old.args, before.args, now.args, strict=True):
        kinds = {type(value) for value in values}
        if values[0] == values[1] == values[2] and len(kinds) == 1:
            steps.append(0)
        elif kinds == {int} or (kinds == {float} and all(value.is_integer() for value in values)):
            step = int(values[2] - values[1])
            is_exact = abs(values[2]) + abs(copies * step) < _LARGEST_EXACT
            if values[1] - values[0] != step or not is_exact:
                return None
            steps.append(step)
        else:
            return None
    return tuple(steps)


def _grown(signature: OpSignature, steps: Sequence[int], copy: int) -> OpSignature:
    args: tuple[Any, ...] = tuple(
        [value + copy * step if step else value for value, step in zip(signature.args, steps, strict=True)]
    )
    return replace(signature, args=args)


def _ends(tape: Tape, starts: Sequence[int], bounds: Sequence[int]) -> list[int | None] | None:
    """For each storage of a round, when it dies, counted from the start of its round; None where rounds differ."""
    lifetimes, now = tape.lifetimes, starts[3]
    old = bounds[0]
    if lifetimes.has_died_since(starts[1], old):
        return None  # something older went in these rounds
    ends: list[int | None] = []
    for place in range(bounds[1] - old):
        ages = [lifetimes.end_of(bounds[turn] + place) for turn in range(3)]
        facts = {lifetimes.fact(bounds[turn] + place, starts[turn]) for turn in range(3)}
        end = None if ages[0] is None else ages[0] - starts[0]
        for turn in (1, 2):
            expected = None if end is None else starts[turn] + end
            is_due = expected is not None and expected < now
            is_open = ages[turn] is None and not is_due
            if ages[turn] != expected and not is_open:
                return None
        if len(facts) > 1:
            return None
        ends.append(end)
    return ends
