"""Inputs that the ranges of static int8 never saw, from the calibration itself: samples held out, sequences rolled.

Ranges fit the inputs that they were found on. A model compared on these alone may differ on all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import UnseenAgreement
from edge_opt.runtimes.agreement import ReferenceModel, singles, unseen_agreement
from edge_opt.runtimes.model_call import in_batches_of
from edge_opt.runtimes.protocol import BuiltModel, Runner

# A quarter is held out: the ranges of the rest are then nearly those of all. Of fewer samples, a quarter says nothing.
_PARTS = 4
_LEAST = 8
# More samples than these tell little more.
_MOST_HELD_OUT = 64
_MOST_ROLLED = 256
_FEW = 16


@dataclass(frozen=True, slots=True)
class Unseen:
    """The agreement on unseen inputs, the file that ran on them, and the sample that differs most."""

    agreement: UnseenAgreement
    file: Path
    worst: Tensors


def compare_unseen(
    original: ReferenceModel,
    built: BuiltModel,
    runner: Runner,
    reopen: Callable[[Path], Runner],
    calibration: Sequence[Tensors],
    checks: Sequence[Tensors],
) -> Iterator[Unseen]:
    """Compare the twin on samples that it was made without, and the file in `runner` on rolled sequences.

    `checks` are the batches that the file was compared on before.
    """
    if built.twin is not None:
        twin, held_out = built.twin(), built.held_out
        source = f"{sum(map(_count, held_out))} calibration samples, with ranges of the others"
        with reopen(twin) as other:
            compared = unseen_agreement(original, other, held_out, "held out", source, checks)
        if compared is not None:
            yield Unseen(compared[0], twin, singles(held_out, compared[1] + 1)[-1])
    if not all(map(_are_sequences, calibration)):
        return
    most = min(_MOST_ROLLED, max(_FEW, original.affordable(calibration) or 0))
    sequences = rolled(original.call.names, calibration, most)
    if sequences is not None and _count(sequences) >= (built.batch or 1):
        batches = in_batches_of([sequences], built.batch)
        source = f"{sum(map(_count, batches))} calibration sequences, rolled so that other tokens come first"
        compared = unseen_agreement(original, runner, batches, "rolled", source, checks)
        if compared is not None:
            yield Unseen(compared[0], built.path, singles(batches, compared[1] + 1)[-1])


def split(batches: Sequence[Tensors], fixed_batch: int | None) -> tuple[list[Tensors], list[Tensors]]:
    """The batches to find ranges on, and others that were held out: none where there are fewer than eight samples.

    One of every four batches, up to 64 samples of them. Of fewer than four batches it is a quarter of the samples of
    each, unless the batch is fixed.
    """
    if sum(map(_count, batches)) < _LEAST:
        return [*batches], []
    if len(batches) >= _PARTS:
        held: list[int] = []
        for place in _one_of_four(len(batches)):
            if sum(_count(batches[other]) for other in held) < _MOST_HELD_OUT:
                held.append(place)
        return [batch for place, batch in enumerate(batches) if place not in held], [batches[place] for place in held]
    if fixed_batch is not None or any(_count(batch) < _PARTS for batch in batches):
        return [*batches], []
    kept, held_out = [], []
    for batch in batches:
        places = _one_of_four(_count(batch))[:_MOST_HELD_OUT]
        kept.append(_samples(batch, [place for place in range(_count(batch)) if place not in places]))
        held_out.append(_samples(batch, places))
    return kept, held_out


def _one_of_four(count: int) -> list[int]:
    """A place in every four, each time another one, for loaders may have a rhythm."""
    return [group * _PARTS + _PARTS - 1 - group % _PARTS for group in range(count // _PARTS)]


def rolled(names: Sequence[str], batches: Sequence[Tensors], most: int = _MOST_ROLLED) -> Tensors | None:
    """Sequences of the batches, each rolled so that a token from within comes first; None where there is none.

    Models read single places, as a classifier does the first, and of a token that no sample had there ranges know
    nothing. Each token that no mask hides has its turn, frequent ones before others, and then each again from another
    place, at most so many. All inputs of a sample are rolled together: masks and types stay with their tokens. What
    all samples begin with, as many tokenizers do, stays in front.
    """
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    masks = [tensor.bool() for name, tensor in zip(names, whole, strict=True) if "mask" in name]
    others = [tensor for name, tensor in zip(names, whole, strict=True) if "mask" not in name]
    if not others:
        return None
    # Of ids, types and positions, ids have the most values.
    ids = max(others, key=lambda tensor: len(torch.unique(tensor)))
    is_read = torch.stack([torch.ones_like(ids, dtype=torch.bool), *masks]).all(0)
    # One sample tells nothing of what others begin with.
    start = int((ids == ids[0]).all(0).long().cumprod(0).sum()) if len(ids) > 1 else 0
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, place in is_read.nonzero().tolist():
        if place > start:
            places[int(ids[row, place])].append((row, place))
    frequent = sorted(places, key=lambda token: (-len(places[token]), token))
    rounds = zip_longest(*(places[token] for token in frequent))
    turns = [turn for each in rounds for turn in each if turn is not None][:most]
    if not turns:
        return None
    return tuple(
        torch.stack([torch.cat([tensor[row, :start], tensor[row, start:].roll(start - place)]) for row, place in turns])
        for tensor in whole
    )


def _are_sequences(batch: Tensors) -> bool:
    """Whether all inputs are whole numbers of one shape, samples by places, as token ids and masks are."""
    shape = batch[0].shape
    return (
        batch[0].dim() == 2
        and shape[1] > 1
        and all(tensor.shape == shape and not tensor.is_floating_point() for tensor in batch)
    )


def _count(batch: Tensors) -> int:
    return len(batch[0]) if batch[0].dim() else 1


def _samples(batch: Tensors, places: list[int]) -> Tensors:
    count = _count(batch)
    return tuple(tensor[places] if tensor.dim() and len(tensor) == count else tensor for tensor in batch)
