"""Results of pruning, fine-tuning, explanation and sensitivity."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from edge_opt import units
from edge_opt.records.fields import Record, Shown, field, record
from edge_opt.records.measurements import Comparison
from edge_opt.records.predictions import LatencyRatio

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

Importance = Literal["auto", "group", "reconstruction", "taylor", "random"]

PRUNE_SCHEMA = "edge_opt.pruned"
PRUNE_SCHEMA_VERSION = 1


@record
class TensorShape(Record):
    """A tensor of the original model's state, by which that model is recognized."""

    name: str = field("Its name in the state dict.")
    shape: tuple[int, ...] = field("Its dimensions.")


@record
class KeptIndices(Record):
    """The kept part of one dimension of a tensor of the original model."""

    tensor: str = field("Name of the tensor in the state dict.")
    dim: int = field("The dimension that is cut, from 0.")
    indices: tuple[int, ...] = field("The indices that stay, in order.")


@record
class ChangedAttribute(Record):
    """An attribute of a module that counts channels, heads or groups."""

    module: str = field("Path of the module.")
    name: str = field('Name of the attribute, such as "out_channels".')
    value: int | tuple[int, ...] = field("Its value after pruning.")


@record
class PruneSpec(Record):
    """The recipe of a pruned model: all that turns the original into it, except the weights."""

    original: tuple[TensorShape, ...] = field("The tensors of the original model.")
    kept: tuple[KeptIndices, ...] = field("What stays of each tensor that is cut.")
    attributes: tuple[ChangedAttribute, ...] = field("Attributes that change with it.")
    attention: tuple[str, ...] = field("Paths of modules replaced by `PrunedAttention`.", default=())
    schema: str = field("Name of the file format.", default=PRUNE_SCHEMA)
    schema_version: int = field("Version of the file format.", default=PRUNE_SCHEMA_VERSION)


@record
class PruneRequest(Record):
    """The request: one ratio, ratios by layer, or a share of MACs or of latency that is to remain."""

    ratio: float | None = field("Share to remove of every layer; None where something else was asked for.")
    layers: tuple[tuple[str, float], ...] = field("Layers with the share to remove of each.")
    macs_target: float | None = field("Share of the MACs that is to remain; None where it was not asked for.")
    latency_target: float | None = field("Share of the latency that is to remain; None where it was not asked for.")
    importance: str = field("How channels are ranked.")
    round_to: int = field("Kept channels are a multiple of this.")
    ignored: tuple[str, ...] = field("Paths of layers that stay whole.")
    seed: int = field("Decides a random ranking.")
    is_round_auto: bool = field("Whether `round_to` was chosen for speed; narrow layers round to less.", default=False)


@record
class LayerChannels(Record):
    """Output channels of one layer, or the heads of an attention layer."""

    path: str = field("Path of the layer.")
    kind: str = field('Class of the layer, such as "Conv2d".')
    unit: Literal["channels", "heads"] = field("What is counted.")
    before: int = field("How many there were.")
    after: int = field("How many are left.")
    asked: float = field("The share that was to be removed.")

    @property
    def achieved(self) -> float:
        """Share removed."""
        return 1 - self.after / self.before


@record
class Shortfall(Record):
    """A layer that was pruned less than requested."""

    path: str = field("Path of the layer.")
    asked: float = field("The share of channels or heads that was to be removed.")
    achieved: float = field("The share that was removed.")
    reason: str = field("Why it was not more.")


@record
class PruneResult(Shown):
    """The cost of the pruned model and of the original, counted on the example inputs."""

    macs_before: int = field("MACs of the original.")
    macs: int = field("MACs of the pruned model.")
    params_before: int = field("Parameters of the original.")
    params: int = field("Parameters of the pruned model.")
    channels_before: int = field("Output channels and heads of the layers that can be pruned, in the original.")
    channels: int = field("The same in the pruned model.")
    layers: tuple[LayerChannels, ...] = field("Channels or heads by layer.")
    ratio: float | None = field("Pruning ratio that was used; None for ratios by layer.")
    latency_before_s: float | None = field("Seconds of the original; None: not asked.", default=None)
    latency_s: float | None = field("Seconds of the pruned model, found in the same way.", default=None)
    is_lower_bound: bool = field("Whether an operator has no cost rule: the true MACs are higher.", default=False)

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


@record
class PruneCheck(Record):
    """The checks that were run on the pruned model."""

    outputs: tuple[tuple[int, ...], ...] = field("Shapes of its outputs.")
    gradients: int = field("How many parameters got a gradient in a backward pass.")
    silenced_error: float | None = field("Distance from the original with these channels zeroed; None: none removed.")


@record
class Pruned(Shown):
    """A pruned copy of a model, the recipe that rebuilds it, and what was reached of what was asked."""

    model: nn.Module = field("The pruned copy.")
    spec: PruneSpec = field("The recipe.")
    asked: PruneRequest = field("What was asked for.")
    achieved: PruneResult = field("What was reached.")
    shortfalls: tuple[Shortfall, ...] = field("Layers that lost less than asked; empty where a target was reached.")
    check: PruneCheck = field("What was run to prove it.")

    def _brief(self) -> str:
        got = self.achieved
        return (
            f"{type(self.model).__name__}: {units.percent(got.macs_ratio)} of the MACs and "
            f"{units.percent(got.params_ratio)} of the parameters remain, {len(got.layers)} layers"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model and its recipe, as JSON holds it."""
        from edge_opt._support.json import to_plain

        names = ("macs_ratio", "params_ratio", "channels_ratio", "latency_ratio")
        shares = {name: getattr(self.achieved, name) for name in names}
        return {
            "asked": to_plain(self.asked),
            "achieved": {**to_plain(self.achieved), **shares},
            "shortfalls": [to_plain(fall) for fall in self.shortfalls],
            "check": to_plain(self.check),
        }


@record
class EpochRecord(Record):
    """One epoch of fine-tuning."""

    epoch: int = field("Its number from 1; 0 is the model before training.")
    loss: float | None = field("Mean loss over the epoch; None for epoch 0.")
    score: float | None = field("Score on the validation data, higher is better; None without data.")


@record
class FineTuned(Shown):
    """A trained copy with the weights of its best epoch."""

    model: nn.Module = field("The trained copy.")
    history: tuple[EpochRecord, ...] = field("Loss and score of each epoch; epoch 0 is the model as it came.")
    best_epoch: int = field("Number of the epoch whose weights it has.")

    def _brief(self) -> str:
        best = next((it for it in self.history if it.epoch == self.best_epoch), None)
        score = "" if best is None or best.score is None else f", score {best.score:.4g}"
        return f"{type(self.model).__name__}: epoch {self.best_epoch} of {len(self.history) - 1} is the best{score}"


Bottleneck = Literal["overhead", "memory", "compute", "unknown"]
Topic = Literal[
    "time", "conversions", "float layers", "slow precision", "overhead", "memory", "unchanged layers", "vector width",
    "shortfall", "slower layers", "runtime", "between layers", "noise", "structure", "not measured", "score",
    "classes", "outside", "prediction",
]  # fmt: skip


@record
class LayerChange(Record):
    """One layer before and after. None where the layer is not there, or its time is not known."""

    path: str = field("Path of the layer.")
    kind: str = field('Class of the layer, such as "Conv2d".')
    macs_before: int | None = field("MACs before.")
    macs_after: int | None = field("MACs after.")
    bytes_before: int | None = field("Bytes moved before, at its precision; 0 where it is fused.")
    bytes_after: int | None = field("Bytes moved after, counted in the same way.")
    seconds_before: float | None = field("Seconds per forward before, measured, or predicted on a target.")
    seconds_after: float | None = field("Seconds per forward after, likewise.")
    channels_before: int | None = field("Output channels before; None for layers that have none.")
    channels_after: int | None = field("Output channels after; None for layers that have none.")
    precision: str | None = field("What it runs in afterwards; None where no conversion says.")
    bottleneck: Bottleneck = field("What limits it afterwards, by the best rates measured, or on the target.")
    kernels_before: str = field('Kernels that ran it before, such as "Conv fp32"; "" where not known.', default="")
    kernels_after: str = field("Kernels that ran it afterwards.", default="")

    @property
    def saved_s(self) -> float | None:
        """Seconds saved; below zero where the layer became slower."""
        if self.seconds_before is None or self.seconds_after is None:
            return None
        return self.seconds_before - self.seconds_after


@record
class Reason(Record):
    """One cause with its figures in a sentence."""

    topic: Topic = field("What it is about.")
    sentence: str = field("The cause in words.")
    seconds: float | None = field("What it costs per forward; None where that was not measured.", default=None)
    layers: tuple[str, ...] = field("Paths of the layers that it is about.", default=())


@record
class HelpfulChange(Record):
    """A change that would make the second model faster on the target."""

    topic: Literal["precision", "runtime", "prune", "widths", "activations"] = field("What is changed.")
    sentence: str = field("The change in words.")
    latency: LatencyRatio = field("The predicted time after the change over that before it, with its interval.")
    layers: tuple[str, ...] = field("Paths of the layers that change; empty where all do.", default=())


@record
class Explanation(Shown):
    """Why the second model is faster than the first, or is not."""

    headline: str = field("The result in one sentence.")
    comparison: Comparison | None = field("The second latency against the first; None where no times were given.")
    macs_ratio: float | None = field("MACs after over before; None where there were none before.")
    bytes_ratio: float | None = field("Bytes moved after over before; None where there were none before.")
    layers: tuple[LayerChange, ...] = field("Every layer before and after.")
    reasons: tuple[Reason, ...] = field("The causes, in order of importance.")
    latency: LatencyRatio | None = field("Predicted times on the target; None without a target.", default=None)
    helpful: tuple[HelpfulChange, ...] = field("Changes that would help most there, at most three.", default=())

    @property
    def sentences(self) -> tuple[str, ...]:
        """The headline and every reason."""
        return (self.headline, *(reason.sentence for reason in self.reasons))

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per layer."""
        import pandas as pd

        names = list(LayerChange.__dataclass_fields__)
        rows = [{**{name: getattr(row, name) for name in names}, "saved_s": row.saved_s} for row in self.layers]
        return pd.DataFrame(rows, columns=[*names, "saved_s"])


Change = Literal["prune", "quantize"]


@record
class LayerSensitivity(Record):
    """One layer changed, all others as they were."""

    path: str = field("Path of the layer.")
    kind: str = field('Class of the layer, such as "Conv2d".')
    change: Change = field("What was done to it.")
    amount: str = field('The share of channels to remove ("0.5") or the precision ("int8").')
    score: float = field("Score of the changed model, higher is better.")
    score_change: float = field("Score after minus score before.")
    output_error: float = field("Distance of the outputs from the unchanged ones, over their length.")
    disagreement: float | None = field("Share of samples with another top-1; None without classes.")
    removed: float | None = field("Share of its channels that was really removed; None for a quantized layer.")
    note: str = field('Layers that lost channels together with it, or "simulated".')


@record
class Sensitivity(Shown):
    """The effect of changing each layer alone. Pruning is real; quantization is simulated in floating point."""

    metric: str = field('What the score is: "accuracy", or the metric that was asked for.')
    baseline: float = field("Score of the unchanged model.")
    samples: int = field("Samples that it was measured on.")
    rows: tuple[LayerSensitivity, ...] = field("One row per layer and change.")
    unchanged: tuple[tuple[str, str], ...] = field("Layers that could not be changed, each with the reason.")
    direction: Literal["higher", "lower"] = field("Whether a higher or a lower score is better.", default="higher")

    def worst_first(self) -> tuple[LayerSensitivity, ...]:
        """Return the rows, those that hurt most in front: by score, among equals by error of the outputs."""
        sign = 1 if self.direction == "higher" else -1
        return tuple(sorted(self.rows, key=lambda row: (row.score_change * sign, -row.output_error)))

    def spare(self, change: Change | None = None, most: int = 3) -> tuple[str, ...]:
        """Return the layers that hurt most when changed; those that cost nothing are not among them.

        Args:
            change: Look at "prune" or at "quantize" only; None looks at both.
            most: Number of layers at most.
        """
        sign = 1 if self.direction == "higher" else -1
        hurting = [row for row in self.worst_first() if row.score_change * sign < 0]
        return tuple(dict.fromkeys(row.path for row in hurting if change in (None, row.change)))[:most]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per layer and change, in the model's order."""
        import pandas as pd

        names = list(LayerSensitivity.__dataclass_fields__)
        return pd.DataFrame([asdict(row) for row in self.rows], columns=names)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON holds it."""
        from edge_opt._support.json import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain
