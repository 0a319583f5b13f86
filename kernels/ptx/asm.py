"""How an instruction becomes a function that a Numba kernel can call: inline PTX, and loads and stores of LLVM.

Pointers are ``types.CPointer`` arguments of a kernel (or Numba arrays); indices count elements of the access, never
bytes. Nothing here works outside a compiled kernel; the simulator of the tests has the same in Python.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from bcqfmt.kernels.runtime.numba_cuda import types

__all__ = [
    "F32", "F64", "I32", "NONE", "U32", "U64", "asm", "asm_at", "copy_run", "intrinsic_of", "multiply_group",
    "reinterpret", "shared_base", "shared_load", "shared_store",
]  # fmt: skip

ir: Any = importlib.import_module("llvmlite.ir")
intrinsic: Any = importlib.import_module("numba.cuda.extending").intrinsic
F32, F64, I32, U32, U64, NONE = types.float32, types.float64, types.int32, types.uint32, types.uint64, types.void
_LETTER = {F32: "f", F64: "d", I32: "r", U32: "r", U64: "l"}
_LLVM = {
    F32: ir.FloatType(),
    F64: ir.DoubleType(),
    I32: ir.IntType(32),
    U32: ir.IntType(32),
    U64: ir.IntType(64),
    NONE: ir.VoidType(),
}
_ATTRIBUTES = {
    "": ("readnone", "nounwind"),
    "load": (),
    "warp": ("convergent",),
    "memory": (),
    "barrier": ("convergent",),
}
_ORDERED = ("memory", "barrier")
Function = Callable[..., Any]


def asm(text: str, result: Any, *arguments: Any, count: int = 1, effects: str = "", literals: int = 0) -> Function:
    """A function of one PTX text.

    ``$0`` ... are the ``count`` results of type ``result`` and then the ``arguments``; the last ``literals``
    arguments of the call must be constants and are put into the text for ``{0}``, ``{1}``. ``effects``: "" for a pure
    function, "warp" for one that all lanes take part in (never moved into a branch, merged or dropped), "memory" for
    one that loads and stores must not pass and that is not dropped, "barrier" for both.
    """

    def typing(context: Any, *given: Any) -> Any:
        given_constants = constants(given[len(arguments) :], literals)
        if given_constants is None or len(given) != len(arguments) + literals:
            return None
        returned = types.UniTuple(result, count) if count > 1 else result
        signature = returned(*arguments, *given[len(arguments) :])

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            body = text.format(*given_constants) if literals else text
            outcome = _call(builder, body, result, count, arguments, values[: len(arguments)], effects)
            return _returned(context, builder, signature, outcome, result, count)

        return signature, codegen

    return intrinsic_of(typing, text, len(arguments) + literals)


def asm_at(text: str, result: Any, *arguments: Any, size: int, count: int = 1, effects: str = "") -> Function:
    """Like :func:`asm` for ``f(pointer, index, *arguments)``: the address ``pointer + size * index`` comes last.

    In ``text`` it is the operand after the results and the arguments.
    """

    def typing(context: Any, pointer: Any, index: Any, *given: Any) -> Any:
        if len(given) != len(arguments):
            return None
        returned = types.UniTuple(result, count) if count > 1 else result
        signature = returned(pointer, U32 if index.bitwidth <= 32 else U64, *arguments)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            base = address(context, builder, signature.args[0], values[0])
            i64 = ir.IntType(64)
            index = values[1] if values[1].type == i64 else builder.zext(values[1], i64)
            place = builder.add(base, builder.mul(index, ir.Constant(i64, size)))
            outcome = _call(builder, text, result, count, (*arguments, U64), [*values[2:], place], effects)
            return _returned(context, builder, signature, outcome, result, count)

        return signature, codegen

    return intrinsic_of(typing, text, len(arguments) + 2)


def copy_run(count: int, step: int) -> Function:
    """``f(pointer, index, address)``: ``count`` asynchronous copies of 16 bytes, ``step`` bytes apart."""
    text = " ".join(f"cp.async.cg.shared.global [$0+{i * step}], [$1+{i * step}], 16;" for i in range(count))
    return asm_at(text, NONE, U32, size=16, effects="memory")


def shared_load(element: Any, count: int = 1) -> Function:
    """``f(address, offset)``: ``count`` elements of 4 bytes at a 32-bit shared address, one aligned access."""

    def typing(context: Any, address: Any, offset: Any) -> Any:
        returned = types.UniTuple(element, count) if count > 1 else element

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.VectorType(_LLVM[element], count) if count > 1 else _LLVM[element]
            place = shared_place(builder, values[0], values[1], kind)
            loaded = builder.load(place, align=4 * count)
            if count == 1:
                return loaded
            items = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), i)) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, items)

        return returned(U32, U32), codegen

    return intrinsic_of(typing, f"shared load {element} x{count}", 2)


def shared_store(element: Any, count: int = 1) -> Function:
    """``f(address, offset, *values)``, the counterpart of :func:`shared_load`."""

    def typing(context: Any, address: Any, offset: Any, *given: Any) -> Any:
        if len(given) != count:
            return None

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.VectorType(_LLVM[element], count) if count > 1 else _LLVM[element]
            place = shared_place(builder, values[0], values[1], kind)
            stored = values[2]
            if count > 1:
                stored = ir.Constant(kind, ir.Undefined)
                for i in range(count):
                    stored = builder.insert_element(stored, values[2 + i], ir.Constant(ir.IntType(32), i))
            builder.store(stored, place, align=4 * count)
            return context.get_dummy_value()

        return NONE(U32, U32, *(element,) * count), codegen

    return intrinsic_of(typing, f"shared store {element} x{count}", count + 2)


def shared_base() -> Function:
    """``f(array)``: the 32-bit address of a shared array."""

    def typing(context: Any, array: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
            place = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
            return builder.ptrtoint(place, ir.IntType(32))

        return U32(array), codegen

    return intrinsic_of(typing, "shared address", 1)


def multiply_group(vectors: int, kind: str) -> Function:
    """``f(sums, a0, a1, a2, a3, address, piece)``: 64 rows of 16 numbers times ``vectors`` vectors, by four warps.

    ``sums``: a local array of ``vectors`` / 2 float32. ``a``: as in `mma`, 16 rows a warp. Vectors: rows of 128 bytes
    in shared memory, their 16-byte pieces exchanged by the row modulo 8; ``piece``, a constant: the first of two pieces
    of the first row that are meant, from the address on; the address is a multiple of 1024, as is what is skipped.
    ``kind``: "f16" or "bf16". The sums may be read after ``wgmma_wait``.
    """
    count = vectors // 2
    sums = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{vectors}k16.f32.{kind}.{kind} "
        f"{{{sums}}}, {{${count}, ${count + 1}, ${count + 2}, ${count + 3}}}, ${count + 4}, p, 1, 1, 0; }}"
    )

    def typing(context: Any, array: Any, a0: Any, a1: Any, a2: Any, a3: Any, address: Any, piece: Any) -> Any:
        found = constants([piece], 1)
        if found is None:
            return None

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
            single, word, long = ir.FloatType(), ir.IntType(32), ir.IntType(64)
            places = [builder.gep(data, [ir.Constant(word, i)]) for i in range(count)]
            held = [builder.load(place) for place in places]
            # the descriptor: 14 bits of the address / 16, rows of 1024 bytes apart, 128 bytes exchanged
            start = builder.lshr(builder.and_(values[5], ir.Constant(word, 0x3FFFF)), ir.Constant(word, 4))
            made = builder.or_(builder.zext(start, long), ir.Constant(long, 0x4000004000010000))
            descriptor = builder.add(made, ir.Constant(long, found[0]))
            kinds = [*(word for _ in range(4)), long, *(single for _ in range(count))]
            function = ir.FunctionType(ir.LiteralStructType([single] * count), kinds)
            tied = ["=f"] * count + ["r"] * 4 + ["l"] + [str(i) for i in range(count)] + ["~{memory}"]
            body = ir.InlineAsm(function, text, ",".join(tied), side_effect=True)
            outcome = builder.call(body, [*values[1:5], descriptor, *held])
            for i, place in enumerate(places):
                builder.store(builder.extract_value(outcome, i), place)
            return context.get_dummy_value()

        return NONE(array, *(U32,) * 5, piece), codegen

    return intrinsic_of(typing, f"wgmma n{vectors} {kind}", 7)


def reinterpret(source: Any, target: Any) -> Function:
    """The same bits as another type."""

    def typing(context: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], _LLVM[target])

        return target(source), codegen

    return intrinsic_of(typing, f"{source} as {target}", 1)


def address(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Where a pointer or an array begins, as a 64-bit number."""
    pointer = (
        value if isinstance(kind, types.CPointer) else context.make_array(kind)(context, builder, value=value).data
    )
    return builder.ptrtoint(pointer, ir.IntType(64))


def shared_place(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Base and offset stay apart up to the load, so that a constant offset becomes part of the instruction."""
    start = builder.inttoptr(base, ir.PointerType(ir.IntType(8), 3))
    return builder.bitcast(builder.gep(start, [offset]), ir.PointerType(kind, 3))


def intrinsic_of(typing: Function, name: str, arity: int) -> Function:
    """Numba reads the number of arguments off the signature of ``typing``."""
    names = ["context", *(f"a{i}" for i in range(arity))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typing.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    typing.__name__ = "ptx"
    typing.__doc__ = name
    made: Function = intrinsic(typing)
    return made


def constants(given: Sequence[Any], wanted: int) -> list[int] | None:
    """The values of arguments that are constants; None where one is not."""
    if len(given) != wanted or not all(isinstance(kind, types.IntegerLiteral) for kind in given):
        return None
    return [kind.literal_value for kind in given]


def _call(
    builder: Any, text: str, result: Any, count: int, kinds: Sequence[Any], values: Sequence[Any], effects: str
) -> Any:
    if result == NONE:
        returned, outputs = _LLVM[NONE], []
    elif count > 1:
        returned, outputs = ir.LiteralStructType([_LLVM[result]] * count), [f"={_LETTER[result]}"] * count
    else:
        returned, outputs = _LLVM[result], [f"={_LETTER[result]}"]
    constraints = outputs + [_LETTER[kind] for kind in kinds] + (["~{memory}"] if effects in _ORDERED else [])
    function = ir.FunctionType(returned, [_LLVM[kind] for kind in kinds])
    body = ir.InlineAsm(function, text, ",".join(constraints), side_effect=effects in ("warp", *_ORDERED))
    return builder.call(body, values, attrs=_ATTRIBUTES[effects])


def _returned(context: Any, builder: Any, signature: Any, outcome: Any, result: Any, count: int) -> Any:
    if result == NONE:
        return context.get_dummy_value()
    if count == 1:
        return outcome
    items = [builder.extract_value(outcome, i) for i in range(count)]
    return context.make_tuple(builder, signature.return_type, items)
