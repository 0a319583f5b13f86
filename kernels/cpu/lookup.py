"""Products by table: the sums of four inputs under all signs, looked up by the bits of sixteen rows at once.

A table of four columns has 16 entries, one for every pattern of four bits. With AVX-512 it fits one register, and one
"permute" looks up 16 rows in it. One word of a plane, for 16 rows, takes eight look-ups and eight additions. The
look-up is the only operation here that depends on the machine.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.compiled.intrinsics import ir

from .lanes import LANES, LaneEmit, intrinsic
from .machine import target


def lookup(emit: LaneEmit, entries: Any, pointer: Any, index: Any) -> Any:
    """``table[index & 15]`` in every lane, for a table in a register (``entries``) and in memory (``pointer``)."""
    builder, how = emit.builder, target()
    if how == "avx512":
        return emit.call("llvm.x86.avx512.permvar.sf.512", emit.floats, [entries, index])
    if how == "avx2":
        half, words = ir.VectorType(emit.f32, 8), ir.VectorType(emit.i32, 8)
        low, high = (emit.shuffle(entries, entries, list(range(i, i + 8))) for i in (0, 8))
        found = []
        for start in (0, 8):
            piece = emit.shuffle(index, index, list(range(start, start + 8)))
            upper = builder.icmp_signed("<", builder.shl(piece, ir.Constant(words, [28] * 8)), ir.Constant(words, None))
            a, b = (emit.call("llvm.x86.avx2.permps", half, [entry, piece]) for entry in (low, high))
            found.append(builder.select(upper, b, a))
        return emit.shuffle(found[0], found[1], list(range(LANES)))
    result = ir.Constant(emit.floats, ir.Undefined)
    first = builder.bitcast(pointer, emit.f32.as_pointer())
    for lane in range(LANES):
        entry = builder.and_(builder.extract_element(index, emit.i32(lane)), emit.i32(15))
        result = builder.insert_element(result, emit.load(builder.gep(first, [entry])), emit.i32(lane))
    return result


def _mirrored(emit: LaneEmit, word: Any) -> Any:
    """A word in which the lower three bits of a nibble are inverted where its upper bit is set."""
    builder = emit.builder
    upper = builder.and_(word, ir.Constant(emit.words, [0x88888888] * LANES))
    return builder.xor(word, builder.sub(upper, builder.lshr(upper, ir.Constant(emit.words, [3] * LANES))))


def _lookup_signed(emit: LaneEmit, entries: Any, pointer: Any, word: Any, nibble: int) -> Any:
    """``table[nibble of word]``, for a table whose entry 15 - v is minus entry v.

    AVX2 permutes eight entries: half the table, and for the other half (of a mirrored word) the sign.
    """
    builder = emit.builder
    shift = ir.Constant(emit.words, [4 * nibble] * LANES)
    index = builder.lshr(word, shift) if nibble else word
    if target() != "avx2":
        return lookup(emit, entries, pointer, index)
    low = emit.shuffle(entries, entries, list(range(8)))
    half = ir.VectorType(emit.f32, 8)
    found = [
        emit.call("llvm.x86.avx2.permps", half, [low, emit.shuffle(index, index, list(range(i, i + 8)))])
        for i in (0, 8)
    ]
    magnitude = builder.bitcast(emit.shuffle(found[0], found[1], list(range(LANES))), emit.words)
    moved = builder.shl(word, ir.Constant(emit.words, [28 - 4 * nibble] * LANES))
    sign = builder.and_(moved, ir.Constant(emit.words, [0x80000000] * LANES))
    return builder.bitcast(builder.xor(magnitude, sign), emit.floats)


def _table(x: Any, at: Any, tables: Any, to: Any) -> Any:
    """The 16 sums +-x0 +-x1 +-x2 +-x3 of four floats from ``x[at]`` on; bit b of an entry's index set: plus x_b."""

    def write(emit: LaneEmit) -> None:
        total = emit.zero
        for b in range(4):
            number = emit.load(emit.at(0, emit.plus(emit.values[1], b), emit.f32))
            signs = ir.Constant(emit.floats, [1.0 if entry >> b & 1 else -1.0 for entry in range(LANES)])
            total = emit.fma(emit.splat(number), signs, total)
        emit.store(total, emit.at(2, emit.values[3], emit.floats))

    return None, write


def _lookups(
    sums: Any, words: Any, at: Any, shift: Any, tables: Any, to: Any, stride: Any, bits: Any, count: Any
) -> Any:
    """Add ``count`` look-ups to every entry of ``sums``, a tuple: ``bits`` planes of vector 0, then of vector 1 ...

    ``words[at + 16 * i]`` on: the words of plane i, one per lane, of which the lowest ``shift`` bits are skipped. Then
    nibble j is the index into the table at ``tables[to + stride * b + 16 * j]`` of vector b, j = 0 .. count - 1.
    ``bits`` and ``count`` are literals.
    """
    q = bits.literal_value

    def write(emit: LaneEmit) -> Any:
        totals, builder = emit.unpack(0), emit.builder
        planes = emit.vectors(1, emit.values[2], q, emit.words)
        skipped = emit.splat(builder.trunc(emit.values[3], emit.i32))
        planes = [builder.lshr(plane, skipped) for plane in planes]
        if target() == "avx2":
            planes = [_mirrored(emit, plane) for plane in planes]
        starts = [emit.values[5]]
        while len(starts) * q < len(totals):
            starts.append(builder.add(starts[-1], emit.values[6]))
        waiting: list[Any] = [None] * len(totals)
        for j in range(count.literal_value):
            for b, start in enumerate(starts):
                pointer = emit.at(4, emit.plus(start, LANES * j), emit.floats)
                entries = emit.load(pointer)
                for k, plane in enumerate(planes, b * q):
                    found = _lookup_signed(emit, entries, pointer, plane, j)
                    if waiting[k] is None:
                        waiting[k] = found
                    else:  # in pairs: half as long a chain of additions
                        totals[k] = builder.fadd(totals[k], builder.fadd(waiting[k], found))
                        waiting[k] = None
        return emit.pack(totals)

    return sums, write


def _flush(totals: Any, sums: Any, numbers: Any, at: Any, x: Any, to: Any, stride: Any) -> Any:
    """totals[b] + scale * (sums of vector b combined, plane 0 weighing most) + z * x[to + stride * b].

    The group's numbers from ``numbers[at]`` on: scale and z, sixteen each.
    """
    q = sums.count // totals.count

    def write(emit: LaneEmit) -> Any:
        scale, z = emit.vectors(2, emit.values[3], 2)
        pieces, made = emit.unpack(1), _with_bias(emit, z)
        for b, total in enumerate(made):
            combined, *rest = pieces[b * q : b * q + q]
            for piece in rest:
                combined = emit.fma(combined, ir.Constant(emit.floats, [2.0] * LANES), piece)
            made[b] = emit.fma(combined, scale, total)
        return emit.pack(made)

    return totals, write


def _flush_planes(totals: Any, sums: Any, numbers: Any, at: Any, x: Any, to: Any, stride: Any) -> Any:
    """Like ``flush`` with a scale for every plane: alpha_0, alpha_1, ..., z."""
    q = sums.count // totals.count

    def write(emit: LaneEmit) -> Any:
        *alpha, z = emit.vectors(2, emit.values[3], q + 1)
        made = _with_bias(emit, z)
        for k, piece in enumerate(emit.unpack(1)):
            made[k // q] = emit.fma(piece, alpha[k % q], made[k // q])
        return emit.pack(made)

    return totals, write


def _with_bias(emit: LaneEmit, z: Any) -> list[Any]:
    """totals[b] + z * x[to + stride * b]."""
    made, place = emit.unpack(0), emit.values[5]
    for b, total in enumerate(made):
        made[b] = emit.fma(emit.splat(emit.load(emit.at(4, place, emit.f32))), z, total)
        place = emit.builder.add(place, emit.values[6])
    return made


table, lookups = map(intrinsic, (_table, _lookups))
flush, flush_planes = map(intrinsic, (_flush, _flush_planes))
