"""Sixteen float32 lanes for compiled CPU code, written in LLVM IR.

Numba has no vector type. Here is one, ``Lanes``: 16 floats, a register on AVX-512, two on AVX2, plain code elsewhere;
with the functions that move them, which only compiled code can call. Arrays are C-contiguous and addressed by a flat
unsigned index. ``Emit`` writes the IR, :func:`intrinsic` makes a function of what was written.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

__all__ = [
    "LANES", "Emit", "Lanes", "claim", "intrinsic", "ir", "loads", "prefetch", "registry", "stores", "transpose",
    "types", "zeros",
]  # fmt: skip

ir: Any = importlib.import_module("llvmlite.ir")
types: Any = importlib.import_module("numba.types")
extending: Any = importlib.import_module("numba.extending")
cgutils: Any = importlib.import_module("numba.core.cgutils")
registry: Any = importlib.import_module("numba.core.registry")

LANES = 16
_FUSE = ("contract",)


class _LanesType(types.Type):  # type: ignore[misc]  # numba's classes have no types
    """Numba's name for 16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


class _LanesModel(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, Emit.floats)


class Emit:
    """IR for one call: ``kinds`` are the types of its arguments, ``values`` their values."""

    f32, i32, i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    floats, words, four_words = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES), ir.VectorType(i32, 4)
    zero = ir.Constant(floats, None)

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        self.kinds, self.values = signature.args, values

    def at(self, argument: int, index: Any, element: Any = floats) -> Any:
        """The address of element ``index`` of the array that is that argument, as a pointer to ``element``."""
        proxy = cgutils.create_struct_proxy(self.kinds[argument])
        data = proxy(self.context, self.builder, value=self.values[argument]).data
        return self.builder.bitcast(self.builder.gep(data, [index]), element.as_pointer())

    def load(self, pointer: Any) -> Any:
        """What is there; only aligned as its elements are."""
        found = self.builder.load(pointer)
        found.align = 4
        return found

    def store(self, value: Any, pointer: Any) -> None:
        """The counterpart of ``load``."""
        self.builder.store(value, pointer).align = 4

    def vectors(self, argument: int, index: Any, count: int, element: Any = floats) -> list[Any]:
        """``count`` vectors of an array, one after the other."""
        return [self.load(self.at(argument, self.plus(index, LANES * i), element)) for i in range(count)]

    def plus(self, index: Any, offset: int) -> Any:
        """index + offset."""
        return self.builder.add(index, ir.Constant(index.type, offset)) if offset else index

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Lanes of ``a``, then of ``b``, by number."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(self.i32, len(lanes)), lanes))

    def splat(self, value: Any) -> Any:
        """One number in every lane."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, value, self.i32(0))
        return self.shuffle(first, first, [0] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, fused where the machine can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)

    def call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """One of LLVM's own functions."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def unpack(self, argument: int) -> list[Any]:
        """The entries of a tuple."""
        return list(cgutils.unpack_tuple(self.builder, self.values[argument]))

    def pack(self, entries: list[Any]) -> Any:
        """A tuple as the result."""
        return self.context.make_tuple(self.builder, self.signature.return_type, entries)


extending.register_model(_LanesType)(_LanesModel)
Lanes = _LanesType()


def intrinsic(function: Any) -> Any:
    """A function for compiled code, from one that takes the types of the arguments.

    It gives the type of the result (None: nothing) and a function that writes the IR with an ``Emit``. Integers that
    are written out in the call come as literals.
    """

    def wrapped(typing: Any, *kinds: Any) -> Any:
        result, write = function(*kinds)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = write(Emit(context, builder, signature, values))
            return context.get_dummy_value() if made is None else made

        return (types.void if result is None else result)(*kinds), emit

    names = ("typing", *inspect.signature(function).parameters)  # numba asks for them by looking
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shown: Any = wrapped
    shown.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return extending.intrinsic(prefer_literal=True)(shown)


def _zeros(count: Any) -> Any:
    """A tuple of ``count`` (a literal) times sixteen zeros."""
    return types.UniTuple(Lanes, count.literal_value), lambda emit: emit.pack([emit.zero] * count.literal_value)


def _loads(array: Any, at: Any, count: Any) -> Any:
    """``count`` (a literal) times sixteen floats from ``array[at]`` on, a tuple."""

    def write(emit: Emit) -> Any:
        return emit.pack(emit.vectors(0, emit.values[1], count.literal_value))

    return types.UniTuple(Lanes, count.literal_value), write


def _stores(array: Any, at: Any, entries: Any) -> Any:
    """The inverse of ``loads``."""

    def write(emit: Emit) -> None:
        for i, vector in enumerate(emit.unpack(2)):
            emit.store(vector, emit.at(0, emit.plus(emit.values[1], LANES * i)))

    return None, write


def _transpose(planes: Any, at: Any, stride: Any, rows: Any, words: Any, to: Any, step: Any) -> Any:
    """``words[to + step * w + r] = planes[at + stride * r + w]`` for 16 words of 16 rows.

    With fewer rows (1..15) the last one stands for those that are missing: nothing beyond it is read.
    """

    def write(emit: Emit) -> None:
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
                a, b, c_, d = (
                    emit.load(emit.at(0, emit.plus(starts[4 * m + j], c), emit.four_words)) for m in range(4)
                )
                half = list(range(8))
                pieces.append(emit.shuffle(emit.shuffle(a, b, half), emit.shuffle(c_, d, half), list(range(LANES))))
            for w, vector in enumerate(_four_by_four(emit, pieces)):
                index = builder.add(place, builder.mul(ir.Constant(gap.type, c + w), gap))
                emit.store(vector, emit.at(4, index, emit.words))

    return None, write


def _four_by_four(emit: Emit, rows: list[Any]) -> list[Any]:
    """Four 4x4 blocks side by side, each transposed."""
    quarters = range(0, LANES, 4)
    low = [i for k in quarters for i in (k, 16 + k, k + 1, 17 + k)]
    high = [i + 2 for i in low]
    first = [i for k in quarters for i in (k, k + 1, 16 + k, 17 + k)]
    second = [i + 2 for i in first]
    a, b = emit.shuffle(rows[0], rows[1], low), emit.shuffle(rows[0], rows[1], high)
    c, d = emit.shuffle(rows[2], rows[3], low), emit.shuffle(rows[2], rows[3], high)
    return [emit.shuffle(x, y, part) for x, y in ((a, c), (b, d)) for part in (first, second)]


def _prefetch(array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``; any index will do."""

    def write(emit: Emit) -> None:
        pointer = emit.at(0, emit.values[1], ir.IntType(8))
        read, level, data = emit.i32(0), emit.i32(2), emit.i32(1)
        emit.call("llvm.prefetch.p0i8", ir.VoidType(), [pointer, read, level, data])

    return None, write


def _claim(counter: Any) -> Any:
    """``counter[0]`` (uint64) before it is raised by one, atomically: how threads share out work."""

    def write(emit: Emit) -> Any:
        one = ir.Constant(emit.i64, 1)
        return emit.builder.atomic_rmw("add", emit.at(0, ir.Constant(emit.i64, 0), emit.i64), one, "monotonic")

    return types.uint64, write


zeros, loads, stores = map(intrinsic, (_zeros, _loads, _stores))
transpose, prefetch, claim = map(intrinsic, (_transpose, _prefetch, _claim))
