"""CUDA's caching allocator on a trace of allocations: the memory that it reserves, and if that fits.

Its rules, with the constants of c10/cuda/CUDACachingAllocator.cpp: It rounds sizes to 512 bytes. Blocks of up to 1 MiB,
larger blocks, and blocks of different streams have pools of their own. It takes the smallest free block that fits, and
splits it. It merges free neighbors. When the device is full it releases wholly free segments, once.

Left out: memory of other processes, blocks that wait for a second stream (FSDP2 has none), and cudaMalloc's rounding.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 2**20
ROUND_BYTES = 512
SMALL_BYTES = MIB  # the largest of the small pool
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # from here on a block has a segment of its own, rounded to 2 MiB
LEAST_REST_BYTES = MIB  # a large block is split if more than this is left of it


class Event(NamedTuple):
    """An allocation, or the release of one."""

    is_allocation: bool
    name: int  # of the allocation; its release has the same
    num_bytes: int
    stream: int


@dataclass(frozen=True)
class Reserved:
    """Memory that the allocator took from the device."""

    peak_bytes: int  # of reserved memory, or when the device was full
    allocated_bytes: int  # peak in use; rounded, with rests too small to split off
    retries: int  # releases of all free segments: a run that does this is slow
    fits: bool


def reserved(trace: Iterable[Event], *, limit_bytes: int | None = None, expandable: bool = False) -> Reserved:
    """Replay a trace on a device with ``limit_bytes``; None: without limit.

    ``expandable`` is ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: one segment per pool, which grows.
    """
    allocator = _Allocator(limit_bytes, expandable)
    for event in trace:
        if event.is_allocation and not allocator.allocate(event.name, event.num_bytes, event.stream):
            return allocator.result(fits=False)
        if not event.is_allocation:
            allocator.free(event.name)
    return allocator.result(fits=True)


@dataclass(eq=False)
class _Block:
    """A stretch of a segment. ``start`` counts from the segment's beginning."""

    pool: "_Pool"
    start: int
    size: int
    is_free: bool = True
    is_mapped: bool = True  # false: released, inside an expandable segment
    before: "_Block | None" = None
    after: "_Block | None" = None
    number: int = 0  # free blocks of one size are taken in the order of their release

    def split(self, size: int) -> "_Block":
        """Keep ``size`` bytes; return the rest as a block of its own."""
        start, size_left = self.start + size, self.size - size
        remainder = _Block(self.pool, start, size_left, self.is_free, self.is_mapped, self, self.after)
        if self.after is not None:
            self.after.before = remainder
        self.after, self.size = remainder, size
        return remainder

    def merge_after(self) -> None:
        """Merge the next block into this one."""
        assert self.after is not None
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


@dataclass(eq=False)
class _Pool:
    """The free blocks of one stream and of one kind of size."""

    is_small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)  # (size, number, block), smallest first
    first: _Block | None = None  # of the expandable segment

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def put(self, block: _Block) -> None:
        bisect.insort(self.free, (block.size, block.number, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.number))]

    def take_best(self, size: int) -> _Block | None:
        """Take the smallest free block of at least ``size`` bytes; None if there is none."""
        at = bisect.bisect_left(self.free, (size,))
        return self.free.pop(at)[2] if at < len(self.free) else None


class _Allocator:
    def __init__(self, limit_bytes: int | None, expandable: bool) -> None:
        self._limit, self._expandable = limit_bytes, expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._reserved = self._peak = self._allocated = self._allocated_peak = self._retries = self._numbers = 0

    def result(self, *, fits: bool) -> Reserved:
        return Reserved(self._peak, self._allocated_peak, self._retries, fits)

    def allocate(self, name: int, num_bytes: int, stream: int) -> bool:
        """Allocate; return false if there is no room."""
        size = max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)
        pool = self._pools.setdefault((stream, size <= SMALL_BYTES), _Pool(size <= SMALL_BYTES))
        block = pool.take_best(size) or self._new_block(pool, size)
        if block is None:
            self._retries += 1
            self._release()
            block = self._new_block(pool, size)
        if block is None:
            return False
        self._take(block, size)
        self._used[name] = block
        return True

    def free(self, name: int) -> None:
        block = self._used.pop(name)
        self._allocated -= block.size
        for neighbour in (block.after, block.before):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                neighbour.pool.remove(neighbour)
                block = block if neighbour is block.after else neighbour
                block.merge_after()
        self._put(block)

    def _take(self, block: _Block, size: int) -> None:
        remaining_bytes = block.size - size
        is_fine = block.pool.is_small or self._expandable
        if remaining_bytes >= ROUND_BYTES if is_fine else remaining_bytes > LEAST_REST_BYTES:
            self._put(block.split(size))
        block.is_free = False
        self._allocated += block.size
        self._allocated_peak = max(self._allocated_peak, self._allocated)

    def _put(self, block: _Block) -> None:
        self._numbers += 1
        block.is_free, block.number = True, self._numbers
        block.pool.put(block)

    def _reserve(self, num_bytes: int) -> bool:
        if self._limit is not None and self._reserved + num_bytes > self._limit:
            return False
        self._reserved += num_bytes
        self._peak = max(self._peak, self._reserved)
        return True

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of a new segment, or grow the expandable one; None if the device is full."""
        if self._expandable:
            return self._grow(pool, size)
        single_bytes = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        segment = pool.page_bytes if size < OWN_SEGMENT_BYTES else single_bytes
        return _Block(pool, 0, segment) if self._reserve(segment) else None

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Map the first hole that is large enough, with free bytes before it; the last hole has no end."""
        hole, last = pool.first, None
        while hole is not None and (hole.is_mapped or _room(hole) < size):
            hole, last = hole.after, hole
        if hole is None:
            start = last.start + last.size if last else 0
            hole = _Block(pool, start, 0, is_mapped=False, before=last)
            if last is None:
                pool.first = hole
            else:
                last.after = hole
        needed = -(-(size - _free_before(hole)) // pool.page_bytes) * pool.page_bytes
        if not self._reserve(needed):
            _drop_empty(hole)
            return None
        if hole.size > needed:
            hole.split(needed)
        hole.size, hole.is_mapped = needed, True
        if (before := hole.before) is not None and _free_before(hole):
            pool.remove(before)
            before.merge_after()
            return before
        return hole

    def _release(self) -> None:
        """Release every segment, or every page, that is wholly free."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self._reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        page = block.pool.page_bytes
        first, last = -(-block.start // page) * page, (block.start + block.size) // page * page
        if first >= last:
            return
        block.pool.remove(block)
        if last < block.start + block.size:
            self._put(block.split(last - block.start))
        if first > block.start:
            hole = block.split(first - block.start)
            self._put(block)
        else:
            hole = block
        hole.is_free, hole.is_mapped = False, False
        self._reserved -= hole.size


def _free_before(hole: _Block) -> int:
    """Return the bytes of a free block before a hole."""
    before = hole.before
    return before.size if before is not None and before.is_free and before.is_mapped else 0


def _room(hole: _Block) -> float:
    """Return the room of a hole; the last one grows."""
    return float("inf") if hole.after is None else hole.size + _free_before(hole)


def _drop_empty(hole: _Block) -> None:
    """Remove a hole without size."""
    if hole.size:
        return
    if hole.before is None:
        hole.pool.first = None
    else:
        hole.before.after = None
