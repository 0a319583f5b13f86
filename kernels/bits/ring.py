"""How weights in the order of `bit_layout` flow through shared memory, and how tiles are finished: device functions.

The warps of a tile (``slices``) take neighbouring chunks, a *block* of a tile at a time. One more warp for each of the
tiles side by side does nothing but start copies: two for a block, its planes and its numbers, into the next of
``stages`` buffers. A barrier tells the others that a buffer is filled, another tells it that all of them are done.
So fetching costs the warps that multiply nothing, and the first buffers are asked for before anything else is done.

At the end of a tile every warp leaves its sums in shared memory and goes on; one of them, another for every tile, waits
for all and adds them up in a fixed order. A third kind of barrier counts who has left sums. No warp can be so far ahead
that it overwrites sums that are still needed: buffers would have had to be freed that the adding warp has not seen.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.ring import after_copy
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import Ring

__all__ = ["fetcher", "finisher", "releaser", "seats"]

_ALL = 0xFFFFFFFF  # copies: more than there can be


def seats(ring: Ring, begin: int) -> Any:
    """A device function: where a thread has its place; buffers begin ``begin`` bytes after ``base``.

    Given: lane, warp (from ``slices * sides`` on they fetch, then they add up outliers), which of the tiles side by
    side, its first tile and the step to the next, the block to start with, its buffers and its barriers.
    """
    slices, side, blocks, workers = ring.slices, ring.sides, ring.blocks, ring.slices * ring.sides
    buffer_bytes, bar_begin, bar_bytes = ring.stages * ring.slot_bytes, begin + ring.barriers_at, ring.barriers * 8

    def seat(base: Any, thread: Any, rotation: Any) -> Any:
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        beside = ptx.u32(warp // slices) if warp < workers else ptx.u32((warp - workers) % side)
        tile = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * beside)
        turn = ptx.u32((cuda.blockIdx.x * rotation + beside) % blocks)
        place, bars = ptx.u32(base + begin + beside * buffer_bytes), ptx.u32(base + bar_begin + beside * bar_bytes)
        return lane, warp, beside, tile, ptx.u32(cuda.gridDim.x * side), turn, place, bars

    return inlined(seat)


def releaser(ring: Ring) -> Any:
    """A device function for a warp that is done with a buffer: it says so. Returned: the next block and buffer.

    That is its number, its place, its barrier and the barrier's parity.
    """
    stages, blocks, slot_bytes = ring.stages, ring.blocks, ring.slot_bytes

    def release(
        lane: Any, place: Any, bars: Any, block: Any, slot: Any, bar: Any, parity: Any
    ) -> Any:  # fmt: skip
        ptx.syncwarp()
        if lane == 0:
            ptx.mbarrier_arrive(ptx.u32(bar + stages * 8))
        block = ptx.u32(block + 1)
        if block == blocks:
            block = ptx.u32(0)
        slot, bar = ptx.u32(slot + slot_bytes), ptx.u32(bar + 8)
        if bar == ptx.u32(bars + stages * 8):
            slot, bar, parity = place, bars, ptx.u32(parity ^ 1)
        return block, slot, bar, parity

    return inlined(release)


def fetcher(ring: Ring) -> Any:
    """A device function for a whole warp that fetches: all blocks of the tiles ``tile``, ``tile + step`` ...

    Every tile is begun at block ``turn``. Buffers are at ``place``, the tile's barriers, which it makes ready, at
    ``bars``. The first buffers do not wait for anybody; then all threads of the block meet.
    """
    stages, blocks, open_barriers, produce = ring.stages, ring.blocks, _opener(ring), _producer(ring)

    def fetch(
        planes: Any, numbers: Any, tile: Any, tiles: Any, step: Any, turn: Any, place: Any, bars: Any, lane: Any
    ) -> None:  # fmt: skip
        block, left, spot, parity = turn, ptx.u32(blocks), ptx.u32(0), ptx.u32(1)
        if lane == 0:
            open_barriers(bars)
            tile, block, left, spot, parity = produce(
                planes, numbers, tiles, step, turn, place, bars, ptx.u32(stages), tile, block, left, spot, parity
            )
        ptx.sync_block()
        if lane == 0:
            produce(planes, numbers, tiles, step, turn, place, bars, ptx.u32(_ALL), tile, block, left, spot, parity)

    return inlined(fetch)


def _opener(ring: Ring) -> Any:
    """A device function for one lane: the barriers of a tile at ``bars`` are made ready."""
    stages, slices, finished, arrivals = ring.stages, ring.slices, ring.finished, ring.arrivals

    def open_barriers(bars: Any) -> None:
        for i in static(stages):
            ptx.mbarrier_init(ptx.u32(bars + i * 8))
            ptx.mbarrier_init_arrivals(ptx.u32(bars + (stages + i) * 8), ptx.u32(slices))
        for i in static(finished):
            ptx.mbarrier_init_arrivals(ptx.u32(bars + (2 * stages + i) * 8), ptx.u32(arrivals))
        ptx.mbarrier_fence()

    return inlined(unrolled(open_barriers))


def _producer(ring: Ring) -> Any:
    """A device function for one lane: start the next ``count`` copies, or what is left of them.

    Tiles ``tile``, ``tile + step`` ...; each from block ``turn`` on. Given and returned is where it stands: the tile,
    the block, how many blocks the tile still has, the buffer, the parity of its barrier (at first 1: it is free).
    """
    layout, stages, slices, blocks = ring.layout, ring.stages, ring.slices, ring.blocks
    go_on = after_copy(stages)
    q, chunks, sharing, sets = layout.bits, layout.chunks, layout.sharing, layout.sets
    halves, set_bytes, slot_bytes, plane_bytes = 256 // layout.span, layout.set_bytes, ring.slot_bytes, ring.plane_bytes

    def produce(
        planes: Any, numbers: Any, tiles: Any, step: Any, turn: Any, place: Any, bars: Any, count: Any,
        tile: Any, block: Any, left: Any, spot: Any, parity: Any,
    ) -> Any:  # fmt: skip
        while tile < tiles and count > 0:
            first = ptx.u32(block * slices)
            end = min(ptx.u32(first + slices), ptx.u32(chunks))
            first_set = ptx.u32(ptx.u32(first * halves) // sharing)
            several = ptx.u32(ptx.u32(end * halves - 1) // sharing - first_set + 1)
            size, more = ptx.u32((end - first) * (q * 512)), ptx.u32(several * set_bytes)
            filled, slot = ptx.u32(bars + spot * 8), ptx.u32(place + spot * slot_bytes)
            ptx.mbarrier_wait(ptx.u32(filled + stages * 8), parity)
            ptx.mbarrier_expect(filled, ptx.u32(size + more))
            ptx.bulk_copy(planes, ptx.u32((tile * chunks + first) * (q * 32)), slot, size, filled)
            from_set = ptx.u32((tile * sets + first_set) * (set_bytes // 16))
            ptx.bulk_copy(numbers, from_set, ptx.u32(slot + plane_bytes), more, filled)
            tile, block, left, spot, parity = go_on(tile, block, left, spot, parity, step, turn, ptx.u32(blocks))
            count = ptx.u32(count - 1)
        return tile, block, left, spot, parity

    return inlined(produce)


def finisher(ring: Ring, out: int, added: bool) -> Any:
    """A device function for every warp of a tile, when its sums lie in buffer ``buffer`` at ``held``.

    Every lane that has left some of them (``leaves``) tells the buffer's barrier, for itself. The warp whose turn it is
    (``adding == mine``) waits for the others, adds up and writes 16 rows of y. Returned: whose turn it is next, the
    next buffer and the parity of its barrier.
    """
    slices, batch, held_bytes, finished, terms = ring.slices, ring.batch, ring.held_bytes, ring.finished, ring.terms
    narrow = ptx.f32_to_bf16 if out == 2 else ptx.f32_to_f16

    def finish(
        addend: Any, y: Any, rows: Any, tile: Any, held: Any, bars: Any, mine: Any, lane: Any, leaves: Any,
        adding: Any, buffer: Any, parity: Any,
    ) -> Any:  # fmt: skip
        bar = ptx.u32(bars + buffer * 8)
        if leaves:
            ptx.mbarrier_arrive(bar)
        if adding == mine:
            ptx.mbarrier_wait(bar, parity)
            from_here = ptx.u32(held + buffer * held_bytes)
            e = lane
            while e < batch * 16:
                row = ptx.u32(tile * 16 + (e & 15))
                if row < rows:
                    place = ptx.u32((e >> 4) * rows + row)
                    value = addend[place] if added else ptx.f32(0.0)
                    for k in static(terms):
                        value = ptx.f32(value + ptx.lds_f32(ptx.u32(from_here + e * 4), ptx.u32(k * (batch * 64))))
                    if out == 0:
                        y[place] = value
                    else:
                        y[place] = narrow(value)
                e = ptx.u32(e + 32)
        adding = ptx.u32(adding + 1)
        if adding == slices:
            adding = ptx.u32(0)
        buffer = ptx.u32(buffer + 1)
        if buffer == finished:
            buffer, parity = ptx.u32(0), ptx.u32(parity ^ 1)
        return adding, buffer, parity

    return inlined(unrolled(finish))
