"""What became of a model: pruned, explained, probed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edge_opt import units
from edge_opt.records.measurements import Comparison
from edge_opt.records.shown import Record, Shown

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

Importance = Literal["auto", "group", "reconstruction", "taylor", "bn_scale", "l1", "l2", "random"]

PRUNE_SCHEMA = "edge_opt.pruned"
PRUNE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorShape(Record):
    """A tensor of the original model's state, by which that model is recognized.

    Attributes:
        name: Its name in the state dict.
        shape: Its dimensions.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptIndices(Record):
    """What is left of one dimension of a tensor of the original model.

    Attributes:
        tensor: Name of the tensor in the state dict.
        dim: The dimension that is cut, from 0.
        indices: The indices that stay, in order.
    """

    tensor: str
    dim: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChangedAttribute(Record):
    """An attribute of a module that counts channels, heads or groups.

    Attributes:
        module: Path of the module.
        name: Name of the attribute, such as "out_channels".
        value: Its value after pruning.
    """

    module: str
    name: str
    value: int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PruneSpec(Record):
    """The recipe of a pruned model: all that turns the original into it, except the weights.

    Attributes:
        original: The tensors of the original model.
        kept: What stays of each tensor that is cut.
        attributes: Attributes that change with it.
        attention: Paths of modules replaced by `PrunedAttention`, which can have any number of heads.
        schema: Name of the file format.
        schema_version: Version of the file format.
    """

    original: tuple[TensorShape, ...]
    kept: tuple[KeptIndices, ...]
    attributes: tuple[ChangedAttribute, ...]
    attention: tuple[str, ...] = ()
    schema: str = PRUNE_SCHEMA
    schema_version: int = PRUNE_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PruneRequest(Record):
    """What was asked for: one ratio, ratios by layer, or a share of MACs or of latency that is to remain.

    Attributes:
        ratio: Share to remove of every layer; None where something else was asked for.
        layers: Layers with the share to remove of each.
        macs_target: Share of the MACs that is to remain; None where it was not asked for.
        latency_target: Share of the latency that is to remain; None where it was not asked for.
        importance: How channels are ranked.
        round_to: Kept channels are a multiple of this.
        ignored: Paths of layers that stay whole.
        global_ranking: Whether channels of all layers compete with each other.
        seed: Decides a random ranking.
        is_round_auto: Whether `round_to` was chosen for speed; then narrow layers are rounded to less.
    """

    ratio: float | None
    layers: tuple[tuple[str, float], ...]
    macs_target: float | None
    latency_target: float | None
    importance: Importance
    round_to: int
    ignored: tuple[str, ...]
    global_ranking: bool
    seed: int
    is_round_auto: bool = False


@dataclass(frozen=True, slots=True)
class LayerChannels(Record):
    """Output channels of one layer, or the heads of an attention layer.

    Attributes:
        path: Path of the layer.
        kind: Class of the layer, such as "Conv2d".
        unit: What is counted.
        before: How many there were.
        after: How many are left.
        asked: The share that was to be removed.
    """

    path: str
    kind: str
    unit: Literal["channels", "heads"]
    before: int
    after: int
    asked: float

    @property
    def achieved(self) -> float:
        """Share removed."""
        return 1 - self.after / self.before


@dataclass(frozen=True, slots=True)
class Shortfall(Record):
    """A layer that lost less than asked.

    Attributes:
        path: Path of the layer.
        asked: The share of channels or heads that was to be removed.
        achieved: The share that was removed.
        reason: Why it was not more.
    """

    path: str
    asked: float
    achieved: float
    reason: str


@dataclass(frozen=True, slots=True)
class PruneResult(Shown):
    """What the pruned model costs beside the original, by our own count, on the example inputs.

    Attributes:
        macs_before: MACs of the original.
        macs: MACs of the pruned model.
        params_before: Parameters of the original.
        params: Parameters of the pruned model.
        channels_before: Output channels and heads of the layers that can be pruned, in the original.
        channels: The same in the pruned model.
        layers: Channels or heads by layer.
        ratio: The ratio that was used: the one asked for, or the one that meets the target; None for ratios by layer.
        latency_before_s: Seconds of the original, by `latency_of` or predicted for the target; None where not asked.
        latency_s: Seconds of the pruned model, found in the same way; None where not asked.
        is_lower_bound: Whether an operator has no price, so that the true MACs are higher.
    """

    macs_before: int
    macs: int
    params_before: int
    params: int
    channels_before: int
    channels: int
    layers: tuple[LayerChannels, ...]
    ratio: float | None
    latency_before_s: float | None = None
    latency_s: float | None = None
    is_lower_bound: bool = False

    @property
    def macs_ratio(self) -> float:
        """Share of the MACs that remains."""
        return self.macs / self.macs_before if self.macs_before else 1.0

    @property
    def params_ratio(self) -> float:
        """Share of the parameters that remains."""
        return self.params / self.params_before if self.params_before else 1.0

    @property
    def channels_ratio(self) -> float:
        """Share of the prunable layers' output channels and heads that remains."""
        return self.channels / self.channels_before if self.channels_before else 1.0

    @property
    def latency_ratio(self) -> float | None:
        """Share of the latency that remains; None where it was not asked about."""
        if self.latency_s is None or not self.latency_before_s:
            return None
        return self.latency_s / self.latency_before_s


@dataclass(frozen=True, slots=True)
class PruneCheck(Record):
    """What was run to prove the pruned model.

    Attributes:
        outputs: Shapes of its outputs.
        gradients: How many parameters got a gradient in a backward pass.
        silenced_error: Distance from the original with those channels silenced, over what silencing changes.
            None where nothing was removed.
    """

    outputs: tuple[tuple[int, ...], ...]
    gradients: int
    silenced_error: float | None


@dataclass(frozen=True, slots=True)
class Pruned(Shown):
    """A pruned copy of a model, the recipe that rebuilds it, and what was reached of what was asked.

    Attributes:
        model: The pruned copy.
        spec: The recipe.
        asked: What was asked for.
        achieved: What was reached.
        shortfalls: Layers that lost less than asked; empty where a target was reached.
        check: What was run to prove it.
    """

    model: nn.Module
    spec: PruneSpec
    asked: PruneRequest
    achieved: PruneResult
    shortfalls: tuple[Shortfall, ...]
    check: PruneCheck

    def _brief(self) -> str:
        got = self.achieved
        return (
            f"{type(self.model).__name__}: {units.percent(got.macs_ratio)} of the MACs and "
            f"{units.percent(got.params_ratio)} of the parameters remain, {len(got.layers)} layers"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model and its recipe, as JSON holds it."""
        from edge_opt.report.results import pruned_document

        return pruned_document(self)


@dataclass(frozen=True, slots=True)
class EpochRecord(Record):
    """One epoch of fine-tuning.

    Attributes:
        epoch: Its number from 1; 0 is the model before training.
        loss: Mean loss over the epoch; None for epoch 0.
        score: Score on the validation data, higher is better; None where there was nothing to validate with.
    """

    epoch: int
    loss: float | None
    score: float | None


@dataclass(frozen=True, slots=True)
class FineTuned(Shown):
    """A trained copy with the weights of its best epoch.

    Attributes:
        model: The trained copy.
        history: Loss and score of each epoch; epoch 0 is the model as it came.
        best_epoch: Number of the epoch whose weights it has.
    """

    model: nn.Module
    history: tuple[EpochRecord, ...]
    best_epoch: int

    def _brief(self) -> str:
        best = next((it for it in self.history if it.epoch == self.best_epoch), None)
        score = "" if best is None or best.score is None else f", score {best.score:.4g}"
        return f"{type(self.model).__name__}: epoch {self.best_epoch} of {len(self.history) - 1} is the best{score}"


Bottleneck = Literal["overhead", "memory", "compute", "unknown"]
Topic = Literal[
    "time", "conversions", "float layers", "slow precision", "overhead", "memory", "unchanged layers", "vector width",
    "shortfall", "slower layers", "runtime", "between layers", "noise", "structure", "not measured", "score",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerChange(Record):
    """One layer before and after. None where the layer is not there, or its time was not measured.

    Attributes:
        path: Path of the layer.
        kind: Class of the layer, such as "Conv2d".
        macs_before: MACs before.
        macs_after: MACs after.
        bytes_before: Bytes moved before, in the bits that it runs in; 0 where it is fused into another layer.
        bytes_after: Bytes moved after, counted in the same way.
        seconds_before: Seconds per forward before.
        seconds_after: Seconds per forward after.
        channels_before: Output channels before; None for layers that have none.
        channels_after: Output channels after; None for layers that have none.
        precision: What it runs in afterwards; None where no conversion says.
        bottleneck: What limits it afterwards, by the best rates seen in these measurements.
    """

    path: str
    kind: str
    macs_before: int | None
    macs_after: int | None
    bytes_before: int | None
    bytes_after: int | None
    seconds_before: float | None
    seconds_after: float | None
    channels_before: int | None
    channels_after: int | None
    precision: str | None
    bottleneck: Bottleneck

    @property
    def saved_s(self) -> float | None:
        """Seconds saved; below zero where the layer became slower."""
        if self.seconds_before is None or self.seconds_after is None:
            return None
        return self.seconds_before - self.seconds_after


@dataclass(frozen=True, slots=True)
class Reason(Record):
    """One cause with its figures in a sentence.

    Attributes:
        topic: What it is about.
        sentence: The cause in words.
        seconds: What it costs per forward; None where that was not measured.
        layers: Paths of the layers that it is about.
    """

    topic: Topic
    sentence: str
    seconds: float | None = None
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """Why the second model is faster than the first, or is not.

    Attributes:
        headline: The result in one sentence.
        comparison: The second latency against the first; None where no times were given.
        macs_ratio: MACs after over before; None where there were none before.
        bytes_ratio: Bytes moved after over before; None where there were none before.
        layers: Every layer before and after.
        reasons: The causes, in order of importance.
    """

    headline: str
    comparison: Comparison | None
    macs_ratio: float | None
    bytes_ratio: float | None
    layers: tuple[LayerChange, ...]
    reasons: tuple[Reason, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The headline and every reason."""
        return (self.headline, *(reason.sentence for reason in self.reasons))

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer."""
        import pandas as pd

        names = list(LayerChange.__dataclass_fields__)
        rows = [{**{name: getattr(row, name) for name in names}, "saved_s": row.saved_s} for row in self.layers]
        return pd.DataFrame(rows, columns=[*names, "saved_s"])


Change = Literal["prune", "quantize"]


@dataclass(frozen=True, slots=True)
class LayerSensitivity(Record):
    """One layer changed, all others as they were.

    Attributes:
        path: Path of the layer.
        kind: Class of the layer, such as "Conv2d".
        change: What was done to it.
        amount: The share of channels to remove ("0.5") or the precision ("int8").
        score: Score of the changed model, higher is better.
        score_change: Score after minus score before.
        output_error: Distance of the outputs from the unchanged ones, over their length.
        disagreement: Share of samples with another first answer; None where outputs are not (samples, classes).
        removed: Share of its channels that was really removed; None for a quantized layer.
        note: Layers that lost channels together with it, or "simulated".
    """

    path: str
    kind: str
    change: Change
    amount: str
    score: float
    score_change: float
    output_error: float
    disagreement: float | None
    removed: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Sensitivity(Shown):
    """What each layer's change costs. Pruning is real; quantization is simulated in floating point.

    Attributes:
        metric: What the score is: "accuracy", or the metric that was asked for.
        baseline: Score of the unchanged model.
        samples: Samples that it was measured on.
        rows: One row per layer and change.
        unchanged: Layers that could not be changed, each with the reason.
        direction: Whether a higher or a lower score is better.
    """

    metric: str
    baseline: float
    samples: int
    rows: tuple[LayerSensitivity, ...]
    unchanged: tuple[tuple[str, str], ...]
    direction: Literal["higher", "lower"] = "higher"

    def worst_first(self) -> tuple[LayerSensitivity, ...]:
        """The rows, those that hurt most in front: by score, among equals by error of the outputs."""
        sign = 1 if self.direction == "higher" else -1
        return tuple(sorted(self.rows, key=lambda row: (row.score_change * sign, -row.output_error)))

    def spare(self, change: Change | None = None, most: int = 3) -> tuple[str, ...]:
        """The layers that hurt most when changed; those that cost nothing are not among them.

        Args:
            change: Look at "prune" or at "quantize" only; None looks at both.
            most: Number of layers at most.
        """
        hurting = [row for row in self.worst_first() if change in (None, row.change)]
        return tuple(
            dict.fromkeys(
                row.path for row in hurting if row.score_change * (1 if self.direction == "higher" else -1) < 0
            )
        )[:most]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and change, in the model's order."""
        from edge_opt.report.results import sensitivity_dataframe

        return sensitivity_dataframe(self)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        from edge_opt._support.json import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain
