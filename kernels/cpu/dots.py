"""Products by dot products of bytes, straight from the canonical planes: two rows, 128 columns of them at a time.

x becomes whole numbers of 24 bits times a power of two for every 32 columns: rounded as float32 rounds the largest of
the 32. Each is split into three signed bytes. Sixteen bytes of every plane, 128 columns of a row, become
sixteen codes in each of eight vectors; vector k has the columns 8j + k. A dot product adds four neighbouring bytes, so
lane w of its result belongs to word w of the four, and after eight vectors it is the exact sum of the word's 32
columns. The numbers of the groups then weigh these sums in float32. The dot product is the only operation here that
depends on the machine.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from bcqfmt.compiled.intrinsics import Emit, has_dot_products, ir, types, vector_type
from bcqfmt.compiled.intrinsics import intrinsic as plain_intrinsic

from .layout import WORDS

__all__ = ["CHUNK", "DIGITS", "WORDS", "codes", "load_sums", "multiply", "store_sums", "with_bias"]


CHUNK = 32 * WORDS  # columns
DIGITS = 3  # bytes of a number of x
_BYTES, _INTS, _FLOATS = (ir.VectorType(kind, n) for kind, n in ((ir.IntType(8), 16), (Emit.i32, 4), (Emit.f32, 4)))
_FUSE = ("contract",)
_Codes, _Sums = vector_type("Codes", _BYTES), vector_type("Sums", _FLOATS)


class _DotEmit(Emit):
    """Writes the IR of a call on vectors of 16 bytes."""

    def vector(self, argument: int, index: Any, offset: int, kind: Any) -> Any:
        """A vector from ``offset`` elements after ``index`` on; of one element, the element."""
        place = self.builder.add(index, ir.Constant(index.type, offset))
        return self.load(self.at(argument, place, kind), align=1 if kind is _BYTES else 4)

    def bytes_of(self, value: int) -> Any:
        """The same byte sixteen times."""
        return ir.Constant(_BYTES, [value] * 16)

    def shifted(self, vector: Any, left: int) -> Any:
        """Every byte, shifted to the left; to the right for a negative number."""
        shift = self.builder.shl if left > 0 else self.builder.lshr
        return shift(vector, self.bytes_of(abs(left))) if left else vector

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, fused where the machine can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)

    def numbers(self, argument: int, index: Any, per: int) -> Any:
        """Four numbers, one for each word, from ``per`` stored ones."""
        kind = self.f32 if per == 1 else ir.VectorType(self.f32, per)
        found = self.load(self.at(argument, index, kind))
        if per == 1:
            found = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), found, self.i32(0))
        return found if per == WORDS else self.shuffle(found, found, [0, 0, per - 1, per - 1])


_intrinsic = functools.partial(plain_intrinsic, emit=_DotEmit)


def _codes(
    planes: Any, at: Any, stride: Any, held: Any, place: Any, short: Any, bits: Any, table: Any, looked: Any
) -> Any:  # fmt: skip
    """Codes of 128 columns, eight vectors, from 16 bytes at ``planes[at]``, ``planes[at + stride]``, ... (``bits``).

    If ``short``, from ``held[place]``, ``held[place + 4]``, ... As signed bytes: codes of 8 bits are lowered by 128,
    those of one bit are 0 and -1, others are as they are; if ``looked``, what ``table`` (sixteen bytes) has for them.
    """
    count = bits.literal_value

    def write(emit: _DotEmit) -> Any:
        builder, found = emit.builder, []
        _, start, stride, _, other, short, *_ = emit.values
        pointer = builder.select(short, emit.at(3, other, emit.i32), emit.at(0, start, emit.i32))
        step = builder.select(short, ir.Constant(stride.type, WORDS), stride)
        for _ in range(count):
            found.append(emit.load(builder.bitcast(pointer, _BYTES.as_pointer())))
            pointer = builder.gep(pointer, [step])
        if count == 8:
            found[0] = builder.not_(found[0])
        width = 1 << (count - 1).bit_length()
        found = [emit.bytes_of(0)] * (width - count) + found
        laid = _interleaved(emit, found)
        columns: list[Any] = [None] * 8
        for column in range(8):
            vector, low = laid[column % width], column - column % width
            if width == 1:
                bit = builder.and_(vector, emit.bytes_of(1 << column))
                vector = builder.sext(builder.icmp_unsigned("!=", bit, emit.bytes_of(0)), _BYTES)
            elif width < 8:
                vector = builder.and_(emit.shifted(vector, -low), emit.bytes_of((1 << width) - 1))
            if looked.literal_value:
                entries = emit.load(emit.at(7, emit.i64(0), _BYTES), align=1)
                vector = emit.call("llvm.aarch64.neon.tbl1.v16i8", _BYTES, [entries, vector])
            columns[column] = vector
        return emit.pack(columns)

    return types.UniTuple(_Codes, 8), write


def _interleaved(emit: _DotEmit, planes: list[Any]) -> list[Any]:
    """n = 1, 2, 4 or 8 planes, most significant first -> n vectors of fields of n bits.

    Field f of a byte of vector c is the code of column f * n + c of the byte's eight.
    """
    width = 1
    laid = [planes]  # by column; of each the fields that have to be joined
    while len(laid[0]) > 1:
        upper = sum((1 << width) - 1 << at for at in range(width, 8, 2 * width))
        even, odd = [], []
        for fields in laid:
            pairs = list(zip(fields[::2], fields[1::2], strict=True))
            even.append([_select(emit, upper, emit.shifted(a, width), b) for a, b in pairs])
            odd.append([_select(emit, upper, a, emit.shifted(b, -width)) for a, b in pairs])
        laid, width = even + odd, 2 * width
    return [fields[0] for fields in laid]


def _select(emit: _DotEmit, mask: int, a: Any, b: Any) -> Any:
    """The bits of ``a`` where the mask has ones, of ``b`` elsewhere."""
    builder = emit.builder
    return builder.or_(builder.and_(a, emit.bytes_of(mask)), builder.and_(b, emit.bytes_of(255 - mask)))


def _sums_of_words(emit: _DotEmit, rows: list[list[Any]], x: Any, at: Any, starts: list[Any], small: bool) -> Any:
    """By row: sums of codes times each of the three bytes of x at ``x[at]``, 32 bits, by word.

    ``starts`` is added to those of the second and the third. ``small``: codes have at most four bits.
    """
    builder, shorts = emit.builder, ir.VectorType(ir.IntType(16), 16)
    direct = has_dot_products()
    sums: list[Any] = [[ir.Constant(_INTS, None), *starts] for _ in rows]
    near: list[Any] = [[ir.Constant(shorts, None)] * DIGITS for _ in rows]
    for k, digit in itertools.product(range(8), range(DIGITS)):
        bytes_ = emit.vector(x, at, (digit * 8 + k) * 16, _BYTES)
        for r, codes in enumerate(rows):  # independent chains of additions
            if direct:
                given = [sums[r][digit], codes[k], bytes_]
                sums[r][digit] = emit.call("llvm.aarch64.neon.sdot.v4i32.v16i8", _INTS, given)
                continue
            product = builder.mul(builder.sext(codes[k], shorts), builder.sext(bytes_, shorts))
            near[r][digit] = builder.add(near[r][digit], product)
            if k == 7 or not small:  # eight products of at most 15 * 128 fit 16 bits
                sums[r][digit] = builder.add(sums[r][digit], _in_fours(emit, near[r][digit]))
                near[r][digit] = ir.Constant(shorts, None)
    return sums


def _joined(emit: _DotEmit, digits: list[Any], small: bool) -> Any:
    """The sum of a word from those of its digits, as float32.

    ``small``: codes are in -8..7, so that it fits 32 bits: 32 * 8 * 127 * (2^16 + 2^8 + 1) < 2^31.
    """
    builder, eight = emit.builder, ir.Constant(_INTS, [8] * WORDS)
    upper = builder.add(builder.shl(digits[0], eight), digits[1])
    if small:
        return builder.sitofp(builder.add(builder.shl(upper, eight), digits[2]), _FLOATS)
    high, low = (builder.sitofp(one, _FLOATS) for one in (upper, digits[2]))
    return emit.fma(high, ir.Constant(_FLOATS, [256.0] * WORDS), low)


def _in_fours(emit: _DotEmit, shorts: Any) -> Any:
    """Sixteen 16-bit numbers, four neighbours added up to 32 bits."""
    halves = [emit.shuffle(shorts, shorts, list(range(i, 16, 2))) for i in (0, 1)]
    pairs = emit.builder.add(*(emit.builder.sext(half, ir.VectorType(emit.i32, 8)) for half in halves))
    return emit.builder.add(*(emit.shuffle(pairs, pairs, list(range(i, 8, 2))) for i in (0, 1)))


def _multiply(
    totals: Any, first: Any, second: Any, x: Any, starts: Any, factors: Any, piece: Any, numbers: Any, at: Any,
    gap: Any, bits: Any, per: Any,
) -> Any:  # fmt: skip
    """totals (one for each of two rows) + scale * (starts + codes * x).

    ``first``, ``second``: the codes of the rows. ``piece``: which 3 * 8 * 16 bytes of x, 2 * 4 sums in ``starts`` and
    factor and sum of x, 4 each, in ``factors``. Scales of the first row from ``numbers[at]``, ``per`` (a literal) of
    them, of the second ``gap`` later. ``bits`` (a literal) of a code.
    """

    def write(emit: _DotEmit) -> Any:
        builder, place, scales = emit.builder, emit.values[6], emit.values[8]
        at_x, at_start, at_factor = (
            builder.mul(place, ir.Constant(place.type, n)) for n in (8 * DIGITS * 16, 2 * WORDS, 2 * WORDS)
        )
        begin = [emit.vector(4, at_start, half * WORDS, _INTS) for half in range(2)]
        factor = emit.vector(5, at_factor, 0, _FLOATS)
        made, small = [], bits.literal_value <= 4
        found = _sums_of_words(emit, [emit.unpack(1), emit.unpack(2)], 3, at_x, begin, small)
        for total, digits in zip(emit.unpack(0), found, strict=True):
            whole = builder.fmul(_joined(emit, digits, small), factor)
            made.append(emit.fma(whole, emit.numbers(7, scales, per.literal_value), total))
            scales = builder.add(scales, emit.values[9])
        return emit.pack(made)

    return totals, write


def _with_bias(totals: Any, factors: Any, piece: Any, numbers: Any, at: Any, gap: Any, per: Any) -> Any:
    """totals + z * the sums of x; arguments as for ``multiply``."""

    def write(emit: _DotEmit) -> Any:
        builder, place = emit.builder, emit.values[4]
        sums = emit.vector(1, builder.mul(emit.values[2], ir.Constant(emit.values[2].type, 2 * WORDS)), WORDS, _FLOATS)
        made = []
        for total in emit.unpack(0):
            made.append(emit.fma(emit.numbers(3, place, per.literal_value), sums, total))
            place = builder.add(place, emit.values[5])
        return emit.pack(made)

    return totals, write


def _load_sums(array: Any, at: Any) -> Any:
    """Two vectors of four floats from ``array[at]`` on."""
    return types.UniTuple(_Sums, 2), lambda emit: emit.pack(
        [emit.vector(0, emit.values[1], WORDS * i, _FLOATS) for i in range(2)]
    )


def _store_sums(array: Any, at: Any, sums: Any) -> Any:
    """The inverse of ``load_sums``."""

    def write(emit: _DotEmit) -> None:
        for i, vector in enumerate(emit.unpack(2)):
            place = emit.builder.add(emit.values[1], ir.Constant(emit.values[1].type, WORDS * i))
            emit.store(vector, emit.at(0, place, _FLOATS))

    return None, write


codes, multiply, with_bias = map(_intrinsic, (_codes, _multiply, _with_bias))
load_sums, store_sums = map(_intrinsic, (_load_sums, _store_sums))
