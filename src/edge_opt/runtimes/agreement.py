"""Agreement of a converted model with the original: at several batch sizes, and on inputs that ranges never saw.

Ranges of static int8 fit the inputs that they were found on. A model compared on these alone may differ on all others.
So samples of the calibration are held out, and sequences rolled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

import torch

from edge_opt import units
from edge_opt._support.checks import is_number
from edge_opt.errors import ConversionFailed, Disagrees, EdgeOptError, InvalidInput, first_line
from edge_opt.profiling import profile
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import Agreement, BatchAgreement, UnseenAgreement, UnseenKind
from edge_opt.runtimes.model_call import LabeledBatches, ModelCall, in_batches_of
from edge_opt.runtimes.protocol import BuiltModel, Runner
from edge_opt.tasks.batches import joined_calls, sized_call
from edge_opt.trace.inputs import CallArguments

# The largest mean difference of any output, over that output's mean, before a conversion counts as ruined. int8 that
# works mostly stays below a tenth, and a wrong kernel is near or beyond 1. Between them lies what too few calibration
# samples do: a third of the mean, where two in five samples got another answer (timm's fastvit_t8).
BOUNDS = MappingProxyType({"fp32": 0.01, "fp16": 0.05, "bf16": 0.1, "int8": 0.2, "int4": 0.5})
# Share of samples with a clear answer that may change it, and significant loss of accuracy that is allowed.
FLIPS_ALLOWED = 0.1
DROP_ALLOWED = 0.05
# A single sample may differ by this factor times the bound: in int8, by half of the mean output.
SINGLE_ALLOWED = 2.5
# A large batch is where runtimes change their kernels. It may cost this many FLOPs, because it is run twice.
_LARGE_BATCH = 512
# The mean of one sample's outputs says little: calls of fewer samples than this are judged together.
_SMALL_BATCH = 16
_LARGE_FLOPS = 3e10
# Outputs of float kernels for other batch sizes differ by less than this share.
_ROUNDING = 1e-4
# Answers of the original are kept for the next file up to this size.
_KEPT_BYTES = 1 << 24


def bound_of(precision: str, max_difference: float | None) -> float:
    """Return the bound on differences: the caller's, or that of the precision."""
    if max_difference is None:
        return BOUNDS.get(precision, BOUNDS["int8"])
    if max_difference is True or max_difference == math.inf:
        return math.inf
    if not is_number(max_difference) or max_difference < 0:
        raise InvalidInput(
            f"max_difference is {max_difference!r}; it is a share of the mean output such as 0.3, or True for anything"
        )
    return float(max_difference)


@dataclass(slots=True)
class _Sums:
    """Differences of all outputs, added up over batches."""

    largest: float = 0.0
    total: float = 0.0
    magnitude: float = 0.0
    elements: int = 0
    same: int = 0
    scored: int = 0
    right_before: int = 0
    right: int = 0
    labelled: int = 0

    def add(self, expected: Tensors, converted: Tensors, labels: torch.Tensor | None) -> None:
        for ours, theirs in zip(expected, converted, strict=True):
            difference = _difference(ours, theirs)
            self.largest = max(self.largest, float(difference.max()) if difference.numel() else 0.0)
            self.total += float(difference.sum())
            self.magnitude += _magnitude(ours)
            self.elements += ours.numel()
        first, second = expected[0], converted[0]
        if _is_scores(first):
            answers, others = first.argmax(1), second.argmax(1)
            self.same += int((answers == others).sum())
            self.scored += first.shape[0]
            if labels is not None and len(labels) == len(answers):
                self.right_before += int((answers == labels).sum())
                self.right += int((others == labels).sum())
                self.labelled += len(labels)


class ReferenceModel:
    """The original, asked once for each batch: several files are compared with its outputs."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call
        self._known: dict[int, tuple[Tensors, Tensors]] = {}
        self._other_sizes: dict[int, list[Tensors]] = {}
        self._flops: list[float | None] = []

    def outputs(self, batch: Tensors) -> Tensors:
        """Return what the original returns."""
        if id(batch) in self._known:
            return self._known[id(batch)][1]
        outputs = self.call.outputs(batch)
        if sum(tensor.nbytes for tensor in outputs) <= _KEPT_BYTES:
            # With the batch, whose number no other may get meanwhile.
            self._known[id(batch)] = batch, outputs
        return outputs

    def takes(self, batch: Tensors) -> bool:
        """Return whether the original accepts a batch size that the user did not pass."""
        try:
            self.outputs(batch)
        except Exception:  # whatever the model's own code raises
            return False
        return True

    def affordable(self, batches: Sequence[Tensors]) -> int | None:
        """Return how many samples may be asked at once; None where it is not known what one costs."""
        if not self._flops:
            # A file that is run as it is knows its own source, which can be profiled.
            model = getattr(self.call.model, "source", [self.call.flat()])[0]
            try:
                self._flops.append(float(profile(model, list(batches[0])).totals.flops))
            except EdgeOptError:
                self._flops.append(None)
        [flops] = self._flops
        return None if flops is None else int(_LARGE_FLOPS / max(flops / max(1, _count(batches[0])), 1.0))

    def other_sizes(self, batches: Sequence[Tensors]) -> list[Tensors]:
        """Return samples one by one, and as many at once as are affordable up to 512, where the original takes them."""
        first, key = batches[0], id(batches[0])
        if key in self._other_sizes:
            return self._other_sizes[key]
        sizes: list[Tensors] = []
        if first[0].dim() and _count(first):
            counts = {_count(batch) for batch in batches}
            affordable = self.affordable(batches)
            if 1 not in counts:
                sizes += singles(batches, min(_SMALL_BATCH, max(1, affordable or 1)))
                self._take_rows(first, sizes)
            target = min(_LARGE_BATCH, affordable or 0)
            if target > max(counts):
                sizes.append(sized(batches, target))
        self._other_sizes[key] = [batch for batch in sizes if self.takes(batch)]
        return self._other_sizes[key]

    def _take_rows(self, batch: Tensors, alone: Sequence[Tensors]) -> None:
        """Keep rows of a batch's outputs as outputs of its samples alone, where first and last sample have the same.

        Samples of few models depend on each other, and one call for each takes longer than the batch.
        """
        _, outputs = self._known.get(id(batch), (batch, ()))
        is_split = outputs and 2 < len(alone) <= _count(outputs) == _count(batch)
        if not is_split or not (self.takes(alone[0]) and self.takes(alone[-1])):
            return
        rows = [_samples(outputs, [row]) for row in range(len(alone))]
        pairs = [pair for row in (0, -1) for pair in zip(self.outputs(alone[row]), rows[row], strict=True)]
        if all(one.shape == row.shape and difference_share(one, row) < _ROUNDING for one, row in pairs):
            inner = zip(alone[1:-1], rows[1:-1], strict=True)
            self._known |= {id(sample): (sample, row) for sample, row in inner}


def agreement(original: ReferenceModel, runner: Runner, batches: LabeledBatches, fixed_batch: int | None) -> Agreement:
    """Return differences over all outputs and batches; a converted output that is not finite raises.

    Beside the batches as they come, one sample and a large batch are compared, unless the batch is fixed.
    """
    sums = _Sums()
    entries: list[BatchAgreement] = []
    small: dict[int, list[tuple[Tensors, Tensors]]] = defaultdict(list)

    def note(batch: Tensors, converted: Tensors) -> None:
        expected, count = original.outputs(batch), _count(batch)
        _check(expected, converted, runner)
        if count < _SMALL_BATCH:
            small[count].append((expected, converted))
        else:
            entries.append(_batch_agreement(count, count, expected, converted))

    for batch, classes in zip(batches.tensors, batches.labels, strict=True):
        expected, converted = original.outputs(batch), runner(*batch)
        note(batch, converted)
        sums.add(expected, converted, classes)
    for batch in original.other_sizes(batches.tensors) if fixed_batch is None else ():
        try:
            converted = runner(*batch)
        except EdgeOptError as error:  # a refusal is not a wrong output
            entries.append(BatchAgreement(_count(batch), None, None, None, refused=first_line(error)))
        else:
            note(batch, converted)
    for count, pairs in small.items():
        expected, converted = (_joined(outputs) for outputs in zip(*pairs, strict=True))
        entries.append(_batch_agreement(count, count * len(pairs), expected, converted))
    return Agreement(
        max_difference=sums.largest,
        mean_difference=sums.total / max(1, sums.elements),
        scale=sums.magnitude / max(1, sums.elements),
        top1=sums.same / sums.scored if sums.scored else None,
        samples=sum(map(_count, batches.tensors)),
        batches=len(batches.tensors),
        source=batches.source,
        by_batch=tuple(_merged(entries)),
        accuracy_before=sums.right_before / sums.labelled if sums.labelled else None,
        accuracy=sums.right / sums.labelled if sums.labelled else None,
    )


def _count(batch: Tensors) -> int:
    return batch[0].shape[0] if batch[0].dim() else 1


def _is_scores(output: torch.Tensor) -> bool:
    return output.dim() == 2 and output.shape[1] > 1 and output.is_floating_point()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return absolute differences; equal infinities, as masks have them, differ by nothing."""
    a, b = ours.double(), theirs.double()
    return torch.where(a == b, 0.0, (a - b).abs())


def _magnitude(output: torch.Tensor) -> float:
    values = output.double().abs()
    return float(values[torch.isfinite(values)].sum())


def _joined(outputs: Sequence[Tensors]) -> Tensors:
    """Return outputs of several calls as those of one; flat where shapes differ behind the first dimension."""
    parts = list(zip(*outputs, strict=True))
    is_even = [all(part.dim() and part.shape[1:] == each[0].shape[1:] for part in each) for each in parts]
    return tuple(
        torch.cat([part if even else part.flatten() for part in each])
        for each, even in zip(parts, is_even, strict=True)
    )


def _batch_agreement(
    count: int, samples: int, expected: Tensors, converted: Tensors, scales: Sequence[float] | None = None
) -> BatchAgreement:
    """Return the output and the sample that differ most, and the clear answers that became others, in calls of `count`.

    The scale of an output is its own mean, or the one given where that is larger.
    """
    scales = scales or [0.0] * len(expected)
    shares = [difference_share(*both) for both in zip(expected, converted, scales, strict=True)]
    worst = max(range(len(shares)), key=lambda output: shares[output])
    flips = _clear_flips(expected[0], converted[0]) if _is_scores(expected[0]) else None
    by_sample = _by_sample(samples, expected, converted, scales)
    single = None if by_sample is None else float(by_sample.max())
    return BatchAgreement(count, shares[worst], worst, flips, worst_sample=single, compared=samples)


def _by_sample(samples: int, expected: Tensors, converted: Tensors, scales: Sequence[float]) -> torch.Tensor | None:
    """Return the mean difference of each sample, over the mean output of all, or over its own if that is more.

    The mean of one sample may be near zero, where any rounding would be much of it. Of several outputs the one that
    differs most counts; None where no output has a row for each sample.
    """
    rows = []
    for ours, theirs, scale in zip(expected, converted, scales, strict=True):
        if ours.dim() and len(ours) == samples and ours.numel() and ours.is_floating_point():
            sizes = ours.double().abs().reshape(samples, -1)
            sizes = torch.where(torch.isfinite(sizes), sizes, 0.0).mean(1)
            difference = _difference(ours, theirs).reshape(samples, -1).mean(1)
            rows.append(difference / sizes.clamp_min(max(float(sizes.mean()), scale) or 1e-6))
    return torch.stack(rows).amax(0) if rows else None


@dataclass(frozen=True, slots=True)
class Unseen:
    """The agreement on unseen inputs, the file that ran on them, and the sample that differs most."""

    agreement: UnseenAgreement
    file: Path
    worst: Tensors


def unseen_agreement(
    original: ReferenceModel,
    runner: Runner,
    file: Path,
    batches: Sequence[Tensors],
    kind: UnseenKind,
    source: str,
    checks: Sequence[Tensors],
) -> Unseen | None:
    """Return differences of the file in `runner` over batches that ranges were found without.

    They are judged together, and may be few, and small by chance: outputs of the batches `checks` are a scale as well.
    None where the original or the runtime refuses them: what was made up may be nothing that they take.
    """
    if not all(map(original.takes, batches)):
        return None
    expected = [original.outputs(batch) for batch in batches]
    try:
        converted = [runner(*batch) for batch in batches]
    except EdgeOptError:
        return None
    for pair in zip(expected, converted, strict=True):
        _check(*pair, runner)
    samples = sum(_count(batch) for batch in batches)
    ours, theirs = _joined(expected), _joined(converted)
    scales = [_mean_size(output) for output in _joined([original.outputs(check) for check in checks])]
    whole = _batch_agreement(samples, samples, ours, theirs, scales)
    by_sample = _by_sample(samples, ours, theirs, scales)
    assert whole.difference is not None and whole.output is not None
    compared = UnseenAgreement(
        kind=kind,
        source=source,
        samples=samples,
        difference=whole.difference,
        error=float(by_sample.std() / math.sqrt(samples)) if by_sample is not None and samples > 1 else 0.0,
        output=whole.output,
        flips=whole.flips,
        worst_sample=whole.worst_sample,
    )
    worst = 0 if by_sample is None else int(by_sample.argmax())
    return Unseen(compared, file, singles(batches, worst + 1)[-1])


def difference_share(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 0.0) -> float:
    """Return mean difference over mean output; of whole numbers, which are ids or flags, the share that differs.

    What bounds are held against. However small outputs are, they are their own scale, unless a larger one is given.
    """
    if not ours.numel():
        return 0.0
    if not ours.is_floating_point():
        return float((ours != theirs).double().mean())
    difference = float(_difference(ours, theirs).mean())
    # An output of nothing but zeros has no scale of its own.
    return difference / (max(_mean_size(ours), scale) or 1e-6) if difference else 0.0


def _mean_size(output: torch.Tensor) -> float:
    return _magnitude(output) / max(1, output.numel())


def _clear_flips(scores: torch.Tensor, others: torch.Tensor) -> float | None:
    """Return the share that gets another answer of the samples whose best score is clearly ahead.

    Clearly: by half the spread of that sample's scores, or of the mean spread of all where that is more: two scores
    are always as far apart as twice their own. Networks that are not trained have many near ties, which any rounding
    decides anew.
    """
    best, spread = scores.double().topk(2, dim=1).values, scores.double().std(1, correction=0)
    is_clear = best[:, 0] - best[:, 1] > 0.5 * spread.clamp_min(float(spread.mean()))
    if not bool(is_clear.any()):
        return None
    return float((scores.argmax(1) != others.argmax(1))[is_clear].double().mean())


def sized(batches: Sequence[Tensors], target: int) -> Tensors:
    """Return one batch of this many samples, taken from batches over and over."""
    shapes = [tensor.shape[1:] for tensor in batches[0]]
    alike = [batch for batch in batches if [tensor.shape[1:] for tensor in batch] == shapes]
    return sized_call(reduce(joined_calls, [CallArguments(batch, {}) for batch in alike]), target).args


def singles(batches: Sequence[Tensors], most: int) -> list[Tensors]:
    """Return at most this many first samples, each as its own batch."""
    count = min(most, sum(_count(batch) for batch in batches))
    return in_batches_of([sized(batches, count)], 1)


def _merged(entries: list[BatchAgreement]) -> Iterator[BatchAgreement]:
    """Yield one entry per batch size: the largest difference, and the most answers that became others, of any batch."""
    for size in sorted({entry.samples for entry in entries}):
        alike = [entry for entry in entries if entry.samples == size]
        worst = max(alike, key=lambda entry: -1.0 if entry.difference is None else entry.difference)
        yield replace(
            worst,
            flips=max((entry.flips for entry in alike if entry.flips is not None), default=None),
            refused=next((entry.refused for entry in alike if entry.refused), ""),
            worst_sample=max((entry.worst_sample for entry in alike if entry.worst_sample is not None), default=None),
            compared=sum(entry.compared for entry in alike),
        )


def _check(expected: Tensors, converted: Tensors, runner: Runner) -> None:
    shapes, theirs = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in converted]
    if shapes != theirs:
        raise ConversionFailed(f"{runner.runtime} returns shapes {theirs}; the original returns {shapes}")
    for number, (ours, other) in enumerate(zip(expected, converted, strict=True)):
        if other.is_floating_point() and not bool(torch.isfinite(other).all()) and bool(torch.isfinite(ours).all()):
            raise ConversionFailed(
                f"output {number} of the converted model has NaN or infinity where the original has numbers; "
                "values left the range of the precision: use bf16 or fp32, or keep the layers that overflow in float"
            )


@dataclass(frozen=True, slots=True)
class TooDifferent:
    """A difference that is too large: the batch size or unseen inputs (None: accuracy over all), and the problem."""

    entry: BatchAgreement | UnseenAgreement | None
    problem: str

    @property
    def text(self) -> str:
        """The place and the problem."""
        if isinstance(self.entry, UnseenAgreement):
            return f"on {self.entry.source}, {self.problem}"
        return self.problem if self.entry is None else f"at batch {self.entry.samples} {self.problem}"


def first_violation(agreement: Agreement, bound: float, single: float | None = None) -> TooDifferent | None:
    """Return the first batch size or unseen inputs that differ too much; None where nothing does.

    A single sample may differ by `single`: two and a half times the bound unless given.
    """
    if math.isinf(bound):
        return None
    single = SINGLE_ALLOWED * bound if single is None else single
    entries: tuple[BatchAgreement | UnseenAgreement, ...] = (*agreement.by_batch, *agreement.unseen)
    for entry in entries:
        problem = _problem(entry, bound, single)
        if problem is not None:
            return TooDifferent(entry, problem)
    if agreement.accuracy is not None and agreement.accuracy_before is not None:
        drop = agreement.accuracy_before - agreement.accuracy
        # Twice the standard error of a share, at most: a few samples prove little.
        if drop > DROP_ALLOWED + 1 / math.sqrt(max(1, agreement.samples)):
            return TooDifferent(
                None,
                f"accuracy falls from {units.percent(agreement.accuracy_before)} to "
                f"{units.percent(agreement.accuracy)} on {agreement.samples} samples",
            )
    return None


def _problem(entry: BatchAgreement | UnseenAgreement, bound: float, single: float) -> str | None:
    flips_allowed, samples = FLIPS_ALLOWED, entry.samples
    if isinstance(entry, BatchAgreement):
        # Calls of a small batch are judged together, and their changed answers with them.
        samples = max(entry.compared, entry.samples)
    else:
        # Beyond chance: they are few, and those held out have ranges of fewer samples than the file has.
        bound, flips_allowed = bound + entry.error, FLIPS_ALLOWED + 1 / math.sqrt(entry.samples)
        # A sample of a kind of its own has no share in the ranges of the twin, and in those of the file it has.
        single = math.inf if entry.kind == "held out" else single
    if entry.difference is not None and entry.difference > bound:
        return f"outputs differ by {units.percent(entry.difference)} of their mean, {units.percent(bound)} is allowed"
    if entry.flips is not None and entry.flips > flips_allowed and samples * FLIPS_ALLOWED >= 1:
        return (
            f"{units.percent(entry.flips)} of the samples with a clear answer get another one, "
            f"{units.percent(flips_allowed)} is allowed"
        )
    if entry.worst_sample is not None and entry.worst_sample > single:
        return (
            f"a sample differs by {units.percent(entry.worst_sample)} of the mean output, {units.percent(single)} is "
            "allowed for a single one"
        )
    return None


# A quarter is held out: the ranges of the rest are then nearly those of all. With fewer, a quarter is too small.
_PARTS = 4
_LEAST = 8
# More samples than these tell little more.
_MOST_HELD_OUT = 64
_MOST_ROLLED = 256
_FEW = 16


def compare_unseen(
    original: ReferenceModel,
    built: BuiltModel,
    runner: Runner,
    reopen: Callable[[Path], Runner],
    calibration: Sequence[Tensors],
    checks: Sequence[Tensors],
) -> Iterator[Unseen | None]:
    """Compare the twin on samples that it was made without, and the file in `runner` on rolled sequences.

    `checks` are the batches that the file was compared on before. None: cannot be compared.
    """
    if built.twin is not None:
        twin, held_out = built.twin(), built.held_out
        source = f"{sum(map(_count, held_out))} calibration samples, with ranges of the others"
        with reopen(twin) as other:
            yield unseen_agreement(original, other, twin, held_out, "held out", source, checks)
    if not all(map(_are_sequences, calibration)):
        return
    most = min(_MOST_ROLLED, max(_FEW, original.affordable(calibration) or 0))
    sequences = rolled(original.call.names, calibration, most)
    if sequences is not None and _count(sequences) >= (built.batch or 1):
        batches = in_batches_of([sequences], built.batch)
        source = f"{sum(map(_count, batches))} calibration sequences, rolled so that other tokens come first"
        yield unseen_agreement(original, runner, built.path, batches, "rolled", source, checks)


def split(batches: Sequence[Tensors], fixed_batch: int | None) -> tuple[list[Tensors], list[Tensors]]:
    """Return the batches to find ranges on, and others that were held out: none of fewer than eight samples.

    One of every four batches, up to 64 samples of them. Of fewer than four batches it is a quarter of the samples of
    each, unless the batch is fixed.
    """
    if sum(map(_count, batches)) < _LEAST:
        return [*batches], []
    if len(batches) >= _PARTS:
        held_out_at: list[int] = []
        for position in _one_of_four(len(batches)):
            if sum(_count(batches[other]) for other in held_out_at) < _MOST_HELD_OUT:
                held_out_at.append(position)
        others = [batch for position, batch in enumerate(batches) if position not in held_out_at]
        return others, [batches[position] for position in held_out_at]
    if fixed_batch is not None or any(_count(batch) < _PARTS for batch in batches):
        return [*batches], []
    kept, held_out = [], []
    for batch in batches:
        rows = _one_of_four(_count(batch))[:_MOST_HELD_OUT]
        kept.append(_samples(batch, [row for row in range(_count(batch)) if row not in rows]))
        held_out.append(_samples(batch, rows))
    return kept, held_out


def _one_of_four(count: int) -> list[int]:
    """Return a position in every four, each time another one, for loaders may have a rhythm."""
    return [group * _PARTS + _PARTS - 1 - group % _PARTS for group in range(count // _PARTS)]


def rolled(names: Sequence[str], batches: Sequence[Tensors], most: int = _MOST_ROLLED) -> Tensors | None:
    """Return sequences of the batches, each rolled so that a token from within comes first; None where there is none.

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
    # Token ids have more values than types and positions.
    ids = max(others, key=lambda tensor: len(torch.unique(tensor)))
    is_read = torch.stack([torch.ones_like(ids, dtype=torch.bool), *masks]).all(0)
    # One sample does not show how others begin.
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
    """Return whether all inputs are whole numbers of one shape, samples by places, as token ids and masks are."""
    shape = batch[0].shape
    return (
        batch[0].dim() == 2
        and shape[1] > 1
        and all(tensor.shape == shape and not tensor.is_floating_point() for tensor in batch)
    )


def _samples(batch: Tensors, rows: list[int]) -> Tensors:
    count = _count(batch)
    return tuple(tensor[rows] if tensor.dim() and len(tensor) == count else tensor for tensor in batch)


# For what differs on the batches given, and for what differs on unseen inputs only.
_REMEDIES = (
    "Keep layers in float (keep_float='auto' finds them), calibrate on more data, choose another runtime or scheme, or "
    "take",
    "Its ranges fit the calibration alone: calibrate on more data, use scheme='dynamic' in onnxruntime, keep layers in "
    "float (keep_float='auto' finds them), compare on data of your own with verify_on=, or take",
)


def disagreement(what: str, agreement: Agreement, violation: TooDifferent, begins: str | None) -> Disagrees:
    """Return the error of a ruined conversion: where, how far, where it begins, and what to do."""
    others = [entry for entry in agreement.by_batch if entry is not violation.entry and entry.difference is not None]
    fine = ""
    if others:
        largest = max(entry.difference or 0.0 for entry in others)
        fine = f" (at batch {', '.join(str(entry.samples) for entry in others)} by at most {units.percent(largest)})"
    place = f"; it begins at {begins}" if begins else ""
    remedy = _REMEDIES[isinstance(violation.entry, UnseenAgreement)]
    return Disagrees(
        f"{what} disagrees with the original: {violation.text}{fine}{place}. {remedy} it as it is with max_difference="
    )
