"""Agreement of a converted model with the original, at several batch sizes, and the layer where a difference begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from edge_opt import units
from edge_opt._support.checks import is_number
from edge_opt.errors import ConversionFailed, Disagrees, EdgeOptError, InvalidInput, first_line
from edge_opt.quantization.onnx_files import Tensors, module_path, require
from edge_opt.records.conversions import Agreement, BatchAgreement, UnseenAgreement, UnseenKind
from edge_opt.runtimes.model_call import ModelCall
from edge_opt.runtimes.protocol import Runner

# The largest mean difference of any output, over that output's mean, before a conversion counts as ruined. int8 that
# works mostly stays below a tenth, and a wrong kernel is near or beyond 1. Between them lies what too few calibration
# samples do: a third of the mean, where two in five samples got another answer (timm's fastvit_t8).
BOUNDS = MappingProxyType({"fp32": 0.01, "fp16": 0.05, "bf16": 0.1, "int8": 0.2, "int4": 0.5})
# Of the samples with a clear answer, so many may get another one; and so much accuracy may go, beyond chance.
FLIPS_ALLOWED = 0.1
DROP_ALLOWED = 0.05
# A single sample may differ by so many times the bound: of int8, by half of the mean output.
SINGLE_ALLOWED = 2.5
# A large batch is where runtimes change their kernels. It may cost this many FLOPs, for it is run twice.
_LARGE_BATCH = 512
# The mean of one sample's outputs says little: calls of fewer samples than this are judged together.
_SMALL_BATCH = 16
_LARGE_FLOPS = 3e10
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

    def add(self, expected: Tensors, found: Tensors, labels: torch.Tensor | None) -> None:
        for ours, theirs in zip(expected, found, strict=True):
            difference = _difference(ours, theirs)
            self.largest = max(self.largest, float(difference.max()) if difference.numel() else 0.0)
            self.total += float(difference.sum())
            self.magnitude += _magnitude(ours)
            self.elements += ours.numel()
        first, second = expected[0], found[0]
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
        self._sizes: dict[int, list[Tensors]] = {}
        self._flops: tuple[float | None] | None = None

    def outputs(self, batch: Tensors) -> Tensors:
        """What the original returns."""
        if id(batch) in self._known:
            return self._known[id(batch)][1]
        found = self.call.outputs(batch)
        if sum(tensor.nbytes for tensor in found) <= _KEPT_BYTES:
            # With the batch, whose number no other may get meanwhile.
            self._known[id(batch)] = batch, found
        return found

    def affordable(self, batches: Sequence[Tensors]) -> int | None:
        """How many samples may be asked at once; None where it is not known what one costs."""
        if self._flops is None:
            self._flops = (_flops(self.call, batches[0]),)
        [flops] = self._flops
        return None if flops is None else int(_LARGE_FLOPS / max(flops / max(1, _count(batches[0])), 1.0))

    def other_sizes(self, batches: Sequence[Tensors]) -> list[Tensors]:
        """Samples of the batches one by one, and many at once."""
        key = id(batches[0])
        if key not in self._sizes:
            self._sizes[key] = list(_other_sizes(self, batches))
        return self._sizes[key]


def agreement(
    call: ModelCall | ReferenceModel,
    runner: Runner,
    batches: Sequence[Tensors],
    source: str,
    labels: Sequence[torch.Tensor | None] | None = None,
    fixed_batch: int | None = None,
) -> Agreement:
    """Differences over all outputs and batches; a converted output that is not finite is a failure, not a figure.

    Beside the batches as they come, one sample and a large batch are compared, unless the batch is fixed.
    """
    original = call if isinstance(call, ReferenceModel) else ReferenceModel(call)
    sums = _Sums()
    sizes: list[BatchAgreement] = []
    small: dict[int, list[tuple[Tensors, Tensors]]] = {}

    def note(batch: Tensors, expected: Tensors, found: Tensors) -> None:
        if _count(batch) < _SMALL_BATCH:
            small.setdefault(_count(batch), []).append((expected, found))
        else:
            sizes.append(_batch_agreement(_count(batch), _count(batch), expected, found))

    for batch, answers in zip(batches, labels or [None] * len(batches), strict=True):
        expected, found = original.outputs(batch), runner(*batch)
        _check(expected, found, runner)
        sums.add(expected, found, answers)
        note(batch, expected, found)
    if fixed_batch is None:
        for batch in original.other_sizes(batches):
            both = _at_another_size(original, runner, batch)
            if isinstance(both, BatchAgreement):
                sizes.append(both)
            elif both is not None:
                note(batch, *both)
    for count, pairs in small.items():
        expected, found = (_joined(outputs) for outputs in zip(*pairs, strict=True))
        sizes.append(_batch_agreement(count, count * len(pairs), expected, found))
    return Agreement(
        max_difference=sums.largest,
        mean_difference=sums.total / max(1, sums.elements),
        scale=sums.magnitude / max(1, sums.elements),
        top1=sums.same / sums.scored if sums.scored else None,
        samples=sum(_count(batch) for batch in batches),
        batches=len(batches),
        source=source,
        by_batch=tuple(_merged(sizes)),
        accuracy_before=sums.right_before / sums.labelled if sums.labelled else None,
        accuracy=sums.right / sums.labelled if sums.labelled else None,
    )


def _count(batch: Tensors) -> int:
    return batch[0].shape[0] if batch[0].dim() else 1


def _is_scores(output: torch.Tensor) -> bool:
    return output.dim() == 2 and output.shape[1] > 1 and output.is_floating_point()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Absolute differences; equal infinities, as masks have them, differ by nothing."""
    a, b = ours.double(), theirs.double()
    return torch.where(a == b, 0.0, (a - b).abs())


def _magnitude(output: torch.Tensor) -> float:
    values = output.double().abs()
    return float(values[torch.isfinite(values)].sum())


def _joined(outputs: Sequence[Tensors]) -> Tensors:
    """The outputs of several calls as those of one; flat where they are not of one shape behind the first dimension."""
    parts = list(zip(*outputs, strict=True))
    is_even = [all(part.dim() and part.shape[1:] == each[0].shape[1:] for part in each) for each in parts]
    return tuple(
        torch.cat([part if even else part.flatten() for part in each])
        for each, even in zip(parts, is_even, strict=True)
    )


def _batch_agreement(
    count: int, samples: int, expected: Tensors, found: Tensors, scales: Sequence[float] | None = None
) -> BatchAgreement:
    """The output and the sample that differ most, and the clear answers that became others, in calls of `count`."""
    scales = scales or [0.0] * len(expected)
    shares = [difference_share(*both) for both in zip(expected, found, scales, strict=True)]
    worst = max(range(len(shares)), key=lambda place: shares[place])
    flips = _clear_flips(expected[0], found[0]) if _is_scores(expected[0]) else None
    by_sample = _by_sample(samples, expected, found, scales)
    single = None if by_sample is None else float(by_sample.max())
    return BatchAgreement(count, shares[worst], worst, flips, worst_sample=single, compared=samples)


def _by_sample(samples: int, expected: Tensors, found: Tensors, scales: Sequence[float]) -> torch.Tensor | None:
    """Of each sample the mean difference, over the mean output of all, or over its own if that is more.

    The mean of one sample may be near zero, where any rounding would be much of it. Of several outputs the one that
    differs most counts; None where no output has a row for each sample.
    """
    rows = []
    for ours, theirs, scale in zip(expected, found, scales, strict=True):
        if ours.dim() and len(ours) == samples and ours.numel() and ours.is_floating_point():
            sizes = ours.double().abs().reshape(samples, -1)
            sizes = torch.where(torch.isfinite(sizes), sizes, 0.0).mean(1)
            difference = _difference(ours, theirs).reshape(samples, -1).mean(1)
            rows.append(difference / sizes.clamp_min(max(float(sizes.mean()), scale) or 1e-6))
    return torch.stack(rows).amax(0) if rows else None


def unseen_agreement(
    original: ReferenceModel,
    runner: Runner,
    batches: Sequence[Tensors],
    kind: UnseenKind,
    source: str,
    checks: Sequence[Tensors],
) -> tuple[UnseenAgreement, int] | None:
    """Differences over batches that ranges were found without, judged together, and the sample that differs most.

    They may be few, and small by chance: outputs of the batches `checks` are a scale, too. None where the original
    refuses them: what was made up may be nothing that it takes.
    """
    pairs = []
    for batch in batches:
        both = _at_another_size(original, runner, batch)
        if both is None or isinstance(both, BatchAgreement):
            return None
        pairs.append(both)
    samples = sum(_count(batch) for batch in batches)
    expected, theirs = (_joined(outputs) for outputs in zip(*pairs, strict=True))
    scales = [_mean_size(output) for output in _joined([original.outputs(check) for check in checks])]
    found = _batch_agreement(samples, samples, expected, theirs, scales)
    by_sample = _by_sample(samples, expected, theirs, scales)
    assert found.difference is not None and found.output is not None
    entry = UnseenAgreement(
        kind=kind,
        source=source,
        samples=samples,
        difference=found.difference,
        error=float(by_sample.std() / math.sqrt(samples)) if by_sample is not None and samples > 1 else 0.0,
        output=found.output,
        flips=found.flips,
        worst_sample=found.worst_sample,
    )
    return entry, 0 if by_sample is None else int(by_sample.argmax())


def difference_share(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 0.0) -> float:
    """Mean difference over mean output; of whole numbers, which are ids or flags, the share that differs.

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
    """Of the samples whose best score is clearly ahead, the share that gets another answer.

    Clearly: by half the spread of that sample's scores, or of the mean spread of all where that is more: two scores
    are always as far apart as twice their own. Networks that are not trained have many near ties, which any rounding
    decides anew.
    """
    best, spread = scores.double().topk(2, dim=1).values, scores.double().std(1, correction=0)
    is_clear = best[:, 0] - best[:, 1] > 0.5 * spread.clamp_min(float(spread.mean()))
    if not bool(is_clear.any()):
        return None
    return float((scores.argmax(1) != others.argmax(1))[is_clear].double().mean())


def _other_sizes(original: ReferenceModel, batches: Sequence[Tensors]) -> Iterator[Tensors]:
    """Samples one by one, and as many at once as are affordable up to 512."""
    first, count = batches[0], _count(batches[0])
    seen = {_count(batch) for batch in batches}
    if not first[0].dim() or not count:
        return
    affordable = original.affordable(batches)
    if 1 not in seen:
        yield from singles(batches, min(_SMALL_BATCH, max(1, affordable or 1)))
    if affordable is None:
        return
    target = min(_LARGE_BATCH, affordable)
    if target > max(seen):
        yield sized(batches, target)


def sized(batches: Sequence[Tensors], target: int) -> Tensors:
    """One batch of this many samples, taken from batches over and over."""
    first, count = batches[0], _count(batches[0])
    is_batched = [tensor.dim() > 0 and tensor.shape[0] == count for tensor in first]
    alike = [batch for batch in batches if all(a.shape[1:] == b.shape[1:] for a, b in zip(batch, first, strict=True))]
    repeats = -(-target // sum(_count(batch) for batch in alike))
    return tuple(
        torch.cat([batch[place] for batch in alike] * repeats)[:target] if batched else first[place]
        for place, batched in enumerate(is_batched)
    )


def singles(batches: Sequence[Tensors], most: int) -> list[Tensors]:
    """The first samples, at most so many, each as a batch of its own."""
    count = min(most, sum(_count(batch) for batch in batches))
    several, one = sized(batches, count), sized(batches, 1)
    is_batched = [tensor.dim() > 0 and tensor.shape[:1] == (count,) for tensor in several]
    return [
        tuple(
            tensor[place : place + 1] if batched else alone
            for tensor, alone, batched in zip(several, one, is_batched, strict=True)
        )
        for place in range(count)
    ]


def _flops(call: ModelCall, batch: Tensors) -> float | None:
    known = getattr(call.model, "flops", None)  # a file knows, and its runtime cannot be asked
    if callable(known):
        return float(known(batch))
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            call.outputs(batch)
    except Exception:  # a mode that the model's own code does not bear
        return None
    return float(counter.get_total_flops())


def _at_another_size(
    original: ReferenceModel, runner: Runner, batch: Tensors
) -> tuple[Tensors, Tensors] | BatchAgreement | None:
    """What both return; None where the original refuses this many. A refusal of the runtime is no wrong output."""
    try:
        expected = original.outputs(batch)
    except Exception:  # whatever the model's own code raises
        return None
    if not expected:
        return None
    try:
        found = runner(*batch)
    except EdgeOptError as error:
        return BatchAgreement(_count(batch), None, None, None, refused=first_line(error))
    _check(expected, found, runner)
    return expected, found


def _merged(found: list[BatchAgreement]) -> Iterator[BatchAgreement]:
    """One entry per batch size: the largest difference, and the most answers that became others, of any batch."""
    for size in sorted({entry.samples for entry in found}):
        entries = [entry for entry in found if entry.samples == size]
        flips = [entry.flips for entry in entries if entry.flips is not None]
        refused = next((entry.refused for entry in entries if entry.refused), "")
        singles = [entry.worst_sample for entry in entries if entry.worst_sample is not None]
        worst = max(entries, key=lambda entry: -1.0 if entry.difference is None else entry.difference)
        yield replace(
            worst,
            flips=max(flips, default=None),
            refused=refused,
            worst_sample=max(singles, default=None),
            compared=sum(entry.compared for entry in entries),
        )


def _check(expected: Tensors, found: Tensors, runner: Runner) -> None:
    shapes, theirs = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in found]
    if shapes != theirs:
        raise ConversionFailed(f"{runner.runtime} returns shapes {theirs}; the original returns {shapes}")
    for number, (ours, other) in enumerate(zip(expected, found, strict=True)):
        if other.is_floating_point() and not bool(torch.isfinite(other).all()) and bool(torch.isfinite(ours).all()):
            raise ConversionFailed(
                f"output {number} of the converted model has NaN or infinity where the original has numbers; "
                "values left the range of the precision: use bf16 or fp32, or keep the layers that overflow in float"
            )


@dataclass(frozen=True, slots=True)
class Violation:
    """What differs too much: the batch size or the unseen inputs, None for the accuracy over all, and the problem."""

    entry: BatchAgreement | UnseenAgreement | None
    problem: str

    @property
    def text(self) -> str:
        """The place and the problem."""
        if isinstance(self.entry, UnseenAgreement):
            return f"on {self.entry.source}, {self.problem}"
        return self.problem if self.entry is None else f"at batch {self.entry.samples} {self.problem}"


def first_violation(agreement: Agreement, bound: float, single: float | None = None) -> Violation | None:
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
            return Violation(entry, problem)
    if agreement.accuracy is not None and agreement.accuracy_before is not None:
        drop = agreement.accuracy_before - agreement.accuracy
        # Twice the standard error of a share, at most: a few samples prove little.
        if drop > DROP_ALLOWED + 1 / math.sqrt(max(1, agreement.samples)):
            return Violation(
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


# For what differs on the batches given, and for what differs on unseen inputs only.
_REMEDIES = (
    "Keep layers in float (keep_float='auto' finds them), calibrate on more data, choose another runtime or scheme, or "
    "take",
    "Its ranges fit the calibration alone: calibrate on more data, use scheme='dynamic' in onnxruntime, keep layers in "
    "float (keep_float='auto' finds them), compare on data of your own with verify_on=, or take",
)


def disagreement(what: str, agreement: Agreement, violation: Violation, begins: str | None) -> Disagrees:
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


# What only computes shapes and positions.
_WITHOUT_FLOATS = frozenset(
    "Shape Cast Constant ConstantOfShape Range Equal Size NonZero Gather Unsqueeze Concat".split()
)


@dataclass(frozen=True, slots=True)
class _SharedLayer:
    """A layer that both files hold, with the tensor it makes in each."""

    path: str
    op: str
    before: str
    after: str


Opener = Callable[[Path], Runner]


def first_difference(
    reference: tuple[Path, Opener], converted: tuple[Path, Opener], batch: Tensors, bound: float
) -> str | None:
    """Return the first layer whose output differs by more than the bound, by bisection; None where files tell nothing.

    Both are files with what opens them. Each step adds one output to both and runs them on the batch; the rest of the
    graph stays, so that the runtime fuses as it did.
    """
    onnx = require("onnx")
    before, after = (onnx.load(str(path), load_external_data=False).graph for path, _ in (reference, converted))
    nodes = {node.name: node for node in after.node}
    layers = [
        _SharedLayer(module_path(node) or node.name, node.op_type, node.output[0], nodes[node.name].output[0])
        for node in before.node
        if node.name in nodes and node.op_type not in _WITHOUT_FLOATS
    ]

    def difference(layer: _SharedLayer) -> float:
        values = []
        for (path, opener), tensor in ((reference, layer.before), (converted, layer.after)):
            probe, position = _with_output(onnx, path, tensor)
            with opener(probe) as runner:
                values.append(runner(*batch)[position])
            probe.unlink()
        expected, converted_values = values
        return difference_share(expected, converted_values)

    try:
        low, high = 0, len(layers)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if difference(layers[middle]) > bound else (middle + 1, high)
    except (EdgeOptError, ValueError):  # a tensor that this runtime does not give away
        return None
    if not layers:
        return None
    layer = layers[min(low, len(layers) - 1)]
    return f"{layer.path!r} ({layer.op})" if low < len(layers) else f"the end, behind {layer.path!r} ({layer.op})"


def _with_output(onnx: Any, path: Path, tensor: str) -> tuple[Path, int]:
    """The file with one more output, beside it, and that output's position."""
    model = onnx.load(str(path), load_external_data=False)
    names = [value.name for value in model.graph.output]
    if tensor not in names:
        model.graph.output.append(onnx.ValueInfoProto(name=tensor))
    probe = path.with_name(f"probe-{path.name}")
    probe.write_bytes(model.SerializeToString())
    return probe, names.index(tensor) if tensor in names else len(names)
