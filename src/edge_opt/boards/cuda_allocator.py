"""The caching allocator that torch puts in front of CUDA, as plain arithmetic: sizes in, blocks and segments out.

It follows `c10/cuda/CUDACachingAllocator.cpp` for one stream. A request is rounded up to 512 bytes and served from the
smallest free block that holds it. Where there is none, a whole segment is taken from the driver, and kept when it is
free again. So a device holds more than its tensors ask for, in three ways: rounding, blocks too large to be worth
splitting, and free blocks between used ones.

    requested   what tensors ask for
    allocated   the blocks they got              (`torch.cuda.memory_allocated`)
    reserved    the segments those lie in        (`torch.cuda.memory_reserved`)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.units import MIB

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
    """What `PYTORCH_CUDA_ALLOC_CONF` can change, and the memory of the device.

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


def parse_settings(text: str, capacity_bytes: int | None = None) -> AllocatorSettings:
    """The settings in the words of `PYTORCH_CUDA_ALLOC_CONF`.

    Args:
        text: `option:value` pairs with commas between; `max_split_size_mb` is known.
        capacity_bytes: Memory of the device in bytes; None, the default: unlimited.

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
    return AllocatorSettings(max_split, capacity_bytes)


def round_size(nbytes: int) -> int:
    """The size of the block that a request asks for: a multiple of 512 bytes, and at least one.

    Args:
        nbytes: What the tensor needs, in bytes.

    >>> round_size(1), round_size(512), round_size(513)
    (512, 512, 1024)
    """
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """What is taken from the driver for a block: 2 MiB for small ones, 20 MiB up to 10 MiB, then its own.

    Args:
        size: The block's size in bytes, rounded already.

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

    @property
    def rank(self) -> tuple[int, int, int]:
        """Best fit: the smallest block, of equal ones the one at the lowest address. Segments lie in order of age."""
        return self.size, self.segment.number, self.offset


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
        """Its blocks by address."""
        found: list[Block] = []
        block: Block | None = self.first
        while block is not None:
            found.append(block)
            block = block.after
        return found


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
        # Free blocks by rank: of small segments, and of large ones.
        self._free: dict[bool, list[tuple[tuple[int, int, int], Block]]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> Block:
        """The block that a request gets.

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
        if block.before is not None and block.before.is_free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            block = self._join(block, block.after)
        self._remember(block)

    def empty_cache(self) -> None:
        """Give whole free segments back to the driver, as torch does before it says that memory is out."""
        for segment in list(self.segments):
            if segment.first.is_free and segment.first.after is None:
                self._forget(segment.first)
                self.segments.remove(segment)
                self.reserved_bytes -= segment.size

    def _fitting(self, size: int, is_small: bool) -> Block | None:
        """The best free block, unless it is one that large requests alone may use, or too large for those."""
        free = self._free[is_small]
        place = bisect_left(free, size, key=lambda entry: entry[0][0])
        if place == len(free):
            return None
        block = free[place][1]
        limit = self.settings.max_split_size_bytes
        if limit is not None and size < limit <= block.size:
            return None
        if limit is not None and size >= limit and block.size >= size + LARGE_SEGMENT:
            return None
        return block

    def _from_driver(self, size: int, is_small: bool) -> Block:
        wanted = segment_size(size)
        self._reserve(wanted, size)
        self._segments_taken += 1
        segment = Segment(self._segments_taken, wanted, is_small)
        self.segments.append(segment)
        self._remember(segment.first)
        return segment.first

    def _reserve(self, nbytes: int, size: int) -> None:
        """Take bytes from the driver; where they are too many, after everything free was given back."""
        capacity = self.settings.capacity_bytes
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

    def _join(self, left: Block, right: Block) -> Block:
        for block in (left, right):
            self._forget(block)
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _remember(self, block: Block) -> None:
        insort(self._free[block.segment.is_small], (block.rank, block), key=lambda entry: entry[0])

    def _forget(self, block: Block) -> None:
        free = self._free[block.segment.is_small]
        place = bisect_left(free, block.rank, key=lambda entry: entry[0])
        if place < len(free) and free[place][1] is block:
            del free[place]
