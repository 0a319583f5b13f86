"""The dense matrix of a weight in 16 bits, out of the codes of `layout`: the bits of the normative decoder.

Where `gemm` does not multiply many vectors, their product decodes the weight first. With this it needs no second copy
of it: codes are those of `layout`, scales and zero points those of the file, which the numbers of `layout` are rounded
from.

A warp decodes its share of a block, 16 rows of 64 columns. Section 8 of the specification computes in binary64 and
rounds once. A scale of 16 bits times the difference of a code and an integer is exact in binary32 already; everything
else is computed in binary64. Values go through shared memory, so that a row's 128 bytes are stored together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bcqfmt.errors import error
from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import FROM_ARRAY, NARROW, WIDEN, rounding
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from . import GemmOperand
from .layout import SIDE

_THREADS = 256
_PITCH = 2 * SIDE + 16  # bytes of a row in shared memory: neighbouring rows in other banks
_MAGIC = 2.0**23  # a float32 whose last bits can hold a code
_ARRAYS = {"F16": "u16*", "BF16": "u16*", "F32": "f32*"}


class Decoding(NamedTuple):
    """What a kernel is compiled for: the part of a layout that codes depend on, and types.

    ``numbers``: of scales and zero points; ``logical``: kind that values are rounded to first, or None; ``result``: 1
    float16, 2 bfloat16.
    """

    bits: int
    bcq: bool
    looked_up: bool
    fields: tuple[int, ...]
    places: int
    numbers: str
    logical: int | None
    result: int


def dense_of(
    operand: GemmOperand, numbers: Sequence[tuple[Any, Any]], logical: str, result: str, *, twice: bool
) -> Callable[[], Any]:
    """A function that decodes an operand of affine or bcq segments to a new matrix (out, in) of type ``result``.

    ``numbers``: of every segment scales (out, G) and zero points, integers, or alpha (q, out, G) and bias (out, G), all
    finite and of one type: F16, BF16 or F32. ``logical``: dtype of the weight; with ``twice`` values are rounded to it
    first. Neither perm nor outliers. Everything is checked here, nothing when the function is called.
    """
    rows, columns = operand.shape
    plain = operand.perm is None and operand.outliers is None and rows * columns <= LIMIT
    if not plain or result not in ("F16", "BF16"):
        found = f"a weight of shape {list(operand.shape)} as {result}"
        raise error("BCQ-E553", found=found, expected="a plain one in 16 bits")
    launches = []
    for segment, (first, second) in zip(operand.segments, numbers, strict=True):
        layout = segment.layout
        groups = -(-layout.width // layout.group_size)
        bcq = layout.formula == "bcq"
        kind = check_array(
            "scales", first, tuple(_ARRAYS), (layout.bits, rows, groups) if bcq else (rows, groups)
        ).dtype
        check_array("zero points", second, (kind,), (rows, groups))
        check_same_device(codes=segment.codes, scales=first, zeros=second)
        first_kind = KINDS[logical] if twice and logical != result else None
        decoding = Decoding(
            layout.bits, bcq, layout.looked_up, layout.fields, layout.places, kind, first_kind, KINDS[result]
        )
        grid = layout.blocks // 2, -(-rows // SIDE)
        scalars = rows, columns, segment.start, layout.width, layout.blocks, groups, layout.sharing
        launches.append((dense_kernel(decoding), grid, (segment.codes, first, second), scalars))
    return partial(_decode, operand.segments[0].codes, operand.shape, result, launches)


def _decode(like: Any, shape: tuple[int, int], result: str, launches: Sequence[tuple[Any, ...]]) -> Any:
    dense = device.empty_like(like, shape, result)
    for made, grid, arrays, scalars in launches:
        made.launch(grid, _THREADS, *arrays, dense, *scalars, shared=_THREADS // 32 * 16 * _PITCH)
    return dense


def _pieces(decoding: Decoding) -> list[list[tuple[int, int, int, int]]]:
    """Where the codes of a thread are, 16 pairs of two: (word, first bit there, bits, first bit of the code)."""
    found, q = [], decoding.bits
    for pair in range(16):
        for half in range(2):
            pieces, start, up = [], 0, q
            for field in decoding.fields if not decoding.looked_up else ():
                per, up = 16 // field, up - field
                if field == 3 and pair == 15:
                    pieces += [(start + bit, 16 * half + 15, 1, up + bit) for bit in range(3)]
                else:
                    pieces.append((start + pair // per, 16 * half + field * (pair % per), field, up))
                start += field
            if decoding.looked_up:
                word, j, upper = pair // 4, pair % 4 // 2 * 2 + half, pair % 2
                n = 4 * upper + j
                if q == 2:
                    pieces = [(word // 2, 4 * n + 2 * (word % 2), 2, 0)]
                elif word < q:
                    pieces = [(word, 4 * n, 3, 0)]
                else:
                    pieces = [(bit, 4 * n + 3, 1, bit) for bit in range(3)]
                if q == 4:
                    pieces.append((word, 8 * j + (3 if upper else 7), 1, 3))
            found.append(pieces)
    return found


def _loader(decoding: Decoding) -> Any:
    """A device function: the words of a lane, of those of a warp from ``at`` on."""
    q, fields = decoding.bits, decoding.fields
    starts = tuple(32 * sum(fields[:f]) for f, field in enumerate(fields) for _ in range(field))
    places = tuple(k for field in fields for k in range(field))
    widths = tuple(field for field in fields for _ in range(field))

    def in_fours(held: Any, codes: Any, at: Any, lane: Any) -> None:
        for k in static(q // 4):
            a, b, c, d = ptx.ldg128(codes, ptx.u32((at >> 2) + 32 * k + lane))
            held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3] = a, b, c, d

    def one_by_one(held: Any, codes: Any, at: Any, lane: Any) -> None:
        for k in static(q):
            held[k] = ptx.u32(codes[ptx.u32(at + starts[k] + lane * widths[k] + places[k])])

    return inlined(unrolled(in_fours if fields in ((4,), (8,)) else one_by_one))


def _group(places: int) -> Any:
    """A device function: the group of a pair's columns."""

    def group(block: Any, pair: Any, sharing: Any, groups: Any) -> Any:
        found = ptx.u32(block * places + pair * places // 16) if places > 1 else ptx.div_u32(block, sharing)
        return ptx.min_u32(found, ptx.u32(groups - 1))

    return inlined(group)


def _number(kind: str) -> Any:
    """A device function: a number of an array as float32."""

    widen = FROM_ARRAY[KINDS[kind]]

    def number(array: Any, at: Any) -> Any:
        return widen(array[at])

    return inlined(number)


def _wide(decoding: Decoding) -> tuple[Any, Any]:
    """Device functions in binary64: the numbers of a row and group into ``held``, and the word of two values."""
    q, bcq, number = decoding.bits, decoding.bcq, _number(decoding.numbers)
    rounded = rounding(decoding.logical)
    narrow = ptx.f64_to_f16 if decoding.result == 1 else ptx.f64_to_bf16

    def load(held: Any, upper: Any, first: Any, second: Any, row: Any, rows: Any, groups: Any, group: Any) -> None:
        at = ptx.u32(row * groups + group)
        held[q] = ptx.f64(number(second, at))
        if bcq:
            for i in static(q):
                held[i] = ptx.f64(number(first, ptx.u32(i * rows * groups + at)))
        else:
            held[0] = ptx.f64(number(first, at))

    def pair(held: Any, upper: Any, low: Any, high: Any) -> Any:
        found = ptx.u32(0)
        for half in range(2):
            code = high if half else low
            exact = held[q]
            if bcq:
                for i in static(q):
                    exact = ptx.add_f64(exact, held[i] if code >> (q - 1 - i) & 1 else -held[i])
            else:
                exact = ptx.mul_f64(held[0], ptx.sub_f64(ptx.f64(code), exact))
            found = ptx.u32(found | narrow(rounded(exact)) << (16 * half))
        return found

    return inlined(unrolled(load)), inlined(unrolled(pair))


def _single(decoding: Decoding) -> tuple[Any, Any]:
    """The same in binary32, scales of 16 bits and integers, for rows 2 r and 2 r + 1: ``upper`` is 0 or 1."""
    number, pack = _number(decoding.numbers), ptx.pack_f16 if decoding.result == 1 else ptx.pack_bf16
    logical = decoding.logical or 0
    twice, widen, narrow = logical > 0, WIDEN[logical], NARROW[logical]

    def load(held: Any, upper: Any, first: Any, second: Any, row: Any, rows: Any, groups: Any, group: Any) -> None:
        at = ptx.u32(row * groups + group)
        held[2 * upper] = number(first, at)
        held[2 * upper + 1] = ptx.add_f32(number(second, at), ptx.f32(_MAGIC))

    def value(held: Any, upper: Any, code: Any) -> Any:
        found = ptx.mul_f32(held[2 * upper], ptx.sub_f32(ptx.bits_f32(ptx.u32(code | 0x4B000000)), held[2 * upper + 1]))
        return widen(narrow(found)) if twice else found

    one = inlined(value)

    def pair(held: Any, upper: Any, low: Any, high: Any) -> Any:
        return pack(one(held, upper, low), one(held, upper, high))

    return inlined(load), inlined(pair)


@functools.cache
def dense_kernel(decoding: Decoding) -> Kernel:
    """The kernel: block (i, j) has columns 128 i .. and rows 64 j .. of a segment; ``sharing`` as in `layout`."""
    q, places, bcq = decoding.bits, decoding.places, decoding.bcq
    wide = bcq or decoding.numbers == "F32"
    load_words, pieces = _loader(decoding), _pieces(decoding)
    most = max(map(len, pieces))
    flat = [piece for own in pieces for piece in own + [(0, 0, 0, 0)] * (most - len(own))]
    sources, shifts, widths, ups = (tuple(piece[k] for piece in flat) for k in range(4))
    inverted = decoding.looked_up and q == 4
    load, pair_of = _wide(decoding) if wide else _single(decoding)
    held_numbers, held_type = (q + 1, types.float64) if wide else (4, types.float32)
    group_of, arrays = _group(places), _ARRAYS[decoding.numbers]
    declared = (
        f"u32* codes, {arrays} first, {arrays} second, u32* dense, u32 rows, u32 columns, u32 start, u32 width, "
        "u32 blocks, u32 groups, u32 sharing"
    )

    @kernel(declared, threads=_THREADS, blocks=3 if wide else 5, variant=repr(decoding))
    @unrolled
    def decode_codes(
        codes: Any, first: Any, second: Any, dense: Any, rows: Any, columns: Any, start: Any, width: Any, blocks: Any,
        groups: Any, sharing: Any,
    ) -> None:  # fmt: skip
        warp, lane = ptx.u32(cuda.threadIdx.x >> 5), ptx.lane_id()
        base = ptx.u32(ptx.shared_address(cuda.shared.array(0, types.uint32)) + warp * (16 * _PITCH))
        block = ptx.u32(cuda.blockIdx.x * 2 + (warp >> 2))
        front = ptx.u32(cuda.blockIdx.y * SIDE + (warp & 3) * 16)
        words = cuda.local.array(q, types.uint32)
        load_words(words, codes, ptx.u32(((cuda.blockIdx.y * blocks + block) * 4 + (warp & 3)) * (32 * q)), lane)
        row, last = ptx.u32(front + (lane >> 2) * 2), ptx.u32(rows - 1)
        held = cuda.local.array(held_numbers, held_type)
        target = ptx.u32(base + (lane >> 2) * _PITCH + (lane & 3) * 4)
        for pair in static(16):
            if pair % (16 // places) == 0 and not wide:  # these columns are in another group
                for upper in static(2):
                    load(
                        held, upper, first, second, ptx.min_u32(ptx.u32(row + upper), last), rows, groups,
                        group_of(block, pair, sharing, groups),
                    )  # fmt: skip
            code = cuda.local.array(2, types.uint32)
            for half in static(2):
                code[half] = ptx.u32(0)
                for k in static(most):
                    at = (2 * pair + half) * most + k
                    bits = ptx.u32(ptx.u32(words[sources[at]] >> shifts[at]) & ((1 << widths[at]) - 1))
                    code[half] = ptx.u32(code[half] | bits << ups[at])
                if inverted:  # the top bit is a minus, with the other bits inverted
                    code[half] = ptx.u32(code[half] ^ (15 if code[half] > 7 else 8))
            if wide:
                found = ptx.u32(code[0] | code[1] << 16)
            else:
                found = pair_of(held, pair % 2, ptx.u32(code[0]), ptx.u32(code[1]))
            ptx.sts32(target, ptx.u32(pair % 2 * (8 * _PITCH) + pair // 4 * 32 + pair // 2 % 2 * 16), found)
        if wide:  # a loop: written out, it takes minutes to compile
            for pair in range(16):
                upper = ptx.u32(pair >> 3)
                own = ptx.min_u32(ptx.u32(row + upper), last)
                if places > 1 or pair & 7 == 0:
                    group = group_of(block, ptx.u32((pair & 7) * 2), sharing, groups)
                    load(held, upper, first, second, own, rows, groups, group)
                place = ptx.u32(target + upper * (8 * _PITCH) + (pair & 7) * 16)
                both = ptx.lds32(place, ptx.u32(0))
                found = pair_of(held, upper, ptx.u32(both & 0xFFFF), ptx.u32(both >> 16))
                ptx.sts32(place, ptx.u32(0), found)
        ptx.syncwarp()
        column = ptx.u32(block * SIDE + (lane & 7) * 8)
        for k in static(4):
            own = ptx.u32(4 * k + (lane >> 3))
            a, b, c, d = ptx.lds128(ptx.u32(base + own * _PITCH + (lane & 7) * 16), ptx.u32(0))
            row = ptx.u32(front + (own & 7) * 2 + (own >> 3))  # as in `layout`: r of 8, first or second
            if column < width and row < rows:
                place = ptx.u64(row) * ptx.u64(columns) + ptx.u64(start + column)
                ptx.stg128(dense, place >> ptx.u64(3), a, b, c, d)

    return decode_codes
