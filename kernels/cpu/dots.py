"""Products by dot products of bytes, straight from the canonical planes: a tile of rows, 128 columns of them at a time.

x becomes whole numbers of 24 bits times a power of two for every 32 columns: rounded as float32 rounds the largest of
the 32. Each is split into three signed bytes. Sixteen bytes of every plane, 128 columns of a row, become
sixteen codes in each of eight vectors; vector k has the columns 8j + k. A dot product adds four neighbouring bytes, so
lane w of its result belongs to word w of the four, and after eight vectors it is the exact sum of the word's 32
columns. The numbers of the groups then weigh these sums in float32. Where registers are longer, a vector has sixteen
bytes of several rows side by side. How many, how bytes are multiplied and looked up, and with that the sign of codes,
depends on the machine (`machine.Dot`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from bcqfmt.compiled.intrinsics import Emit, ir, types, vector_type
from bcqfmt.compiled.intrinsics import intrinsic as plain_intrinsic

from .layout import WORDS
from .machine import dot

__all__ = ["CHUNK", "DIGITS", "WORDS", "centre", "codes", "load_sums", "multiply", "store_sums", "with_bias"]


CHUNK = 32 * WORDS  # columns
DIGITS = 3  # bytes of a number of x
_DOT = dot()
_ROWS, _VECTORS = _DOT.rows, _DOT.vectors
_ROW = ir.VectorType(ir.IntType(8), 16)  # of one row
_BYTES, _SHORTS, _INTS, _FLOATS = (
    ir.VectorType(kind, n * _ROWS)
    for kind, n in ((ir.IntType(8), 16), (ir.IntType(16), 8), (Emit.i32, WORDS), (Emit.f32, WORDS))
)
_LOOK_UP = {1: "ssse3.pshuf.b.128", 2: "avx2.pshuf.b", 4: "avx512.pshuf.b.512"}  # of x86, by the rows of a vector
_PAIRS = {1: "ssse3.pmadd.ub.sw.128", 2: "avx2.pmadd.ub.sw", 4: "avx512.pmaddubs.w.512"}  # bytes to 16 bits
_WIDEN = {1: "sse2.pmadd.wd", 2: "avx2.pmadd.wd", 4: "avx512.pmaddw.d.512"}  # 16 bits to 32
_Codes, _Sums = vector_type("Codes", _BYTES), vector_type("Sums", _FLOATS)


def centre(bits: int, by_plane: bool, looked: bool) -> int:
    """What codes are lowered by when they are multiplied; not what they are lowered by when they are read."""
    if by_plane or bits == 1:
        return 0
    if looked or bits == 8:
        return 128 if _DOT.unsigned else 0
    return 1 << (bits - 1)


class _DotEmit(Emit):
    """Writes the IR of a call on vectors of 16 bytes of each row."""

    def vector(self, argument: int, index: Any, offset: int, kind: Any) -> Any:
        """What 16 bytes of a row are multiplied with, from ``offset`` elements after ``index``: for all rows alike."""
        place, count = self.builder.add(index, ir.Constant(index.type, offset)), kind.count // _ROWS
        pointer = self.at(argument, place, ir.VectorType(kind.element, count))
        found = self.load(pointer, align=1 if kind is _BYTES else 4)
        return self.repeated(found)

    def repeated(self, vector: Any) -> Any:
        """The vector of a row, for every row."""
        return self.shuffle(vector, vector, list(range(vector.type.count)) * _ROWS) if _ROWS > 1 else vector

    def side_by_side(self, vectors: list[Any]) -> Any:
        """Those of all rows as one."""
        while len(vectors) > 1:
            every = list(range(2 * vectors[0].type.count))
            vectors = [self.shuffle(a, b, every) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def bytes_of(self, value: int) -> Any:
        """The same byte everywhere."""
        return ir.Constant(_BYTES, [value] * _BYTES.count)

    def shifted(self, vector: Any, left: int) -> Any:
        """Every byte, shifted to the left; to the right for a negative number."""
        shift = self.builder.shl if left > 0 else self.builder.lshr
        return shift(vector, self.bytes_of(abs(left))) if left else vector

    def numbers(self, argument: int, index: Any, per: int) -> Any:
        """Four numbers of each row, one for each word, from ``per`` stored ones of each."""
        count = _ROWS * per
        found = self.load(self.at(argument, index, self.f32 if count == 1 else ir.VectorType(self.f32, count)))
        if count == 1:
            found = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), found, self.i32(0))
        lanes = [row * per + word * per // WORDS for row in range(_ROWS) for word in range(WORDS)]
        return found if per == WORDS else self.shuffle(found, found, lanes)

    def looked_up(self, table: Any, vector: Any) -> Any:
        """The bytes of ``table``, sixteen for each row, that those of ``vector`` name."""
        if _DOT.unsigned:
            return self.call("llvm.x86." + _LOOK_UP[_ROWS], _BYTES, [table, vector])
        return self.call("llvm.aarch64.neon.tbl1.v16i8", _BYTES, [table, vector])


_intrinsic = functools.partial(plain_intrinsic, emit=_DotEmit)


def _parts(bits: int, looked: bool) -> int:
    """Vectors for a vector of codes: two, their low and high four bits, where pairs of products would overflow."""
    return 2 if _DOT.kind == "pmaddubsw" and (looked or bits == 8) else 1


def _codes(
    planes: Any, at: Any, stride: Any, words: Any, count: Any, held: Any, short: Any, bits: Any, table: Any,
    looked: Any,
) -> Any:  # fmt: skip
    """Codes of 128 columns of a tile of rows, of which there are ``count``: those of its first vectors, then of others.

    From 16 bytes at ``planes[at]``, ``planes[at + stride]``, ... (``bits``), of the next row ``words`` later. If
    ``short``, from ``held``, four words of every plane of every row. Where bytes of codes have no sign
    (``Dot.unsigned``), the codes themselves; elsewhere codes of 8 bits less 128, and for those of one bit 0 and -1. If
    ``looked``, the entries of ``table`` (sixteen bytes) for these codes, plus 128 where bytes have no sign. Of two
    `_parts` each vector is two, one after the other.
    """
    q, by_table = bits.literal_value, bool(looked.literal_value)
    parts = _parts(q, by_table)

    def write(emit: _DotEmit) -> Any:
        builder, made = emit.builder, []
        _, start, stride, words, count, _, short, *_ = emit.values
        begin, other = emit.at(0, start, emit.i32), emit.at(5, ir.Constant(start.type, 0), emit.i32)
        step = builder.select(short, ir.Constant(stride.type, WORDS), stride)
        last = builder.sub(count, ir.Constant(count.type, 1))
        tables = _tables(emit, parts) if by_table else []
        for v in range(_VECTORS):
            pointers = []
            for k in range(v * _ROWS, v * _ROWS + _ROWS):
                row = ir.Constant(count.type, k)
                row = builder.select(builder.icmp_unsigned("<", row, last), row, last) if k else row
                here = builder.gep(begin, [builder.mul(row, words)])
                pointers.append(builder.select(short, builder.gep(other, [emit.i64(k * q * WORDS)]), here))
            found = []
            for _ in range(q):
                found.append(
                    emit.side_by_side([emit.load(builder.bitcast(place, _ROW.as_pointer())) for place in pointers])
                )
                pointers = [builder.gep(place, [step]) for place in pointers]
            if q == 8 and not _DOT.unsigned:
                found[0] = builder.not_(found[0])
            for vector in _columns(emit, found):
                if by_table:
                    made += [emit.looked_up(table, vector) for table in tables]
                elif parts == 2:
                    made += [builder.and_(vector, emit.bytes_of(15)), emit.shifted(vector, -4)]
                else:
                    made.append(vector)
        return emit.pack(made)

    return types.UniTuple(_Codes, 8 * parts * _VECTORS), write


def _tables(emit: _DotEmit, parts: int) -> list[Any]:
    """The table of ``codes``, for every row; its low and its high four bits for two ``parts``."""
    found = emit.repeated(emit.load(emit.at(8, emit.i64(0), _ROW), align=1))
    if _DOT.unsigned:
        found = emit.builder.xor(found, emit.bytes_of(128))
    if parts == 1:
        return [found]
    return [emit.builder.and_(found, emit.bytes_of(15)), emit.shifted(found, -4)]


def _columns(emit: _DotEmit, planes: list[Any]) -> list[Any]:
    """Planes, most significant first -> eight vectors of codes."""
    builder, width = emit.builder, 1 << (len(planes) - 1).bit_length()
    laid = _interleaved(emit, [emit.bytes_of(0)] * (width - len(planes)) + planes)
    found = []
    for column in range(8):
        vector, low = laid[column % width], column - column % width
        if width == 1 and not _DOT.unsigned:
            bit = builder.and_(vector, emit.bytes_of(1 << column))
            vector = builder.sext(builder.icmp_unsigned("!=", bit, emit.bytes_of(0)), _BYTES)
        elif width < 8:
            vector = builder.and_(emit.shifted(vector, -low), emit.bytes_of((1 << width) - 1))
        found.append(vector)
    return found


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


def _sums_of_words(emit: _DotEmit, rows: list[list[Any]], x: Any, at: Any, starts: list[Any], bits: int) -> Any:
    """By vector of rows: sums of codes times each of the three bytes of x at ``x[at]``, 32 bits, by word.

    ``starts`` is added to those of the second and the third. ``bits`` of a code.
    """
    sums: list[Any] = [[ir.Constant(_INTS, None), *starts] for _ in rows]
    near: dict[tuple[int, int, int], Any] = {}
    parts = len(rows[0]) // 8
    # How many products, or pairs of them (`pmaddubsw`), can be added up in 16 bits.
    fitting = 8 if bits <= 4 or parts == 2 else 1 << max(7 - bits, 0)
    for k, digit in itertools.product(range(8), range(DIGITS)):
        bytes_ = emit.vector(x, at, (digit * 8 + k) * 16, _BYTES)
        for (r, codes), part in itertools.product(enumerate(rows), range(parts)):  # independent chains of additions
            code, key = codes[k * parts + part], (r, digit, part)
            if _DOT.kind in ("sdot", "vpdpbusd"):
                sums[r][digit] = _dot_product(emit, sums[r][digit], code, bytes_)
                continue
            product = _products(emit, code, bytes_)
            near[key] = emit.builder.add(near[key], product) if key in near else product
            if k % fitting == fitting - 1:
                four = _in_fours(emit, near.pop(key))
                four = emit.builder.shl(four, ir.Constant(_INTS, [4] * _INTS.count)) if part else four
                sums[r][digit] = emit.builder.add(sums[r][digit], four)
    return sums


def _dot_product(emit: _DotEmit, sums: Any, codes: Any, x: Any) -> Any:
    """sums + products, four by four."""
    if _DOT.kind == "sdot":
        return emit.call("llvm.aarch64.neon.sdot.v4i32.v16i8", _INTS, [sums, codes, x])
    words = [emit.builder.bitcast(vector, _INTS) for vector in (codes, x)]
    return emit.call(f"llvm.x86.avx512.vpdpbusd.{128 * _ROWS}", _INTS, [sums, *words])


def _products(emit: _DotEmit, codes: Any, x: Any) -> Any:
    """Products of 16 bits, on x86 two by two."""
    if _DOT.kind == "pmaddubsw":
        return emit.call("llvm.x86." + _PAIRS[_ROWS], _SHORTS, [codes, x])
    shorts = ir.VectorType(ir.IntType(16), _BYTES.count)
    return emit.builder.mul(*(emit.builder.sext(vector, shorts) for vector in (codes, x)))


def _in_fours(emit: _DotEmit, shorts: Any) -> Any:
    """Products as `_products` gives them, four by four in 32 bits."""
    if _DOT.kind == "pmaddubsw":
        return emit.call("llvm.x86." + _WIDEN[_ROWS], _INTS, [shorts, ir.Constant(_SHORTS, [1] * _SHORTS.count)])
    halves = [emit.shuffle(shorts, shorts, list(range(i, 16, 2))) for i in (0, 1)]
    pairs = emit.builder.add(*(emit.builder.sext(half, ir.VectorType(emit.i32, 8)) for half in halves))
    return emit.builder.add(*(emit.shuffle(pairs, pairs, list(range(i, 8, 2))) for i in (0, 1)))


def _joined(emit: _DotEmit, digits: list[Any], small: bool) -> Any:
    """The sum of a word from those of its digits, as float32.

    ``small``: codes are in -8..7, so that it fits 32 bits: 32 * 8 * 127 * (2^16 + 2^8 + 1) < 2^31.
    """
    builder, eight = emit.builder, ir.Constant(_INTS, [8] * _INTS.count)
    upper = builder.add(builder.shl(digits[0], eight), digits[1])
    if small:
        return builder.sitofp(builder.add(builder.shl(upper, eight), digits[2]), _FLOATS)
    high, low = (builder.sitofp(one, _FLOATS) for one in (upper, digits[2]))
    return emit.fma(high, ir.Constant(_FLOATS, [256.0] * _FLOATS.count), low)


def _multiply(
    totals: Any, codes: Any, x: Any, starts: Any, factors: Any, piece: Any, numbers: Any, at: Any, gap: Any,
    bits: Any, per: Any,
) -> Any:  # fmt: skip
    """totals (one for each vector of rows) + scale * (starts + codes * x).

    ``piece``: which 3 * 8 * 16 bytes of x, 2 * 4 sums in ``starts`` and factor and sum of x, 4 each, in ``factors``.
    Scales of the first rows from ``numbers[at]``, ``per`` (a literal) of each, of the next ``gap`` later. ``bits`` (a
    literal) of a code.
    """

    def write(emit: _DotEmit) -> Any:
        builder, place, scales = emit.builder, emit.values[5], emit.values[7]
        at_x, at_start, at_factor = (
            builder.mul(place, ir.Constant(place.type, n)) for n in (8 * DIGITS * 16, 2 * WORDS, 2 * WORDS)
        )
        begin = [emit.vector(3, at_start, half * WORDS, _INTS) for half in range(2)]
        factor = emit.vector(4, at_factor, 0, _FLOATS)
        made, small, vectors = [], bits.literal_value <= 4, emit.unpack(1)
        size = len(vectors) // _VECTORS
        rows = [vectors[i : i + size] for i in range(0, len(vectors), size)]
        found = _sums_of_words(emit, rows, 2, at_x, begin, bits.literal_value)
        for total, digits in zip(emit.unpack(0), found, strict=True):
            whole = builder.fmul(_joined(emit, digits, small), factor)
            made.append(emit.fma(whole, emit.numbers(6, scales, per.literal_value), total))
            scales = builder.add(scales, emit.values[8])
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
    """Four floats of every row of a tile from ``array[at]`` on."""

    def write(emit: _DotEmit) -> Any:
        places = [emit.builder.add(emit.values[1], emit.values[1].type(_FLOATS.count * i)) for i in range(_VECTORS)]
        return emit.pack([emit.load(emit.at(0, place, _FLOATS)) for place in places])

    return types.UniTuple(_Sums, _VECTORS), write


def _store_sums(array: Any, at: Any, sums: Any) -> Any:
    """The inverse of ``load_sums``."""

    def write(emit: _DotEmit) -> None:
        for i, vector in enumerate(emit.unpack(2)):
            place = emit.builder.add(emit.values[1], emit.values[1].type(_FLOATS.count * i))
            emit.store(vector, emit.at(0, place, _FLOATS))

    return None, write


codes, multiply, with_bias = map(_intrinsic, (_codes, _multiply, _with_bias))
load_sums, store_sums = map(_intrinsic, (_load_sums, _store_sums))
