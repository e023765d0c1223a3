"""A language model divided between devices: which layers or experts go where, and what a token then costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edge_opt.boards.catalog import device
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import DeviceSpec
from edge_opt.records.serving import ServingSplit, SplitPart
from edge_opt.serving.serving_costs import Serving, Speed, speed_of

EXAMPLE = "gpu:24GiB,cpu:64GiB"
# A computer with a GPU has at least this; name the device of your own CPU instead.
USUAL_CPU = "desktop-ddr4"
# What a PCIe 4.0 link of 16 lanes carries beside its protocol, and the time to start one exchange between two GPUs.
LINK_BYTES_PER_S = 25e9
EXCHANGE_S = 15e-6
# Two intervals meet: the devices' own, and that of how well they work together.
SPLIT_SPREAD = 1.25
_ITEM = re.compile(
    r"(?:(?P<count>\d{1,3})\*)?(?P<name>[\w.-]+)(?::(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[GM]i?B?))?(?:@(?P<link>\d+(?:\.\d+)?))?"
)
_UNITS = {"GI": 1 << 30, "G": 10**9, "MI": 1 << 20, "M": 10**6}
_MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a split, with the memory that it may use and the link to it."""

    spec: DeviceSpec
    limit_bytes: int | None
    link_bytes_per_s: float


def parse_split(text: str, target: DeviceSpec | None) -> tuple[bool, list[Place]]:
    """Return whether tensors are divided, and the places of a split such as `gpu:24GiB,cpu:64GiB`.

    `gpu` is the target, `cpu` a usual computer; every name of the catalog will do. `tensor:2*gpu:24GiB@64` divides each
    tensor between two GPUs with a link of 64 GB/s.
    """
    is_tensor, _, listed = text.strip().rpartition("tensor:")
    places: list[Place] = []
    for item in listed.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise InvalidInput(f"split is {text!r}; write devices with their memory, such as {EXAMPLE!r}")
        spec = _named(match["name"], target)
        unit = (match["unit"] or "").upper().rstrip("B")
        limit = int(float(match["size"]) * _UNITS[unit]) if match["size"] else None
        if limit is None and spec.ram_bytes:
            limit = int(spec.ram_bytes[-1].value)
        link = float(match["link"]) * 1e9 if match["link"] else LINK_BYTES_PER_S
        places += [Place(spec, limit, link)] * int(match["count"] or 1)
    if not 1 <= len(places) <= _MOST_DEVICES:
        raise InvalidInput(f"split names {len(places)} devices; name from 1 to {_MOST_DEVICES}")
    if "tensor:" in text and len({place.spec.name for place in places}) > 1:
        raise InvalidInput(f"split is {text!r}; tensors are divided between equal devices only")
    return bool(is_tensor) or "tensor:" in text, places


def _named(name: str, target: DeviceSpec | None) -> DeviceSpec:
    if name == "gpu":
        if target is None:
            raise InvalidInput("split names gpu, which is the target, and there is none; pass target=")
        return target
    return device(USUAL_CPU if name == "cpu" else name)


def split_serving(serving: Serving, places: Sequence[Place], is_tensor: bool, has_flash: bool) -> ServingSplit:
    """Return the fastest way to divide a model between the places."""
    speeds = [speed_of(place.spec, serving.form, None, None, serving.runtime, has_flash) for place in places]
    if is_tensor:
        return _tensor_split(serving, places, speeds)
    ways = [_filled(serving, places, speeds, by_experts=False)]
    if any(unit.expert_bytes for unit in _units(serving)):
        ways.append(_filled(serving, places, speeds, by_experts=True))
    return min(ways, key=lambda way: (way.missing_bytes, -(way.tokens_per_s or 0.0)))


@dataclass(frozen=True, slots=True)
class _Unit:
    """A layer: bytes held and streamed, those of its experts apart, and its part of the cache."""

    bytes: int
    streamed: float
    expert_bytes: int
    expert_streamed: float
    kv_bytes: int


def _units(serving: Serving) -> list[_Unit]:
    """Return the layers of a model, from the first to the last."""
    model, batch = serving.model, serving.batch
    count = max((tensor.layers for tensor in model.tensors), default=0) or 1
    held, streamed, expert_held, expert_streamed = ([0.0] * count for _ in range(4))
    for tensor in model.tensors:
        if tensor.layer is None or tensor.layer >= count:
            continue
        moved = sum(nbytes for _, nbytes in serving.tensor_streams(tensor, model.decode, batch))
        use = model.decode.uses.get(tensor.name)
        is_expert = use is not None and use.experts > 0
        (expert_held if is_expert else held)[tensor.layer] += serving.tensor_bytes(tensor)
        (expert_streamed if is_expert else streamed)[tensor.layer] += moved
    cache = serving.state_bytes(serving.context, batch)
    widths = [state.values(serving.context, serving.prompt) + state.constant for state in model.states]
    if len(widths) != count or not sum(widths):
        widths = [1] * count
    return [
        _Unit(int(held[layer]), streamed[layer], int(expert_held[layer]), expert_streamed[layer],
              round(cache * widths[layer] / sum(widths)))
        for layer in range(count)
    ]  # fmt: skip


def _ends(serving: Serving) -> tuple[int, int, float]:
    """Return the bytes of the table, those of the head and what else is outside the layers, and those streamed."""
    table = head = 0
    streamed = 0.0
    for tensor in serving.model.tensors:
        if tensor.layer is not None:
            continue
        nbytes = serving.tensor_bytes(tensor)
        if serving.part(tensor) == "embedding":
            table += nbytes
        else:
            head += nbytes
            streamed += sum(moved for _, moved in serving.tensor_streams(tensor, serving.model.decode, serving.batch))
    return table, head, streamed


def _filled(serving: Serving, places: Sequence[Place], speeds: Sequence[Speed], by_experts: bool) -> ServingSplit:
    """Fill the places in their order, from the last layer to the first, as llama.cpp does.

    `by_experts`: the first place runs every layer, and holds the experts of as many as fit.
    """
    units = _units(serving)
    table, head, head_streamed = _ends(serving)
    memories = [serving.memory((), place.spec) for place in places]
    buffers = [memory.activation_bytes + memory.buffer_bytes + memory.input_bytes for memory in memories]
    room = [None if place.limit_bytes is None else place.limit_bytes - buffers[i] for i, place in enumerate(places)]
    layers, experts, held, cache = ([0] * len(places) for _ in range(4))
    streamed = [0.0] * len(places)

    def put(nbytes: int, start: int, kv: int = 0, moved: float = 0.0) -> int | None:
        for index in range(start, len(places)):
            free = room[index]
            if free is None or free >= nbytes + kv:
                room[index] = None if free is None else free - nbytes - kv
                held[index] += nbytes
                cache[index] += kv
                streamed[index] += moved
                return index
        return None

    missing = 0
    # The head is the last layer; the table of the embedding stays with the last place, the CPU if there is one.
    last = 0 if put(head, 0, moved=head_streamed) is not None else None
    missing += 0 if last is not None else head
    missing += 0 if put(table, len(places) - 1) is not None or put(table, 0) is not None else table
    start = 0
    for unit in reversed(units):
        whole = unit.bytes if by_experts else unit.bytes + unit.expert_bytes
        index = put(
            whole, 0 if by_experts else start, unit.kv_bytes, unit.streamed + (not by_experts) * unit.expert_streamed
        )
        if index is None:
            missing += whole + unit.kv_bytes
            continue
        layers[index] += 1
        start = index  # layers stay in order: what no longer fits a place goes to the next
        if not by_experts and unit.expert_bytes:
            experts[index] += 1
    for unit in reversed(units) if by_experts else ():
        index = put(unit.expert_bytes, 0, moved=unit.expert_streamed)
        if index is None:
            missing += unit.expert_bytes
        else:
            experts[index] += 1
    seconds = list(_seconds(serving, speeds, layers, experts, streamed, cache, by_experts))
    crossings = (2 * experts[-1] if by_experts else 0) + sum(1 for count in layers if count) - 1
    width = serving.width
    link_s = max(crossings, 0) * (EXCHANGE_S + 4 * width * serving.batch / places[0].link_bytes_per_s)
    parts = tuple(
        SplitPart(place.spec.name, place.limit_bytes, layers[i], experts[i], held[i], cache[i],
                  held[i] + cache[i] + buffers[i] if held[i] + cache[i] else 0, seconds[i])
        for i, place in enumerate(places)
    )  # fmt: skip
    return _result(serving, "experts" if by_experts else "layers", parts, link_s, missing, speeds, places)


def _seconds(
    serving: Serving, speeds: Sequence[Speed], layers: Sequence[int], experts: Sequence[int],
    streamed: Sequence[float], cache: Sequence[int], by_experts: bool,
) -> Iterator[float]:  # fmt: skip
    """Yield the seconds of a step on each place: its bytes, its share of operators and of arithmetic."""
    flops = sum(serving.step_flops(serving.context).values())
    whole, count = sum(streamed) or 1.0, sum(layers) or 1
    for index, speed in enumerate(speeds):
        share = layers[index] / count
        if by_experts and not layers[index] and experts[index]:
            share = 0.1 * experts[index] / count  # three products of a layer's thirty operators
        step = replace(serving.model.decode, operators=round(serving.model.decode.operators * share))
        nbytes = streamed[index] + cache[index]
        seconds, _ = speed.step(nbytes, flops * streamed[index] / whole, step, serving.batch, 0.0, cache[index])
        yield 0.0 if not nbytes else seconds or 0.0


def _tensor_split(serving: Serving, places: Sequence[Place], speeds: Sequence[Speed]) -> ServingSplit:
    """Divide every tensor between equal devices, which add up their results twice in each layer."""
    count = len(places)
    memory = serving.memory((), places[0].spec)
    shared = memory.weights_bytes + memory.kv_bytes
    each = shared // count + memory.total_bytes - shared
    parts_bytes = serving.step_bytes(serving.context)
    nbytes, flops = sum(parts_bytes.values()) / count, sum(serving.step_flops(serving.context).values()) / count
    seconds, _ = speeds[0].step(
        nbytes, flops, serving.model.decode, serving.batch, 0.0, parts_bytes["kv"] / count
    )  # fmt: skip
    layers = len(_units(serving))
    # A ring moves 2·(n − 1)/n of the vector over each link.
    moved = 2 * (count - 1) / count * 2 * serving.width * serving.batch
    link_s = 0.0 if count == 1 else 2 * layers * (EXCHANGE_S + moved / places[0].link_bytes_per_s)
    limit = min((place.limit_bytes for place in places if place.limit_bytes is not None), default=None)
    missing = 0 if limit is None else max(0, each - limit) * count
    part = SplitPart(
        places[0].spec.name,
        limit,
        layers,
        0,
        memory.weights_bytes // count,
        memory.kv_bytes // count,
        each,
        seconds or 0.0,
    )
    # The devices work at the same time: the step takes as long as one of them.
    return _result(serving, "tensor", (part,) * count, link_s, missing, speeds, places, step_s=seconds)


def _result(
    serving: Serving, way: str, parts: tuple[SplitPart, ...], link_s: float, missing: int, speeds: Sequence[Speed],
    places: Sequence[Place], step_s: float | None = None,
) -> ServingSplit:  # fmt: skip
    total = (sum(part.seconds_per_step for part in parts) if step_s is None else step_s) + link_s
    rate = serving.batch / total if total and not missing else None
    below = max((speed.rate.spread for speed in speeds if speed.rate), default=1.0) * SPLIT_SPREAD
    readings = dict.fromkeys(
        f"{place.spec.name}: {speed.rate.reading}" for place, speed in zip(places, speeds, strict=True) if speed.rate
    )
    link = f"link {places[0].link_bytes_per_s / 1e9:g} GB/s"
    return ServingSplit(
        way=way,  # type: ignore[arg-type]
        parts=parts,
        link_s=link_s,
        tokens_per_s=rate,
        low=None if rate is None else rate / below,
        high=None if rate is None else rate * below,
        missing_bytes=missing,
        source="; ".join((*readings, link)),
    )
