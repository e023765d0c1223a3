"""The caching allocator: sizes by its published constants, and what must hold whatever is asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.boards.device_memory import (
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfDeviceMemory,
    parse_settings,
    round_size,
    segment_size,
)
from edge_opt.errors import InvalidInput


@pytest.mark.parametrize(
    ("nbytes", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1 * MIB, 1 * MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(nbytes: int, block: int) -> None:
    assert round_size(nbytes) == block
    assert CachingAllocator().allocate(nbytes).size == block


@pytest.mark.parametrize(
    ("size", "mib"),
    [(512, 2), (1 * MIB, 2), (1 * MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12)],
)
def test_segments_are_of_2_or_20_mib_or_of_their_own(size: int, mib: int) -> None:
    assert segment_size(size) == mib * MIB


def test_a_small_block_is_split_while_512_bytes_remain() -> None:
    allocator = CachingAllocator()
    first, rest = allocator.allocate(MIB), allocator.allocate(MIB - 512)
    assert (first.size, rest.size, allocator.reserved_bytes) == (MIB, MIB - 512, SMALL_SEGMENT)
    last = allocator.allocate(512)
    assert (last.offset, allocator.reserved_bytes) == (2 * MIB - 512, SMALL_SEGMENT)
    allocator.allocate(1)
    assert allocator.reserved_bytes == 2 * SMALL_SEGMENT


def test_a_large_block_is_split_only_if_more_than_1_mib_remains() -> None:
    # 20 - 9 = 11 MiB are left, of which 9.5 MiB leave 1.5: split. Then 1.5 MiB for 1 MiB + 512 B leave half: whole.
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)
    assert allocator.allocate(9 * MIB + MIB // 2).size == 9 * MIB + MIB // 2
    assert allocator.allocate(MIB + 512).size == MIB + MIB // 2
    assert allocator.reserved_bytes == LARGE_SEGMENT


def test_exactly_1_mib_of_rest_is_not_split_off() -> None:
    allocator = CachingAllocator()
    assert [allocator.allocate(size * MIB).size // MIB for size in (9, 5, 5)] == [9, 5, 6]


def test_the_smallest_free_block_that_holds_it_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (4096, 512, 1024, 512, 2048, 512)]
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    assert allocator.allocate(1500).offset == blocks[4].offset
    assert allocator.allocate(900).offset == blocks[2].offset


def test_of_equal_blocks_the_oldest_segment_and_the_lowest_address_wins() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB) for _ in range(4)]
    for block in reversed(blocks):
        if block.offset == 0:
            allocator.free(block)
    again = allocator.allocate(MIB)
    assert (again.segment.number, again.offset) == (1, 0)


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    left, middle, right = (allocator.allocate(4096) for _ in range(3))
    allocator.free(left)
    allocator.free(right)
    allocator.free(middle)
    (segment,) = allocator.segments
    assert [block.size for block in segment.blocks()] == [SMALL_SEGMENT]
    assert allocator.allocate(MIB).offset == 0


def test_a_freed_segment_stays_reserved_until_the_cache_is_emptied() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(33 * MIB)
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 34 * MIB)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_small_and_large_blocks_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MIB)
    allocator.allocate(512)
    assert [segment.size for segment in allocator.segments] == [LARGE_SEGMENT, SMALL_SEGMENT]


def test_above_max_split_size_blocks_are_neither_split_nor_lent_to_smaller_requests() -> None:
    allocator = CachingAllocator(parse_settings("max_split_size_mb:30"))
    allocator.free(allocator.allocate(40 * MIB))
    assert allocator.allocate(12 * MIB).segment.number == 2
    assert allocator.allocate(35 * MIB).size == 40 * MIB
    free_to_split = CachingAllocator()
    free_to_split.free(free_to_split.allocate(40 * MIB))
    assert free_to_split.allocate(12 * MIB).size == 12 * MIB
    assert free_to_split.reserved_bytes == 40 * MIB


def test_an_oversized_block_may_be_at_most_20_mib_too_large() -> None:
    allocator = CachingAllocator(parse_settings("max_split_size_mb:30"))
    allocator.free(allocator.allocate(60 * MIB))
    assert allocator.allocate(40 * MIB).segment.number == 2
    assert allocator.allocate(41 * MIB).segment.number == 1


def test_before_it_fails_it_gives_free_segments_back() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=50 * MIB))
    allocator.free(allocator.allocate(30 * MIB))
    kept = allocator.allocate(12 * MIB)
    assert kept.segment.number == 1
    allocator.free(kept)
    allocator.allocate(44 * MIB)
    assert allocator.reserved_bytes == 44 * MIB
    with pytest.raises(OutOfDeviceMemory, match="needs 20971520 more") as caught:
        allocator.allocate(8 * MIB)
    assert caught.value.missing_bytes == (44 + 20 - 50) * MIB


def test_an_empty_cache_gives_whole_free_segments_back() -> None:
    allocator = CachingAllocator()
    kept, dropped = allocator.allocate(12 * MIB), allocator.allocate(40 * MIB)
    allocator.free(dropped)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 12 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments) == (0, [])


@pytest.mark.parametrize(
    "text", ["max_split_size_mb:20", "max_split_size_mb", "backend:cudaMallocAsync", "expandable_segments:True"]
)
def test_settings_that_are_not_simulated_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_settings(text)


def test_a_block_is_freed_once_and_a_request_is_not_empty() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(InvalidInput, match="free already"):
        allocator.free(block)
    with pytest.raises(InvalidInput, match="at least 1"):
        allocator.allocate(0)


def _check(allocator: CachingAllocator, used: list[Block]) -> None:
    blocks = [block for segment in allocator.segments for block in segment.blocks()]
    assert allocator.reserved_bytes == sum(segment.size for segment in allocator.segments)
    assert allocator.allocated_bytes == sum(block.size for block in blocks if not block.is_free)
    assert {id(block) for block in blocks if not block.is_free} == {id(block) for block in used}
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    for segment in allocator.segments:
        offset = 0
        for block in segment.blocks():
            assert (block.offset, block.segment) == (offset, segment)
            offset += block.size
        assert offset == segment.size
        assert not any(left.is_free and right.is_free for left, right in pairwise(segment.blocks()))


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1, 64 * MIB))
SETTINGS = st.builds(
    AllocatorSettings,
    max_split_size_bytes=st.sampled_from([None, 24 * MIB, 40 * MIB]),
    capacity_bytes=st.sampled_from([None, 100 * MIB]),
)


@given(SETTINGS, st.lists(st.tuples(SIZES, st.integers(0, 9)), max_size=60))
def test_whatever_is_asked_for_the_books_are_right(settings: AllocatorSettings, wishes: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator(settings)
    used: list[Block] = []
    for nbytes, choice in wishes:
        if choice < 4 and used:
            allocator.free(used.pop(choice % len(used)))
        else:
            try:
                block = allocator.allocate(nbytes)
            except OutOfDeviceMemory:
                assert settings.capacity_bytes is not None
            else:
                assert block.size >= round_size(nbytes)
                used.append(block)
        _check(allocator, used)
        assert settings.capacity_bytes is None or allocator.reserved_bytes <= settings.capacity_bytes
    for block in used:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0, 0)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=40))
def test_the_same_requests_get_the_same_blocks(wishes: list[tuple[int, bool]]) -> None:
    def offsets() -> list[tuple[int, int, int]]:
        allocator, found = CachingAllocator(), []
        for nbytes, is_kept in wishes:
            block = allocator.allocate(nbytes)
            found.append((block.size, block.segment.number, block.offset))
            if not is_kept:
                allocator.free(block)
        return found

    assert offsets() == offsets()
