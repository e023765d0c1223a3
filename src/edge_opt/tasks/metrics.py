"""Quality metrics: which way is better, and how they are computed over batches and over resamples."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from edge_opt.errors import EdgeOptError, InvalidInput, MeasurementFailed, first_line
from edge_opt.loading import parse_reference
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import MetricDirection
from edge_opt.tasks.paired_scores import RESAMPLES, Numbers, Score, resampled
from edge_opt.trace.inputs import flat_tensors, map_tensors


@record
class QualityMetric:
    """A quality metric over outputs and targets: its name, which way is better, and how it is computed.

    `gather` turns one batch into a table of numbers: column 0 is the index of the sample in the batch, the others are
    what the sample adds. `reckon` turns the columns of all batches, each row with a weight, into the value. So a metric
    is computed over batches of any shape, and again for a resample of the same samples, which only changes weights.
    A metric without `gather` has `whole`, a function of all outputs and all targets at once.
    """

    name: str = field("As columns and constraints call it: `mae`, `mae_drop`.")
    direction: MetricDirection = field('Whether "higher" or "lower" is better.')
    gather: Callable[[Any, Any], Numbers] | None = field("Outputs and targets of one batch to a table.", default=None)
    reckon: Callable[[Numbers, Numbers], float] | None = field("Columns and weights to the value.", default=None)
    whole: Callable[[Any, Any], float] | None = field("Outputs and targets of all batches to the value.", default=None)
    is_mean: bool = field("It is the mean of one number per sample, or follows from that mean.", default=False)

    def value(self, outputs: Any, targets: Any) -> float:
        """Return the metric of these outputs."""
        return self.scored([(outputs, targets)], resamples=0).value

    def scored(self, answers: Iterable[tuple[Any, Any]], resamples: int = RESAMPLES) -> Score:
        """Return the metric over batches of (outputs, targets), with its values over resamples."""
        if self.gather is None:
            return self._scored_whole(list(answers), resamples)
        tables, samples = [], 0
        for number, (outputs, targets) in enumerate(answers):
            if any(leaf.is_floating_point() and bool(leaf.isnan().any()) for leaf in flat_tensors(outputs)):
                raise MeasurementFailed(f"outputs of batch {number} are NaN; {self.name} has no meaning")
            table = self.gather(outputs, targets)
            table[:, 0] += samples
            samples += count_samples(targets)
            tables.append(table)
        if not samples:
            raise InvalidInput(f"the loader has no batches; {self.name} needs at least one")
        assert self.reckon is not None
        rows, reckon = np.concatenate(tables), self.reckon
        sample_of, columns = rows[:, 0].astype(np.int64), rows[:, 1:]
        value = self._finite(reckon(columns, np.ones(len(rows))))
        drawn = resampled(samples, resamples, lambda weights: reckon(columns, weights[sample_of]))
        each = columns[:, 0] / columns[:, 1] if self.is_mean else None
        return Score(self, value, samples, drawn, each)

    def _finite(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"metric {self.name} returns {str(value)[:60]!r}; it must return a number") from None
        if not math.isfinite(number):
            raise MeasurementFailed(f"{self.name} is {number} on these data; it has no meaning")
        return number

    def _scored_whole(self, answers: list[tuple[Any, Any]], resamples: int) -> Score:
        if not answers:
            raise InvalidInput(f"the loader has no batches; {self.name} needs at least one")
        assert self.whole is not None
        whole = self.whole
        outputs, targets = (_joined(list(parts), self.name) for parts in zip(*answers, strict=True))
        samples, result = count_samples(targets), _plain(whole(outputs, targets))
        if np.shape(result) == (samples,) and samples > 1:
            values = np.asarray([self._finite(value) for value in result])
            drawn = resampled(samples, resamples, lambda weights: float(weights @ values) / samples)
            return Score(self, self._finite(values.mean()), samples, drawn, values)
        if np.size(result) != 1:
            raise InvalidInput(
                f"metric {self.name} returns {np.shape(result)}; it must return one number, or one per sample"
            )

        def again(weights: Numbers) -> float:
            chosen = torch.from_numpy(np.repeat(np.arange(samples), weights.astype(np.int64)))

            def picked(leaf: torch.Tensor) -> torch.Tensor:
                return leaf[chosen] if leaf.dim() and len(leaf) == samples else leaf

            return float(_plain(whole(map_tensors(picked, outputs), map_tensors(picked, targets))))

        return Score(self, self._finite(result), samples, resampled(samples, resamples, again), None)


def first_tensor(output: Any) -> torch.Tensor:
    """Return the scores in whatever a model returns: its `logits`, or the first tensor."""
    scores = output
    while isinstance(scores, (tuple, list)) and scores and not hasattr(scores, "logits"):
        scores = scores[0]
    if isinstance(scores, Mapping):
        scores = scores.get("logits", next(iter(scores.values()), None))
    elif not _is_array(scores):
        scores = getattr(scores, "logits", next(iter(flat_tensors(scores)), None))
    if isinstance(scores, np.ndarray):
        scores = torch.from_numpy(scores)
    if not isinstance(scores, torch.Tensor):
        raise InvalidInput(f"the model returns a {type(output).__name__} without a tensor of scores")
    return scores


def _pair(name: str, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores in float32 and targets, both on the CPU."""
    scores = first_tensor(outputs).detach().cpu()
    is_sequence_of_tensors = isinstance(targets, (tuple, list)) and any(map(_is_array, tree_leaves(targets)))
    if isinstance(targets, Mapping) or is_sequence_of_tensors:
        raise InvalidInput(
            f"targets are a {type(targets).__name__} of several, and {name} takes one tensor; "
            "set metric to a function of your own on (outputs, targets): file.py:f"
        )
    try:
        labels = torch.as_tensor(targets).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"labels are not numbers ({first_line(error)}), and {name} needs them to be") from error
    return scores.float() if scores.is_floating_point() else scores, labels


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def class_scores(name: str, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores (samples, positions, classes) and labels (samples, positions); others are refused.

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


def _hits(name: str, most: int) -> Callable[[Any, Any], Numbers]:
    """Tabulate right answers and answers per sample: right is a label among the `most` best scores."""

    def gather(outputs: Any, targets: Any) -> Numbers:
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


def _confusion(name: str) -> Callable[[Any, Any], Numbers]:
    """Tabulate (sample, truth, guess, how often)."""

    def gather(outputs: Any, targets: Any) -> Numbers:
        scores, labels = class_scores(name, *_pair(name, outputs, targets))
        classes, guesses = scores.shape[-1], scores.argmax(-1)
        samples = torch.arange(len(labels))[:, None].expand_as(labels)
        asked = labels >= 0
        codes = (samples[asked] * classes + labels[asked]) * classes + guesses[asked]
        pairs, counts = np.unique(codes.numpy(), return_counts=True)
        columns = (pairs // classes**2, pairs // classes % classes, pairs % classes, counts)
        return np.column_stack(columns).astype(np.float64)

    return gather


def _by_class(columns: Numbers, weights: Numbers) -> tuple[Any, Any, Any]:
    """Return right, true and guessed counts of each class."""
    truth, guess = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
    counts, size = columns[:, 2] * weights, int(columns[:, :2].max(initial=0)) + 1
    right = np.bincount(truth, np.where(truth == guess, counts, 0.0), size)
    return right, np.bincount(truth, counts, size), np.bincount(guess, counts, size)


def _f1(columns: Numbers, weights: Numbers) -> float:
    """Return the mean over classes of 2 right / (true + guessed), without classes that are in neither."""
    right, true, guessed = _by_class(columns, weights)
    met = true + guessed > 0
    return float((2 * right[met] / (true + guessed)[met]).mean())


def _miou(columns: Numbers, weights: Numbers) -> float:
    """Return the mean over classes of right / (true + guessed - right), without classes that are in neither."""
    right, true, guessed = _by_class(columns, weights)
    union = true + guessed - right
    return float((right[union > 0] / union[union > 0]).mean())


def _errors(name: str, power: int, with_truth: bool = False) -> Callable[[Any, Any], Numbers]:
    """Tabulate summed errors and their number per sample, on request with the sums of targets and their squares."""

    def gather(outputs: Any, targets: Any) -> Numbers:
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


def _ratio(columns: Numbers, weights: Numbers) -> float:
    top, bottom = weights @ columns[:, :2]
    return float(top / bottom) if bottom else math.nan


def _r2(columns: Numbers, weights: Numbers) -> float:
    """Return 1 - squared errors / squared distances from the mean, all outputs together."""
    error, count, total, squares = weights @ columns
    spread = squares - total**2 / count
    return float(1 - error / spread) if spread > 0 else math.nan


def _surprise(outputs: Any, targets: Any) -> Numbers:
    """Tabulate summed negative log likelihoods and their number per sample."""
    scores, labels = class_scores("perplexity", *_pair("perplexity", outputs, targets))
    asked = labels >= 0
    chosen = scores.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return _table(-(chosen * asked).sum(1), asked.sum(1))


def _ranks(outputs: Any, targets: Any) -> Numbers:
    """Tabulate scores and labels, 0 or 1; several classes side by side."""
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


def _auroc(columns: Numbers, weights: Numbers) -> float:
    """Return how often a positive sample is scored above a negative one, ties half; the mean over classes."""
    classes = columns.shape[1] // 2
    areas = []
    for index in range(classes):
        _, rank = np.unique(columns[:, index], return_inverse=True)
        positive = np.bincount(rank, weights * columns[:, classes + index])
        negative = np.bincount(rank, weights * (1 - columns[:, classes + index]))
        pairs = positive.sum() * negative.sum()
        if pairs:
            below = np.cumsum(negative) - negative
            areas.append(float(positive @ (below + negative / 2)) / pairs)
    return float(np.mean(areas)) if areas else math.nan


def _edits(outputs: Any, targets: Any) -> Numbers:
    """Tabulate edits (inserted, deleted, replaced tokens) and target tokens per sample."""
    tokens, truth = _pair("wer", outputs, targets)
    guesses = tokens.argmax(-1) if tokens.is_floating_point() else tokens
    if guesses.dim() != 2 or truth.dim() != 2 or len(guesses) != len(truth) or truth.is_floating_point():
        raise InvalidInput(
            f"wer needs tokens (samples, length), or their scores (samples, length, words), and targets (samples, "
            f"length) of whole numbers; the outputs are {tuple(tokens.shape)} and the targets {tuple(truth.shape)}"
        )
    if guesses.shape == truth.shape:
        # Where nothing is asked, as behind the end of a sentence, nothing is answered.
        guesses = guesses.masked_fill(truth < 0, -1)
    rows = zip(guesses.tolist(), truth.tolist(), strict=True)
    pairs = [tuple([token for token in row if token >= 0] for row in pair) for pair in rows]
    return _table(torch.tensor([edit_distance(*pair) for pair in pairs]), torch.tensor([len(w) for _, w in pairs]))


def _table(*columns: torch.Tensor) -> Numbers:
    rows = torch.stack([torch.arange(len(columns[0])).double(), *(column.double() for column in columns)], 1)
    return rows.numpy()


METRICS: Mapping[str, QualityMetric] = {
    metric.name: metric
    for metric in (
        QualityMetric("accuracy", "higher", _hits("accuracy", 1), _ratio, is_mean=True),
        QualityMetric("top5", "higher", _hits("top5", 5), _ratio, is_mean=True),
        QualityMetric("f1", "higher", _confusion("f1"), _f1),
        QualityMetric("miou", "higher", _confusion("miou"), _miou),
        QualityMetric("auroc", "higher", _ranks, _auroc),
        QualityMetric("mae", "lower", _errors("mae", 1), _ratio, is_mean=True),
        QualityMetric("rmse", "lower", _errors("rmse", 2), lambda c, w: math.sqrt(_ratio(c, w)), is_mean=True),
        QualityMetric("r2", "higher", _errors("r2", 2, with_truth=True), _r2),
        QualityMetric("perplexity", "lower", _surprise, lambda c, w: math.exp(_ratio(c, w))),
        QualityMetric("wer", "lower", _edits, _ratio),
    )
}
_ALSO = {"top5accuracy": "top5", "f1macro": "f1", "macrof1": "f1", "meaniou": "miou", "iou": "miou", "auc": "auroc",
         "rocauc": "auroc", "ppl": "perplexity", "worderrorrate": "wer", "tokenerrorrate": "wer", "ter": "wer",
         "meanabsoluteerror": "mae", "l1": "mae", "rootmeansquarederror": "rmse", "acc": "accuracy"}  # fmt: skip
# Metrics that are not computed here: a function of the user's with such a name need not say which way is better.
_DIRECTIONS: Mapping[str, MetricDirection] = {
    **dict.fromkeys("dice dicescore jaccard precision recall specificity map psnr ssim bleu rouge".split(), "higher"),
    **dict.fromkeys("mse mape loss error meansquarederror cer bitsperbyte fid".split(), "lower"),
}


def _metric_key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("²", "2"))
    return _ALSO.get(key, key)


def known_direction(name: str) -> MetricDirection | None:
    """Return which way is better for a metric of this name; None for an unknown name.

    >>> known_direction("mean_absolute_error"), known_direction("dice"), known_direction("worst")
    ('lower', 'higher', None)
    """
    key = _metric_key(name)
    return METRICS[key].direction if key in METRICS else _DIRECTIONS.get(key)


def metric_named(name: str) -> QualityMetric:
    """Return a metric by its name, however it is spelled.

    >>> metric_named("top-5").name, metric_named("mIoU").name, metric_named("R²").direction
    ('top5', 'miou', 'higher')
    """
    metric = METRICS.get(_metric_key(name))
    if metric is None:
        raise InvalidInput(
            f"unknown metric {name!r}; metrics are {', '.join(METRICS)}, or a function of your own: file.py:f"
        )
    return metric


def metric_of(metric: Any, direction: MetricDirection | None = None, name: str | None = None) -> QualityMetric:
    """Return the metric that a user means: a name, a metric, a torchmetrics object, or a function.

    Args:
        metric: The name, object or function of (outputs, targets). A function returns one number, or one per sample,
            whose mean counts.
        direction: Whether "higher" or "lower" is better. Default: that of a known metric of this name. Other functions
            of your own must say it: here, or as an attribute `higher_is_better` as in torchmetrics.
        name: What to call a function or an object; default: its own name.

    >>> def worst(outputs, targets):
    ...     return (outputs - targets).abs().max()
    >>> metric_of(worst, "lower").value(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]))
    4.0
    """
    if isinstance(metric, str):
        metric = metric_named(metric)
    if isinstance(metric, QualityMetric):
        if direction not in (None, metric.direction):
            raise InvalidInput(f"{metric.name} is better when {metric.direction}; leave metric_direction out")
        return metric
    if isinstance(metric, type):
        metric = metric()
    is_stateful = callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))
    if not is_stateful and not callable(metric):
        raise InvalidInput(
            f"metric is a {type(metric).__name__}; it must be a name or a function of (outputs, targets)"
        )
    name = name or reference_name(metric)
    said = getattr(metric, "higher_is_better", None)
    better = direction or (known_direction(name) if said is None else "higher" if said else "lower")
    if better not in ("higher", "lower"):
        raise InvalidInput(
            f"is a higher {name} better, or a lower one? Set metric_direction (--metric-direction) to higher or lower, "
            f"or {name}.higher_is_better to True or False"
        )
    return QualityMetric(name, better, whole=_guarded(metric, name, is_stateful))


def plain_name(name: str) -> str:
    """Return a name as a column: snake case; "score" where it is not an identifier."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return plain if plain.isidentifier() else "score"


def reference_name(metric: Any) -> str:
    """Return what columns call a metric, from its name, its reference, or itself; nothing is imported for it.

    >>> reference_name("top-5"), reference_name("net.py:dice")
    ('top5', 'dice')
    """
    if not isinstance(metric, str):
        return plain_name(str(getattr(metric, "__name__", None) or type(metric).__name__))
    parsed = parse_reference(metric)
    return metric_named(metric).name if parsed is None else plain_name(parsed.name.rpartition(".")[2])


def _guarded(metric: Any, name: str, is_stateful: bool) -> Callable[[Any, Any], Any]:
    """Return the user's metric as a function of outputs and targets; what it raises is one sentence.

    `is_stateful`: it has update() and compute(), as torchmetrics.
    """

    def whole(outputs: Any, targets: Any) -> Any:
        try:
            if not is_stateful:
                return metric(outputs, targets)
            metric.reset()
            metric.update(first_tensor(outputs), targets)
            return metric.compute()
        except EdgeOptError:
            raise
        except Exception as error:
            shapes = " and ".join(
                ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(each) if hasattr(leaf, "shape"))
                or type(each).__name__
                for each in (outputs, targets)
            )
            raise InvalidInput(
                f"metric {name} raised {first_line(error)} on outputs and targets of {shapes}"
            ) from error

    return whole


def takes_model(function: Callable[..., Any]) -> bool:
    """Return whether a function is one of the model alone: it has one parameter that must be given."""
    if callable(getattr(function, "update", None)):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    return not any(p.kind is p.VAR_POSITIONAL for p in parameters) and (len(required) or len(positional)) == 1


def count_samples(targets: Any) -> int:
    """Return how many samples there are."""
    array = next(filter(_is_array, tree_leaves(targets)), None)
    return len(targets) if array is None else len(array) if array.ndim else 1


def _joined(parts: list[Any], name: str) -> Any:
    """Join batches into one, leaf by leaf."""

    def end_to_end(*column: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf.detach().cpu().reshape(leaf.shape or (1,)) for leaf in column])

    try:
        return map_tensors(end_to_end, *parts)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"metric {name} sees all batches at once, and they cannot be put end to end ({first_line(error)}); pad "
            "them to one length"
        ) from error


def _plain(value: Any) -> Any:
    return value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value


def edit_distance(tokens: Sequence[object], reference: Sequence[object]) -> int:
    """Return how many tokens must be inserted, deleted or replaced to turn one sequence into the other.

    >>> edit_distance("a cat sat here".split(), "the cat sat".split())
    2
    """
    # One row of the Levenshtein table at a time: costs[c] is the distance of the tokens so far to reference[:c].
    costs = list(range(len(reference) + 1))
    for row, token in enumerate(tokens, 1):
        diagonal, costs[0] = costs[0], row
        for column, wanted in enumerate(reference, 1):
            diagonal, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, diagonal + (token != wanted)),
            )
    return costs[-1]
