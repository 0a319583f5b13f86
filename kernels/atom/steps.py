"""What the kernels of the W4A4 product share: one group of columns multiplied, four results written; device functions.

Two tricks. A word of eight codes becomes two words of signed bytes by masking: the codes stand in the upper halves, so
they count 16 times, and the packed scales are a sixteenth. The int32 accumulators start at the pattern of 1.5 * 2^23:
read as binary32 they are that number plus the sum, and one fused multiply-add takes the constant off and scales, with
one rounding because activation scales have 22-bit significands.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

_MAGIC = 0x4B400000  # 12582912.0
UPPER = 0xF0F0F0F0


def group_product(mt: int, nt: int) -> Any:
    """A device function for a warp: ``acc`` += one group of 16 ``mt`` rows with 8 ``nt`` tokens.

    ``a``: words of signed bytes, 16 for every 16 rows. ``ws``: two scales for each of them. The activations' bytes are
    in shared memory at ``at_x``, ``step_x`` bytes from one tile of 8 tokens to the next, their scales at ``at_xs``.
    """
    pair = 2 - nt % 2  # token tiles that are multiplied together: more independent products in flight
    b_words, sum_words = pair * 8, pair * mt * 4

    def multiply(a: Any, ws: Any, acc: Any, at_x: Any, step_x: Any, at_xs: Any) -> None:
        b = cuda.local.array(b_words, types.uint32)
        sums = cuda.local.array(sum_words, types.int32)
        for n0 in static(0, nt, pair):
            for n in range(pair):
                for h in range(2):
                    w = ptx.lds128(ptx.u32(at_x + (n0 + n) * step_x), ptx.u32(h * 512))
                    for k in range(4):
                        b[n * 8 + h * 4 + k] = w[k]
            for i in range(sum_words):
                sums[i] = _MAGIC
            for j in range(4):
                for n in range(pair):
                    for m in range(mt):
                        f, e, s = m * 16 + j * 4, n * 8 + j * 2, (n * mt + m) * 4
                        d = ptx.mma_s8(
                            a[f], a[f + 1], a[f + 2], a[f + 3], b[e], b[e + 1],
                            sums[s], sums[s + 1], sums[s + 2], sums[s + 3],
                        )  # fmt: skip
                        for k in range(4):
                            sums[s + k] = d[k]
            for n in range(pair):
                xs = ptx.lds64_f32(at_xs, ptx.u32((n0 + n) * 32))
                for k in range(2):
                    off = ptx.mul_f32(xs[k], ptx.f32(-12582912.0))
                    for m in range(mt):
                        for p in range(2):
                            d0 = ptx.bits_f32(ptx.u32(sums[(n * mt + m) * 4 + 2 * p + k]))
                            e = (m * nt + n0 + n) * 4 + 2 * p + k
                            acc[e] = ptx.fma_f32(ptx.fma_f32(d0, xs[k], off), ws[m * 2 + p], acc[e])

    return inlined(unrolled(multiply))


def quad_writer(out_type: str) -> Any:
    """A device function: four neighbouring results of a token, of rows ``row`` .. + 3, to y ``[tokens, out]``."""
    half, bf16 = out_type != "F32", out_type == "BF16"
    narrow, pack = (ptx.f32_to_bf16, ptx.pack_bf16) if bf16 else (ptx.f32_to_f16, ptx.pack_f16)

    def write(y: Any, token: Any, row: Any, tokens: Any, out: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
        if token < tokens and row < out:
            to = ptx.u32(token * out + row)
            if out & 3 == 0:
                if half:
                    ptx.stg64(y, ptx.u32(to >> 2), pack(v0, v1), pack(v2, v3))
                else:
                    ptx.stg128(
                        y, ptx.u32(to >> 2), ptx.f32_bits(v0), ptx.f32_bits(v1), ptx.f32_bits(v2), ptx.f32_bits(v3)
                    )
            else:
                for k in static(4):
                    value = v0 if k == 0 else v1 if k == 1 else v2 if k == 2 else v3
                    if row + k < out:
                        if half:
                            y[ptx.u32(to + k)] = narrow(value)
                        else:
                            y[ptx.u32(to + k)] = value

    return inlined(unrolled(write))
