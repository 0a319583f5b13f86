"""y = W x for 2/4-bit weights with second-order scales and outliers, on integer tensor cores, in one launch (sm_90).

x becomes a block-fixed-point number: in every 16 columns a power of two and signed 16-bit integers, as two bytes
``256 high + low`` (float32 vectors get a second integer for what the first leaves over). One ``mma.m16n8k32`` takes 16
rows and two groups of 16 columns of codes: its first half of columns is group 0, the second group 1, so a B operand
whose columns are (high, low) of one group and zeros for the other gives the sums of both groups apart; two of them
with different columns of B fill the accumulators, and lane 4 r + t holds group t of rows r and r + 8. Integer sums are
exact. What is rounded is x, and the products with scales, in float32.

Zero points take their share of sum(x), an integer too. The 16 rows of a tile share the second-order scale and zero of
a group: ``scale = unit * (code - zero)`` is made in registers out of the unit's own bytes, while the copies of the
next ``stages - 1`` blocks are in flight.

For each of ``sides`` tiles a block has one producer warp that starts copies (`ring`), ``slices`` consumer warps that
multiply, and one warp that adds up outliers and runs the epilogue (`epilogue`). All sums are added in a fixed order:
two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.vectors import vector_loader
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .columns import TOGETHER, column_integers, order_loader
from .epilogue import epilogue_warp
from .layout import FOUR_BYTES, FOUR_COLUMNS, TWO_BYTES, TWO_COLUMNS
from .ring import producer_warp
from .shape import MixedShape
from .units import code_words, four_bit_group, four_words, two_bit_group, two_words

_ARGUMENTS = (
    "u32* units, u32* perm, {x}* x, u32* indptr, u32* entries, {y}* y, u32 rows, u32 tiles, u32 columns, u32 twos, "
    "u32 fours, u32 count, u32 room"
)


@functools.cache
def mixed_gemv_kernel(shape: MixedShape) -> Kernel:
    """The kernel for one batch and choice of types; widths are arguments of the launch."""
    batch, kind, out, parts = shape.batch, shape.kind, shape.out, shape.parts
    slices, sides, stages, warps = shape.slices, shape.sides, shape.stages, shape.warps
    slot_bytes, held_bytes, barrier_bytes = shape.slot_bytes, shape.held_bytes, shape.barriers * 8
    vectors, floats, per, workers = batch * parts, 2 * batch * parts, 4 if kind == 0 else 8, 32 * warps
    order_words = 4 * TOGETHER
    produce, finish, load_x = producer_warp(shape), epilogue_warp(shape), vector_loader(batch, kind, workers)
    load_order, to_integers = order_loader(workers), column_integers(batch, parts, kind, workers)
    two_bit, four_bit, load_codes = two_bit_group(), four_bit_group(), code_words()
    load_two, load_four = two_words(), four_words()
    declared = _ARGUMENTS.format(x="u32" if kind == 0 else "u16", y="f32" if out == 0 else "u16")

    @kernel(declared, threads=shape.threads, variant=repr(shape))
    @unrolled
    def mixed_gemv(
        units: Any, perm: Any, x: Any, indptr: Any, entries: Any, y: Any, rows: Any, tiles: Any, columns: Any,
        twos: Any, fours: Any, count: Any, room: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        side = ptx.u32(warp // slices) if warp < warps else ptx.u32((warp - warps) % sides)
        tile, step = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * side), ptx.u32(cuda.gridDim.x * sides)
        chunks = ptx.u32(twos + fours)
        padded = ptx.u32(twos * TWO_COLUMNS + fours * FOUR_COLUMNS)
        blocks = ptx.u32((chunks + (slices - 1)) // slices)
        turn = ptx.rem_u32(ptx.u32(cuda.blockIdx.x * sides + side), blocks)  # not all at the same memory channels
        xs_bytes = ptx.u32((columns + per) // per * 16)
        planes_at = ptx.u32(base + batch * xs_bytes)
        info_at = ptx.u32(planes_at + vectors * padded * 4)
        held = ptx.u32(info_at + vectors * (padded >> 1) + side * (2 * held_bytes))
        kept = ptx.u32(info_at + vectors * (padded >> 1) + sides * (2 * held_bytes) + side * room)
        after_kept = ptx.u32(info_at + vectors * (padded >> 1) + sides * (2 * held_bytes + room))
        place = ptx.u32(after_kept + side * (stages * slot_bytes))
        bars = ptx.u32(after_kept + sides * (stages * slot_bytes) + side * barrier_bytes)
        if warp >= warps + sides:
            finish(
                indptr, entries, y, rows, tiles, columns, count, room, base, xs_bytes, kept, held, bars, tile, step,
                lane,
            )  # fmt: skip
            return
        if warp >= warps:
            pieces = ptx.u32(twos * (TWO_BYTES // 16) + fours * (FOUR_BYTES // 16))  # of a tile
            produce(units, tile, tiles, step, turn, chunks, twos, blocks, pieces, place, bars, lane)
            return

        order = cuda.local.array(order_words, types.uint32)
        load_order(perm, order, thread, ptx.u32(padded >> 3))
        ptx.wait_previous_kernel()
        ptx.launch_next_kernel()
        load_x(x, base, xs_bytes, columns, thread)
        ptx.sync_block()
        to_integers(perm, order, thread, base, xs_bytes, planes_at, info_at, padded, twos, columns)
        ptx.sync_warps(ptx.u32(1), ptx.u32(workers))

        # addresses and constants, passed through a shuffle: the compiler would otherwise recompute them for every unit
        mine, lane = ptx.shfl_u32(ptx.u32(warp % slices), lane), ptx.shfl_u32(lane, lane)
        nothing = ptx.u32(rows >> 31)
        nibbles = ptx.shfl_u32(ptx.u32(nothing + 0x000F000F), lane)
        thousands = ptx.shfl_u32(ptx.u32(nothing + 0x64646464), lane)
        t, r8, own = ptx.u32(lane & 3), ptx.u32(lane >> 2), ptx.u32(lane >> 3)
        lower, upper = lane < 16, ptx.shfl_u32(ptx.u32(lane >> 4), lane) != 0
        xlane = ptx.shfl_u32(ptx.u32(planes_at + own * 128 + (lane & 7 ^ own) * 16), lane)
        xlane4 = ptx.u32(xlane + twos * 1024)
        beyond = ptx.shfl_u32(ptx.u32(576 - ((lane ^ own) & 4) * 32), lane)  # the other 128 columns
        ilane = ptx.shfl_u32(ptx.u32(info_at + t * 32), lane)
        ilane4 = ptx.u32(ilane + twos * 128 - t * 16)
        place, bars = ptx.shfl_u32(place, lane), ptx.shfl_u32(bars, lane)
        # codes are not moved within their bytes: 2-bit sums of rows r and r + 8 are 1 and 4 times too large (odd 64
        # columns: 16 and 64 times, which x's unit knows), 4-bit ones 1 and 16 times
        sums = cuda.local.array(floats, types.float32)
        part = cuda.local.array(floats, types.float32)
        for k in static(floats):
            sums[k] = ptx.f32(0.0)
        given = cuda.local.array(16, types.uint32)  # zeros, except where a lane loads its own
        info = cuda.local.array(8, types.uint32)
        for k in static(16):
            given[k] = ptx.u32(0)
        spot, parity, done = ptx.u32(0), ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            block, left = turn, True
            while left:
                slot, bar = ptx.u32(place + spot * slot_bytes), ptx.u32(bars + spot * 8)
                first = ptx.u32(block * slices)
                c = ptx.u32(first + mine)
                ptx.mbarrier_wait(bar, parity)
                if c < twos:
                    xa, ia = ptx.u32(xlane + c * 1024), ptx.u32(ilane + c * 128)
                    here = ptx.u32(slot + mine * TWO_BYTES)
                    load_two(given, info, xa, ptx.u32(xa + beyond), ia, lower, upper)
                    a = cuda.local.array(8, types.uint32)
                    load_codes(a, ptx.u32(here + lane * 16))
                    codes = ptx.lds32(ptx.u32(here + lane * 4), ptx.u32(1024))
                    zeros = ptx.lds16(ptx.u32(here + lane * 2), ptx.u32(1152))
                    scales = ptx.lds64(ptx.u32(here + t * 8), ptx.u32(1216))
                    lows = ptx.lds32(ptx.u32(here + t * 4), ptx.u32(1248))
                    ptx.syncwarp()
                    if lane == 0:
                        ptx.mbarrier_arrive(ptx.u32(bar + stages * 8))
                    for v in static(vectors):
                        if v > 0:
                            xv, iv = ptx.u32(xa + v * (padded * 4)), ptx.u32(ia + v * (padded >> 1))
                            load_two(given, info, xv, ptx.u32(xv + beyond), iv, lower, upper)
                        for j in static(4):
                            # the second-order multiply: 1024 + code and 1024 + zero are float16 patterns
                            above = ptx.u32((ptx.u32(codes >> ptx.u32(4 * j)) & nibbles) | 0x64006400)
                            above = ptx.hsub2(above, ptx.prmt(lows, thousands, ptx.u32(0x4040 + j * 0x0101)))
                            scale = ptx.hi_f16(scales[j // 2]) if j % 2 else ptx.lo_f16(scales[j // 2])
                            moved = ptx.u32(zeros >> ptx.u32(j // 2 * 8))
                            zero = ptx.i32(moved & (0x30 if j % 2 else 0x03))
                            zero8 = ptx.i32(moved & (0xC0 if j % 2 else 0x0C))
                            less, unit = ptx.i32(info[2 * j]), ptx.f32(scale * ptx.bits_f32(info[2 * j + 1]))
                            d = two_bit(
                                a[j // 2 * 4], a[j // 2 * 4 + 1], a[j // 2 * 4 + 2], a[j // 2 * 4 + 3],
                                given[2 * j], given[2 * j + 1], given[8 + 2 * j], given[9 + 2 * j], j % 2 != 0,
                            )  # fmt: skip
                            low = ptx.f32(ptx.i32(d[0] * 256 + d[1] + zero * less))
                            high = ptx.f32(ptx.i32(d[2] * 256 + d[3] + zero8 * less))
                            sums[2 * v] = ptx.fma_f32(ptx.f32(unit * ptx.lo_f16(above)), low, sums[2 * v])
                            sums[2 * v + 1] = ptx.fma_f32(ptx.f32(unit * ptx.hi_f16(above)), high, sums[2 * v + 1])
                else:
                    if c < chunks:
                        past = ptx.u32(c - twos)
                        xa, ia = ptx.u32(xlane4 + past * 512), ptx.u32(ilane4 + past * 64)
                        ahead = ptx.u32(max(twos, first) - first)  # 2-bit units of the block
                        here = ptx.u32(slot + mine * FOUR_BYTES + ahead * (TWO_BYTES - FOUR_BYTES))
                        load_four(given, info, xa, ia, lower, upper)
                        a = cuda.local.array(8, types.uint32)
                        load_codes(a, ptx.u32(here + lane * 16))
                        pair = ptx.lds32(ptx.u32(here + r8 * 4), ptx.u32(1024))
                        ends = ptx.lds8(ptx.u32(here + r8), ptx.u32(1056))
                        ptx.syncwarp()
                        if lane == 0:
                            ptx.mbarrier_arrive(ptx.u32(bar + stages * 8))
                        zero, zero8 = ptx.i32(ends & 0x0F), ptx.i32(ends & 0xF0)
                        scale, scale8 = ptx.lo_f16(pair), ptx.f32(ptx.hi_f16(pair) * ptx.f32(0.25))
                        for v in static(vectors):
                            if v > 0:
                                xv, iv = ptx.u32(xa + v * (padded * 4)), ptx.u32(ia + v * (padded >> 1))
                                load_four(given, info, xv, iv, lower, upper)
                            part[2 * v], part[2 * v + 1] = ptx.f32(0.0), ptx.f32(0.0)
                            for j in static(2):
                                d = four_bit(
                                    a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3],
                                    given[2 * j], given[2 * j + 1], given[8 + 2 * j], given[9 + 2 * j],
                                )  # fmt: skip
                                less, unit = ptx.i32(info[2 * j]), ptx.bits_f32(info[2 * j + 1])
                                low = ptx.f32(ptx.i32(d[0] * 256 + d[1] + zero * less))
                                high = ptx.f32(ptx.i32(d[2] * 256 + d[3] + zero8 * less))
                                part[2 * v] = ptx.fma_f32(unit, low, part[2 * v])
                                part[2 * v + 1] = ptx.fma_f32(unit, high, part[2 * v + 1])
                            sums[2 * v] = ptx.fma_f32(scale, part[2 * v], sums[2 * v])
                            sums[2 * v + 1] = ptx.fma_f32(scale8, part[2 * v + 1], sums[2 * v + 1])
                    else:
                        ptx.syncwarp()
                        if lane == 0:
                            ptx.mbarrier_arrive(ptx.u32(bar + stages * 8))
                block, spot = ptx.u32(block + 1), ptx.u32(spot + 1)
                if block == blocks:
                    block = ptx.u32(0)
                if spot == stages:
                    spot, parity = ptx.u32(0), ptx.u32(parity ^ 1)
                left = block != turn
            # the tile is done: sums go to the warp that finishes it, when it has taken those of the last but one
            ended = ptx.u32(bars + (2 * stages + (done & 1)) * 8)
            ptx.mbarrier_wait(ptx.u32(ended + 16), ptx.u32(done >> 1 & 1 ^ 1))
            for k in static(2 * batch):
                value = sums[k % 2 + k // 2 * parts * 2]
                for e in static(1, parts):
                    value = ptx.f32(value + sums[k % 2 + (k // 2 * parts + e) * 2])
                value = ptx.f32(value * (ptx.f32(16.0) if k % 2 else ptx.f32(64.0)))
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                if t == 0:
                    at = ptx.u32(held + (done & 1) * held_bytes + (mine * (batch * 16) + r8) * 4)
                    ptx.sts_f32(at, ptx.u32(k // 2 * 64 + k % 2 * 32), value)
            for k in static(floats):
                sums[k] = ptx.f32(0.0)
            if t == 0:
                ptx.mbarrier_arrive(ended)
            tile, done = ptx.u32(tile + step), ptx.u32(done + 1)

    return mixed_gemv
