"""Channels that several layers of a profile share, and the model as it would be with fewer of them.

A profile is all that is known of a file or of a saved run, so that `pruning`, which follows the channels of modules,
has nothing to work on. Channels that this file cannot follow are refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edge_opt.boards.class_costs import LayerWork, ModelWork
from edge_opt.boards.fused_layers import called_works, model_work
from edge_opt.records.costs import OpCall, OpSignature
from edge_opt.records.profiles import ModelProfile

# Operators that change every channel by itself, so that their output has the channels of their input.
_CHANNELWISE = (
    "elementwise",
    "activation",
    "norm",
    "pooling",
    "reduction",
    "interpolation",
    "movement",
    "quantization",
)


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that go together: the layers that write them, how many there are, and the storages that hold them."""

    layers: tuple[str, ...]
    channels: int
    storages: frozenset[int]


def channel_groups(profile: ModelProfile) -> tuple[ChannelGroup, ...]:
    """Return the groups of channels that can be removed from a model, in the order of their first layer."""
    groups = _Groups(profile)
    for call in profile.trace.ops:
        groups.follow(call)
    return tuple(groups.results())


class _Groups:
    """Storages in sets that share their channels: a union-find over `Trace.storages`."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        storages = profile.trace.storages
        self.parent = list(range(len(storages)))
        # Inputs and outputs of the model keep their shape.
        self.refused = {
            number
            for number, it in enumerate(storages)
            if it.role == "input" or (it.role == "activation" and it.died is None)
        }
        self.writers: dict[int, tuple[str, int]] = {}

    def root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def activations(self, call: OpCall) -> list[tuple[int, int]]:
        """Return the storages of the activations that a call reads, each with its channels."""
        trace = self.profile.trace
        inputs = trace.signatures[call.signature].inputs
        return [
            (storage, _channels(tensor.shape))
            for storage, tensor in zip(call.reads, inputs, strict=True)
            if trace.storages[storage].role in ("activation", "input")
        ]

    def follow(self, call: OpCall) -> None:
        """Join the channels that a call passes on; refuse those that it mixes in another way."""
        signature, price = self.profile.trace.signatures[call.signature], self.profile.prices[call.signature]
        inputs = self.activations(call)
        outputs = [(storage, _channels(signature.outputs[0].shape)) for storage in call.creates or call.reads[:1]]
        if price.status == "free":
            # A view shares its storage; only a part of the channels is not followed.
            if signature.outputs and signature.outputs[0].elements < max(it.elements for it in signature.inputs):
                self.refused.update(storage for storage, _ in (*inputs, *outputs))
        elif is_boundary(signature, price.kind) and len(inputs) == 1:
            path = self.profile.trace.modules[call.module].path
            self.writers[outputs[0][0]] = (path, outputs[0][1])
        elif _is_depthwise(signature, price.kind) or (price.kind in _CHANNELWISE and "cat" not in signature.op):
            width = outputs[0][1]
            for storage, channels in (*inputs, *outputs):
                if channels == width:
                    self.parent[self.root(storage)] = self.root(outputs[0][0])
                elif channels != 1:
                    self.refused.update((storage, outputs[0][0]))
        else:
            self.refused.update(storage for storage, _ in (*inputs, *outputs))

    def results(self) -> Iterator[ChannelGroup]:
        members: dict[int, list[int]] = {}
        for number in range(len(self.parent)):
            members.setdefault(self.root(number), []).append(number)
        for storages in members.values():
            writers = [self.writers[number] for number in storages if number in self.writers]
            if writers and self.refused.isdisjoint(storages) and len({channels for _, channels in writers}) == 1:
                paths = tuple(dict.fromkeys(path for path, _ in writers))
                yield ChannelGroup(paths, writers[0][1], frozenset(storages))


def _channels(shape: Sequence[int]) -> int:
    """Return the channels of an activation: of an image its second dimension, of vectors and tokens the last."""
    return shape[1] if len(shape) > 3 else shape[-1] if shape else 1


def _is_depthwise(signature: OpSignature, kind: str) -> bool:
    if kind != "conv" or signature.argument("groups", 1) == 1:
        return False
    is_single: bool = signature.argument("groups", 1) == signature.inputs[0].shape[1] == signature.outputs[0].shape[1]
    return is_single


def is_boundary(signature: OpSignature, kind: str) -> bool:
    """Return whether every output channel of an operator depends on every input channel, through weights."""
    return kind == "matmul" or (kind == "conv" and bool(signature.argument("groups", 1) == 1))


def narrowed(profile: ModelProfile, widths: Sequence[tuple[ChannelGroup, int]]) -> ModelWork:
    """Return the layers of a model whose groups keep these numbers of channels, as a runtime would run them."""
    shares = {number: kept / group.channels for group, kept in widths for number in group.storages}
    works: list[LayerWork] = []
    for call, work, _ in called_works(profile):
        if work is None:
            continue
        signature, kind = profile.trace.signatures[call.signature], profile.prices[call.signature].kind
        read = shares.get(call.reads[0], 1.0) if call.reads else 1.0
        written = shares.get((call.creates or call.reads)[0], 1.0) if call.creates or call.reads else 1.0
        # Work between all channels shrinks with both sides; work on each channel with the channels.
        amount = read * written if is_boundary(signature, kind) else written
        is_depthwise = work.kind == "conv" and work.groups > 1
        works.append(
            work._replace(
                macs=round(work.macs * amount),
                weights=round(work.weights * amount),
                reads=round(work.reads * read),
                writes=round(work.writes * written),
                channels=work.channels if is_depthwise else round(work.channels * read),
                groups=round(work.groups * written) if is_depthwise else work.groups,
                filters=round(work.filters * written),
            )
        )
    return replace(model_work(profile), works=tuple(works))
