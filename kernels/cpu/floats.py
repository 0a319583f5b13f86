"""F32 values by float32 arithmetic, for the weights where that gives the bits of the normative decoder.

Affine: a scale that is an F32 number times an integer of 9 bits is exact in binary64, so that one product in float32
rounds as the format does. Offset: where scales and offsets are multiples of 2^-24 that are not too large, the product
is exact in float32 and the sum exact in binary64, and again one rounding is left. All block types of GGUF that are not
tables are such weights, and so are GPTQ's, AWQ's and compressed-tensors'.

Four words of every plane become 128 codes at once: digits of a bit's address change places, as in the word packers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.loops import compiled, stamp_of
from bcqfmt.kernels.operands import OperandSegment

from . import lanes, machine
from .lanes import LANES, LaneEmit, claim, intrinsic, ir, types
from .machine import target

WORDS = 4  # of a plane at once
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FOUR = ir.VectorType(LaneEmit.i32, WORDS)
_ABOVE, _PATTERN = 2.0**23, 0x4B000000  # its last digits are units: the pattern plus a code is that of the sum
_STEP, _LIMIT = 2.0**-24, 2.0**27
HELD = 128  # words of a plane that are copied together
_0, _1, _4, _8, _16, _32, _HELD = (np.uint64(i) for i in (0, 1, 4, 8, 16, 32, HELD))


def fits(segment: OperandSegment) -> bool:
    """Whether the values of a segment are those of float32 arithmetic; groups of 16, whole words."""
    if segment.formula not in ("affine", "offset") or segment.first.dtype != np.float32:
        return False
    if segment.group_size % LANES or segment.width % LANES or segment.width < 32 * WORDS:
        return False
    if segment.formula == "affine":
        whole = segment.second == np.rint(segment.second)
        return bool(np.isfinite(segment.first).all() and whole.all() and (np.abs(segment.second) <= 256).all())
    if segment.second.dtype != np.float32:
        return False
    first, second = segment.first.astype(np.float64), segment.second.astype(np.float64)
    small = (np.abs(first) < _LIMIT / (1 << segment.bits)).all() and (np.abs(second) < _LIMIT).all()
    if not small:  # or not finite
        return False
    short = segment.first.view(np.uint32) & np.uint32((1 << segment.bits) - 1) == 0  # times a code: still 24 bits
    return bool(short.all() and all((number / _STEP == np.rint(number / _STEP)).all() for number in (first, second)))


def _unpack(bits: Any, planes: Any, at: Any, plane: Any, codes: Any, to: Any) -> Any:
    """``codes[to + j]`` = the code whose bits are bit j of the four words at ``at + i * plane``, i = 0 the highest."""
    q = bits.literal_value

    def write(emit: LaneEmit) -> None:
        builder = emit.builder

        def number(value: int) -> Any:
            return ir.Constant(_FOUR, [value] * WORDS)

        empty = number(0)
        rows = [empty] * (8 if q > 4 else 4)  # row t: bit t of all codes
        for i in range(q):
            index = builder.add(emit.values[2], builder.mul(emit.values[3], emit.values[3].type(i)))
            rows[q - 1 - i] = emit.load(emit.at(1, index, _FOUR))
        for digit, mask in ((0, 0x55555555), (1, 0x33333333), (2, 0x0F0F0F0F)):
            by = 1 << digit
            for x, y in [(x, x | by) for x in range(len(rows)) if not x & by and by < len(rows)]:
                right, left = builder.lshr(rows[x], number(by)), builder.shl(rows[y], number(by))
                rows[y] = builder.or_(builder.and_(right, number(mask)), builder.and_(rows[y], number(mask << by)))
                rows[x] = builder.or_(builder.and_(left, number(mask << by)), builder.and_(rows[x], number(mask)))
        if len(rows) == 4:  # two codes in a byte, the high one four codes further
            high = [builder.lshr(row, number(4)) for row in rows]
            rows = [builder.and_(row, number(0x0F0F0F0F)) for row in rows + high]
        runs = [[builder.bitcast(row, _BYTES)] for row in rows]  # byte m of run r: code 8m + r
        for unit in (1, 2, 4):
            runs = [_zipped(emit, runs[r], runs[r + 1], unit) for r in range(0, len(runs), 2)]
        for i, vector in enumerate(runs[0]):
            emit.store(vector, emit.at(4, emit.plus(emit.values[5], LANES * i), _BYTES), align=1)

    return None, write


def _zipped(emit: LaneEmit, left: list[Any], right: list[Any], unit: int) -> list[Any]:
    """Bytes of two runs by turns, ``unit`` of them at a time."""
    order = [side + k + i for k in range(0, LANES, unit) for side in (0, LANES) for i in range(unit)]
    halves = order[:LANES], order[LANES:]
    return [emit.shuffle(a, b, half) for a, b in zip(left, right, strict=True) for half in halves]


def _above(emit: LaneEmit, codes: Any) -> Any:
    """``_ABOVE`` plus each of sixteen codes."""
    if target() != "neon":
        words = emit.builder.zext(codes, emit.words)
        return emit.builder.bitcast(emit.builder.or_(words, ir.Constant(emit.words, [_PATTERN] * LANES)), emit.floats)
    # upper bytes beside the codes, twice: LLVM would look each byte up, by indices that it loads every time
    runs = [codes]
    for size, upper in ((8, 0), (16, _PATTERN >> 16)):
        kind = ir.VectorType(ir.IntType(size), 128 // size)
        low = [i for k in range(64 // size) for i in (k, 128 // size + k)]
        high, above = [i + 64 // size for i in low], ir.Constant(kind, [upper] * kind.count)
        runs = [emit.shuffle(emit.builder.bitcast(run, kind), above, order) for run in runs for order in (low, high)]
    quarters = [emit.builder.bitcast(run, ir.VectorType(emit.f32, 4)) for run in runs]
    a, b = (emit.shuffle(quarters[i], quarters[i + 1], list(range(8))) for i in (0, 2))
    return emit.shuffle(a, b, list(range(LANES)))


def _values(offset: Any, codes: Any, at: Any, scale: Any, zero: Any, out: Any, to: Any) -> Any:
    """Sixteen values: ``scale * (code - zero)``, or ``scale * code + zero``, nothing fused."""

    def write(emit: LaneEmit) -> None:
        builder = emit.builder
        above = _above(emit, emit.load(emit.at(1, emit.values[2], _BYTES), align=1))
        s, z = emit.values[3:5]
        if offset.literal_value:
            code = builder.fsub(above, ir.Constant(emit.floats, [_ABOVE] * LANES))
            result = builder.fadd(builder.fmul(code, emit.splat(s)), emit.splat(z))
        else:
            result = builder.fmul(emit.splat(s), builder.fsub(above, emit.splat(builder.fadd(z, emit.f32(_ABOVE)))))
        emit.store(result, emit.at(5, emit.values[6], emit.floats))

    return None, write


unpack, values = map(intrinsic, (_unpack, _values))


@functools.cache
def float_kernel(bits: int, offset: bool) -> Any:
    """The loop over rows of one segment of ``bits`` planes; ``offset``: which of the two formulas.

    Arguments: counter uint64[1]; plan uint64: rows of the weight, words of a row of a plane, width, group size, groups,
    first row, rows of the result, its columns, first column of the segment in it; planes uint32, scale and zero
    float32, out float32, all flat; codes uint8 (words * 32) and some words of each plane uint32 (bits * ``HELD``), of
    the thread's own.
    """
    stamp, added = stamp_of(intrinsics, lanes, machine), int(offset)
    copied = bits > 4  # planes are often a power of two apart, and no cache holds lines of more than four of them

    def loop(counter: Any, plan: Any, planes: Any, scale: Any, zero: Any, out: Any, codes: Any, held: Any) -> None:
        rows, words, width, size, groups = plan[0], plan[1], plan[2], plan[3], plan[4]
        first_row, count, columns, start = plan[5], plan[6], plan[7], plan[8]
        while stamp:
            top = claim(counter) * _8  # eight rows at a time
            if top >= count:
                break
            for o in range(top, min(top + _8, count)):
                r = first_row + o
                at, plane = r * words, rows * words
                for w in range(_0, _0 if copied else words, _4):
                    base = min(w, words - _4)  # the last four overlap those before
                    unpack(bits, planes, at + base, plane, codes, base * _32)
                for w in range(_0, words if copied else _0, _HELD):
                    begin = min(w, words - _4)
                    some = min(_HELD, words - begin)
                    for i in range(bits):
                        row, other = held[i * HELD :][:some], planes[at + begin + i * plane :][:some]
                        for k in range(row.size):
                            row[k] = other[k]
                    for k in range(_0, some, _4):
                        base = min(k, some - _4)
                        unpack(bits, held, base, _HELD, codes, (begin + base) * _32)
                j, number, to = _0, r * groups, o * columns + start
                while j < width:  # not a range with steps: its length would be a division for every group
                    end = min(j + size, width)
                    s, z = scale[number], zero[number]
                    while j + _16 < end:  # most groups have 32 columns or more
                        values(added, codes, j, s, z, out, to + j)
                        values(added, codes, j + _16, s, z, out, to + j + _16)
                        j += _32
                    if j < end:
                        values(added, codes, j, s, z, out, to + j)
                        j += _16
                    number += _1

    words, floats = (types.Array(one, 1, "C", readonly=True) for one in (types.uint32, types.float32))
    return compiled(
        loop, types.void, types.uint64[::1], types.uint64[::1], words, floats, floats, types.float32[::1],
        types.uint8[::1], types.uint32[::1],
    )  # fmt: skip
