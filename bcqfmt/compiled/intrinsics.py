"""Functions for compiled loops that are written in LLVM IR: what numba cannot express, such as vectors.

LLVM's vectors fit any processor: a vector that is longer than its registers takes several of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

ir: Any = importlib.import_module("llvmlite.ir")  # by name, because these modules have no type hints
types: Any = importlib.import_module("numba.types")
extending: Any = importlib.import_module("numba.extending")
cgutils: Any = importlib.import_module("numba.core.cgutils")
registry: Any = importlib.import_module("numba.core.registry")
_FUSE = ("contract",)


class Emit:
    """Writes the IR of one call: ``kinds`` are numba's types of its arguments, ``values`` their values."""

    f32, i32, i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        self.kinds, self.values = signature.args, values

    def at(self, argument: int, index: Any, element: Any) -> Any:
        """The address of element ``index`` of the array that is that argument, as a pointer to ``element``."""
        proxy = cgutils.create_struct_proxy(self.kinds[argument])
        data = proxy(self.context, self.builder, value=self.values[argument]).data
        return self.builder.bitcast(self.builder.gep(data, [index]), element.as_pointer())

    def load(self, pointer: Any, align: int = 4) -> Any:
        """A number or vector from memory that is aligned to ``align`` bytes."""
        found = self.builder.load(pointer)
        found.align = align
        return found

    def store(self, value: Any, pointer: Any, align: int = 4) -> None:
        """The inverse of ``load``."""
        self.builder.store(value, pointer).align = align

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """The lanes with these numbers; those of ``b`` are numbered after those of ``a``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(self.i32, len(lanes)), lanes))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, fused where the machine can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)

    def call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """One of LLVM's own functions."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def unpack(self, argument: int) -> list[Any]:
        """The entries of the tuple that is that argument."""
        return list(cgutils.unpack_tuple(self.builder, self.values[argument]))

    def pack(self, entries: list[Any]) -> Any:
        """A tuple as the result."""
        return self.context.make_tuple(self.builder, self.signature.return_type, entries)


def intrinsic(function: Callable[..., Any], emit: type[Emit] = Emit) -> Any:
    """A function that only compiled code can call, from one that takes numba's types of the arguments.

    ``function`` gives the type of the result (None: nothing) and a function that writes the IR with an ``emit``.
    Integers that are constants in the call come as literals.
    """

    def wrapped(typing: Any, *kinds: Any) -> Any:
        result, write = function(*kinds)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = write(emit(context, builder, signature, values))
            return context.get_dummy_value() if made is None else made

        return (types.void if result is None else result)(*kinds), generate

    names = ("typing", *inspect.signature(function).parameters)  # numba looks for them
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shown: Any = wrapped
    shown.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return extending.intrinsic(prefer_literal=True)(shown)


def vector_type(name: str, vector: Any) -> Any:
    """A type of numba's for values that are a vector of LLVM's."""

    class Vector(types.Type):  # type: ignore[misc]  # numba's classes have no types
        pass

    class Model(extending.models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, vector)

    extending.register_model(Vector)(Model)
    return Vector(name)


def features() -> set[str]:
    """Features of the processor that numba compiles for, in LLVM's names (``+avx2``).

    It is the one that the process runs on unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another.
    """
    return set(registry.cpu_target.target_context.codegen().magic_tuple()[2].split(","))


@functools.cache
def has_dot_products() -> bool:
    """Whether that processor has ARM's dot product of bytes (``sdot``).

    `features` leaves it out where the name of the processor implies it. So LLVM is asked: it writes sums of products
    of bytes with that instruction if it may.
    """
    triple, name, features = registry.cpu_target.target_context.codegen().magic_tuple()
    if not triple.startswith(("aarch64", "arm64")):
        return False
    module, binding = ir.Module(), importlib.import_module("llvmlite.binding")
    module.triple = triple
    wide = ir.VectorType(Emit.i32, 16)
    add = ir.Function(module, ir.FunctionType(Emit.i32, [wide]), "llvm.vector.reduce.add.v16i32")
    ask = ir.Function(module, ir.FunctionType(Emit.i32, [ir.VectorType(ir.IntType(8), 16)] * 2), "ask")
    builder = ir.IRBuilder(ask.append_basic_block())
    a, b = (builder.sext(argument, wide) for argument in ask.args)
    builder.ret(builder.call(add, [builder.mul(a, b)]))
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=name, features=features)
    return "sdot" in machine.emit_assembly(binding.parse_assembly(str(module)))
