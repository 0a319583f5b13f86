"""More instructions in the manner of `ptx`, for the kernels that quantize activations and read quantized caches.

===========================  =====================================================================================
numbers                      rint_i32(f): nearest, ties to even, a NaN is 0; div_f32(a, b) sqrt_f32(a): correctly
                             rounded; max_f32 min_f32: a NaN loses; exp2(a) log2(a): the fast approximations,
                             about 2 units in the last place
a warp, all 32 lanes         warp_max_u32(word): the largest of the 32 words
                             transpose(word): an 8 x 8 matrix of 16-bit numbers, row r in lanes 4 r .. 4 r + 3
what other blocks wrote      ldcg128_f32(p, i), after their threadfence
===========================  =====================================================================================
"""

from __future__ import annotations

from typing import Any

from . import SIMULATED

__all__ = [
    "div_f32", "exp2", "ldcg128_f32", "log2", "max_f32", "min_f32", "rint_i32", "sqrt_f32", "transpose", "warp_max_u32",
]  # fmt: skip

if SIMULATED:
    import numpy as np

    from bcqfmt.kernels.simulator.block import exchange
    from bcqfmt.kernels.simulator.memory import lane_id, ldg128

    def rint_i32(x: Any) -> int:
        """Nearest, ties to even; a NaN is 0."""
        return 0 if x != x else int(np.clip(np.rint(np.float64(x)), -(2**31), 2**31 - 1))

    def div_f32(a: Any, b: Any) -> Any:
        """Correctly rounded."""
        return np.float32(a) / np.float32(b)

    def sqrt_f32(a: Any) -> Any:
        """Correctly rounded."""
        return np.sqrt(np.float32(a))

    def max_f32(a: Any, b: Any) -> Any:
        """The larger; a NaN loses."""
        return np.fmax(np.float32(a), np.float32(b))

    def min_f32(a: Any, b: Any) -> Any:
        """The smaller; a NaN loses."""
        return np.fmin(np.float32(a), np.float32(b))

    def exp2(a: Any) -> Any:
        """2 to the power of a."""
        return np.exp2(np.float32(a))

    def log2(a: Any) -> Any:
        """The binary logarithm."""
        return np.log2(np.float32(a))

    def warp_max_u32(word: Any) -> int:
        """The largest word of the warp."""
        return max(int(other) for other in exchange(word))

    def transpose(word: Any) -> int:
        """Row r of the 8 x 8 halves of the warp becomes column r."""
        words, lane = exchange(word), lane_id()
        row, pair = lane // 4, 2 * (lane % 4)
        low, high = (int(words[4 * (pair + i) + row // 2]) >> 16 * (row % 2) & 0xFFFF for i in range(2))
        return high << 16 | low

    def ldcg128_f32(pointer: Any, index: Any) -> tuple[Any, ...]:
        """Four numbers that other blocks may have written."""
        return tuple(np.array(ldg128(pointer, index), np.uint32).view(np.float32))

else:
    from .asm import F32, I32, U32, asm, asm_at

    rint_i32 = asm("cvt.rni.s32.f32 $0, $1;", I32, F32)
    div_f32 = asm("div.rn.f32 $0, $1, $2;", F32, F32, F32)
    sqrt_f32 = asm("sqrt.rn.f32 $0, $1;", F32, F32)
    max_f32 = asm("max.f32 $0, $1, $2;", F32, F32, F32)
    min_f32 = asm("min.f32 $0, $1, $2;", F32, F32, F32)
    exp2 = asm("ex2.approx.ftz.f32 $0, $1;", F32, F32)
    log2 = asm("lg2.approx.ftz.f32 $0, $1;", F32, F32)
    warp_max_u32 = asm("redux.sync.max.u32 $0, $1, 0xffffffff;", U32, U32, effects="warp")
    transpose = asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", U32, U32, effects="warp")
    ldcg128_f32 = asm_at("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", F32, size=16, count=4, effects="memory")
