"""Sixteen float32 lanes for compiled CPU code, written in LLVM IR.

Numba has no vector type. Here is one, ``Lanes``: 16 floats, one register with AVX-512, two with AVX2, four with NEON or
SSE; with the functions that move them, which only compiled code can call. Arrays are C-contiguous and addressed by a
flat unsigned index.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bcqfmt.compiled.intrinsics import Emit, ir, types, vector_type
from bcqfmt.compiled.intrinsics import intrinsic as plain_intrinsic

from .layout import LANES

__all__ = ["LANES", "LaneEmit", "Lanes", "claim", "intrinsic", "ir", "loads", "prefetch", "stores", "transpose"]
__all__ += ["types", "zeros"]

_FOUR_WORDS = ir.VectorType(Emit.i32, 4)


class LaneEmit(Emit):
    """Writes the IR of a call that works on vectors of 16 lanes."""

    floats, words = ir.VectorType(Emit.f32, LANES), ir.VectorType(Emit.i32, LANES)
    zero = ir.Constant(floats, None)

    def vectors(self, argument: int, index: Any, count: int, element: Any = floats) -> list[Any]:
        """``count`` vectors of an array, one after the other."""
        return [self.load(self.at(argument, self.plus(index, LANES * i), element)) for i in range(count)]

    def plus(self, index: Any, offset: int) -> Any:
        return self.builder.add(index, ir.Constant(index.type, offset)) if offset else index

    def splat(self, value: Any) -> Any:
        """One number in every lane."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, value, self.i32(0))
        return self.shuffle(first, first, [0] * LANES)


Lanes = vector_type("Lanes", LaneEmit.floats)
intrinsic = partial(plain_intrinsic, emit=LaneEmit)


def _zeros(count: Any) -> Any:
    """A tuple of ``count`` (a literal) times sixteen zeros."""
    return types.UniTuple(Lanes, count.literal_value), lambda emit: emit.pack([emit.zero] * count.literal_value)


def _loads(array: Any, at: Any, count: Any) -> Any:
    """``count`` (a literal) times sixteen floats from ``array[at]`` on, a tuple."""

    def write(emit: LaneEmit) -> Any:
        return emit.pack(emit.vectors(0, emit.values[1], count.literal_value))

    return types.UniTuple(Lanes, count.literal_value), write


def _stores(array: Any, at: Any, entries: Any) -> Any:
    """The inverse of ``loads``."""

    def write(emit: LaneEmit) -> None:
        for i, vector in enumerate(emit.unpack(2)):
            emit.store(vector, emit.at(0, emit.plus(emit.values[1], LANES * i), emit.floats))

    return None, write


def _transpose(planes: Any, at: Any, stride: Any, rows: Any, words: Any, to: Any, step: Any) -> Any:
    """``words[to + step * w + r] = planes[at + stride * r + w]`` for 16 words of 16 rows.

    With fewer rows (1..15) the last one stands for those that are missing: nothing beyond it is read.
    """

    def write(emit: LaneEmit) -> None:
        _, start, between, count, _, place, gap = emit.values
        builder = emit.builder
        last = builder.sub(count, ir.Constant(count.type, 1))
        starts = []
        for r in range(LANES):
            row = ir.Constant(count.type, r)
            row = builder.select(builder.icmp_unsigned("<", row, count), row, last)
            starts.append(builder.add(start, builder.mul(row, between)))
        for c in range(0, LANES, 4):  # four words at a time; quarter m of piece j holds row 4m + j
            pieces = []
            for j in range(4):
                a, b, c_, d = (emit.load(emit.at(0, emit.plus(starts[4 * m + j], c), _FOUR_WORDS)) for m in range(4))
                half = list(range(8))
                pieces.append(emit.shuffle(emit.shuffle(a, b, half), emit.shuffle(c_, d, half), list(range(LANES))))
            for w, vector in enumerate(_four_by_four(emit, pieces)):
                index = builder.add(place, builder.mul(ir.Constant(gap.type, c + w), gap))
                emit.store(vector, emit.at(4, index, emit.words))

    return None, write


def _four_by_four(emit: LaneEmit, rows: list[Any]) -> list[Any]:
    """Four 4x4 blocks side by side, each transposed."""
    quarters = range(0, LANES, 4)
    low = [i for k in quarters for i in (k, 16 + k, k + 1, 17 + k)]
    high = [i + 2 for i in low]
    first = [i for k in quarters for i in (k, k + 1, 16 + k, 17 + k)]
    second = [i + 2 for i in first]
    a, b = emit.shuffle(rows[0], rows[1], low), emit.shuffle(rows[0], rows[1], high)
    c, d = emit.shuffle(rows[2], rows[3], low), emit.shuffle(rows[2], rows[3], high)
    return [emit.shuffle(x, y, part) for x, y in ((a, c), (b, d)) for part in (first, second)]


def _prefetch(array: Any, at: Any, near: Any) -> Any:
    """Ask for the cache line of ``array[at]``; ``near`` (a literal): 3 into the first cache, 2 into the second.

    An index out of range is allowed.
    """

    def write(emit: LaneEmit) -> None:
        pointer = emit.at(0, emit.values[1], ir.IntType(8))
        read, level, data = emit.i32(0), emit.i32(near.literal_value), emit.i32(1)
        emit.call("llvm.prefetch.p0i8", ir.VoidType(), [pointer, read, level, data])

    return None, write


def _claim(counter: Any) -> Any:
    """``counter[0]`` (uint64) before it is raised by one, atomically: how threads share out work."""

    def write(emit: LaneEmit) -> Any:
        one = ir.Constant(emit.i64, 1)
        return emit.builder.atomic_rmw("add", emit.at(0, ir.Constant(emit.i64, 0), emit.i64), one, "monotonic")

    return types.uint64, write


zeros, loads, stores = map(intrinsic, (_zeros, _loads, _stores))
transpose, prefetch, claim = map(intrinsic, (_transpose, _prefetch, _claim))
