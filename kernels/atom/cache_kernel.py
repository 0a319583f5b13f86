"""Keys and values into the INT4 cache: a warp takes one token of one head.

For a vector x of D numbers, all in binary32 with one rounding each::

    offset = F16(min x)    scale = max(F16((max x - offset) / 15), 2^-14)
    code = clamp(rint((x - offset) / scale), 0, 15)

Code i stands in bits 4 (i % 8) of word i / 8; scale (low half) and offset (high half) are one word. Where x holds a
NaN, an infinity, or more than F16 can, scale and offset are NaN, and so is every output that sees the token.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import WIDEN
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.limits import KINDS
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

CACHE_WARPS = 4
_NAN = 0x7FFF7FFF


@functools.cache
def quantize_kv_kernel(head_dim: int, kind: str) -> Kernel:
    """k, v ``[B, H_kv, new, D]`` of ``kind`` to places ``starts[b] ..`` of the cache (see `attention_kernel`).

    Grid: (B H_kv new / 4 rounded up, 2: keys, values), 128 threads. Tokens without a place in the cache are dropped.
    """
    EACH, LANES = head_dim // 32, 8 * 32 // head_dim  # numbers of a lane; lanes that make up a word
    widen = WIDEN[KINDS[kind]]

    def quantize_kv(
        k: Any, v: Any, keys: Any, key_parameters: Any, values: Any, value_parameters: Any, starts: Any,
        heads: Any, new: Any, capacity: Any, vectors: Any,
    ) -> None:  # fmt: skip
        number = cuda.local.array(EACH, types.float32)
        lane = ptx.u32(cuda.threadIdx.x & 31)
        vector = ptx.u32(cuda.blockIdx.x * CACHE_WARPS + (cuda.threadIdx.x >> 5))
        if vector < vectors:
            for i in range(EACH):
                at = ptx.u32(vector * head_dim + lane * EACH + i)
                number[i] = widen(ptx.u32(k[at] if cuda.blockIdx.y == 0 else v[at]))
            low = high = number[0]
            bad = ptx.u32(0)
            for i in range(EACH):
                low, high = ptx.min_f32(low, number[i]), ptx.max_f32(high, number[i])
                if not abs(number[i]) <= ptx.f32(65504):
                    bad = ptx.u32(1)
            for i in range(5):
                low = ptx.min_f32(low, ptx.shfl_xor_f32(low, ptx.u32(1 << i)))
                high = ptx.max_f32(high, ptx.shfl_xor_f32(high, ptx.u32(1 << i)))
            offset_bits = ptx.f32_to_f16(low)
            offset = ptx.f16_to_f32(offset_bits)
            scale = ptx.max_f32(
                ptx.f16_to_f32(ptx.f32_to_f16(ptx.div_f32(ptx.sub_f32(high, offset), ptx.f32(15)))), ptx.f32(2.0**-14)
            )
            parameters = ptx.u32(ptx.u32(offset_bits << 16) | ptx.f32_to_f16(scale))
            if ptx.ballot(bad) != 0:
                parameters = ptx.u32(_NAN)
            word = ptx.u32(0)
            for i in range(EACH):
                code = ptx.rint_i32(ptx.div_f32(ptx.sub_f32(number[i], offset), scale))
                code = min(max(code, ptx.i32(0)), ptx.i32(15))
                word = ptx.u32(word | ptx.u32(ptx.u32(code) << ptx.u32((lane * EACH + i) * 4 & 31)))
            if LANES > 1:
                word = ptx.u32(word | ptx.shfl_xor_u32(word, ptx.u32(1)))
            if LANES > 2:
                word = ptx.u32(word | ptx.shfl_xor_u32(word, ptx.u32(2)))
            row = ptx.u32(vector // new)  # batch and head
            place = ptx.u32(starts[ptx.u32(row // heads)] + (vector - row * new))
            if place < capacity:
                token = ptx.u32(row * capacity + place)
                at = ptx.u32(token * (head_dim // 8) + lane // LANES)
                if cuda.blockIdx.y == 0:
                    if lane % LANES == 0:
                        keys[at] = word
                    if lane == 0:
                        key_parameters[token] = parameters
                else:
                    if lane % LANES == 0:
                        values[at] = word
                    if lane == 0:
                        value_parameters[token] = parameters

    element = "u32" if kind == "F32" else "u16"
    declared = (
        f"{element}* k, {element}* v, u32* keys, u32* key_parameters, u32* values, u32* value_parameters, i32* starts, "
        "u32 heads, u32 new, u32 capacity, u32 vectors"
    )
    return kernel(declared, threads=32 * CACHE_WARPS, blocks=8, variant=repr((head_dim, kind)))(quantize_kv)
