"""The pipeline of weights through shared memory, and the epilogue of a tile: device functions.

The consumer warps of a tile (``slices``) take neighbouring chunks, a *block* of a tile at a time. A producer warp for
each of the tiles side by side only starts copies: two for a block, its planes and its numbers (`layout`), into the next
of ``stages`` buffers; without bulk copies (before sm_90) its lanes copy 16 bytes each. One barrier tells the consumers
that a stage is filled, another tells the producer that all of them are done with it. So copies cost the consumers
nothing, and the first stages are in flight before all else.

At the end of a tile every consumer warp stores its sums in shared memory and goes on; one of them, another for every
tile, waits for all and adds them up in a fixed order. A third kind of barrier counts the warps that have stored sums.
No warp can be so far ahead that it overwrites sums that are still needed: stages would have had to be released that the
adding warp has not seen.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import TO_ARRAY
from bcqfmt.kernels.device_functions.ring import next_stage
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import Ring

_ALL = 0xFFFFFFFF  # copies: more than there can be


def waiter(bulk: bool) -> Any:
    """The function that waits for a barrier; the faster one needs sm_90, as bulk copies do."""
    return ptx.mbarrier_wait if bulk else ptx.mbarrier_poll


def warp_roles(ring: Ring, begin: int) -> Any:
    """A device function: what a thread works on; buffers begin ``begin`` bytes after ``base``.

    Returned: lane, warp (first the consumers, ``slices * sides`` of them, then the producers, then those that add up
    outliers), which of the tiles side by side, its first tile and the step to the next, the block to start with, its
    buffers and its barriers.
    """
    slices, sides, blocks, consumers = ring.slices, ring.sides, ring.blocks, ring.slices * ring.sides
    buffer_bytes, bar_begin, bar_bytes = ring.stages * ring.slot_bytes, begin + ring.barriers_at, ring.barriers * 8

    def role(base: Any, thread: Any, rotation: Any) -> Any:
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        side = ptx.u32(warp // slices) if warp < consumers else ptx.u32((warp - consumers) % sides)
        tile = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * side)
        turn = ptx.u32((cuda.blockIdx.x * rotation + side) % blocks)
        place, bars = ptx.u32(base + begin + side * buffer_bytes), ptx.u32(base + bar_begin + side * bar_bytes)
        return lane, warp, side, tile, ptx.u32(cuda.gridDim.x * sides), turn, place, bars

    return inlined(role)


def stage_release(ring: Ring) -> Any:
    """A device function for a consumer warp that is done with a stage: it releases the buffer.

    Returned is the next block and stage: its number, its buffer, its barrier and the barrier's parity.
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


def producer_warp(ring: Ring) -> Any:
    """A device function for a whole producer warp: all blocks of the tiles ``tile``, ``tile + step`` ...

    Every tile is begun at block ``turn``. Buffers are at ``place``, the tile's barriers, which it initialises, at
    ``bars``. The first ``stages`` copies wait for no barrier; then all threads of the block synchronise.
    """
    stages, blocks, bulk = ring.stages, ring.blocks, ring.bulk
    init_barriers, copy_stages = _barrier_initialiser(ring), _stage_copier(ring) if bulk else _lane_copier(ring)

    def produce(
        planes: Any, numbers: Any, tile: Any, tiles: Any, step: Any, turn: Any, place: Any, bars: Any, lane: Any
    ) -> None:  # fmt: skip
        block, left, spot, parity = turn, ptx.u32(blocks), ptx.u32(0), ptx.u32(1)
        if lane == 0:
            init_barriers(bars)
        if not bulk:
            ptx.syncwarp()
        if not bulk or lane == 0:
            tile, block, left, spot, parity = copy_stages(
                planes, numbers, tiles, step, turn, place, bars, ptx.u32(stages), tile, block, left, spot, parity, lane
            )
        ptx.sync_block()
        if not bulk or lane == 0:
            copy_stages(
                planes, numbers, tiles, step, turn, place, bars, ptx.u32(_ALL), tile, block, left, spot, parity, lane
            )

    return inlined(produce)


def _barrier_initialiser(ring: Ring) -> Any:
    """A device function for one lane: initialise the barriers of a tile at ``bars``."""
    stages, slices, finished, arrivals = ring.stages, ring.slices, ring.finished, ring.arrivals
    bulk, copying = ring.bulk, 1 if ring.bulk else 32

    def init_barriers(bars: Any) -> None:
        for i in static(stages):
            ptx.mbarrier_init_arrivals(ptx.u32(bars + i * 8), ptx.u32(copying))
            ptx.mbarrier_init_arrivals(ptx.u32(bars + (stages + i) * 8), ptx.u32(slices))
        for i in static(finished):
            ptx.mbarrier_init_arrivals(ptx.u32(bars + (2 * stages + i) * 8), ptx.u32(arrivals))
        if bulk:
            ptx.mbarrier_fence()

    return inlined(unrolled(init_barriers))


def _stage_copier(ring: Ring) -> Any:
    """A device function for one lane: start the next ``count`` copies, or what is left of them.

    Tiles ``tile``, ``tile + step`` ...; each from block ``turn`` on. Given and returned is where it stands: the tile,
    the block, how many blocks the tile still has, the buffer, the parity of its barrier (at first 1: it is free).
    """
    layout, stages, blocks = ring.layout, ring.stages, ring.blocks
    advance, part = next_stage(stages), _part_of_block(ring)
    q, chunks, sets = layout.bits, layout.chunks, layout.sets
    set_bytes, plane_bytes = layout.set_bytes, ring.plane_bytes

    def copy_stages(
        planes: Any, numbers: Any, tiles: Any, step: Any, turn: Any, place: Any, bars: Any, count: Any,
        tile: Any, block: Any, left: Any, spot: Any, parity: Any, lane: Any,
    ) -> Any:  # fmt: skip
        while tile < tiles and count > 0:
            first, end, first_set, several, filled, slot = part(block, spot, place, bars)
            size, more = ptx.u32((end - first) * (q * 512)), ptx.u32(several * set_bytes)
            ptx.mbarrier_wait(ptx.u32(filled + stages * 8), parity)
            ptx.mbarrier_expect(filled, ptx.u32(size + more))
            ptx.bulk_copy(planes, ptx.u32((tile * chunks + first) * (q * 32)), slot, size, filled)
            from_set = ptx.u32((tile * sets + first_set) * (set_bytes // 16))
            ptx.bulk_copy(numbers, from_set, ptx.u32(slot + plane_bytes), more, filled)
            tile, block, left, spot, parity = advance(tile, block, left, spot, parity, step, turn, ptx.u32(blocks))
            count = ptx.u32(count - 1)
        return tile, block, left, spot, parity

    return inlined(copy_stages)


def _lane_copier(ring: Ring) -> Any:
    """The same for a whole warp of a GPU without bulk copies: every lane copies 16 bytes at a time."""
    layout, stages, blocks = ring.layout, ring.stages, ring.blocks
    run = 1 if layout.chunks % ring.slices else ring.slices  # chunks of a loop; some blocks have fewer than others
    advance, part, copy_run = next_stage(stages), _part_of_block(ring), ptx.cp_async_run(run * layout.bits, 512)
    q, chunks, sets = layout.bits, layout.chunks, layout.sets
    set_pieces, plane_bytes = layout.set_bytes // 16, ring.plane_bytes

    def copy_stages(
        planes: Any, numbers: Any, tiles: Any, step: Any, turn: Any, place: Any, bars: Any, count: Any,
        tile: Any, block: Any, left: Any, spot: Any, parity: Any, lane: Any,
    ) -> Any:  # fmt: skip
        while tile < tiles and count > 0:
            first, end, first_set, several, filled, slot = part(block, spot, place, bars)
            ptx.mbarrier_poll(ptx.u32(filled + stages * 8), parity)
            index, to = ptx.u32((tile * chunks + first) * (q * 32) + lane), ptx.u32(slot + lane * 16)
            while first < end:
                copy_run(planes, index, to)
                first, index, to = ptx.u32(first + run), ptx.u32(index + run * q * 32), ptx.u32(to + run * q * 512)
            piece = lane
            while piece < several * set_pieces:
                from_set = ptx.u32((tile * sets + first_set) * set_pieces + piece)
                ptx.cp_async16(numbers, from_set, ptx.u32(slot + plane_bytes + piece * 16), ptx.u32(16))
                piece = ptx.u32(piece + 32)
            ptx.cp_async_arrive(filled)
            tile, block, left, spot, parity = advance(tile, block, left, spot, parity, step, turn, ptx.u32(blocks))
            count = ptx.u32(count - 1)
        return tile, block, left, spot, parity

    return inlined(copy_stages)


def _part_of_block(ring: Ring) -> Any:
    """A device function: what is copied for a block of a tile, and where to.

    Its first chunk and the one after its last, its first set of numbers and how many sets; the barrier that tells that
    buffer ``spot`` is filled, and the buffer.
    """
    slices, chunks, sharing, slot_bytes = ring.slices, ring.layout.chunks, ring.layout.sharing, ring.slot_bytes
    halves = 256 // ring.layout.span

    def part(block: Any, spot: Any, place: Any, bars: Any) -> Any:
        first = ptx.u32(block * slices)
        end = min(ptx.u32(first + slices), ptx.u32(chunks))
        first_set = ptx.u32(ptx.u32(first * halves) // sharing)
        several = ptx.u32(ptx.u32(end * halves - 1) // sharing - first_set + 1)
        return first, end, first_set, several, ptx.u32(bars + spot * 8), ptx.u32(place + spot * slot_bytes)

    return inlined(part)


def epilogue(ring: Ring, out: int, added: bool) -> Any:
    """A device function for every consumer warp of a tile, when its sums lie in buffer ``buffer`` at ``held``.

    Every lane that has stored some of them (``stored``) arrives at the buffer's barrier. The warp whose turn it is
    (``adding == mine``) waits for the others, adds up and writes 16 rows of y. Returned: whose turn it is next, the
    next buffer and the parity of its barrier.
    """
    slices, batch, held_bytes, finished, terms = ring.slices, ring.batch, ring.held_bytes, ring.finished, ring.terms
    narrow, wait = TO_ARRAY[out], waiter(ring.bulk)

    def finish(
        addend: Any, y: Any, rows: Any, tile: Any, held: Any, bars: Any, mine: Any, lane: Any, stored: Any,
        adding: Any, buffer: Any, parity: Any,
    ) -> Any:  # fmt: skip
        bar = ptx.u32(bars + buffer * 8)
        if stored:
            ptx.mbarrier_arrive(bar)
        if adding == mine:
            wait(bar, parity)
            from_here = ptx.u32(held + buffer * held_bytes)
            e = lane
            while e < batch * 16:
                row = ptx.u32(tile * 16 + (e & 15))
                if row < rows:
                    place = ptx.u32((e >> 4) * rows + row)
                    value = addend[place] if added else ptx.f32(0.0)
                    for k in static(terms):
                        value = ptx.f32(value + ptx.lds_f32(ptx.u32(from_here + e * 4), ptx.u32(k * (batch * 64))))
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
