"""Y = X W^T for groups of 8 and 16 columns: bit planes and bytes of x on integer tensor cores.

Operands are those of `binary_kernel`, in the same order. As in `integer_kernel` one ``mma.m16n8k32`` takes 16 rows and
32 columns of a plane, and its eight columns of bytes are high and low of four groups. There a step takes every fourth
column, here eight that follow one another in each of the four words of a row: a group of 8, or half of one of 16. So
sums of different groups stay apart, and no bits have to be masked off group by group. The bits of a word lie so
(`layout.in_steps`) that one mask leaves what step s takes of every byte, 2^(s+1), in the word and in the word
rotated by 4 bits.

A byte of x belongs to one group, in the other three columns it is zero: these are not stored, lanes that would read
them read a place that is zero. Integer sums begin with the pattern of 1.5 * 2^23, so that they can be read as float32;
the pattern is taken away together with the sum of x, which makes signs out of bits. What masks have made larger is
undone once for 128 columns, where the sums of all steps are added up. What is rounded is x, to 2^-15 of the largest of
128 neighbours (in every other eight columns of groups of 16 to 2^-14), and the products with scales, in float32.

The pipeline and the epilogue: `ring`. All sums are added in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import PATTERN, number_pairs
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .binary_kernel import declared
from .outliers import outlier_warp
from .prepare import short_vectors
from .ring import epilogue, producer_warp, stage_release, waiter, warp_roles
from .shape import ShortShape

_HALF = np.float32(0.5)
_WIDE = np.float32(256)
_MASK = 0x02020202


@functools.cache
def short_gemv_kernel(shape: ShortShape) -> Kernel:
    """The kernel for one layout, batch and choice of types."""
    bulk, wait = shape.bulk, waiter(shape.bulk)
    layout, batch, ring = shape.layout, shape.batch, shape.ring
    q, chunks, passes, set_bytes = layout.bits, layout.chunks, layout.passes, layout.set_bytes
    slices, stages, blocks = shape.slices, shape.stages, ring.blocks
    bcq, offset = layout.formula == "bcq", layout.formula == "offset"
    number_bytes, pair_bytes, pass_bytes = 128 * layout.pair_words, 4 * layout.pair_words, set_bytes // passes
    steps, last = 4 // passes, layout.numbers - 1
    stride, zeros_at, sums_at, sums_bytes = shape.stride, shape.zeros_at, shape.sums_at, shape.sums_bytes
    floats, each, b_words, kept = 2 * batch, 4 * batch, 8 * batch, passes * batch
    counts = each if bcq else passes * each
    plane_bytes, consumers = ring.plane_bytes, slices * shape.tiles
    adders, add_outliers = consumers + shape.tiles, outlier_warp(shape)
    held_base, held_bytes, finished = shape.fixed_bytes + ring.held_at, ring.held_bytes, ring.finished
    role, release = warp_roles(ring, shape.fixed_bytes), stage_release(ring)
    pair_at, prepare = number_pairs(layout.number), short_vectors(shape)
    produce, finish = producer_warp(ring), epilogue(ring, shape.out, shape.added)
    part_floats, less = passes * floats, np.float32(2.0**-steps)  # of a pass, after those of the one before

    @kernel(declared(shape.kind, shape.out), threads=ring.threads, variant=repr(shape))
    @unrolled
    def short_gemv(
        planes: Any, numbers: Any, x: Any, perm: Any, addend: Any, y: Any, indptr: Any, entries: Any,
        rows: Any, tiles: Any, columns: Any, start: Any, rotation: Any, count: Any, room: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp, side, tile, step, turn, place, bars = role(base, thread, rotation)
        if warp >= adders:  # none, where there are no outliers
            add_outliers(indptr, entries, x, count, room, columns, base, tile, tiles, step, side, bars, lane)
            return
        if warp >= consumers:
            produce(planes, numbers, tile, tiles, step, turn, place, bars, lane)
            return
        if bulk:
            ptx.wait_previous_kernel()
            ptx.launch_next_kernel()
        prepare(x, perm, base, thread, columns, start)
        t, r8, mine = ptx.u32(lane & 3), ptx.u32(lane >> 2), ptx.u32(warp % slices)
        # addresses, passed through a shuffle: the compiler would otherwise recompute them for every chunk
        own = t == r8 >> 1  # columns of x for the group that this lane's column of bytes stands for
        on = ptx.shfl_u32(ptx.u32(stride) if own else ptx.u32(0), lane)
        xlane = ptx.u32(base + t * 16 + (r8 & 1) * 8) if own else ptx.u32(base + zeros_at)
        xlane = ptx.shfl_u32(ptx.u32(xlane + mine * 2 * on), lane)
        ilane = ptx.shfl_u32(ptx.u32(base + sums_at + t * 8 + mine * (2 * sums_bytes)), lane)
        wlane = ptx.shfl_u32(ptx.u32(mine * (q * 512) + lane * 16), lane)
        nlane = ptx.shfl_u32(ptx.u32(plane_bytes + (t * 8 + r8) * pair_bytes + mine * (2 * set_bytes)), lane)
        hlane = ptx.u32(base + held_base + side * (finished * held_bytes))
        mine_at = ptx.shfl_u32(ptx.u32(hlane + mine * (batch * 64) + r8 * 4), lane)
        ended = ptx.u32(bars + 2 * stages * 8)
        # kept in registers: the compiler would build constants again for every instruction that uses them
        start0, start1 = ptx.i32(ptx.shfl_u32(ptx.u32(0), lane)), ptx.i32(ptx.shfl_u32(ptx.u32(PATTERN), lane))
        start2, start3 = ptx.i32(ptx.shfl_u32(ptx.u32(0), lane)), ptx.i32(ptx.shfl_u32(ptx.u32(PATTERN), lane))
        sums = cuda.local.array(floats, types.float32)
        for k in static(floats):
            sums[k] = ptx.f32(0.0)
        slot, bar, parity = place, bars, ptx.u32(0)
        adding, buffer, phase = ptx.u32(0), ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            block, left = turn, ptx.u32(blocks)
            while left > 0:  # counted in 32 bits, as everything in this loop
                left = ptx.u32(left - 1)
                c = ptx.u32(block * slices)
                wait(bar, parity)
                if chunks % slices == 0 or c + mine < chunks:
                    xc, ic = ptx.u32(xlane + c * 2 * on), ptx.u32(ilane + c * (2 * sums_bytes))
                    wc, nc = ptx.u32(slot + wlane), ptx.u32(slot + nlane)
                    h = ptx.u32(0)
                    while h < 2:  # not unrolled: Numba would take minutes
                        b = cuda.local.array(b_words, types.uint32)
                        d = cuda.local.array(counts, types.int32)
                        part = cuda.local.array(part_floats, types.float32)
                        begin = cuda.local.array(kept, types.float32)
                        share = cuda.local.array(kept, types.float32)  # the sum of x in a group
                        for k in static(4 * batch):
                            two = ptx.lds64(xc, ptx.u32(k * 64))
                            b[2 * k], b[2 * k + 1] = two[0], two[1]
                        for p in static(passes):
                            if bcq or offset:
                                low, high = pair_at(nc, p * pass_bytes + last * number_bytes)
                            for e in static(batch):
                                known, at = ptx.lds64(ic, ptx.u32((p * batch + e) * 32)), p * floats + 2 * e
                                begin[p * batch + e] = ptx.bits_f32(known[0])
                                share[p * batch + e] = ptx.bits_f32(known[1])
                                part[at], part[at + 1] = ptx.f32(0.0), ptx.f32(0.0)
                                if bcq or offset:  # z or the offset, times the sum of x
                                    part[at] = ptx.f32(low * ptx.bits_f32(known[1]))
                                    part[at + 1] = ptx.f32(high * ptx.bits_f32(known[1]))
                        for k in static(counts):
                            d[k] = ptx.i32(0)
                        wi, ni, i = wc, nc, ptx.u32(0)
                        ahead = ptx.lds64(wi, ptx.u32(0))
                        while i < q:  # counted in 32 bits too
                            w, w8 = ahead[0], ahead[1]
                            v, v8 = ptx.u32((w >> 4) | (w << 28)), ptx.u32((w8 >> 4) | (w8 << 28))
                            ahead = ptx.lds64(wi, ptx.u32(512))  # after the last plane: other data, never used
                            for p in static(passes):
                                at = 0 if bcq else p * each
                                for e in static(batch):
                                    if bcq:
                                        d[4 * e], d[4 * e + 1], d[4 * e + 2], d[4 * e + 3] = (
                                            start0, start1, start2, start3,
                                        )  # fmt: skip
                                    else:
                                        for k in static(4):
                                            d[at + 4 * e + k] = ptx.i32(d[at + 4 * e + k] + d[at + 4 * e + k])
                                for m in static(steps):
                                    s = p * steps + m
                                    mask = _MASK << s
                                    a0, a1 = ptx.u32(w & mask), ptx.u32(w8 & mask)
                                    a2, a3 = ptx.u32(v & mask), ptx.u32(v8 & mask)
                                    for e in static(batch):
                                        x_at, d_at = (s * batch + e) * 2, at + 4 * e
                                        f = ptx.mma_u8(
                                            a0, a1, a2, a3, b[x_at], b[x_at + 1],
                                            d[d_at], d[d_at + 1], d[d_at + 2], d[d_at + 3],
                                        )  # fmt: skip
                                        for k in static(4):
                                            d[d_at + k] = f[k]
                                if bcq:
                                    scale, scale8 = pair_at(ni, p * pass_bytes)
                                    for e in static(batch):
                                        less_x, to = begin[p * batch + e], p * floats + 2 * e
                                        one = ptx.bits_f32(ptx.u32(d[4 * e] * 256 + d[4 * e + 1]))
                                        one8 = ptx.bits_f32(ptx.u32(d[4 * e + 2] * 256 + d[4 * e + 3]))
                                        part[to] = ptx.fma_f32(scale, ptx.f32(one - less_x), part[to])
                                        part[to + 1] = ptx.fma_f32(scale8, ptx.f32(one8 - less_x), part[to + 1])
                            wi, ni, i = ptx.u32(wi + 512), ptx.u32(ni + number_bytes), ptx.u32(i + 1)
                        if not bcq:
                            for p in static(passes):
                                scale, scale8 = pair_at(nc, p * pass_bytes)
                                low, high = pair_at(nc, p * pass_bytes + last * number_bytes)
                                for e in static(batch):
                                    at, to = p * each + 4 * e, p * floats + 2 * e
                                    known_sum = share[p * batch + e]
                                    one = ptx.fma_f32(ptx.f32(d[at]), _WIDE, ptx.f32(d[at + 1]))
                                    one8 = ptx.fma_f32(ptx.f32(d[at + 2]), _WIDE, ptx.f32(d[at + 3]))
                                    below = ptx.f32(0.0) if offset else ptx.f32(low * known_sum)
                                    below8 = ptx.f32(0.0) if offset else ptx.f32(high * known_sum)
                                    part[to] = ptx.fma_f32(scale, ptx.fma_f32(one, _HALF, -below), part[to])
                                    part[to + 1] = ptx.fma_f32(scale8, ptx.fma_f32(one8, _HALF, -below8), part[to + 1])
                        for e in static(batch):
                            unit = ptx.lds_f32(ic, ptx.u32((kept + e) * 32))
                            for k in static(2):
                                total = part[(passes - 1) * floats + 2 * e + k]
                                for p in static(1, passes):
                                    total = ptx.fma_f32(total, less, part[(passes - 1 - p) * floats + 2 * e + k])
                                sums[2 * e + k] = ptx.fma_f32(unit, total, sums[2 * e + k])
                        xc, ic = ptx.u32(xc + on), ptx.u32(ic + sums_bytes)
                        wc, nc = ptx.u32(wc + 8), ptx.u32(nc + set_bytes)
                        h = ptx.u32(h + 1)
                block, slot, bar, parity = release(lane, place, bars, block, slot, bar, parity)
            for k in static(floats):  # lane 4 r + t has rows r and r + 8 of the groups in the t-th word
                value = ptx.f32(sums[k] + ptx.shfl_xor_f32(sums[k], ptx.u32(1)))
                sums[k] = ptx.f32(0.0)
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                if t == 0:
                    ptx.sts_f32(ptx.u32(mine_at + buffer * held_bytes), ptx.u32(k // 2 * 64 + k % 2 * 32), value)
            adding, buffer, phase = finish(
                addend, y, rows, tile, hlane, ended, mine, lane, t == 0, adding, buffer, phase
            )
            tile = ptx.u32(tile + step)

    return short_gemv
