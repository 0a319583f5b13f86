"""Decode attention over an INT4 key-value cache: the codes are widened in registers on their way to the tensor cores.

A token of a head is D codes of 4 bits and a word of two F16, ``scale * code + offset``. With the codes c, exact in F16,

    score  = scale * (q . c) + offset * sum(q)          output = sum p * (scale * c + offset)

so scales and offsets never touch the codes. A warp takes 32 tokens at a time and up to 8 query heads that share the
key-value head: scores are a product (tokens x D)(D x heads), outputs one of (D x tokens)(tokens x heads); between them
is the running softmax, in base 2. The scale of a value is part of its token's exponent there, so that what is
rounded to F16 for the second product is at most 1.

Each lane of a warp loads whole rows' quarters (keys) or eighths (values), so nothing passes through shared memory
before the end, when the four warps of a block add up. Long contexts are split over blocks; a second kernel joins the
splits in order. Two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import NARROW
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.limits import KINDS
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

ATTENTION_WARPS = 4
HEADS = 8  # query heads of a block
TILE = 32  # tokens that a warp takes at a time
_LOWEST = -1.0e30  # the maximum of an empty set
# A code c in bits 0..3 or 4..7 of a half is the subnormal F16 c * 2^-24 or c * 2^-20.
_LOW, _HIGH = 0x000F000F, 0x00F000F0
_FOUR, _QUARTER = 0x44004400, 0x34003400  # queries are multiplied by 4 for the first, 1/4 for the second: c * q * 2^-22


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block: sums of every warp, then maximum and denominators."""
    return ATTENTION_WARPS * HEADS * (head_dim + 2) * 4


@functools.cache
def attention_kernel(head_dim: int, kind: str) -> Kernel:
    """q ``[B, H, D]`` of ``kind`` and the cache -> y ``[B, H, D]``, or with splits partial sums and their statistics.

    Grid: (splits, key-value heads x blocks of 8 query heads, B), 128 threads. ``keys`` and ``values``
    ``[B, H_kv, capacity, D / 8]`` words, their ``_parameters`` ``[B, H_kv, capacity]`` words (scale low, offset high);
    ``lengths [B]``; ``span``: tokens of a split, a multiple of 32; ``factor``: softmax scale / ln 2. partials
    ``[B, H, splits, D]``, statistics ``[B, H, splits, 2]`` (maximum, denominator).
    """
    D, W, VW, QW = head_dim, head_dim // 32, head_dim // 64, head_dim // 8
    TILES_D, STEPS = head_dim // 16, head_dim // 16
    ACC, QUERY, KEY_WORDS, VALUE_WORDS = TILES_D * 4, STEPS * 2, 4 * W, 8 * VW
    WIDE, BF16, narrow = kind == "F32", kind == "BF16", NARROW[KINDS[kind]]
    THREADS = 32 * ATTENTION_WARPS
    STATS = ATTENTION_WARPS * HEADS * head_dim * 4  # where the statistics lie in shared memory

    def attention(
        q: Any, keys: Any, key_parameters: Any, values: Any, value_parameters: Any, lengths: Any, y: Any,
        partials: Any, statistics: Any, heads: Any, kv_heads: Any, capacity: Any, span: Any, factor: Any,
    ) -> None:  # fmt: skip
        shared = cuda.shared.array(0, types.float32)
        o = cuda.local.array(ACC, types.float32)
        query = cuda.local.array(QUERY, types.uint32)
        raw = cuda.local.array(8, types.uint32)
        kw = cuda.local.array(KEY_WORDS, types.uint32)
        vw = cuda.local.array(VALUE_WORDS, types.uint32)
        kp = cuda.local.array(4, types.uint32)
        vp = cuda.local.array(4, types.uint32)
        score = cuda.local.array(8, types.float32)
        share = cuda.local.array(4, types.uint32)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        r, c4 = ptx.u32(lane >> 2), ptx.u32(lane & 3)
        batch = ptx.u32(cuda.blockIdx.z)
        ratio = ptx.u32(heads // kv_heads)
        parts = ptx.u32((ratio + HEADS - 1) // HEADS)
        kv_head = ptx.u32(cuda.blockIdx.y // parts)
        first_head = ptx.u32((cuda.blockIdx.y - kv_head * parts) * HEADS)  # among those of the key-value head
        count = min(ptx.u32(ratio - first_head), ptx.u32(HEADS))
        head = ptx.u32(batch * heads + kv_head * ratio + first_head)
        row = ptx.u32((batch * kv_heads + kv_head) * capacity)
        begin = ptx.u32(cuda.blockIdx.x * span)
        length = min(ptx.u32(lengths[batch]), ptx.u32(capacity))
        end = min(ptx.u32(begin + span), length)

        # queries as the second operand: pairs (0, 4) (1, 5) (2, 6) (3, 7) of eight columns, like the codes' words
        own = ptx.f32(0)
        mine = min(r, ptx.u32(count - 1))
        for i in range(W):
            at = ptx.u32((head + mine) * QW + c4 * W + i)
            if WIDE:
                for h in range(2):
                    w = ptx.ldg128_keep(q, ptx.u32(at * 2 + h))
                    raw[2 * h] = ptx.pack_f16(ptx.bits_f32(w[0]), ptx.bits_f32(w[1]))
                    raw[2 * h + 1] = ptx.pack_f16(ptx.bits_f32(w[2]), ptx.bits_f32(w[3]))
            else:
                w = ptx.ldg128_keep(q, at)
                for k in range(4):
                    raw[k] = ptx.pack_f16(ptx.lo_bf16(w[k]), ptx.hi_bf16(w[k])) if BF16 else w[k]
            for k in range(4):
                own = ptx.add_f32(own, ptx.add_f32(ptx.lo_f16(raw[k]), ptx.hi_f16(raw[k])))
            for k in range(2):
                query[i * 4 + 2 * k] = ptx.hmul2(ptx.prmt(raw[k], raw[2 + k], ptx.u32(0x5410)), ptx.u32(_FOUR))
                query[i * 4 + 2 * k + 1] = ptx.hmul2(ptx.prmt(raw[k], raw[2 + k], ptx.u32(0x7632)), ptx.u32(_QUARTER))
        own = ptx.add_f32(own, ptx.shfl_xor_f32(own, ptx.u32(1)))
        own = ptx.add_f32(own, ptx.shfl_xor_f32(own, ptx.u32(2)))
        sum0 = ptx.shfl_f32(own, ptx.u32(c4 * 8))
        sum1 = ptx.shfl_f32(own, ptx.u32(c4 * 8 + 4))

        key_factor = ptx.mul_f32(factor, ptx.f32(2.0**22))
        for i in range(ACC):
            o[i] = ptx.f32(0)
        max0 = max1 = ptx.f32(_LOWEST)
        den0 = den1 = off0 = off1 = ptx.f32(0)

        # Turn j loads keys j, adds up values j - 1, loads values j, scores keys j: every load overlaps with work.
        start = ptx.u32(begin + warp * TILE)
        pending = False
        while start < end or pending:
            more = start < end
            first = ptx.u64(row + start)
            if more:
                for t in range(4):  # keys: tokens r, r + 8, r + 16, r + 24
                    if W == 2:
                        pair = ptx.ldg64(keys, ptx.u64((first + r) * 4 + c4 + t * 32))
                        for k in range(2):
                            kw[t * W + k] = pair[k]
                    else:
                        for h in range(W // 4):
                            quad = ptx.ldg128(keys, ptx.u64(((first + r) * 4 + c4 + t * 32) * (W // 4) + h))
                            for k in range(4):
                                kw[(t * W + h * 4 + k) % KEY_WORDS] = quad[k]
                    kp[t] = ptx.ldg32(key_parameters, ptx.u64(first + r + t * 8))
                    vp[t] = ptx.ldg32(value_parameters, ptx.u64(first + r + t * 8))
            if pending:
                for u in static(2):
                    for i in range(VW):
                        v0, v1 = vw[4 * u * VW + i], vw[(4 * u + 1) * VW + i]
                        v2, v3 = vw[(4 * u + 2) * VW + i], vw[(4 * u + 3) * VW + i]
                        for h in range(2):
                            pick = ptx.u32(0x7632 if h else 0x5410)
                            low, high = ptx.prmt(v0, v1, pick), ptx.prmt(v2, v3, pick)
                            for k in range(2):
                                e = ((i * 2 + h) * 2 + k) * 4
                                d = ptx.mma_f16(
                                    ptx.u32(low & _LOW), ptx.u32(low & _HIGH), ptx.u32(high & _LOW),
                                    ptx.u32(high & _HIGH), share[2 * u], share[2 * u + 1],
                                    o[e], o[e + 1], o[e + 2], o[e + 3],
                                )  # fmt: skip
                                for j in range(4):
                                    o[e + j] = d[j]
                                low, high = ptx.u32(low >> 8), ptx.u32(high >> 8)
            if more:
                for t in range(8):  # values: tokens 2 c, 2 c + 1, and the same 8, 16, 24 further on
                    at = ptx.u64((first + c4 * 2) * 8 + r + (t // 2 * 64 + t % 2 * 8))
                    if VW == 1:
                        vw[t] = ptx.ldg32(values, at)
                    elif VW == 2:
                        pair = ptx.ldg64(values, at)
                        for k in range(2):
                            vw[(t * VW + k) % VALUE_WORDS] = pair[k]
                    else:
                        quad = ptx.ldg128(values, at)
                        for k in range(4):
                            vw[(t * VW + k) % VALUE_WORDS] = quad[k]
                for i in range(8):
                    score[i] = ptx.f32(0)
                for i in range(W):
                    for h in range(2):
                        for u in range(2):
                            low, high = ptx.u32(kw[2 * u * W + i] >> 8 * h), ptx.u32(kw[(2 * u + 1) * W + i] >> 8 * h)
                            d = ptx.mma_f16(
                                ptx.u32(low & _LOW), ptx.u32(high & _LOW), ptx.u32(low & _HIGH), ptx.u32(high & _HIGH),
                                query[i * 4 + 2 * h], query[i * 4 + 2 * h + 1],
                                score[4 * u], score[4 * u + 1], score[4 * u + 2], score[4 * u + 3],
                            )  # fmt: skip
                            for k in range(4):
                                score[4 * u + k] = d[k]
                top0 = top1 = nothing = ptx.bits_f32(ptx.u32(0xFF800000))
                for t in range(4):
                    there = ptx.u32(start + r + 8 * t) < end
                    vp[t] = cuda.selp(there, vp[t], ptx.u32(0))
                    ks = ptx.mul_f32(ptx.lo_f16(kp[t]), key_factor)
                    ko = ptx.mul_f32(ptx.hi_f16(kp[t]), factor)
                    score[2 * t] = cuda.selp(there, ptx.fma_f32(ks, score[2 * t], ptx.mul_f32(ko, sum0)), nothing)
                    score[2 * t + 1] = cuda.selp(
                        there, ptx.fma_f32(ks, score[2 * t + 1], ptx.mul_f32(ko, sum1)), nothing
                    )
                    weight = ptx.log2(ptx.lo_f16(vp[t]))
                    top0 = ptx.max_f32(top0, ptx.add_f32(score[2 * t], weight))
                    top1 = ptx.max_f32(top1, ptx.add_f32(score[2 * t + 1], weight))
                for i in range(3):
                    top0 = ptx.max_f32(top0, ptx.shfl_xor_f32(top0, ptx.u32(4 << i)))
                    top1 = ptx.max_f32(top1, ptx.shfl_xor_f32(top1, ptx.u32(4 << i)))
                if ptx.ballot(ptx.u32(top0 > max0 or top1 > max1)) != 0:
                    top0, top1 = ptx.max_f32(top0, max0), ptx.max_f32(top1, max1)
                    less0, less1 = ptx.exp2(ptx.sub_f32(max0, top0)), ptx.exp2(ptx.sub_f32(max1, top1))
                    max0, max1 = top0, top1
                    den0, den1 = ptx.mul_f32(den0, less0), ptx.mul_f32(den1, less1)
                    off0, off1 = ptx.mul_f32(off0, less0), ptx.mul_f32(off1, less1)
                    for i in range(ACC // 2):
                        o[2 * i] = ptx.mul_f32(o[2 * i], less0)
                        o[2 * i + 1] = ptx.mul_f32(o[2 * i + 1], less1)
                for t in range(4):
                    p0, p1 = ptx.exp2(ptx.sub_f32(score[2 * t], max0)), ptx.exp2(ptx.sub_f32(score[2 * t + 1], max1))
                    vs, vo = ptx.lo_f16(vp[t]), ptx.hi_f16(vp[t])
                    den0, den1 = ptx.add_f32(den0, p0), ptx.add_f32(den1, p1)
                    off0, off1 = ptx.fma_f32(p0, vo, off0), ptx.fma_f32(p1, vo, off1)
                    share[t] = ptx.transpose(ptx.pack_f16(ptx.mul_f32(p0, vs), ptx.mul_f32(p1, vs)))
            pending = more
            start = ptx.u32(start + ATTENTION_WARPS * TILE)

        for i in range(3):
            den0 = ptx.add_f32(den0, ptx.shfl_xor_f32(den0, ptx.u32(4 << i)))
            den1 = ptx.add_f32(den1, ptx.shfl_xor_f32(den1, ptx.u32(4 << i)))
            off0 = ptx.add_f32(off0, ptx.shfl_xor_f32(off0, ptx.u32(4 << i)))
            off1 = ptx.add_f32(off1, ptx.shfl_xor_f32(off1, ptx.u32(4 << i)))

        # [warp][head][column], then [warp][head] maximum and denominator
        base = ptx.shared_address(shared)
        for k in range(2):
            own_head = ptx.u32(warp * HEADS + c4 * 2 + k)
            for i in range(TILES_D // 2):
                e = i * 8 + k
                off = off1 if k else off0
                even, odd = ptx.f32(2.0**24), ptx.f32(2.0**20)
                ptx.sts128_f32(
                    base, ptx.u32((own_head * D + r * (D // 8) + i * 4) * 4),
                    ptx.fma_f32(o[e], even, off), ptx.fma_f32(o[e + 2], odd, off),
                    ptx.fma_f32(o[e + 4], even, off), ptx.fma_f32(o[e + 6], odd, off),
                )  # fmt: skip
            if r == 0:
                ptx.sts64_f32(base, ptx.u32(STATS + own_head * 8), max1 if k else max0, den1 if k else den0)
        cuda.syncthreads()
        for h in range(HEADS):
            if h < count:
                top = ptx.f32(_LOWEST)
                for other in range(ATTENTION_WARPS):
                    top = ptx.max_f32(top, ptx.lds_f32(base, ptx.u32(STATS + (other * HEADS + h) * 8)))
                column = thread
                while column < D:
                    total = denominator = ptx.f32(0)
                    for other in range(ATTENTION_WARPS):
                        pair = ptx.lds64_f32(base, ptx.u32(STATS + (other * HEADS + h) * 8))
                        factor = ptx.exp2(ptx.sub_f32(pair[0], top))
                        denominator = ptx.fma_f32(pair[1], factor, denominator)
                        value = ptx.lds_f32(base, ptx.u32(((other * HEADS + h) * D + column) * 4))
                        total = ptx.fma_f32(value, factor, total)
                    if cuda.gridDim.x == 1:
                        result = ptx.f32(0)
                        if denominator > 0:
                            result = ptx.div_f32(total, denominator)
                        elif denominator != denominator:
                            result = denominator
                        y[ptx.u32((head + h) * D + column)] = narrow(result)
                    else:
                        split = ptx.u32((head + h) * cuda.gridDim.x + cuda.blockIdx.x)
                        partials[ptx.u32(split * D + column)] = total
                        if column == 0:
                            statistics[ptx.u32(split * 2)] = top
                            statistics[ptx.u32(split * 2 + 1)] = denominator
                    column = ptx.u32(column + THREADS)

    element = "u32" if WIDE else "u16"
    declared = (
        f"{element}* q, u32* keys, u32* key_parameters, u32* values, u32* value_parameters, i32* lengths, "
        f"{element}* y, f32* partials, f32* statistics, u32 heads, u32 kv_heads, u32 capacity, u32 span, f32 factor"
    )
    blocks = 3 if head_dim <= 128 else 2
    return kernel(declared, threads=THREADS, blocks=blocks, variant=repr((head_dim, kind)))(unrolled(attention))


@functools.cache
def join_kernel(kind: str) -> Kernel:
    """Splits to y ``[B H, D]`` in order; grid (B H,), D threads."""
    narrow = NARROW[KINDS[kind]]

    def join(y: Any, partials: Any, statistics: Any, splits: Any) -> None:
        head, column, D = ptx.u32(cuda.blockIdx.x), ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.blockDim.x)
        top = ptx.f32(_LOWEST)
        for s in range(splits):
            top = ptx.max_f32(top, statistics[ptx.u32((head * splits + s) * 2)])
        total = denominator = ptx.f32(0)
        for s in range(splits):
            at = ptx.u32(head * splits + s)
            share = ptx.exp2(ptx.sub_f32(statistics[ptx.u32(at * 2)], top))
            denominator = ptx.fma_f32(statistics[ptx.u32(at * 2 + 1)], share, denominator)
            total = ptx.fma_f32(partials[ptx.u32(at * D + column)], share, total)
        result = ptx.f32(0)
        if denominator > 0:
            result = ptx.div_f32(total, denominator)
        elif denominator != denominator:
            result = denominator
        y[ptx.u32(head * D + column)] = narrow(result)

    element = "u32" if kind == "F32" else "u16"
    return kernel(f"{element}* y, f32* partials, f32* statistics, u32 splits", threads=256, variant=kind)(join)
