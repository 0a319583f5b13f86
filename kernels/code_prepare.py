"""Several vectors become integers, in blocks of 32 columns with a power of two each, as a device function."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.mixed_steps import PRECISION, block_integers
from bcqfmt.kernels.ptx_numba import cuda, inlined, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["code_integers"]


def code_integers(batch: int, kind: int, warps: int) -> Any:
    """A device function for all warps of a block: 128 columns of every vector at a time, four columns a lane.

    To ``planes_at``, ``stride`` bytes a vector: for every 32 columns [high, low byte][t][half] words of columns
    16 half + 4 t .. + 3. To ``info_at``: [unit][four powers of two, then the sum][``vectors``] float32.
    """
    low_of, high_of = (ptx.lo_f16, ptx.hi_f16) if kind == 1 else (ptx.lo_bf16, ptx.hi_bf16)
    integers, vectors, count = block_integers(), -(-batch // 4) * 4, 2 * batch

    def prepare(
        x: Any, lane: Any, warp: Any, planes_at: Any, info_at: Any, stride: Any, units: Any, columns: Any
    ) -> None:
        unit_at = warp
        while unit_at < units:
            column = ptx.u32(unit_at * 128 + lane * 4)
            words = cuda.local.array(count, types.uint32)
            for b in static(batch):  # all are asked for before one is used
                words[2 * b], words[2 * b + 1] = ptx.u32(0), ptx.u32(0)
                if column < columns:
                    first, second = ptx.ldg64_keep(x, ptx.u32((b * columns + column) >> 2))
                    words[2 * b], words[2 * b + 1] = first, second
            at = ptx.u32(planes_at + (unit_at * 4 + (lane >> 3)) * 64 + (lane & 3) * 8 + ((lane >> 2) & 1) * 4)
            info = ptx.u32(info_at + unit_at * (5 * vectors * 4))
            for b in static(batch):
                v0, v1 = low_of(words[2 * b]), high_of(words[2 * b])
                v2, v3 = low_of(words[2 * b + 1]), high_of(words[2 * b + 1])
                largest = max(ptx.u32(ptx.f32_bits(v0) & 0x7FFFFFFF), ptx.u32(ptx.f32_bits(v1) & 0x7FFFFFFF))
                largest = max(largest, ptx.u32(ptx.f32_bits(v2) & 0x7FFFFFFF))
                largest = max(largest, ptx.u32(ptx.f32_bits(v3) & 0x7FFFFFFF))
                for k in static(3):
                    largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1 << k)))
                # 127 * 256 + 127 is the largest integer: a little more than 1.99 times a power of two
                exponent = max(ptx.u32((largest + 0x18000) >> 23), ptx.u32(PRECISION + 8))
                unit, total, high, low, _, _, _, _ = integers(v0, v1, v2, v3, exponent, ptx.u32(PRECISION))
                ptx.sts32(ptx.u32(at + b * stride), ptx.u32(0), high)
                ptx.sts32(ptx.u32(at + b * stride), ptx.u32(32), low)
                for k in static(3):
                    total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1 << k)))
                if largest >= 0x7F800000:  # infinities and NaNs in x: everything is NaN
                    unit = ptx.bits_f32(ptx.u32(0x7FC00000))
                value = ptx.f32(unit * ptx.f32(ptx.i32(total)))
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(8)))
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(16)))
                if lane & 7 == 0:
                    ptx.sts_f32(ptx.u32(info + ((lane >> 3) * vectors + b) * 4), ptx.u32(0), unit)
                if lane == 0:
                    ptx.sts_f32(ptx.u32(info + (4 * vectors + b) * 4), ptx.u32(0), value)
            unit_at = ptx.u32(unit_at + warps)

    return inlined(unrolled(prepare))
