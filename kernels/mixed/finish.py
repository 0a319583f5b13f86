"""How a tile of a product with 2/4-bit weights is finished: by a warp of its own, so nobody waits. Device functions.

It makes barriers ready, adds up the outliers of the tile while others multiply, waits for their sums, adds them in a
fixed order and writes 16 rows of y.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.outliers import outlier_tiles
from bcqfmt.kernels.runtime.limits import ROWS
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import MixedShape

__all__ = ["closer"]


def closer(shape: MixedShape) -> Any:
    """A device function for a whole warp: tiles ``tile``, ``tile + step`` ... are finished.

    When all have met, x is at ``base``, ``xs_bytes`` a vector, and no kernel before this one is still at work, so that
    y may be written. Outliers go to ``kept``; sums are found in two buffers at ``held``.
    """
    batch, slices, stages, size, out = shape.batch, shape.slices, shape.stages, shape.outliers, shape.out
    held_bytes = shape.held_bytes
    usual_of, look, ask, add_up = outlier_tiles(batch, shape.kind, size or 4)
    narrow = ptx.f32_to_bf16 if out == 2 else ptx.f32_to_f16

    def close(
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
            begin, end, next_begin, next_end = look(indptr, entries, count, tile, tiles, step, lane)
        ptx.sync_block()
        if size:
            # These numbers are not looked at before all have met, or everybody would wait for them. The compiler would
            # do so earlier, if they did not depend on what only then can be read.
            nothing = ptx.lds32(zero_at, ptx.u32(0))
            begin, end = ptx.u32(begin + nothing), ptx.u32(end + nothing)
            begin, end, first = ask(entries, count, room, kept, kept_bar, lane, begin, end)
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
                place = ptx.u32((lane >> 4) * rows + row)
                if out == 0:
                    y[place] = value
                else:
                    y[place] = narrow(value)
            ptx.mbarrier_arrive(ptx.u32(left + (2 + turned_over) * 8))
            turned_over = ptx.u32(turned_over ^ 1)
            if turned_over == 0:
                phase = ptx.u32(phase ^ 1)
            tile = ptx.u32(tile + step)

    return inlined(unrolled(close))
