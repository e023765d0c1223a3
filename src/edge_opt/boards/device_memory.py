"""Device memory without the device: a trace's lifetimes replayed on the caching allocator.

What stands in device memory follows from four things that a trace knows: which tensors the model owns, when each new
one is born, how large it is, and when the last reference to it is gone. The allocator does the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from edge_opt.boards.cuda_allocator import AllocatorSettings, Block, CachingAllocator, parse_settings
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import Trace
from edge_opt.records.measurements import ModuleMemory
from edge_opt.records.predictions import DeviceMemory, DeviceMemoryPoint
from edge_opt.records.profiles import ModelProfile

SOURCE = "simulated: torch's CUDA caching allocator, replayed on the traced lifetimes"
NOT_IN_IT = "workspaces of cuDNN and cuBLAS, the CUDA context and loaded kernels are not in it"
_SCRATCH = "what operators hold inside is taken from the CPU's kernels; those of CUDA may hold more or less"
# A Python number beside a tensor is wrapped into a tensor of up to 16 bytes, which stays on the host.
_A_NUMBER = 16
_NO_ORDER = "the profile is of a version that did not record the order of the weights; their blocks may lie otherwise"


def device_memory(profile: ModelProfile, device: str = "cuda", settings: str | AllocatorSettings = "") -> DeviceMemory:
    """What the allocator would hold during the forward of a profile.

    Args:
        profile: The model, traced; its tensors' sizes are those of the dtypes it was traced with.
        device: "cuda", the only allocator that is known.
        settings: As in PYTORCH_CUDA_ALLOC_CONF, or parsed already; empty, the default, is how torch behaves without it.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> found = device_memory(eo.profile(nn.Linear(256, 256, bias=False), (1, 256)))
    >>> found.resident_bytes, found.activation_bytes, found.reserved_bytes
    (263168, 1024, 2097152)
    """
    if device != "cuda":
        raise InvalidInput(f"no allocator is known for the device {device!r}; 'cuda' can be simulated")
    chosen = parse_settings(settings) if isinstance(settings, str) else settings
    trace = profile.trace
    run = _AllocatorReplay(trace, CachingAllocator(chosen))
    moments = run.play()
    peak = max(moments, key=lambda moment: moment.allocated, default=run.start)
    call = trace.ops[peak.op] if moments else None
    return DeviceMemory(
        device=device,
        source=SOURCE,
        resident_bytes=run.start.allocated,
        requested_bytes=max([run.start.requested, *(moment.requested for moment in moments)]),
        allocated_bytes=peak.allocated,
        reserved_bytes=max([run.start.reserved, *(moment.reserved for moment in moments)]),
        peak_op=call.index if call else None,
        peak_module=trace.modules[call.module].path if call else "",
        modules=tuple(run.modules(moments)),
        tape=tuple(
            DeviceMemoryPoint(moment.op, call.module, moment.requested, moment.allocated, moment.reserved)
            for moment, call in zip(moments, trace.ops, strict=True)
        ),
        notes=tuple(_notes(trace)),
    )


def _notes(trace: Trace) -> Iterator[str]:
    yield NOT_IN_IT
    if any(signature.scratch_bytes > _A_NUMBER for signature in trace.signatures):
        yield _SCRATCH
    if not trace.moved_tensor_bytes and trace.param_bytes:
        yield _NO_ORDER


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes around one operator: allocated before it and after it, and the most of each kind while it runs."""

    op: int
    before: int
    after: int
    requested: int
    allocated: int
    reserved: int


class _AllocatorReplay:
    """One forward on an allocator; weights and inputs are there when it is made."""

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self.trace = trace
        self.allocator = allocator
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        for nbytes in (*_own_bytes(trace), *(item.nbytes for item in trace.storages if item.role == "input")):
            if nbytes:
                allocator.allocate(nbytes)
        self.start = self._moment(0, allocator.allocated_bytes)

    def play(self) -> list[_Moment]:
        """Every operator in order: what died before it is freed, then what it makes is allocated."""
        born: dict[int, list[int]] = defaultdict(list)
        died: dict[int, list[int]] = defaultdict(list)
        for number, storage in enumerate(self.trace.storages):
            if storage.role == "activation" and storage.born is not None and storage.nbytes:
                born[storage.born].append(number)
                if storage.died is not None:
                    died[max(storage.died, storage.born + 1)].append(number)
        moments = []
        for call in self.trace.ops:
            for number in died[call.index]:
                self.allocator.free(self._blocks.pop(number))
            before = self.allocator.allocated_bytes
            for number in born[call.index]:
                self._blocks[number] = block = self.allocator.allocate(self.trace.storages[number].nbytes)
                self._sizes[number] = block.size
            after = self.allocator.allocated_bytes
            moments.append(self._with_scratch(call.index, before, after))
        return moments

    def _with_scratch(self, op: int, before: int, after: int) -> _Moment:
        scratch = self.trace.signatures[self.trace.ops[op].signature].scratch_bytes
        block = self.allocator.allocate(scratch) if scratch > _A_NUMBER else None
        moment = self._moment(op, before, after)
        if block is not None:
            self.allocator.free(block)
        return moment

    def _moment(self, op: int, before: int, after: int | None = None) -> _Moment:
        now = self.allocator
        return _Moment(
            op, before, before if after is None else after, now.requested_bytes, now.allocated_bytes, now.reserved_bytes
        )

    def modules(self, moments: list[_Moment]) -> Iterator[ModuleMemory]:
        """What each module call finds, adds and reaches, above what was there before the forward."""
        base = self.start.allocated
        for call, (first, end) in zip(self.trace.modules, _spans(self.trace), strict=True):
            if first == end:
                found = moments[first].before if first < len(moments) else moments[-1].after if moments else base
                yield ModuleMemory(call.index, call.path, found - base, 0, found - base)
                continue
            before = moments[first].before
            after = moments[end - 1].after - self._dropped(first, end)
            most = max(moment.allocated for moment in moments[first:end])
            yield ModuleMemory(call.index, call.path, before - base, after - before, most - base)

    def _dropped(self, first: int, end: int) -> int:
        """Bytes that were born in a call and gone before the next operator: its own variables, dropped on return."""
        return sum(
            self._sizes[number]
            for op in range(first, end)
            for number in self.trace.ops[op].creates
            if self.trace.storages[number].died == end and number in self._sizes
        )


def _own_bytes(trace: Trace) -> tuple[int, ...]:
    """The model's own tensors in the order in which they are moved to the device."""
    if trace.moved_tensor_bytes:
        return trace.moved_tensor_bytes
    return tuple(item.nbytes for item in trace.storages if item.role in ("parameter", "buffer"))


def _spans(trace: Trace) -> list[tuple[int, int]]:
    """The operators of each module call with its children: the first, and the one behind the last.

    A call without operators stands before the first operator of a call that began after it.
    """
    count = len(trace.ops)
    first, end = [count] * len(trace.modules), [0] * len(trace.modules)
    for op in trace.ops:
        first[op.module] = min(first[op.module], op.index)
        end[op.module] = max(end[op.module], op.index + 1)
    for call in reversed(trace.modules):
        if call.parent is not None and end[call.index]:
            first[call.parent] = min(first[call.parent], first[call.index])
            end[call.parent] = max(end[call.parent], end[call.index])
    spans: list[tuple[int, int]] = []
    following = count
    for start, stop in zip(reversed(first), reversed(end), strict=True):
        following = start if stop else following
        spans.append((following, stop or following))
    return spans[::-1]
