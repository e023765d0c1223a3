"""Records of pruning: what was asked, what came of it, and how to rebuild it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Importance = Literal["l1", "l2", "taylor", "random"]

PRUNE_SCHEMA = "edge_opt.pruned"
PRUNE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of the original model's state, by which that model is recognized."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptIndices:
    """What is left of one dimension of a tensor of the original model: the indices that stay, in order."""

    tensor: str
    dim: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChangedAttribute:
    """An attribute of a module that counts channels, heads or groups, with its new value."""

    module: str
    name: str
    value: int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PruneSpec:
    """All that turns the original model into the pruned one, its weights apart.

    `attention` names the modules that are replaced by `PrunedAttention`, which can have fewer heads than its width
    divides by.
    """

    original: tuple[TensorShape, ...]
    kept: tuple[KeptIndices, ...]
    attributes: tuple[ChangedAttribute, ...]
    attention: tuple[str, ...] = ()
    schema: str = PRUNE_SCHEMA
    schema_version: int = PRUNE_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """What was asked for: one ratio, ratios by layer, or a share of MACs or of latency that is to remain."""

    ratio: float | None
    layers: tuple[tuple[str, float], ...]
    macs_target: float | None
    latency_target: float | None
    importance: Importance
    round_to: int
    ignored: tuple[str, ...]
    global_ranking: bool
    seed: int


@dataclass(frozen=True, slots=True)
class LayerChannels:
    """Output channels of one layer, of which `asked` is the share to remove; of an attention layer, its heads."""

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
class Shortfall:
    """A layer that lost less than asked, as shares of its channels or heads, and why."""

    path: str
    asked: float
    achieved: float
    reason: str


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What the pruned model costs beside the original, by our own count, on the example inputs.

    `latency_s` holds what `latency_of` or the target's roofline said; None where latency was not asked about.
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
class PruneCheck:
    """What was run to prove the pruned model.

    `silenced_error` compares it with the original whose removed channels are silenced: the distance of the outputs as
    a share of what silencing changes. None where nothing was removed. `export_difference` is the largest difference of
    outputs in ONNX Runtime, as a share of their mean size; None where an export was not asked for.
    """

    outputs: tuple[tuple[int, ...], ...]
    gradients: int
    silenced_error: float | None
    export_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """A pruned copy of a model, the recipe that rebuilds it, and how far it got against what was asked."""

    model: nn.Module
    spec: PruneSpec
    asked: PruneRequest
    achieved: PruneResult
    shortfalls: tuple[Shortfall, ...]
    check: PruneCheck

    def __str__(self) -> str:
        from edge_opt.report.pruning import pruned_text

        return pruned_text(self.asked, self.achieved, self.shortfalls)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model and its recipe, as JSON holds it."""
        from edge_opt.report.pruning import pruned_document

        return pruned_document(self)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of fine-tuning: the mean loss and the validation score; epoch 0, before training, has no loss."""

    epoch: int
    loss: float | None
    score: float | None
