"""y = W x on binary tensor cores: bits against bits, the fast product for one to four vectors (sm_90).

x becomes a block-fixed-point number: in every 128 columns (256 for wide groups) a power of two 2^e and signed integers
of 8 ``parts`` bits, so x is 8 ``parts`` bit planes itself. The product of a weight plane and a plane of x is a popcount
of their conjunction, which one instruction does for 16 rows, 128 columns and 8 planes of x. So the planes of a weight
go from memory into the tensor cores as they are: no table, no unpacking, no multiplication. The integer sums are exact;
what is rounded is x (to 2^-15 of the largest of its 128 neighbours with two parts, 2^-22 with three; subnormal float32
numbers count as zero), and the products with the scales, in float32.

A lane of a warp gets counts for rows r and r + 8 and for some of the planes of x; shifted and added they are its share
of ``sum(b * x)``. With signs s = 2b - 1 the sum is ``2 * share - C``, C the same share of sum(x), known beforehand: the
integer starts at the pattern of 1.5 * 2^23 minus C, so reading it as float32 costs one subtraction. Lanes with other
planes (or other groups, where a group is shorter than 128 columns) are added up at the end of a tile.

A block holds x as bits for all columns in shared memory, made by all of its threads while the first weights are on
their way. Its warps take the chunks of a tile in turn (``slices``, with ``tiles`` side by side); each has a ring of
``stages`` buffers, filled by bulk copies. Slices are added in a fixed order, so two runs give the same bits. Blocks
start at different chunks of their rows: equal strides would meet on the same memory channels.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.bit_shape import BitShape, examples
from bcqfmt.kernels.bit_steps import MAGIC, PATTERN, WIDEN, bit_turner, fetcher, number_pairs, sums_as_floats
from bcqfmt.kernels.launch import Kernel, kernel
from bcqfmt.kernels.ptx_bits import barrier_of, bulk_fence, bulk_init, bulk_wait, mma_b1, mma_b1_wide, sts8
from bcqfmt.kernels.ptx_numba import cuda, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["bit_gemv_kernel", "compile_cases"]

_ONES = 0xFFFFFFFF


def _declared(kind: int, out: int) -> str:
    x, y = "u32" if kind == 0 else "u16", "f32" if out == 0 else "u16"
    pointers = f"u32* planes, u32* numbers, {x}* x, i32* perm, f32* addend, {y}* y"
    return f"{pointers}, u32 rows, u32 tiles, u32 columns, u32 start, u32 rotation"


@functools.cache
def bit_gemv_kernel(shape: BitShape) -> Kernel:
    """The kernel for one layout, batch and choice of types."""
    layout, batch, parts = shape.layout, shape.batch, shape.parts
    q, width, chunks, wide = layout.bits, layout.width, layout.chunks, layout.wide
    passes, places, set_bytes, unit = layout.passes, layout.places, layout.set_bytes, layout.unit_bytes
    slices, side, stages, threads = shape.slices, shape.tiles, shape.stages, shape.threads
    kind, out, reordered, added = shape.kind, shape.out, shape.reordered, shape.added
    bcq, offset = layout.formula == "bcq", layout.formula == "offset"
    number_bytes = places * 32 * layout.pair_words
    halves = 256 // layout.span  # sets of a chunk
    sharers = 4 // places  # lanes that share a group, each with other planes of x
    held = 8 * parts // sharers  # planes of x of a lane
    pairs = held // 2
    stride = (parts * 32 + 4) * 4  # bytes of 128 columns of x; 16 more keep banks apart
    precision = 14 if parts == 2 else 21
    start_value = 0 if shape.converted else PATTERN
    piece, piece_mask = 32 // passes, (1 << (32 // passes)) - 1
    rounds = -(-chunks * 256 // (threads * 8))
    x_words = 8 if kind == 0 else 4  # of eight columns
    early_words, floats, b_words = rounds * x_words, 2 * batch, batch * pairs
    t_base = batch * chunks * 2 * stride
    r_base = t_base + batch * chunks * halves * passes * 64
    ring_base, warps = shape.fixed_bytes, slices * side
    bar_base = ring_base + warps * stages * unit
    total_columns = chunks * 256
    pair_bytes = 4 * layout.pair_words
    last = layout.numbers - 1
    pair_at, value_of, widen = number_pairs(layout.number), sums_as_floats(shape.converted), WIDEN[kind]
    fetch, turn_bits = fetcher(layout), bit_turner()
    narrow = ptx.f32_to_bf16 if out == 2 else ptx.f32_to_f16

    @kernel(_declared(kind, out), threads=threads, variant=repr(shape))
    @unrolled
    def bit_gemv(
        planes: Any, numbers: Any, x: Any, perm: Any, addend: Any, y: Any,
        rows: Any, tiles: Any, columns: Any, start: Any, rotation: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        t, r8 = ptx.u32(lane & 3), ptx.u32(lane >> 2)
        mine, beside = ptx.u32(warp % slices), ptx.u32(warp // slices)
        ring = ptx.u32(base + ring_base + warp * (stages * unit))
        ring_end = ptx.u32(ring + stages * unit)
        bars = ptx.u32(base + bar_base + warp * (stages * 8))
        step = ptx.u32(cuda.gridDim.x * side)
        tile = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * beside)
        turn = ptx.u32((cuda.blockIdx.x * rotation + beside * 5) % chunks)
        if lane == 0:
            for i in static(stages):
                bulk_init(ptx.u32(bars + i * 8))
            bulk_fence()
        early = cuda.local.array(early_words, types.uint32)
        quick = (columns & 7) == 0 and (start & 7) == 0 and not reordered
        for i in static(rounds):  # the first vector is asked for before anything else
            column = ptx.u32(thread * 8 + i * (threads * 8))
            for e in static(x_words):
                early[i * x_words + e] = ptx.u32(0)
            if quick and column + 8 <= width:
                at = ptx.u32((start + column) // (32 // x_words))
                for e in static(x_words // 4):
                    four = ptx.ldg128_keep(x, ptx.u32(at + e))
                    for w in static(4):
                        early[i * x_words + e * 4 + w] = four[w]
        ptx.syncwarp()
        next_tile, next_chunk, slot, bar = tile, mine, ring, bars
        for _ in static(stages):
            if lane == 0 and next_tile < tiles:
                fetch(planes, numbers, next_tile, next_chunk, turn, slot, bar)
            next_chunk = ptx.u32(next_chunk + slices)
            if next_chunk >= chunks:
                next_chunk = mine
                next_tile = ptx.u32(next_tile + step)
            slot, bar = ptx.u32(slot + unit), ptx.u32(bar + 8)

        # x becomes bits: eight columns a thread, a byte of every plane
        for i in static(rounds):
            column = ptx.u32(thread * 8 + i * (threads * 8))
            for b in static(batch):
                v = cuda.local.array(8, types.float32)
                if b == 0 and quick:
                    for k in static(8):
                        word = early[i * x_words + (k if kind == 0 else k // 2)]
                        v[k] = widen(ptx.u32(word if kind == 0 or k % 2 == 0 else word >> 16))
                if b > 0 or not quick or column + 8 > width:
                    for k in static(8):
                        v[k] = ptx.f32(0.0)
                        if column + k < width:
                            place = ptx.u32(start + column + k)
                            if reordered:
                                place = min(ptx.u32(perm[place]), ptx.u32(columns - 1))
                            found = x[ptx.u32(b * columns + place)]
                            v[k] = widen(ptx.u32(found))
                largest = ptx.u32(0)
                for k in static(8):
                    largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
                for k in static(5 if wide else 4):
                    largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1 << k)))
                exponent = max(ptx.u32(largest >> 23), ptx.u32(precision + 2))
                unit_value = ptx.bits_f32(ptx.u32((exponent - precision) << 23))
                if exponent == 255:  # infinities and NaNs in x: everything is NaN
                    unit_value = ptx.bits_f32(ptx.u32(0x7FC00000))
                inverse = ptx.bits_f32(ptx.u32((254 + precision - exponent) << 23))
                n = cuda.local.array(8, types.uint32)
                for k in static(8):
                    n[k] = ptx.u32(ptx.f32_bits(ptx.fma_f32(v[k], inverse, MAGIC)) - PATTERN)
                here = ptx.u32(base + (b * chunks * 2 + (column >> 7)) * stride + ((column >> 3) & 15))
                for e in static(parts):
                    pick = ptx.u32(e | (e + 4) << 4)
                    turned, rest = turn_bits(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], pick)
                    for j in static(8):
                        # plane 8 e + j lies where the lanes that hold it look for it
                        at = ((8 * e + j) % held // 2 * (2 * sharers) + (8 * e + j) // held * 2 + j % 2) * 16
                        bits = turned if j < 4 else rest
                        if column < total_columns:
                            sts8(here, ptx.u32(at), ptx.u32(bits >> (j % 4 * 8)))
                if (column >> 3) % (32 if wide else 16) < 4 and column < total_columns:
                    entry = ptx.u32(b * chunks * halves + (column >> (8 if wide else 7)))
                    for p in static(passes):
                        at = ptx.u32(base + t_base + (entry * passes + p) * 64 + ((column >> 3) & 3) * 16)
                        ptx.sts_f32(at, ptx.u32(8), unit_value)
        cuda.syncthreads()
        sign = -1 if t % sharers == sharers - 1 else 1
        factor = ptx.bits_f32(ptx.u32((127 + (t % sharers) * held) << 23))
        xlane = ptx.u32(base + (((r8 >> 1) % sharers * 2 + (r8 & 1)) * 4 + t) * 4)
        keep = ptx.u32(_ONES) if t // sharers == (r8 >> 1) // sharers else ptx.u32(0)
        tlane = ptx.u32(base + t_base + t * 16)
        # shares of sum(x), by the same instruction with all weights set
        for b in static(batch):
            s = warp
            while s < chunks * halves:
                for p in static(passes):
                    at = ptx.u32(xlane + (b * chunks * 2 + s * (2 // halves)) * stride)
                    share = ptx.i32(0)
                    for m in static(pairs):
                        word = ptx.u32(ptx.lds32(at, ptx.u32(m * sharers * 32)) & keep)
                        if passes > 1:
                            word = ptx.u32(word & (piece_mask << (p * piece)))
                        ones = ptx.u32(_ONES)
                        if wide:
                            other = ptx.lds32(at, ptx.u32(m * sharers * 32 + stride))
                            counts = mma_b1_wide(ones, ones, ones, ones, word, other)
                        else:
                            counts = mma_b1(ones, ones, word)
                        share = ptx.i32(share + (counts[0] << (2 * m)))
                        share = ptx.i32(share + (counts[1] << (2 * m + 1)) * (sign if m == pairs - 1 else 1))
                    if r8 == 0:
                        entry = ptx.u32(tlane + ((b * chunks * halves + s) * passes + p) * 64)
                        first_value = ptx.u32(start_value - (share if bcq else 0))
                        ptx.sts64(entry, ptx.u32(0), first_value, ptx.f32_bits(ptx.f32(share)))
                s = ptx.u32(s + warps)
        cuda.syncthreads()
        sums = cuda.local.array(floats, types.float32)
        for k in static(floats):
            sums[k] = ptx.f32(0.0)
        chunk, slot, bar, parity, turned_over = mine, ring, bars, ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            c = ptx.u32(chunk + turn)
            c = ptx.u32(c - chunks) if c >= chunks else c
            bulk_wait(bar, parity)
            for h in range(halves):
                part = cuda.local.array(floats, types.float32)
                units = cuda.local.array(batch, types.float32)
                for k in static(floats):
                    part[k] = ptx.f32(0.0)
                for p in static(passes):
                    bits = cuda.local.array(b_words, types.uint32)
                    others = cuda.local.array(b_words, types.uint32)
                    count = cuda.local.array(floats, types.int32)
                    share = cuda.local.array(batch, types.float32)
                    begin = cuda.local.array(batch, types.int32)
                    for b in static(batch):
                        at = ptx.u32(xlane + (b * chunks * 2 + c * 2 + h) * stride)
                        for m in static(pairs):
                            word = ptx.u32(ptx.lds32(at, ptx.u32(m * sharers * 32)) & keep)
                            if passes > 1:
                                word = ptx.u32(word & (piece_mask << (p * piece)))
                            bits[b * pairs + m] = word
                            if wide:
                                others[b * pairs + m] = ptx.lds32(at, ptx.u32(m * sharers * 32 + stride))
                        entry = ptx.u32(tlane + ((b * chunks * halves + c * halves + h) * passes + p) * 64)
                        known = ptx.lds128(entry, ptx.u32(0))
                        begin[b] = ptx.i32(known[0])
                        share[b] = ptx.bits_f32(known[1])
                        units[b] = ptx.bits_f32(known[2])
                        count[2 * b] = begin[b]
                        count[2 * b + 1] = begin[b]
                    at = ptx.u32(slot + q * 512 + h * set_bytes + p * (set_bytes // passes))
                    at = ptx.u32(at + (t // sharers * 8 + r8) * pair_bytes)
                    low, high = pair_at(at, last * number_bytes)
                    scale, scale8 = pair_at(at, 0)
                    for b in static(batch):
                        if bcq or offset:  # z or the offset, times the share of sum(x)
                            part[2 * b] = ptx.f32(part[2 * b] + low * share[b])
                            part[2 * b + 1] = ptx.f32(part[2 * b + 1] + high * share[b])
                    for i in range(q):
                        if wide:
                            a = ptx.lds128(ptx.u32(slot + i * 512 + lane * 16), ptx.u32(0))
                        else:
                            a = ptx.lds64(ptx.u32(slot + i * 512 + lane * 16 + h * 8), ptx.u32(0))
                        if bcq and i > 0:
                            scale, scale8 = pair_at(at, i * number_bytes)
                        more = 1 if bcq else q - 1 - i  # how far plane i is shifted
                        for b in static(batch):
                            for m in static(pairs):
                                if wide:
                                    d = mma_b1_wide(a[0], a[1], a[2], a[3], bits[b * pairs + m], others[b * pairs + m])
                                else:
                                    d = mma_b1(a[0], a[1], bits[b * pairs + m])
                                last_pair = sign if m == pairs - 1 else 1
                                one, two = 2 * m + more, 2 * m + 1 + more
                                count[2 * b] = ptx.i32(count[2 * b] + (d[0] << one) + (d[1] << two) * last_pair)
                                count[2 * b + 1] = ptx.i32(count[2 * b + 1] + (d[2] << one) + (d[3] << two) * last_pair)
                            if bcq:
                                part[2 * b] = ptx.f32(part[2 * b] + scale * value_of(count[2 * b]))
                                part[2 * b + 1] = ptx.f32(part[2 * b + 1] + scale8 * value_of(count[2 * b + 1]))
                                count[2 * b] = begin[b]
                                count[2 * b + 1] = begin[b]
                    if not bcq:
                        for b in static(batch):
                            below = ptx.f32(0.0) if offset else ptx.f32(low * share[b])
                            below8 = ptx.f32(0.0) if offset else ptx.f32(high * share[b])
                            part[2 * b] = ptx.f32(part[2 * b] + scale * ptx.f32(value_of(count[2 * b]) - below))
                            part[2 * b + 1] = ptx.f32(
                                part[2 * b + 1] + scale8 * ptx.f32(value_of(count[2 * b + 1]) - below8)
                            )
                for k in static(floats):
                    sums[k] = ptx.f32(sums[k] + units[k // 2] * part[k])
            ptx.syncwarp()
            if lane == 0 and next_tile < tiles:
                fetch(planes, numbers, next_tile, next_chunk, turn, slot, bar)
            next_chunk = ptx.u32(next_chunk + slices)
            if next_chunk >= chunks:
                next_chunk = mine
                next_tile = ptx.u32(next_tile + step)
            slot, bar = ptx.u32(slot + unit), ptx.u32(bar + 8)
            if slot == ring_end:
                slot, bar, parity = ring, bars, ptx.u32(parity ^ 1)
            chunk = ptx.u32(chunk + slices)
            if chunk >= chunks:  # the tile is done
                chunk = mine
                held_at = ptx.u32(base + r_base + turned_over * (warps * batch * 64))
                for k in static(floats):
                    value = ptx.f32(sums[k] * factor)
                    sums[k] = ptx.f32(0.0)
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                    if t == 0:
                        at = ptx.u32(held_at + (warp * (batch * 16) + k // 2 * 16 + k % 2 * 8 + r8) * 4)
                        ptx.sts_f32(at, ptx.u32(0), value)
                barrier_of(ptx.u32(beside + 1), ptx.u32(slices * 32))
                e = ptx.u32(mine * 32 + lane)
                while e < batch * 16:
                    row = ptx.u32(tile * 16 + (e & 15))
                    if row < rows:
                        place = ptx.u32((e >> 4) * rows + row)
                        value = addend[place] if added else ptx.f32(0.0)
                        for k in range(slices):
                            at = ptx.u32(held_at + ((beside * slices + k) * (batch * 16) + e) * 4)
                            value = ptx.f32(value + ptx.lds_f32(at, ptx.u32(0)))
                        if out == 0:
                            y[place] = value
                        else:
                            y[place] = narrow(value)
                    e = ptx.u32(e + slices * 32)
                turned_over = ptx.u32(turned_over ^ 1)
                tile = ptx.u32(tile + step)

    return bit_gemv


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What `tests/kernels/compile_check.py` compiles."""
    return {"bit_gemv_kernel": [(shape,) for shape in examples()]}
