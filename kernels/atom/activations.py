"""Activations for a W4A4 product: RMSNorm, reordering and quantization, fused or one by one.

One source with two options. To quantize, a warp takes one group of one token and each lane four of its columns, so
that even a few tokens keep many processors busy. To normalise as well, every block that works on a token adds up the
squares of the whole row, which costs less than sharing the sum. The fused kernel rounds to the type of x where the two
kernels would, so its codes equal theirs.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import NARROW, WIDEN
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.limits import KINDS
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

from .operands import NORM_THREADS

WARPS = NORM_THREADS // 32
_KEEP22 = 0xFFFFFFFC


@functools.cache
def activation_kernel(kind: str, norm: bool, quantize: bool) -> Kernel:
    """x ``[tokens, columns]`` and gamma ``[columns]`` of ``kind`` (F16, BF16, F32), perm ``[columns]``; 256 threads.

    ``quantize``: codes and scales of ``tiles`` tiles of 8 tokens as `operands` says, zeros
    for tokens that are not there; grid (8 tiles, blocks that share the groups of a token). Else y ``[tokens, columns]``
    in the order of x; grid (tokens,). Channels outside of x, should perm have any, are read as the last one.
    """
    WIDE, widen, narrow = kind == "F32", WIDEN[KINDS[kind]], NARROW[KINDS[kind]]
    low, high = (ptx.lo_bf16, ptx.hi_bf16) if kind == "BF16" else (ptx.lo_f16, ptx.hi_f16)
    pack = ptx.pack_bf16 if kind == "BF16" else ptx.pack_f16
    LOADS = 2 if WIDE else 1
    PER_LOAD = 8 // LOADS

    def activations(
        x: Any, gamma: Any, y: Any, perm: Any, codes: Any, scale: Any,
        columns: Any, tokens: Any, tiles: Any, eps: Any, factor: Any, outlier: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(WARPS, types.float32)
        v = cuda.local.array(8, types.float32)
        raw = cuda.local.array(8, types.uint32)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        token = ptx.u32(cuda.blockIdx.x)
        row = ptx.u32(min(token, ptx.u32(tokens - 1)) * columns)
        root = ptx.f32(1)

        if norm:
            square = ptx.f32(0)
            c = thread
            while c < columns >> 3:
                for h in range(LOADS):
                    w = ptx.ldg128_keep(x, ptx.u32(((row >> 3) + c) * LOADS + h))
                    for i in range(4):
                        if WIDE:
                            v[i] = ptx.bits_f32(w[i])
                        else:
                            v[2 * i], v[2 * i + 1] = low(w[i]), high(w[i])
                    for i in range(PER_LOAD):
                        square = ptx.fma_f32(v[i], v[i], square)
                c = ptx.u32(c + NORM_THREADS)
            for i in range(5):
                square = ptx.add_f32(square, ptx.shfl_xor_f32(square, ptx.u32(16 >> i)))
            if lane == 0:
                sums[warp] = square
            cuda.syncthreads()
            total = sums[0]
            for i in range(1, WARPS):
                total = ptx.add_f32(total, sums[i])
            mean = ptx.add_f32(ptx.div_f32(total, ptx.f32(columns)), eps)
            root = ptx.div_f32(ptx.f32(1), ptx.sqrt_f32(mean))

        groups = ptx.u32(columns >> 7)
        g = ptx.u32(cuda.blockIdx.y * WARPS + warp)
        while g < groups:
            if quantize:
                channels = ptx.ldg128_keep(perm, ptx.u32(g * 32 + lane))
                for i in range(4):
                    raw[4 + i] = channels[i]
            else:
                for i in range(4):
                    raw[4 + i] = ptx.u32(g * 128 + lane * 4 + i)
            for i in range(4):  # all loads before the first use
                c = ptx.u32(min(ptx.u32(raw[4 + i]), ptx.u32(columns - 1)))
                raw[i] = ptx.u32(x[ptx.u32(row + c)])
                raw[4 + i] = ptx.u32(gamma[c]) if norm else ptx.u32(0)
            for i in range(4):
                v[i] = widen(raw[i])
                if norm:  # of float32 neither rounds
                    n = widen(narrow(ptx.mul_f32(v[i], root)))
                    v[i] = widen(narrow(ptx.mul_f32(n, widen(raw[4 + i]))))
            if not quantize:
                at = ptx.u32(row + g * 128 + lane * 4)
                if WIDE:
                    for i in range(4):
                        y[ptx.u32(at + i)] = ptx.f32_bits(v[i])
                else:
                    ptx.stg64(y, ptx.u32(at >> 2), pack(v[0], v[1]), pack(v[2], v[3]))
            else:
                largest = ptx.u32(0)
                for i in range(4):
                    if token >= tokens:
                        v[i] = ptx.f32(0)
                    largest = max(largest, ptx.u32(ptx.f32_bits(v[i]) & 0x7FFFFFFF))  # patterns: a NaN has to win
                last = g == groups - 1
                product = ptx.mul_f32(ptx.bits_f32(ptx.warp_max_u32(largest)), outlier if last else factor)
                step = ptx.bits_f32(ptx.u32(ptx.f32_bits(product) & _KEEP22))
                inverse = ptx.f32(0)
                if step >= ptx.f32(2.0**-126):
                    inverse = ptx.div_f32(ptx.f32(1), step)
                if step < ptx.f32(2.0**-126):
                    step = ptx.f32(0)
                if step >= ptx.f32(2.0**100):
                    step, inverse = ptx.bits_f32(ptx.u32(0x7F800000)), ptx.f32(0)
                top = ptx.i32(127 if last else 7)
                word = ptx.u32(0)
                for i in range(4):
                    code = min(max(ptx.rint_i32(ptx.mul_f32(v[i], inverse)), ptx.i32(-top - 1)), top)
                    word = ptx.u32(word | ptx.u32(ptx.u32(code & 255) << (8 * i)))
                place = ptx.u32(ptx.u32(((token >> 3) * groups + g) * 2 + (lane >> 4)) * 128 + (token & 7) * 16)
                codes[ptx.u32(place + (lane & 15))] = word
                if lane == 0:
                    scale[ptx.u32(g * (tiles * 8) + token)] = step
            g = ptx.u32(g + cuda.gridDim.y * WARPS)

    pointer = "u32" if WIDE else "u16"
    declared = (
        f"{pointer}* x, {pointer}* gamma, {pointer}* y, u32* perm, u32* codes, f32* scale, "
        "u32 columns, u32 tokens, u32 tiles, f32 eps, f32 factor, f32 outlier"
    )
    return kernel(declared, threads=NORM_THREADS, blocks=4, variant=repr((kind, norm, quantize)))(activations)
