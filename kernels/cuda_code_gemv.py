"""Y = X W^T for 4-bit codes and one to eight vectors on integer tensor cores, in one launch (sm_90).

Every vector becomes a block-fixed-point number: in every 32 columns a power of two and signed 16-bit integers, as two
bytes ``256 high + low``. One ``mma.m16n8k32`` multiplies 16 rows and 32 columns of codes by eight columns of bytes:
high and low of four vectors, so up to eight vectors cost two of them, and the weight is read once. Integer sums are
exact; what is rounded is x, and the products with scales, in float32. Codes are not moved within their bytes: the sums
of rows 8..15 of a tile are 16 times too large.

The warps of a tile take its units (`mixed_layout`, the 4-bit ones) in turn, each with a ring of buffers of its own that
bulk copies fill ahead. All sums are added in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.code_prepare import code_integers
from bcqfmt.kernels.code_shape import SHAPES, CodeShape
from bcqfmt.kernels.launch import Kernel, kernel
from bcqfmt.kernels.mixed_layout import FOUR_BYTES, ROWS
from bcqfmt.kernels.mixed_ptx import mma_u8
from bcqfmt.kernels.ptx_bits import barrier_of, bulk_copy, bulk_expect, bulk_fence, bulk_init, bulk_wait
from bcqfmt.kernels.ptx_numba import cuda, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["code_gemv_kernel", "compile_cases"]

_PIECES = FOUR_BYTES // 16
_ARGUMENTS = "u32* weight, u16* x, {y}* y, u32 rows, u32 tiles, u32 columns, u32 units, u32 stages"


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What ``make kernels-check`` compiles; bulk copies need sm_90."""
    return {"code_gemv_kernel": [(shape,) for shape in SHAPES]}


@functools.cache
def code_gemv_kernel(shape: CodeShape) -> Kernel:
    """The kernel for one batch and choice of types; widths are arguments of the launch."""
    batch, sets, slices, side, out = shape.batch, shape.sets, shape.slices, shape.tiles, shape.out
    vectors, warps, floats = 4 * sets, slices * side, 2 * sets
    prepare = code_integers(batch, shape.kind, warps)
    narrow = ptx.f32_to_bf16 if out == 2 else ptx.f32_to_f16
    declared = _ARGUMENTS.format(y="f32" if out == 0 else "u16")

    @kernel(declared, threads=shape.threads, variant=repr(shape))
    @unrolled
    def code_gemv(
        weight: Any, x: Any, y: Any, rows: Any, tiles: Any, columns: Any, units: Any, stages: Any
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        t, n = ptx.u32(lane & 3), ptx.u32(lane >> 2)
        mine, beside = ptx.u32(warp % slices), ptx.u32(warp // slices)
        stride = ptx.u32(units * 256 + 64)  # of a vector; 64 more so that neighbours lie in other banks
        info_at = ptx.u32(base + vectors * stride)
        held_base = ptx.u32(info_at + units * (5 * vectors * 4))
        ring = ptx.u32(held_base + 2 * warps * (vectors * 64) + warp * stages * FOUR_BYTES)
        bars = ptx.u32(held_base + warps * (2 * vectors * 64 + stages * FOUR_BYTES) + warp * stages * 8)
        step = ptx.u32(cuda.gridDim.x * side)
        tile = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * beside)
        if lane == 0:
            for i in range(stages):
                bulk_init(ptx.u32(bars + i * 8))
            bulk_fence()
        ptx.syncwarp()
        next_tile, next_unit, next_piece = tile, mine, ptx.u32(tile * units * _PIECES)
        for i in range(stages - 1):
            if next_unit >= units:
                next_unit, next_tile = mine, ptx.u32(next_tile + step)
                next_piece = ptx.u32(next_piece + step * units * _PIECES)
            if lane == 0 and next_tile < tiles:
                bulk_expect(ptx.u32(bars + i * 8), ptx.u32(FOUR_BYTES))
                at = ptx.u32(next_piece + next_unit * _PIECES)
                bulk_copy(weight, at, ptx.u32(ring + i * FOUR_BYTES), ptx.u32(FOUR_BYTES), ptx.u32(bars + i * 8))
            next_unit = ptx.u32(next_unit + slices)
        prepare(x, lane, warp, base, info_at, stride, units, columns)
        cuda.syncthreads()

        # places, by an instruction that the compiler cannot repeat: otherwise it works them out anew for every unit
        ring, bars = ptx.shfl_u32(ring, lane), ptx.shfl_u32(bars, lane)
        words_at, pairs_at = ptx.shfl_u32(ptx.u32(ring + lane * 16), lane), ptx.shfl_u32(ptx.u32(ring + n * 4), lane)
        zeros_at, shift = ptx.shfl_u32(ptx.u32(ring + (n & 4)), lane), ptx.u32((n & 3) * 8)
        xlane = ptx.shfl_u32(ptx.u32(base + (n >> 1) * stride + (n & 1) * 32 + t * 8), lane)
        ilane = ptx.shfl_u32(ptx.u32(info_at + t * 4), lane)
        sums = cuda.local.array(floats, types.float32)
        for k in static(2 * sets):
            sums[k] = ptx.f32(0.0)
        unit_at, spot, parity, turned_over, spare = mine, ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(stages - 1)
        while tile < tiles:
            ptx.syncwarp()  # the buffer of the last unit is free: fill it before anything is multiplied
            if next_unit >= units:
                next_unit, next_tile = mine, ptx.u32(next_tile + step)
                next_piece = ptx.u32(next_piece + step * units * _PIECES)
            if lane == 0 and next_tile < tiles:
                bulk_expect(ptx.u32(bars + spare * 8), ptx.u32(FOUR_BYTES))
                at, slot = ptx.u32(next_piece + next_unit * _PIECES), ptx.u32(ring + spare * FOUR_BYTES)
                bulk_copy(weight, at, slot, ptx.u32(FOUR_BYTES), ptx.u32(bars + spare * 8))
            next_unit = ptx.u32(next_unit + slices)
            bulk_wait(ptx.u32(bars + spot * 8), parity)
            slot = ptx.u32(spot * FOUR_BYTES)
            pair = ptx.lds32(ptx.u32(pairs_at + slot), ptx.u32(1024))
            zeros = ptx.u32(ptx.lds32(ptx.u32(zeros_at + slot), ptx.u32(1056)) >> shift)
            zero, zero8 = ptx.f32(ptx.i32(zeros & 0x0F)), ptx.f32(ptx.i32(zeros & 0xF0))
            part = cuda.local.array(floats, types.float32)
            for k in static(2 * sets):
                part[k] = ptx.f32(0.0)
            here, info = ptx.u32(xlane + unit_at * 256), ptx.u32(ilane + unit_at * (5 * vectors * 4))
            for h in static(2):
                a = ptx.lds128(ptx.u32(words_at + slot), ptx.u32(h * 512))
                for m in static(2):
                    a0, a1 = ptx.u32(a[2 * m] & 0x0F0F0F0F), ptx.u32(a[2 * m] & 0xF0F0F0F0)
                    a2, a3 = ptx.u32(a[2 * m + 1] & 0x0F0F0F0F), ptx.u32(a[2 * m + 1] & 0xF0F0F0F0)
                    for s in static(sets):
                        b = ptx.lds64(ptx.u32(here + 4 * s * stride), ptx.u32((2 * h + m) * 64))
                        unit = ptx.lds_f32(info, ptx.u32((2 * h + m) * (vectors * 4) + s * 16))
                        d = mma_u8(a0, a1, a2, a3, b[0], b[1], ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(0))
                        low, high = ptx.f32(ptx.i32(d[0] * 256 + d[1])), ptx.f32(ptx.i32(d[2] * 256 + d[3]))
                        part[2 * s] = ptx.fma_f32(unit, low, part[2 * s])
                        part[2 * s + 1] = ptx.fma_f32(unit, high, part[2 * s + 1])
            scale, scale8 = ptx.lo_f16(pair), ptx.f32(ptx.hi_f16(pair) * ptx.f32(0.0625))
            for s in static(sets):
                total = ptx.lds_f32(info, ptx.u32(4 * (vectors * 4) + s * 16))
                value, value8 = ptx.fma_f32(-zero, total, part[2 * s]), ptx.fma_f32(-zero8, total, part[2 * s + 1])
                sums[2 * s] = ptx.fma_f32(scale, value, sums[2 * s])
                sums[2 * s + 1] = ptx.fma_f32(scale8, value8, sums[2 * s + 1])
            spare, spot = spot, ptx.u32(spot + 1)
            if spot == stages:
                spot, parity = ptx.u32(0), ptx.u32(parity ^ 1)
            unit_at = ptx.u32(unit_at + slices)
            if unit_at >= units:  # the tile is done; lane 4 r + t has rows r and r + 8 of vectors t, t + 4
                unit_at = mine
                held_at = ptx.u32(held_base + turned_over * (warps * vectors * 64))
                for k in static(2 * sets):
                    at = ptx.u32(held_at + (warp * (vectors * 16) + (k // 2 * 4 + t) * 16 + k % 2 * 8 + n) * 4)
                    ptx.sts_f32(at, ptx.u32(0), sums[k])
                    sums[k] = ptx.f32(0.0)
                barrier_of(ptx.u32(beside + 1), ptx.u32(slices * 32))
                e = ptx.u32(mine * 32 + lane)
                while e < batch * 16:
                    row = ptx.u32(tile * ROWS + (e & 15))
                    if row < rows:
                        value = ptx.f32(0.0)
                        for k in range(slices):
                            at = ptx.u32(held_at + ((beside * slices + k) * (vectors * 16) + e) * 4)
                            value = ptx.f32(value + ptx.lds_f32(at, ptx.u32(0)))
                        place = ptx.u32((e >> 4) * rows + row)
                        if out == 0:
                            y[place] = value
                        else:
                            y[place] = narrow(value)
                    e = ptx.u32(e + slices * 32)
                turned_over = ptx.u32(turned_over ^ 1)
                tile = ptx.u32(tile + step)

    return code_gemv
