"""The normative decoder, compiled: planes and numbers of a segment to values, bit for bit those of `weight.decode`.

The value of an element depends on its code and its group alone. So where a group has more elements than there are
codes, all values of the group are computed once (in binary64, in the order of section 8, rounded once) and looked up by
code; sixteen at a time while a code has at most four bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.compiled import intrinsics, rounding
from bcqfmt.compiled.loops import compiled, inner, stamp_of
from bcqfmt.compiled.rounding import pattern, pattern64, rounded

from . import lanes, lookup, machine
from .lanes import LANES, LaneEmit, claim, intrinsic, ir, types

FORMULAS = {"affine": 0, "float-zero": 1, "offset": 2, "bcq": 3, "table": 4}
LOGICAL = {"F16": 0, "BF16": 1, "F32": 2}
PATTERNS: dict[str, Any] = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32, "F64": np.uint64}

_CODES = np.arange(256, dtype=np.float64)
_0, _1, _8, _16, _32 = (np.uint64(i) for i in (0, 1, 8, 16, 32))


def _spread(planes: Any, at: Any, codes: Any, to: Any) -> Any:
    """``codes[to + j] = codes[to + j] << 1 | bit j of planes[at]`` for j = 0..31."""

    def write(emit: LaneEmit) -> None:
        builder = emit.builder
        bytes_ = ir.VectorType(ir.IntType(8), 32)
        word = emit.load(emit.at(0, emit.values[1], emit.i32))
        bits = builder.zext(builder.bitcast(word, ir.VectorType(ir.IntType(1), 32)), bytes_)
        pointer = emit.at(2, emit.values[3], bytes_)
        before = emit.load(pointer, align=1)
        emit.store(builder.or_(builder.add(before, before), bits), pointer, align=1)

    return None, write


def _pick(codes: Any, at: Any, values: Any, first: Any, out: Any, to: Any) -> Any:
    """``out[to + j] = values[first + codes[at + j]]`` for j = 0..15, codes below 16.

    Sixteen values are read, patterns of 32 bits; out has 16 or 32.
    """

    def write(emit: LaneEmit) -> None:
        builder = emit.builder
        pointer = emit.at(0, emit.values[1], ir.VectorType(ir.IntType(8), LANES))
        found = emit.load(pointer, align=1)
        table = emit.at(2, emit.values[3], emit.floats)
        index = builder.zext(found, emit.words)
        picked = builder.bitcast(lookup.lookup(emit, emit.load(table), table, index), emit.words)
        if out.dtype.bitwidth == 16:
            picked = builder.trunc(picked, ir.VectorType(ir.IntType(16), LANES))
        emit.store(picked, emit.at(4, emit.values[5], picked.type), align=out.dtype.bitwidth // 8)

    return None, write


spread, pick = map(intrinsic, (_spread, _pick))


@inner
def value(code: Any, formula: Any, logical: Any, s: Any, zero: Any) -> Any:
    """E of a code for the formulas with a scale."""
    if formula == 2:
        return s * code + zero
    return s * (rounded(code - zero, logical) if formula == 1 else code - zero)


@inner
def plane_sum(code: Any, bits: Any, alpha: Any, at: Any, plane: Any, z: Any) -> Any:
    """E of a code for bcq: z and then +-alpha_i, plane 0 first."""
    for i in range(bits):
        a = alpha[at + i * plane]
        z = z + a if code >> (bits - _1 - i) & _1 else z - a
    return z


@inner
def code_value(
    code: Any, bits: Any, formula: Any, logical: Any, first: Any, second: Any, at: Any, plane: Any
) -> Any:  # fmt: skip
    """E of a code of the group ``at``, for any formula."""
    if formula == 4:
        return first[at] * second[code]
    if formula == 3:
        return plane_sum(code, bits, first, at, plane, second[at])
    return value(np.float64(code), formula, logical, first[at], second[at])


@inner
def row_values(
    exact: Any, bits: Any, formula: Any, logical: Any, first: Any, second: Any, row: Any, groups: Any, plane: Any
) -> None:
    """E of every code of every group of a row: ``exact[(group << bits) + code]``."""
    for group in range(groups):
        at, to = row * groups + group, group << bits
        if formula == 4:
            for c in range(_1 << bits):
                exact[to + c] = first[at] * second[c]
            continue
        zero, s = second[at], first[at]
        if formula == 0:
            for c in range(_1 << bits):
                exact[to + c] = s * (_CODES[c] - zero)
        elif formula < 3:
            for c in range(_1 << bits):
                exact[to + c] = value(_CODES[c], formula, logical, s, zero)
        else:  # the sums of i planes, then each of them minus and plus alpha_i
            exact[to] = zero
            for i in range(bits):
                a = first[at + i * plane]
                for c in range(_1 << i):
                    code = (_1 << i) - _1 - c
                    before = exact[to + code]
                    exact[to + code + code] = before - a
                    exact[to + code + code + _1] = before + a


def row_table_size(bits: int, group_size: int, groups: int) -> int:
    """Values of a row that are computed in advance, and sixteen more because sixteen are read at a time."""
    return (groups << bits if 1 << bits <= group_size else 0) + LANES


@functools.cache
def decode_kernel(kind: str, twice: bool = False) -> Any:
    """The loop over rows of one segment, for values of type ``kind`` (F16, BF16, F32, F64) as patterns of their bits.

    ``twice``: rounded to the logical dtype first.

    Arguments: counter uint64[1]; plan uint64: rows, words, bits, width, group size, groups, start, first row, formula,
    logical dtype, 1 if outliers replace; planes uint32 (bits * rows * words); first, second float64 (flat); perm int32
    (in, or none); out (rows of it, in) patterns, of whose columns those of the segment are filled; outliers of all rows
    (indptr, indices, stored column of every column: int32; values float64); codes uint8 (words * 32), exact
    float64 and final (`row_table_size` of each) of the thread's own.
    """
    stamp = stamp_of(intrinsics, lanes, machine, lookup, rounding)
    which, double = list(PATTERNS).index(kind), kind == "F64"

    def loop(
        counter: Any, plan: Any, planes: Any, first: Any, second: Any, perm: Any, out: Any, flat: Any, indptr: Any,
        indices: Any, stored: Any, values: Any, codes: Any, exact: Any, final: Any,
    ) -> None:  # fmt: skip
        rows, words, bits, width, size, groups, start, first_row = (
            plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6], plan[7],
        )  # fmt: skip
        formula, logical, replace = plan[8], plan[9], plan[10]
        kinds = _1 << bits  # of elements in a group
        count, columns, plane = np.uint64(out.shape[0]), np.uint64(out.shape[1]), rows * groups
        while stamp:
            top = claim(counter) * _8  # eight rows at a time
            if top >= count:
                break
            for o in range(top, min(top + _8, count)):
                r = first_row + o
                codes[:] = np.uint8(0)
                for i in range(bits):
                    for w in range(words):
                        spread(planes, (i * rows + r) * words + w, codes, w * _32)
                if kinds <= size:
                    row_values(exact, bits, formula, logical, first, second, r, groups, plane)
                    for c in range(np.int64(groups * kinds)):  # signed: such a loop becomes vector code
                        e = rounded(exact[c], logical) if twice else exact[c]
                        final[c] = pattern64(e) if double else pattern(e, which)
                for a in range(groups):
                    begin, at = a * size, r * groups + a
                    end = min(begin + size, width)
                    j = begin
                    if kinds > size:
                        for j in range(begin, end):
                            code = np.uint64(codes[j])
                            e = code_value(code, bits, formula, logical, first, second, at, plane)
                            if twice:
                                e = rounded(e, logical)
                            out[o, np.uint64(perm[start + j]) if perm.size else start + j] = (
                                pattern64(e) if double else pattern(e, which)
                            )
                    elif perm.size:
                        for j in range(begin, end):
                            out[o, perm[start + j]] = final[a * kinds + codes[j]]
                    else:
                        if final.itemsize == 4 and bits <= 4:
                            while j + _16 <= end:
                                pick(codes, j, final, a * kinds, flat, o * columns + start + j)
                                j += _16
                        while j < end:
                            out[o, start + j] = final[a * kinds + codes[j]]
                            j += _1
                if indptr.size:
                    for k in range(np.uint64(indptr[r]), np.uint64(indptr[r + _1])):
                        place = np.uint64(stored[indices[k]])
                        if start <= place < start + width:
                            code, at = np.uint64(codes[place - start]), r * groups + (place - start) // size
                            if replace:
                                e = values[k]
                            else:
                                e = code_value(code, bits, formula, logical, first, second, at, plane) + values[k]
                            if twice:
                                e = rounded(e, logical)
                            out[o, indices[k]] = pattern64(e) if double else pattern(e, which)

    element = getattr(types, np.dtype(PATTERNS[kind]).name)
    words, numbers, places = (
        types.Array(one, 1, "C", readonly=True) for one in (types.uint32, types.float64, types.int32)
    )
    return compiled(
        loop, types.void, types.uint64[::1], types.uint64[::1], words, numbers, numbers, places, element[:, ::1],
        element[::1], places, places, places, numbers, types.uint8[::1], types.float64[::1],
        (types.uint64 if double else types.uint32)[::1],
    )  # fmt: skip
