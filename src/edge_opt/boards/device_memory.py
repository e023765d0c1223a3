"""Device memory without the device: a trace's lifetimes, replayed on the caching allocator that torch has for CUDA.

The contents of device memory follow from four things that a trace knows: which tensors the model owns, when each new
one is born, how large it is, and when the last reference to it is gone. The allocator does the rest, as plain
arithmetic: sizes in, blocks and segments out. It follows `c10/cuda/CUDACachingAllocator.cpp` for one stream. A request
is rounded up to 512 bytes and served from the smallest free block that holds it. Where there is none, a whole segment
is taken from the driver, and kept when it is free again. So a device holds more than its tensors ask for, in three
ways: rounding, blocks too large to be worth splitting, and free blocks between used ones.

    requested   what tensors ask for
    allocated   the blocks they got              (`torch.cuda.memory_allocated`)
    reserved    the segments those lie in        (`torch.cuda.memory_reserved`)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.records.costs import Trace
from edge_opt.records.measurements import ModuleMemory
from edge_opt.records.predictions import DeviceMemory, DeviceMemoryPoint
from edge_opt.records.profiles import ModelProfile
from edge_opt.units import MIB

SOURCE = "simulated: torch's CUDA caching allocator, replayed on the traced lifetimes"
NOT_IN_IT = "workspaces of cuDNN and cuBLAS, the CUDA context and loaded kernels are not in it"
_SCRATCH = "what operators hold inside is taken from the CPU's kernels; those of CUDA may hold more or less"
# A Python number beside a tensor is wrapped into a tensor of up to 16 bytes, which stays on the host.
_A_NUMBER = 16
_NO_ORDER = "the profile is of a version that did not record the order of the weights; their blocks may lie otherwise"
# Constants of the C++ source: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
MIN_BLOCK = 512
SMALL_REQUEST = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB


class OutOfDeviceMemory(EdgeOptError):
    """A request that the capacity of the device cannot hold, also after free segments were given back.

    Args:
        message: What was asked for, and what there was.
        missing_bytes: Bytes by which that one request is too large; a later one may miss more.
    """

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings of `PYTORCH_CUDA_ALLOC_CONF`, and the memory of the device.

    Attributes:
        max_split_size_bytes: Blocks of this size or more are never split, and only serve requests of this size or
            more; None, torch's default: every block may be split.
        capacity_bytes: What the device has for this process; None: as much as is asked for.
    """

    max_split_size_bytes: int | None = None
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        limit = self.max_split_size_bytes
        if limit is not None and limit <= LARGE_SEGMENT:
            raise InvalidInput(f"max_split_size is {limit} bytes; torch wants more than {LARGE_SEGMENT} (20 MiB)")
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise InvalidInput(f"the capacity is {self.capacity_bytes} bytes; it must be at least 1")


def parse_settings(text: str) -> AllocatorSettings:
    """Return the settings in the words of `PYTORCH_CUDA_ALLOC_CONF`.

    Args:
        text: `option:value` pairs with commas between; `max_split_size_mb` is known.

    >>> parse_settings("max_split_size_mb:128")
    AllocatorSettings(max_split_size_bytes=134217728, capacity_bytes=None)
    """
    max_split: int | None = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        option, _, value = (word.strip() for word in part.partition(":"))
        if option == "max_split_size_mb" and value.isdigit():
            max_split = int(value) * MIB
        else:
            raise InvalidInput(f"allocator setting {part!r} is not simulated; known is max_split_size_mb:N")
    return AllocatorSettings(max_split)


def round_size(nbytes: int) -> int:
    """Return the size of the block that a request asks for: a multiple of 512 bytes, and at least one.

    >>> round_size(1), round_size(512), round_size(513)
    (512, 512, 1024)
    """
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Return what is taken from the driver for a block: 2 MiB for small ones, 20 MiB up to 10 MiB, then its own.

    >>> [segment_size(size) // MIB for size in (512, 1 * MIB, 1 * MIB + 512, 10 * MIB, 33 * MIB)]
    [2, 2, 20, 10, 34]
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment. Neighbours know each other, so that free ones can be put together again.

    Attributes:
        segment: What it is a piece of.
        offset: Where it begins in the segment, in bytes.
        size: Its bytes, a multiple of 512.
        requested: Bytes that the tensor in it asked for; 0 while it is free, as every block is at first.
        is_free: Whether no tensor is in it; a new one is free until `allocate` hands it out.
        before: The neighbour at lower addresses; None, the default, at the start of the segment.
        after: The neighbour at higher addresses; None, the default, at the end of the segment.
    """

    segment: Segment
    offset: int
    size: int
    requested: int = 0
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True, eq=False)
class Segment:
    """Memory taken from the driver at once.

    Attributes:
        number: Its place in the order in which segments were taken, from 1 on.
        size: Its bytes, a multiple of 2 MiB.
        is_small: Whether it serves requests of up to 1 MiB; else it serves larger ones.
        first: The block at its start; a new segment is one free block.
    """

    number: int
    size: int
    is_small: bool
    first: Block = field(init=False)

    def __post_init__(self) -> None:
        self.first = Block(self, 0, self.size)

    def blocks(self) -> list[Block]:
        """Return its blocks by address."""
        blocks = [self.first]
        while blocks[-1].after is not None:
            blocks.append(blocks[-1].after)
        return blocks


class CachingAllocator:
    """Blocks in segments, as torch would hand them out in this order of requests.

    Args:
        settings: How it splits and what it may hold; the default is torch's own, without a limit.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(700)
    >>> allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
    (700, 1024, 2097152)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 2097152)
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.requested_bytes = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.segments: list[Segment] = []
        self._segments_taken = 0
        # Free blocks, the best fit first: of small segments, and of large ones.
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> Block:
        """Return the block that a request gets.

        Args:
            nbytes: What the tensor needs, in bytes, above zero; torch takes no memory for an empty tensor.
        """
        if nbytes < 1:
            raise InvalidInput(f"a request of {nbytes} bytes; it must be at least 1")
        size = round_size(nbytes)
        is_small = size <= SMALL_REQUEST
        block = self._fitting(size, is_small) or self._from_driver(size, is_small)
        self._forget(block)
        if self._is_worth_splitting(block, size):
            self._split(block, size)
        block.is_free = False
        block.requested = nbytes
        self.requested_bytes += nbytes
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it joins its free neighbours. The segment stays reserved.

        Args:
            block: What `allocate` returned, once.
        """
        if block.is_free:
            raise InvalidInput(f"the block at {block.offset} of segment {block.segment.number} is free already")
        self.requested_bytes -= block.requested
        self.allocated_bytes -= block.size
        block.is_free, block.requested = True, 0
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._forget(before)
            block = _joined(before, block)
        if after is not None and after.is_free:
            self._forget(after)
            block = _joined(block, after)
        self._remember(block)

    def empty_cache(self) -> None:
        """Give whole free segments back to the driver, as torch does before it says that memory is out."""
        for segment in list(self.segments):
            if segment.first.is_free and segment.first.after is None:
                self._forget(segment.first)
                self.segments.remove(segment)
                self.reserved_bytes -= segment.size

    def _fitting(self, size: int, is_small: bool) -> Block | None:
        """Return the best free block, unless only large requests may use it, or it is too large for those."""
        free = self._free[is_small]
        position = bisect_left(free, size, key=lambda block: block.size)
        if position == len(free):
            return None
        block, limit = free[position], self.settings.max_split_size_bytes
        if limit is None:
            return block
        is_refused = block.size >= limit if size < limit else block.size >= size + LARGE_SEGMENT
        return None if is_refused else block

    def _from_driver(self, size: int, is_small: bool) -> Block:
        """Take a segment from the driver; where that is too much, after everything free was given back."""
        nbytes, capacity = segment_size(size), self.settings.capacity_bytes
        if capacity is not None and self.reserved_bytes + nbytes > capacity:
            self.empty_cache()
            missing = self.reserved_bytes + nbytes - capacity
            if missing > 0:
                raise OutOfDeviceMemory(
                    f"a block of {size} bytes needs {nbytes} more from the device, which has {capacity} bytes; "
                    f"{self.reserved_bytes} are reserved, {self.allocated_bytes} of them in use",
                    missing,
                )
        self.reserved_bytes += nbytes
        self._segments_taken += 1
        segment = Segment(self._segments_taken, nbytes, is_small)
        self.segments.append(segment)
        self._remember(segment.first)
        return segment.first

    def _is_worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.segment.is_small:
            return rest >= MIN_BLOCK
        limit = self.settings.max_split_size_bytes
        return (limit is None or size < limit) and rest > SMALL_REQUEST

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.segment, block.offset + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._remember(rest)

    def _remember(self, block: Block) -> None:
        insort(self._free[block.segment.is_small], block, key=_rank)

    def _forget(self, block: Block) -> None:
        free = self._free[block.segment.is_small]
        del free[bisect_left(free, _rank(block), key=_rank)]


def _rank(block: Block) -> tuple[int, int, int]:
    """Order free blocks by fit: the smallest, of equal ones the lowest address. Segments lie in order of age."""
    return block.size, block.segment.number, block.offset


def _joined(left: Block, right: Block) -> Block:
    """Return the block of two neighbours."""
    left.size += right.size
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    return left


def device_memory(profile: ModelProfile, device: str = "cuda", settings: str | AllocatorSettings = "") -> DeviceMemory:
    """Return what the allocator would hold during the forward of a profile.

    Args:
        profile: The model, traced; its tensors' sizes are those of the dtypes it was traced with.
        device: "cuda", the only allocator that is known.
        settings: As in PYTORCH_CUDA_ALLOC_CONF, or parsed already; empty, the default, is how torch behaves without it.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> memory = device_memory(eo.profile(nn.Linear(256, 256, bias=False), (1, 256)))
    >>> memory.resident_bytes, memory.activation_bytes, memory.reserved_bytes
    (263168, 1024, 2097152)
    """
    if device != "cuda":
        raise InvalidInput(f"no allocator is known for the device {device!r}; 'cuda' can be simulated")
    trace = profile.trace
    allocator = CachingAllocator(parse_settings(settings) if isinstance(settings, str) else settings)
    own_bytes = trace.moved_tensor_bytes or tuple(
        item.nbytes for item in trace.storages if item.role in ("parameter", "buffer")
    )
    for nbytes in (*own_bytes, *(item.nbytes for item in trace.storages if item.role == "input")):
        if nbytes:
            allocator.allocate(nbytes)
    resident_bytes = allocator.allocated_bytes
    requested_bytes, reserved_bytes = allocator.requested_bytes, allocator.reserved_bytes
    tape, around, sizes = _replayed(trace, allocator)
    allocated = [point.allocated_bytes for point in tape]
    peak = allocated.index(max(allocated)) if tape else None
    return DeviceMemory(
        device=device,
        source=SOURCE,
        resident_bytes=resident_bytes,
        requested_bytes=max([requested_bytes, *(point.requested_bytes for point in tape)]),
        allocated_bytes=resident_bytes if peak is None else allocated[peak],
        reserved_bytes=max([reserved_bytes, *(point.reserved_bytes for point in tape)]),
        peak_op=peak,
        peak_module="" if peak is None else trace.modules[trace.ops[peak].module].path,
        modules=tuple(_modules(trace, allocated, around, sizes, resident_bytes)),
        tape=tuple(tape),
        notes=tuple(_notes(trace)),
    )


def _notes(trace: Trace) -> Iterator[str]:
    yield NOT_IN_IT
    if any(signature.scratch_bytes > _A_NUMBER for signature in trace.signatures):
        yield _SCRATCH
    if not trace.moved_tensor_bytes and trace.param_bytes:
        yield _NO_ORDER


def _replayed(
    trace: Trace, allocator: CachingAllocator
) -> tuple[list[DeviceMemoryPoint], list[tuple[int, int]], dict[int, int]]:
    """Run every operator in order: what died before it is freed, then what it makes is allocated.

    Returns the most while each operator runs, the bytes allocated before and after it, and the block of each storage.
    """
    born: dict[int, list[int]] = defaultdict(list)
    died: dict[int, list[int]] = defaultdict(list)
    for number, storage in enumerate(trace.storages):
        if storage.role == "activation" and storage.born is not None and storage.nbytes:
            born[storage.born].append(number)
            if storage.died is not None:
                died[max(storage.died, storage.born + 1)].append(number)
    blocks: dict[int, Block] = {}
    sizes: dict[int, int] = {}
    tape: list[DeviceMemoryPoint] = []
    around: list[tuple[int, int]] = []
    for call in trace.ops:
        for number in died[call.index]:
            allocator.free(blocks.pop(number))
        before = allocator.allocated_bytes
        for number in born[call.index]:
            blocks[number] = block = allocator.allocate(trace.storages[number].nbytes)
            sizes[number] = block.size
        around.append((before, allocator.allocated_bytes))
        scratch_bytes = trace.signatures[call.signature].scratch_bytes
        scratch = allocator.allocate(scratch_bytes) if scratch_bytes > _A_NUMBER else None
        held = allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
        tape.append(DeviceMemoryPoint(call.index, call.module, *held))
        if scratch is not None:
            allocator.free(scratch)
    return tape, around, sizes


def _modules(
    trace: Trace, most: Sequence[int], around: Sequence[tuple[int, int]], sizes: Mapping[int, int], base: int
) -> Iterator[ModuleMemory]:
    """Yield what each module call finds, adds and reaches, above what was there before the forward."""
    for call, (first, end) in zip(trace.modules, _spans(trace), strict=True):
        if first == end:
            before = around[first][0] if first < len(around) else around[-1][1] if around else base
            yield ModuleMemory(call.index, call.path, before - base, 0, before - base)
            continue
        # Tensors created in a call and released before the next operator are its local variables.
        dropped = sum(
            sizes.get(number, 0)
            for op in trace.ops[first:end]
            for number in op.creates
            if trace.storages[number].died == end
        )
        before, after = around[first][0], around[end - 1][1] - dropped
        yield ModuleMemory(call.index, call.path, before - base, after - before, max(most[first:end]) - base)


def _spans(trace: Trace) -> list[tuple[int, int]]:
    """Return the operators of each module call with its children: the first, and the one behind the last.

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
