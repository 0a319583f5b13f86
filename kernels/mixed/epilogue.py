"""The epilogue of a tile of a product with 2/4-bit weights, in a separate warp, so that consumers need not wait.

It initialises barriers, adds up the outliers of the tile while the consumer warps multiply, waits for their sums, adds
them in a fixed order and writes 16 rows of y.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import TO_ARRAY
from bcqfmt.kernels.device_functions.outliers import outlier_tiles
from bcqfmt.kernels.runtime.limits import ROWS
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import MixedShape


def epilogue_warp(shape: MixedShape) -> Any:
    """A device function for a whole warp: tiles ``tile``, ``tile + step`` ... are finished.

    When the block has synchronised, x is at ``base``, ``xs_bytes`` a vector, and no kernel before this one is still
    running, so that y may be written. Outliers go to ``kept``; sums are found in two buffers at ``held``.
    """
    batch, slices, stages, size, out = shape.batch, shape.slices, shape.stages, shape.outliers, shape.out
    held_bytes = shape.held_bytes
    usual_of, bounds, prefetch, add_up = outlier_tiles(batch, shape.kind, size or 4)
    narrow = TO_ARRAY[out]

    def finish(
        indptr: Any, entries: Any, y: Any, rows: Any, tiles: Any, columns: Any, count: Any, room: Any,
        base: Any, xs_bytes: Any, kept: Any, held: Any, bars: Any, tile: Any, step: Any, lane: Any,
    ) -> None:  # fmt: skip
        left = ptx.u32(bars + 2 * stages * 8)
        kept_bar, zero_at = ptx.u32(left + 32), ptx.u32(left + 40)
        if lane == 0:
            for i in static(stages):
                ptx.mbarrier_init_arrivals(ptx.u32(bars + (stages + i) * 8), ptx.u32(slices))
            for i in static(2):
                ptx.mbarrier_init_arrivals(ptx.u32(left + i * 8), ptx.u32(8 * slices))
                ptx.mbarrier_init_arrivals(ptx.u32(left + (2 + i) * 8), ptx.u32(32))
            ptx.mbarrier_init(kept_bar)
            ptx.mbarrier_fence()
            ptx.sts32(zero_at, ptx.u32(0), ptx.u32(0))
        begin, end, first, next_begin, next_end = ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        if size:
            usual = usual_of(count, tiles)
            begin, end, next_begin, next_end = bounds(indptr, entries, count, tile, tiles, step, lane)
        ptx.sync_block()
        if size:
            # These loads are not used before the block has synchronised, or all warps would wait for them. The compiler
            # would use them earlier if they did not depend on a value that can be read only then.
            nothing = ptx.lds32(zero_at, ptx.u32(0))
            begin, end = ptx.u32(begin + nothing), ptx.u32(end + nothing)
            begin, end, first = prefetch(entries, count, room, kept, kept_bar, lane, begin, end)
        turned_over, phase, kept_parity = ptx.u32(0), ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            values = cuda.local.array(batch, types.float32)
            for b in static(batch):
                values[b] = ptx.f32(0.0)
            if size:
                kept_parity, begin, end, first, next_begin, next_end = add_up(
                    values, indptr, entries, count, room, base, xs_bytes, columns, kept, kept_bar, tile, tiles, step,
                    usual, lane, kept_parity, begin, end, first, next_begin, next_end,
                )  # fmt: skip
            ptx.mbarrier_wait(ptx.u32(left + turned_over * 8), phase)
            row = ptx.u32(tile * ROWS + (lane & 15))
            if lane < batch * 16 and row < rows:
                at = ptx.u32(held + turned_over * held_bytes + lane * 4)
                value = ptx.f32(0.0)
                for k in static(slices):
                    value = ptx.f32(value + ptx.lds_f32(at, ptx.u32(k * (batch * 64))))
                if size:
                    extra = values[0]
                    for b in static(1, batch):
                        extra = values[b] if lane >= b * 16 else extra
                    value = ptx.f32(value + extra)
                y[ptx.u32((lane >> 4) * rows + row)] = narrow(value)
            ptx.mbarrier_arrive(ptx.u32(left + (2 + turned_over) * 8))
            turned_over = ptx.u32(turned_over ^ 1)
            if turned_over == 0:
                phase = ptx.u32(phase ^ 1)
            tile = ptx.u32(tile + step)

    return inlined(unrolled(finish))
