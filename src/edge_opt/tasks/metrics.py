"""Metrics: what a model's answers are worth, which way is better, and how sure the figure is."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from edge_opt._support.output_tensors import flat_tensors, map_tensors
from edge_opt.errors import EdgeOptError, InvalidInput, MeasurementFailed, first_line
from edge_opt.loading import parse_reference
from edge_opt.measuring.statistics import wilson
from edge_opt.records.sweeps import SHARES, MetricDirection
from edge_opt.text import edit_distance

Table = npt.NDArray[np.float64]
Weights = npt.NDArray[np.float64]

RESAMPLES = 1000
# Own metrics may be slow: after this many seconds, the resamples that are there have to do.
_RESAMPLING_SECONDS = 10.0
_FEWEST_RESAMPLES = 40


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of merit over outputs and targets: its name, which way is better, and how it is reckoned.

    `gather` turns one batch into a table of numbers: column 0 is the sample's place in the batch, what follows is what
    the sample adds. `reckon` turns the columns of all batches, each row with a weight, into the value. So a metric is
    found over batches of any shape, and found again for a resample of the same samples, which only changes weights.
    A metric without `gather` has `whole`, a function of all outputs and all targets at once.

    Attributes:
        name: As columns and constraints call it: `mae`, `mae_drop`.
        direction: Whether "higher" or "lower" is better.
        gather: Outputs and targets of one batch to a table.
        reckon: Columns and weights of the rows to the value.
        whole: Outputs and targets of all batches to the value; None where the metric gathers.
        is_mean: The value is the mean of one number per sample, or a function of that mean that never turns.
    """

    name: str
    direction: MetricDirection
    gather: Callable[[Any, Any], Table] | None = None
    reckon: Callable[[Table, Weights], float] | None = None
    whole: Callable[[Any, Any], float] | None = field(default=None, repr=False)
    is_mean: bool = False

    def value(self, outputs: Any, targets: Any) -> float:
        """The metric of these outputs."""
        return self.scored([(outputs, targets)], resamples=0).value

    def per_sample(self, outputs: Any, targets: Any) -> npt.NDArray[np.float64] | None:
        """One number per sample whose mean decides the metric; None where there is no such number."""
        return self.scored([(outputs, targets)], resamples=0).per_sample

    def drop(self, reference: float, value: float) -> float:
        """By how much a value is worse than the reference's; below zero where it is better.

        >>> metric_named("mae").drop(0.30, 0.25), metric_named("accuracy").drop(0.90, 0.88)
        (-0.04999999999999999, 0.020000000000000018)
        """
        return reference - value if self.direction == "higher" else value - reference

    def scored(self, answers: Iterable[tuple[Any, Any]], resamples: int = RESAMPLES) -> Score:
        """The metric over batches of (outputs, targets), with values of resamples to know it by."""
        batches = iter(answers)
        if self.gather is None:
            return self._scored_whole(list(batches), resamples)
        tables, samples = [], 0
        for number, (outputs, targets) in enumerate(batches):
            found = self._gathered(outputs, targets, number)
            found[:, 0] += samples
            samples += count_samples(targets)
            tables.append(found)
        if not samples:
            raise InvalidInput(f"the loader has no batches; {self.name} needs at least one")
        assert self.reckon is not None
        table, reckon = np.concatenate(tables), self.reckon
        places, columns = table[:, 0].astype(np.int64), table[:, 1:]
        value = self._finite(reckon(columns, np.ones(len(table))))
        drawn = _resampled(samples, resamples, lambda weights: reckon(columns, weights[places]))
        each = columns[:, 0] / columns[:, 1] if self.is_mean else None
        return Score(self, value, samples, drawn, each)

    def _gathered(self, outputs: Any, targets: Any, number: int) -> Table:
        assert self.gather is not None
        if any(_is_odd(leaf) for leaf in flat_tensors(outputs)):
            raise MeasurementFailed(f"outputs of batch {number} are NaN; {self.name} has no meaning")
        return self.gather(outputs, targets)

    def _finite(self, value: Any) -> float:
        found = float(value)
        if not math.isfinite(found):
            raise MeasurementFailed(f"{self.name} is {found} on these data; it has no meaning")
        return found

    def _scored_whole(self, answers: list[tuple[Any, Any]], resamples: int) -> Score:
        if not answers:
            raise InvalidInput(f"the loader has no batches; {self.name} needs at least one")
        assert self.whole is not None
        whole, own = self.whole, self.name
        outputs = _joined([outputs for outputs, _ in answers], own)
        targets = _joined([targets for _, targets in answers], own)
        samples, first = count_samples(targets), whole(outputs, targets)
        values = _numbers(first, samples)
        if values is not None:
            return _mean_score(self, values, resamples)
        if np.size(_plain(first)) != 1:
            raise InvalidInput(
                f"metric {own} returns {tuple(np.shape(_plain(first)))}; it must return one number, or one per sample"
            )

        def again(weights: Weights) -> float:
            chosen = torch.from_numpy(np.repeat(np.arange(samples), weights.astype(np.int64)))
            pick = [map_tensors(lambda leaf: _picked(leaf, chosen, samples), each) for each in (outputs, targets)]
            return float(_plain(whole(*pick)))

        return Score(self, self._finite(_plain(first)), samples, _resampled(samples, resamples, again), None)


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value over a part of the data, and how sure it is.

    Attributes:
        metric: What was reckoned.
        value: The value over all samples.
        samples: Samples it was reckoned over.
        resamples: The value over each of a row of resamples. The same number of samples gives the same resamples, so
            two models that answered the same samples are compared resample by resample.
        per_sample: One number per sample whose mean decides the metric; None where there is no such number.
    """

    metric: Metric
    value: float
    samples: int
    resamples: npt.NDArray[np.float64]
    per_sample: npt.NDArray[np.float64] | None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the value lies, 19 times in 20: Wilson's for shares of right answers, else by the resamples.

        >>> right = torch.zeros(100, dtype=torch.int64)
        >>> right[:5] = 1
        >>> scored = metric_named("accuracy").scored([(torch.tensor([[1.0, 0.0]]).repeat(100, 1), right)])
        >>> [round(bound, 4) for bound in scored.interval]
        [0.8882, 0.9785]
        """
        counted = self.per_sample
        if self.metric.name in SHARES and counted is not None and np.isin(counted, (0.0, 1.0)).all():
            return wilson(int(counted.sum()), len(counted))
        return _middle(self.resamples, self.value)

    def difference(self, other: Score) -> tuple[float, float, float]:
        """By how much `other` is worse than this on the same samples, with the 95 % interval of that: paired.

        >>> truth = torch.arange(4.0)
        >>> one, two = (metric_named("mae").scored([(truth + gap, truth)]) for gap in (0.5, 0.75))
        >>> one.difference(two)
        (0.25, 0.25, 0.25)
        """
        if self.samples != other.samples or self.metric.name != other.metric.name:
            raise InvalidInput(
                f"{self.metric.name} over {self.samples} samples and {other.metric.name} over {other.samples} "
                "cannot be paired; score both by the same metric on the same data"
            )
        count = min(len(self.resamples), len(other.resamples))
        drops = self.resamples[:count] - other.resamples[:count]
        value = self.metric.drop(self.value, other.value)
        return (value, *_middle(drops if self.metric.direction == "higher" else -drops, value))


def _middle(values: npt.NDArray[np.float64], value: float) -> tuple[float, float]:
    """The middle 95 % of resampled values; the value itself alone where there are none."""
    known = values[np.isfinite(values)]
    if len(known) < _FEWEST_RESAMPLES:
        return value, value
    low, high = np.quantile(known, (0.025, 0.975))
    return min(float(low), value), max(float(high), value)


def _resampled(samples: int, count: int, value: Callable[[Weights], float]) -> npt.NDArray[np.float64]:
    """The value for samples drawn with replacement, as often as there are; the same draws for the same number."""
    generator, found, end = np.random.default_rng(samples), [], time.monotonic() + _RESAMPLING_SECONDS
    for _ in range(count):
        weights = np.bincount(generator.integers(0, samples, samples), minlength=samples).astype(np.float64)
        found.append(value(weights))
        if time.monotonic() > end:
            break
    return np.asarray(found, dtype=np.float64)


def _mean_score(metric: Metric, values: npt.NDArray[np.float64], resamples: int) -> Score:
    """The score of a metric that gives one number per sample: their mean."""
    mean = metric._finite(values.mean())
    drawn = _resampled(len(values), resamples, lambda weights: float(weights @ values) / len(values))
    return Score(metric, mean, len(values), drawn, values)


def first_tensor(output: Any) -> torch.Tensor:
    """The scores in whatever a model returns: its `logits`, or the first tensor."""
    found = output
    while isinstance(found, (tuple, list)) and found and not hasattr(found, "logits"):
        found = found[0]
    if isinstance(found, Mapping):
        found = found.get("logits", next(iter(found.values()), None))
    elif not isinstance(found, (torch.Tensor, np.ndarray)):
        found = getattr(found, "logits", next(iter(flat_tensors(found)), None))
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found)
    if not isinstance(found, torch.Tensor):
        raise InvalidInput(f"the model returns a {type(output).__name__} without a tensor of scores")
    return found


def _pair(name: str, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float32 and targets, both on the CPU."""
    scores = first_tensor(outputs).detach().cpu()
    if isinstance(targets, Mapping) or (isinstance(targets, (tuple, list)) and tree_has_tensors(targets)):
        raise InvalidInput(
            f"targets are a {type(targets).__name__} of several, and {name} takes one tensor; "
            "set metric to a function of your own on (outputs, targets): file.py:f"
        )
    try:
        found = torch.as_tensor(targets).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"labels are not numbers ({first_line(error)}), and {name} needs them to be") from error
    return scores.float() if scores.is_floating_point() else scores, found


def tree_has_tensors(value: Any) -> bool:
    """Whether a structure holds tensors or arrays at all."""
    return any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in tree_leaves(value))


def class_scores(name: str, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (samples, positions, classes) and labels (samples, positions); what does not fit is refused.

    Scores are (samples, classes, ...) as torch's losses take them, or (samples, ..., classes) as language models do.
    Labels below 0 are ignored.
    """
    whole = not labels.is_floating_point() and not labels.is_complex()
    shape = tuple(scores.shape)
    if whole and scores.dim() == 2 and labels.dim() == 2 and labels.shape == (len(scores), 1):
        labels = labels[:, 0]
    is_first = scores.dim() > 1 and tuple(labels.shape) == (shape[0], *shape[2:])
    is_last = scores.dim() > 2 and tuple(labels.shape) == shape[:-1]
    classes = 0 if not (is_first or is_last) else shape[1] if is_first else shape[-1]
    if not whole or classes < 2:
        raise InvalidInput(
            f"outputs {shape} and labels {tuple(labels.shape)} of {labels.dtype} do not fit {name}; it needs scores "
            f"(samples, classes, ...) and whole-numbered labels (samples, ...). {_way_out(scores, labels)}"
        )
    ordered = scores.movedim(1, -1) if is_first else scores
    truth = labels[:, None].flatten(1).to(torch.int64)
    if truth.numel() and int(truth.max()) >= classes:
        raise InvalidInput(
            f"a label is {int(truth.max())}, and the outputs have {classes} classes; labels count from 0, and those to "
            "be ignored are below 0, such as -100"
        )
    return ordered.reshape(len(labels), truth.shape[1], classes), truth


def _way_out(scores: torch.Tensor, labels: torch.Tensor) -> str:
    own = "or a function of your own: file.py:f"
    if scores.shape == labels.shape and scores.dim() == 2 and bool(((labels == 0) | (labels == 1)).all()):
        return f"For several labels per sample set metric to auroc, for one-hot labels pass their argmax, {own}"
    if labels.is_floating_point():
        return f"For numbers set metric to mae, rmse or r2, {own}"
    if scores.dim() < 2 or (scores.dim() == 2 and scores.shape[1] == 1):
        return f"For one score per sample set metric to auroc, for numbers to mae, {own}"
    return f"Set metric to what fits them: mae, rmse, r2, miou, auroc, perplexity, wer, {own}"


def _hits(name: str, most: int) -> Callable[[Any, Any], Table]:
    """A table of right answers and of answers, per sample: right is a label among the `most` best scores."""

    def gather(outputs: Any, targets: Any) -> Table:
        scores, labels = class_scores(name, *_pair(name, outputs, targets))
        if most >= scores.shape[-1]:
            raise InvalidInput(f"{name} of {scores.shape[-1]} classes is always 1; set metric to accuracy")
        if most == 1:
            right = scores.argmax(-1) == labels
        else:
            right = (scores.topk(most, dim=-1).indices == labels[..., None]).any(-1)
        asked = labels >= 0
        return _table((right & asked).sum(1), asked.sum(1))

    return gather


def _confusion(name: str) -> Callable[[Any, Any], Table]:
    """A table of (sample, truth, guess, how often)."""

    def gather(outputs: Any, targets: Any) -> Table:
        scores, labels = class_scores(name, *_pair(name, outputs, targets))
        classes, guesses = scores.shape[-1], scores.argmax(-1)
        samples = torch.arange(len(labels))[:, None].expand_as(labels)
        asked = labels >= 0
        codes = (samples[asked] * classes + labels[asked]) * classes + guesses[asked]
        found, counts = np.unique(codes.numpy(), return_counts=True)
        columns = (found // classes**2, found // classes % classes, found % classes, counts)
        return np.column_stack(columns).astype(np.float64)

    return gather


def _by_class(columns: Table, weights: Weights) -> tuple[Any, Any, Any]:
    """Right, true and guessed counts of each class."""
    truth, guess = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
    counts, size = columns[:, 2] * weights, int(columns[:, :2].max(initial=0)) + 1
    right = np.bincount(truth, np.where(truth == guess, counts, 0.0), size)
    return right, np.bincount(truth, counts, size), np.bincount(guess, counts, size)


def _f1(columns: Table, weights: Weights) -> float:
    """The mean over classes of 2 right / (true + guessed); classes that neither occur nor are guessed are left out."""
    right, true, guessed = _by_class(columns, weights)
    met = true + guessed > 0
    return float((2 * right[met] / (true + guessed)[met]).mean())


def _miou(columns: Table, weights: Weights) -> float:
    """The mean over classes of right / (true + guessed - right); classes that are in neither are left out."""
    right, true, guessed = _by_class(columns, weights)
    union = true + guessed - right
    return float((right[union > 0] / union[union > 0]).mean())


def _errors(name: str, power: int, with_truth: bool = False) -> Callable[[Any, Any], Table]:
    """A table of summed errors and their number per sample; with the sums of targets and of their squares, too."""

    def gather(outputs: Any, targets: Any) -> Table:
        values, truth = _pair(name, outputs, targets)
        if values.shape != truth.shape and values.numel() == truth.numel() and len(values) == len(truth):
            # (samples, 1) and (samples,) mean the same; subtracting them would compare all with all.
            values = values.reshape(truth.shape)
        if values.shape != truth.shape or not len(truth):
            raise InvalidInput(
                f"{name} needs outputs and targets of one shape, and they are {tuple(values.shape)} and "
                f"{tuple(truth.shape)}; for classes set metric to accuracy, or to a function of your own: file.py:f"
            )
        values, truth = (each.reshape(len(truth), -1).double() for each in (values, truth))
        columns = [((values - truth).abs() ** power).sum(1), torch.full((len(truth),), float(truth.shape[1]))]
        return _table(*columns, *([truth.sum(1), truth.square().sum(1)] if with_truth else []))

    return gather


def _ratio(columns: Table, weights: Weights) -> float:
    top, bottom = weights @ columns[:, :2]
    return float(top / bottom) if bottom else math.nan


def _r2(columns: Table, weights: Weights) -> float:
    """1 - squared errors / squared distances from the mean, all outputs together."""
    error, count, total, squares = weights @ columns
    spread = squares - total**2 / count
    return float(1 - error / spread) if spread > 0 else math.nan


def _surprise(outputs: Any, targets: Any) -> Table:
    """A table of summed negative log likelihoods and their number per sample."""
    scores, labels = class_scores("perplexity", *_pair("perplexity", outputs, targets))
    asked = labels >= 0
    chosen = scores.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return _table(-(chosen * asked).sum(1), asked.sum(1))


def _ranks(outputs: Any, targets: Any) -> Table:
    """A table of scores and labels, 0 or 1; several classes side by side."""
    scores, labels = _pair("auroc", outputs, targets)
    scores = scores.reshape(len(scores), -1) if scores.dim() < 3 else scores
    if scores.dim() == 2 and labels.dim() < 3 and len(labels) == len(scores):
        hot = labels.reshape(len(labels), -1).double()
        if hot.shape[1] == 1 and scores.shape[1] == 2:
            scores = scores[:, 1:] - scores[:, :1]
        elif hot.shape[1] == 1 and scores.shape[1] > 2 and not labels.is_floating_point():
            hot = (labels.reshape(-1, 1) == torch.arange(scores.shape[1])).double()
            # Scores of several classes are compared between samples: as probabilities, which some models return.
            is_shares = bool((scores >= 0).all()) and torch.allclose(scores.sum(1), torch.ones(len(scores)), atol=1e-3)
            scores = scores if is_shares else scores.softmax(1)
        if hot.shape == scores.shape and bool(((hot == 0) | (hot == 1)).all()):
            return np.column_stack([np.arange(len(hot)), scores.double().numpy(), hot.numpy()])
    raise InvalidInput(
        f"auroc needs one score per class and labels 0 or 1, or whole numbers; the outputs are {tuple(scores.shape)} "
        f"and the labels {tuple(labels.shape)} of {str(labels.dtype).removeprefix('torch.')}; for numbers set metric "
        "to mae, or to a function of your own: file.py:f"
    )


def _auroc(columns: Table, weights: Weights) -> float:
    """How often a positive sample is scored above a negative one, ties half; the mean over classes that have both."""
    classes = columns.shape[1] // 2
    found = []
    for index in range(classes):
        _, place = np.unique(columns[:, index], return_inverse=True)
        positive = np.bincount(place, weights * columns[:, classes + index])
        negative = np.bincount(place, weights * (1 - columns[:, classes + index]))
        pairs = positive.sum() * negative.sum()
        if pairs:
            below = np.cumsum(negative) - negative
            found.append(float(positive @ (below + negative / 2)) / pairs)
    return float(np.mean(found)) if found else math.nan


def _edits(outputs: Any, targets: Any) -> Table:
    """A table of edits (inserted, deleted, replaced tokens) and of target tokens per sample."""
    found, truth = _pair("wer", outputs, targets)
    guesses = found.argmax(-1) if found.is_floating_point() else found
    if guesses.dim() != 2 or truth.dim() != 2 or len(guesses) != len(truth) or truth.is_floating_point():
        raise InvalidInput(
            f"wer needs tokens (samples, length), or their scores (samples, length, words), and targets (samples, "
            f"length) of whole numbers; the outputs are {tuple(found.shape)} and the targets {tuple(truth.shape)}"
        )
    if guesses.shape == truth.shape:
        # Where nothing is asked, as behind the end of a sentence, nothing is answered.
        guesses = guesses.masked_fill(truth < 0, -1)
    rows = zip(guesses.tolist(), truth.tolist(), strict=True)
    pairs = [tuple([token for token in row if token >= 0] for row in pair) for pair in rows]
    return _table(torch.tensor([edit_distance(*pair) for pair in pairs]), torch.tensor([len(w) for _, w in pairs]))


def _table(*columns: torch.Tensor) -> Table:
    rows = torch.stack([torch.arange(len(columns[0])).double(), *(column.double() for column in columns)], 1)
    return rows.numpy()


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "higher", _hits("accuracy", 1), _ratio, is_mean=True),
        Metric("top5", "higher", _hits("top5", 5), _ratio, is_mean=True),
        Metric("f1", "higher", _confusion("f1"), _f1),
        Metric("miou", "higher", _confusion("miou"), _miou),
        Metric("auroc", "higher", _ranks, _auroc),
        Metric("mae", "lower", _errors("mae", 1), _ratio, is_mean=True),
        Metric("rmse", "lower", _errors("rmse", 2), lambda c, w: math.sqrt(_ratio(c, w)), is_mean=True),
        Metric("r2", "higher", _errors("r2", 2, with_truth=True), _r2),
        Metric("perplexity", "lower", _surprise, lambda c, w: math.exp(_ratio(c, w))),
        Metric("wer", "lower", _edits, _ratio),
    )
}
_ALSO = {"top5accuracy": "top5", "f1macro": "f1", "macrof1": "f1", "meaniou": "miou", "iou": "miou", "auc": "auroc",
         "rocauc": "auroc", "ppl": "perplexity", "worderrorrate": "wer", "tokenerrorrate": "wer", "ter": "wer",
         "meanabsoluteerror": "mae", "l1": "mae", "rootmeansquarederror": "rmse", "acc": "accuracy"}  # fmt: skip


def metric_named(name: str) -> Metric:
    """A metric by its name, however it is spelled.

    >>> metric_named("top-5").name, metric_named("mIoU").name, metric_named("R²").direction
    ('top5', 'miou', 'higher')
    """
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("²", "2"))
    found = METRICS.get(_ALSO.get(key, key))
    if found is None:
        raise InvalidInput(
            f"unknown metric {name!r}; metrics are {', '.join(METRICS)}, or a function of your own: file.py:f"
        )
    return found


def metric_of(given: Any, direction: MetricDirection | None = None, name: str | None = None) -> Metric:
    """The metric that a user means: a name, a Metric, a torchmetrics object, or a function of (outputs, targets).

    Args:
        given: The name, object or function. A function returns one number, or one per sample, whose mean counts.
        direction: Whether "higher" or "lower" is better. A function of your own must say it: here, or as an attribute
            `higher_is_better` as in torchmetrics.
        name: What to call a function or an object; its own name unless given.

    >>> def worst(outputs, targets):
    ...     return (outputs - targets).abs().max()
    >>> metric_of(worst, "lower").value(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]))
    4.0
    """
    if isinstance(given, str):
        given = metric_named(given)
    if isinstance(given, Metric):
        if direction not in (None, given.direction):
            raise InvalidInput(f"{given.name} is better when {given.direction}; leave metric_direction out")
        return given
    if isinstance(given, type):
        given = given()
    is_stateful = callable(getattr(given, "update", None)) and callable(getattr(given, "compute", None))
    if not is_stateful and not callable(given):
        raise InvalidInput(f"metric is a {type(given).__name__}; it must be a name or a function of (outputs, targets)")
    name = name or own_name(given)
    said = getattr(given, "higher_is_better", None)
    better = direction or (None if said is None else "higher" if said else "lower")
    if better not in ("higher", "lower"):
        raise InvalidInput(
            f"is a higher {name} better, or a lower one? Set metric_direction to higher or lower, "
            f"or {name}.higher_is_better to True or False"
        )
    return Metric(name, better, whole=_guarded(_updated(given) if is_stateful else given, name))


def own_name(given: Any) -> str:
    """What columns and constraints call a function or an object of the user's."""
    name = getattr(given, "__name__", None) or type(given).__name__
    return plain_name(str(name))


def plain_name(name: str) -> str:
    """A name as a column: snake case; "score" where it is no name at all."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return plain if plain.isidentifier() else "score"


def reference_name(given: Any) -> str:
    """What columns call a metric, from its name, its reference, or itself; nothing is imported for it.

    >>> reference_name("top-5"), reference_name("net.py:dice")
    ('top5', 'dice')
    """
    parsed = parse_reference(given) if isinstance(given, str) else None
    if parsed is not None:
        return plain_name(parsed.name.rpartition(".")[2])
    return metric_named(given).name if isinstance(given, str) else own_name(given)


def _updated(given: Any) -> Callable[[Any, Any], Any]:
    """A metric with update() and compute(), as torchmetrics has, as a function."""

    def whole(outputs: Any, targets: Any) -> Any:
        given.reset()
        given.update(first_tensor(outputs), targets)
        return given.compute()

    return whole


def _guarded(function: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
    """The user's function; what it raises is one sentence."""

    def whole(outputs: Any, targets: Any) -> Any:
        try:
            return function(outputs, targets)
        except EdgeOptError:
            raise
        except Exception as error:
            shapes = " and ".join(_shapes(each) for each in (outputs, targets))
            raise InvalidInput(
                f"metric {name} raised {first_line(error)} on outputs and targets of {shapes}"
            ) from error

    return whole


def takes_model(function: Callable[..., Any]) -> bool:
    """Whether a function is one of the model alone: it has one parameter that must be given."""
    if callable(getattr(function, "update", None)):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty]
    return not any(p.kind is p.VAR_POSITIONAL for p in parameters) and (len(required) or len(places)) == 1


def _shapes(value: Any) -> str:
    found = [str(tuple(leaf.shape)) for leaf in tree_leaves(value) if hasattr(leaf, "shape")]
    return ", ".join(found) or type(value).__name__


def _is_odd(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() and bool(leaf.isnan().any())


def count_samples(targets: Any) -> int:
    """How many samples there are."""
    for leaf in tree_leaves(targets):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            return len(leaf) if leaf.ndim else 1
    return len(targets)


def _joined(parts: list[Any], name: str) -> Any:
    """Batches as one, leaf by leaf."""
    try:
        return map_tensors(_end_to_end, *parts)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"metric {name} sees all batches at once, and they cannot be put end to end ({first_line(error)}); pad "
            "them to one length"
        ) from error


def _end_to_end(*column: torch.Tensor) -> torch.Tensor:
    return torch.cat([leaf.detach().cpu() if leaf.dim() else leaf[None].detach().cpu() for leaf in column])


def _picked(leaf: torch.Tensor, chosen: torch.Tensor, samples: int) -> torch.Tensor:
    return leaf[chosen] if leaf.dim() and len(leaf) == samples else leaf


def _plain(value: Any) -> Any:
    return value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value


def _numbers(value: Any, samples: int) -> npt.NDArray[np.float64] | None:
    """One number per sample, where that is what a metric returns."""
    found = np.asarray(_plain(value), dtype=np.float64) if np.ndim(_plain(value)) == 1 else None
    return found if found is not None and len(found) == samples > 1 else None
