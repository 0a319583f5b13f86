"""The pipeline of 2/4-bit weights through shared memory: a producer warp for each tile. Device functions.

The ``slices`` consumer warps of a tile take neighbouring units, a *block* of the tile at a time: one copy into the next
of ``stages`` buffers. One barrier tells them that a stage is filled, another tells the producer that all of them have
taken what they need.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.ring import next_stage
from bcqfmt.kernels.runtime.numba_cuda import inlined
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .layout import FOUR_BYTES, TWO_BYTES
from .shape import MixedShape

_ALL = 0xFFFFFFFF  # copies: more than there can be


def producer_warp(shape: MixedShape) -> Any:
    """A device function for a whole warp: all blocks of the tiles ``tile``, ``tile + step`` ..., each from ``turn`` on.

    Buffers are at ``place``, the tile's barriers at ``bars``: it initialises those of the copies and fills all stages
    before the threads of the block synchronise.
    """
    stages, first_copies, other_copies = shape.stages, _stage_copier(shape, False), _stage_copier(shape, True)

    def produce(
        units: Any, tile: Any, tiles: Any, step: Any, turn: Any, chunks: Any, low: Any, blocks: Any, pieces: Any,
        place: Any, bars: Any, lane: Any,
    ) -> None:  # fmt: skip
        block, left, spot, parity = turn, blocks, ptx.u32(0), ptx.u32(1)
        if lane == 0:
            for i in static(stages):
                ptx.mbarrier_init(ptx.u32(bars + i * 8))
            ptx.mbarrier_fence()
            tile, block, left, spot, parity = first_copies(
                units, tiles, step, turn, chunks, low, blocks, pieces, place, bars, ptx.u32(stages),
                tile, block, left, spot, parity,
            )  # fmt: skip
        ptx.sync_block()
        if lane == 0:
            other_copies(
                units, tiles, step, turn, chunks, low, blocks, pieces, place, bars, ptx.u32(_ALL),
                tile, block, left, spot, parity,
            )  # fmt: skip

    return inlined(unrolled(produce))


def _stage_copier(shape: MixedShape, waits: bool) -> Any:
    """A device function for one lane: start the next ``count`` copies, or what is left of them.

    Given and returned is where it stands: the tile, the block, how many blocks the tile still has, the buffer, and the
    parity of its barrier. Unless it ``waits``, buffers are known to be free.
    """
    stages, slices, slot_bytes, advance = shape.stages, shape.slices, shape.slot_bytes, next_stage(shape.stages)
    two, less = TWO_BYTES // 16, (TWO_BYTES - FOUR_BYTES) // 16

    def copy_stages(
        units: Any, tiles: Any, step: Any, turn: Any, chunks: Any, low: Any, blocks: Any, pieces: Any, place: Any,
        bars: Any, count: Any, tile: Any, block: Any, left: Any, spot: Any, parity: Any,
    ) -> Any:  # fmt: skip
        while tile < tiles and count > 0:
            first = ptx.u32(block * slices)
            end = min(ptx.u32(first + slices), chunks)
            begin = ptx.u32(first * two - (max(first, low) - low) * less)
            size = ptx.u32(end * two - (max(end, low) - low) * less - begin)
            filled = ptx.u32(bars + spot * 8)
            if waits:
                ptx.mbarrier_wait(ptx.u32(filled + stages * 8), parity)
            ptx.mbarrier_expect(filled, ptx.u32(size * 16))
            ptx.bulk_copy(
                units, ptx.u32(tile * pieces + begin), ptx.u32(place + spot * slot_bytes), ptx.u32(size * 16), filled
            )
            tile, block, left, spot, parity = advance(tile, block, left, spot, parity, step, turn, blocks)
            count = ptx.u32(count - 1)
        return tile, block, left, spot, parity

    return inlined(copy_stages)
