"""Outliers in the products of bits, bytes and short groups: a warp for each tile that does nothing else.

Consumer warps have x as integers only, so these warps copy x unchanged; then they add up the outliers of a tile for
all its rows and store the sums next to those of the consumers, to be added in a fixed order (`ring`).

Pipeline stages hold back consumers, but not this warp. Before it overwrites the sums of an earlier tile it waits until
all have stored those of the tile after that one: a warp adds up the sums of a tile before it goes on to the next.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.outliers import outlier_tiles
from bcqfmt.kernels.device_functions.vectors import vector_loader
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import AnyShape

_TOGETHER = 8  # pieces of x in flight


def outlier_warp(shape: AnyShape) -> Any:
    """A device function for a whole warp: all tiles from ``tile`` on, number ``side`` of those side by side.

    ``room``: bytes for the outliers of a tile. All threads of the block synchronise once in it. Without outliers there
    is no such warp, and nothing to compile.
    """
    if not shape.outliers:
        return inlined(_nothing)
    ring, batch, per = shape.ring, shape.batch, 4 if shape.kind == 0 else 8
    stages, finished, held_bytes, sides = ring.stages, ring.finished, ring.held_bytes, ring.sides
    held_at, x_at = shape.fixed_bytes + ring.held_at, shape.shared_bytes
    own = ring.slices * batch * 64  # after the sums of the consumers
    load = vector_loader(batch, shape.kind, 32 * sides, _TOGETHER)
    usual_of, bounds, prefetch, add_up = outlier_tiles(batch, shape.kind, shape.outliers)

    def work(
        indptr: Any, entries: Any, x: Any, count: Any, room: Any, columns: Any, base: Any, tile: Any, tiles: Any,
        step: Any, side: Any, bars: Any, lane: Any,
    ) -> None:  # fmt: skip
        xs_bytes, xs = ptx.u32((columns + per) // per * 16), ptx.u32(base + x_at)
        kept = ptx.u32(xs + batch * xs_bytes + side * room)
        ended, bar = ptx.u32(bars + 2 * stages * 8), ptx.u32(bars + (2 * stages + finished) * 8)
        if lane == 0:
            ptx.mbarrier_init(bar)
            ptx.mbarrier_fence()
        usual = usual_of(count, tiles)
        begin, end, next_begin, next_end = bounds(indptr, entries, count, tile, tiles, step, lane)
        ptx.wait_previous_kernel()
        load(x, xs, xs_bytes, columns, ptx.u32(side * 32 + lane))
        ptx.sync_block()
        begin, end, first = prefetch(entries, count, room, kept, bar, lane, begin, end)
        to = ptx.u32(base + held_at + side * (finished * held_bytes) + own + lane * 4)
        parity, done, buffer, before, phase = ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            values = cuda.local.array(batch, types.float32)
            parity, begin, end, first, next_begin, next_end = add_up(
                values, indptr, entries, count, room, xs, xs_bytes, columns, kept, bar, tile, tiles, step, usual,
                lane, parity, begin, end, first, next_begin, next_end,
            )  # fmt: skip
            if done >= finished - 1:
                ptx.mbarrier_wait(ptx.u32(ended + before * 8), phase)
                before = ptx.u32(before + 1)
                if before == finished:
                    before, phase = ptx.u32(0), ptx.u32(phase ^ 1)
            if lane < 16:
                for b in static(batch):
                    ptx.sts_f32(ptx.u32(to + buffer * held_bytes), ptx.u32(b * 64), values[b])
                ptx.mbarrier_arrive(ptx.u32(ended + buffer * 8))
            buffer, done = ptx.u32(buffer + 1), ptx.u32(done + 1)
            if buffer == finished:
                buffer = ptx.u32(0)
            tile = ptx.u32(tile + step)

    return inlined(unrolled(work))


def _nothing(
    indptr: Any, entries: Any, x: Any, count: Any, room: Any, columns: Any, base: Any, tile: Any, tiles: Any,
    step: Any, side: Any, bars: Any, lane: Any,
) -> None:  # fmt: skip
    pass
