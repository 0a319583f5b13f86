"""Y = X W^T for bit planes and bytes of x on integer tensor cores: several vectors, or short groups.

Operands are those of `binary_kernel`, in the same order. There every vector costs its own counting of bits; here one
``mma.m16n8k32`` takes 16 rows and 32 columns of one plane and eight columns of bytes, high and low of four vectors (or
of four groups of 32 columns), so that eight vectors cost little more than one. A word of a plane has 32 columns of a
row: a mask leaves one bit of every byte, 64 or 128, and shifts bring each of the eight bits to one of these two places.
Columns that count 128 have their x in units twice as large (`prepare`). Integer sums are exact; what is rounded is
x, and the products with scales, in float32.

The pipeline and the epilogue: `ring`. All sums are added in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import number_pairs
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .binary_kernel import declared
from .outliers import outlier_warp
from .prepare import byte_vectors
from .ring import epilogue, producer_warp, stage_release, waiter, warp_roles
from .shape import ByteShape

_ONE = np.float32(1 / 64)  # a bit counts 64
_TWO = np.float32(1 / 32)
_WIDE = np.float32(256)
_MASKS = (0x40404040, 0x80808080)


@functools.cache
def byte_gemv_kernel(shape: ByteShape) -> Kernel:
    """The kernel for one layout, batch and choice of types."""
    bulk, wait = shape.bulk, waiter(shape.bulk)
    layout, batch, ring, sets = shape.layout, shape.batch, shape.ring, shape.sets
    q, chunks, sharing, places, set_bytes = layout.bits, layout.chunks, layout.sharing, layout.places, layout.set_bytes
    slices, stages, blocks = shape.slices, shape.stages, ring.blocks
    bcq, offset = layout.formula == "bcq", layout.formula == "offset"
    number_bytes, pair_bytes = places * 32 * layout.pair_words, 4 * layout.pair_words
    halves, last = 256 // layout.span, layout.numbers - 1
    stride, sums_at = shape.stride, shape.sums_at
    floats, counts, b_words = 2 * sets, 4 * sets, 8 * sets
    plane_bytes, consumers = ring.plane_bytes, slices * shape.tiles
    adders, add_outliers = consumers + shape.tiles, outlier_warp(shape)
    held_base, held_bytes, finished = shape.fixed_bytes + ring.held_at, ring.held_bytes, ring.finished
    role, release = warp_roles(ring, shape.fixed_bytes), stage_release(ring)
    pair_at, prepare = number_pairs(layout.number), byte_vectors(shape)
    produce, finish = producer_warp(ring), epilogue(ring, shape.out, shape.added)
    even, uneven = _MASKS

    @kernel(declared(shape.kind, shape.out), threads=ring.threads, variant=repr(shape))
    @unrolled
    def byte_gemv(
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
        xlane = ptx.shfl_u32(ptx.u32(base + lane * 8 + mine * (2 * stride)), lane)
        ilane = ptx.shfl_u32(ptx.u32(base + sums_at + t * 8 + mine * (2 * sets * 32)), lane)
        wlane = ptx.shfl_u32(ptx.u32(mine * (q * 512) + lane * 16), lane)
        group = ptx.u32(t % places)  # of the set's groups, the one whose sums this lane gets
        nlane = ptx.u32(plane_bytes + (group * 8 + r8) * pair_bytes)
        nlane = ptx.shfl_u32(ptx.u32(nlane + (mine * (halves * set_bytes) if sharing == 1 else 0)), lane)
        hlane = ptx.u32(base + held_base + side * (finished * held_bytes))
        mine_at = ptx.shfl_u32(ptx.u32(hlane + mine * (batch * 64) + t // places * 64 + r8 * 4), lane)
        ended = ptx.u32(bars + 2 * stages * 8)
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
                    xc, ic = ptx.u32(xlane + c * (2 * stride)), ptx.u32(ilane + c * (2 * sets * 32))
                    wc, nc = ptx.u32(slot + wlane), ptx.u32(slot + nlane)
                    h = ptx.u32(0)
                    while h < 2:  # not unrolled: Numba would take minutes
                        nh = nc
                        if sharing > 1:
                            first_set = ptx.u32(ptx.u32(c * halves) // sharing)
                            here = ptx.u32((c + mine) * halves + (h if halves == 2 else 0))
                            nh = ptx.u32(nc + (ptx.u32(here // sharing) - first_set) * set_bytes)
                        b = cuda.local.array(b_words, types.uint32)
                        d = cuda.local.array(counts, types.int32)
                        part = cuda.local.array(floats, types.float32)
                        known = cuda.local.array(floats, types.float32)  # a power of two, a sum of x
                        for s in static(4):
                            for e in static(sets):
                                two = ptx.lds64(xc, ptx.u32((s * sets + e) * 256))
                                b[(s * sets + e) * 2], b[(s * sets + e) * 2 + 1] = two[0], two[1]
                        low, high = pair_at(nh, last * number_bytes)
                        scale, scale8 = pair_at(nh, 0)
                        for e in static(sets):
                            pair = ptx.lds64_f32(ic, ptx.u32(e * 32))
                            known[2 * e], known[2 * e + 1] = pair[0], pair[1]
                            part[2 * e], part[2 * e + 1] = ptx.f32(0.0), ptx.f32(0.0)
                            if bcq or offset:  # z or the offset, times the sum of x
                                part[2 * e], part[2 * e + 1] = ptx.f32(low * pair[1]), ptx.f32(high * pair[1])
                        for k in static(counts):
                            d[k] = ptx.i32(0)
                        for i in range(q):
                            w, w8 = ptx.lds64(wc, ptx.u32(i * 512))
                            if bcq:
                                scale, scale8 = pair_at(nh, i * number_bytes)
                            for k in static(counts):
                                d[k] = ptx.i32(0) if bcq else ptx.i32(d[k] + d[k])
                            for s in static(4):  # bits s and s + 4 of every byte
                                mask, up = (uneven if s % 2 else even), 6 - s // 2 * 2
                                a0, a1 = ptx.u32((w << up) & mask), ptx.u32((w8 << up) & mask)
                                a2, a3 = ptx.u32((w << (up - 4)) & mask), ptx.u32((w8 << (up - 4)) & mask)
                                for e in static(sets):
                                    at = (s * sets + e) * 2
                                    f = ptx.mma_u8(
                                        a0,
                                        a1,
                                        a2,
                                        a3,
                                        b[at],
                                        b[at + 1],
                                        d[4 * e],
                                        d[4 * e + 1],
                                        d[4 * e + 2],
                                        d[4 * e + 3],
                                    )
                                    for k in static(4):
                                        d[4 * e + k] = f[k]
                            if bcq:
                                for e in static(sets):
                                    less = known[2 * e + 1]
                                    one = ptx.f32(ptx.i32(d[4 * e] * 256 + d[4 * e + 1]))
                                    two8 = ptx.f32(ptx.i32(d[4 * e + 2] * 256 + d[4 * e + 3]))
                                    part[2 * e] = ptx.fma_f32(scale, ptx.fma_f32(one, _TWO, -less), part[2 * e])
                                    part[2 * e + 1] = ptx.fma_f32(
                                        scale8, ptx.fma_f32(two8, _TWO, -less), part[2 * e + 1]
                                    )
                        if not bcq:
                            for e in static(sets):
                                less = known[2 * e + 1]
                                one = ptx.fma_f32(ptx.f32(d[4 * e]), _WIDE, ptx.f32(d[4 * e + 1]))
                                two8 = ptx.fma_f32(ptx.f32(d[4 * e + 2]), _WIDE, ptx.f32(d[4 * e + 3]))
                                below = ptx.f32(0.0) if offset else ptx.f32(low * less)
                                below8 = ptx.f32(0.0) if offset else ptx.f32(high * less)
                                part[2 * e] = ptx.fma_f32(scale, ptx.fma_f32(one, _ONE, -below), part[2 * e])
                                part[2 * e + 1] = ptx.fma_f32(scale8, ptx.fma_f32(two8, _ONE, -below8), part[2 * e + 1])
                        for k in static(floats):
                            sums[k] = ptx.fma_f32(known[k // 2 * 2], part[k], sums[k])
                        xc, ic, wc = ptx.u32(xc + stride), ptx.u32(ic + sets * 32), ptx.u32(wc + 8)
                        if sharing == 1 and halves == 2:
                            nc = ptx.u32(nc + set_bytes)
                        h = ptx.u32(h + 1)
                block, slot, bar, parity = release(lane, place, bars, block, slot, bar, parity)
            for k in static(floats):  # lane 4 r + t has rows r and r + 8 of vector (4 set + t) / places
                value = sums[k]
                sums[k] = ptx.f32(0.0)
                if places > 1:
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
                if places > 2:
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                if group == 0 and ptx.u32((k // 2 * 4 + t) // places) < batch:
                    at = ptx.u32(k // 2 * (4 // places * 64) + k % 2 * 32)
                    ptx.sts_f32(ptx.u32(mine_at + buffer * held_bytes), at, value)
            adding, buffer, phase = finish(
                addend, y, rows, tile, hlane, ended, mine, lane, group == 0, adding, buffer, phase
            )
            tile = ptx.u32(tile + step)

    return byte_gemv
