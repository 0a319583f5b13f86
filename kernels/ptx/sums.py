"""Sums of a tile in a local array, taken all at once: what would be thousands of lines for Numba if it were unrolled.

A thread of a product on tensor cores has, for every 8 vectors k, four sums: ``sums[4 k + 2 h + j]`` of row ``h`` and
vector ``8 k + j`` of its own. All functions take the array first; ``first``: where in it the sums begin. `looked_up`
does the same for look-ups in a table. The simulator of the tests has all of it in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bcqfmt.kernels.runtime.numba_cuda import types

from .asm import F32, NONE, U32, Function, address, constants, intrinsic_of, ir

__all__ = ["add_rows", "at_once", "load_sums", "looked_up", "save_sums", "scale_sums", "store_sums", "zero_sums"]

_SINGLE, _WORD = ir.FloatType(), ir.IntType(32)
_LOADED = 8  # loads of 16 bytes that are on the way at once: more would take too many registers


def at_once(count: int) -> int:
    """Of how many blocks :func:`load_sums` takes ``count`` sums of a thread."""
    return max(1, 4 * _LOADED // count)


def _each(count: int, arguments: tuple[Any, ...], name: str, make: Callable[..., Any], first: int = 0) -> Function:
    """``f(sums, *arguments)``: ``make(context, builder, places, signature, values)`` with the places of the sums.

    None among ``arguments`` is a pointer of any type. ``first``: where in the array they begin.
    """

    def typing(context: Any, *given: Any) -> Any:
        kinds = [found if kind is None else kind for kind, found in zip(arguments, given[1:], strict=True)]

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
            places = [builder.gep(data, [ir.Constant(_WORD, first + i)]) for i in range(count)]
            make(context, builder, places, signature.args[1:], values[1:])
            return context.get_dummy_value()

        return NONE(given[0], *kinds), codegen

    return intrinsic_of(typing, name, 1 + len(arguments))


def zero_sums(count: int) -> Function:
    """``f(sums)``: all are 0."""

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        for place in places:
            builder.store(ir.Constant(_SINGLE, 0.0), place)

    return _each(count, (), "zero sums", make)


def scale_sums(count: int, first: int = 0) -> Function:
    """``f(sums, scale, next_scale)``: times the scale of their row."""

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        for i, place in enumerate(places):
            builder.store(builder.fmul(builder.load(place), values[i >> 1 & 1]), place)

    return _each(count, (F32, F32), "scale sums", make, first)


def save_sums(count: int) -> Function:
    """``f(sums, pointer, index, step)``: four at a time to the 16 bytes ``index``, ``index + step``, ..."""

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        for i, place in _pieces(context, builder, count, kinds, values):
            four = ir.Constant(ir.VectorType(_SINGLE, 4), ir.Undefined)
            for k in range(4):
                four = builder.insert_element(four, builder.load(places[4 * i + k]), ir.Constant(_WORD, k))
            builder.store(four, place, align=16)

    return _each(count, (None, U32, U32), "save sums", make)


def load_sums(count: int) -> Function:
    """``f(sums, pointer, index, step, further, left)``: what :func:`save_sums` of ``left`` blocks saved is added.

    The first one's at the 16 bytes ``index``, ``index + step``, ..., the next one's ``further`` after these. As many as
    :func:`at_once` says, or all that are left.
    """
    kind = ir.FunctionType(ir.LiteralStructType([_SINGLE] * 4), [ir.IntType(64)])
    text, zero = "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", ir.Constant(_SINGLE, 0.0)

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        body = ir.InlineAsm(kind, text, "=f,=f,=f,=f,l,~{memory}", side_effect=True)
        pointer, index, step, further, left = values
        wanted = []
        for m in range(at_once(count)):
            there = builder.icmp_unsigned("<", ir.Constant(_WORD, m), left)
            own = builder.add(index, builder.mul(further, ir.Constant(_WORD, m)))
            own = builder.select(there, own, index) if m else index
            wanted += [(*piece, there) for piece in _pieces(context, builder, count, kinds, [pointer, own, step])]
        for first in range(0, len(wanted), _LOADED):
            chosen = wanted[first : first + _LOADED]
            found = [builder.call(body, [builder.ptrtoint(place, ir.IntType(64))]) for _, place, _ in chosen]
            for (i, _, there), four in zip(chosen, found, strict=True):
                for k in range(4):
                    place = places[4 * i + k]
                    more = builder.select(there, builder.extract_value(four, k), zero)
                    builder.store(builder.fadd(builder.load(place), more), place)

    return _each(count, (None, U32, U32, U32, U32), "load sums", make)


def _pieces(context: Any, builder: Any, count: int, kinds: Any, values: Any) -> Any:
    """(number, place) of every four sums in global memory."""
    base, vector = address(context, builder, kinds[0], values[0]), ir.VectorType(_SINGLE, 4)
    index = values[1]
    for i in range(count // 4):
        place = builder.add(base, builder.shl(builder.zext(index, ir.IntType(64)), ir.Constant(ir.IntType(64), 4)))
        yield i, builder.inttoptr(place, ir.PointerType(vector, 1))
        index = builder.add(index, values[2])


def add_rows(count: int, first: int = 0) -> Function:
    """``f(sums, pointer, place, step, left, inside, next_inside)``: plus ``pointer[place + step (8 k + j) + h]``.

    Float32; only for vectors before ``left`` and for rows whose ``inside`` (h 0) or ``next_inside`` is not 0.
    """

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        for i, place in _wanted(context, builder, count, kinds, values, _SINGLE):
            sum_ = builder.fadd(builder.load(places[i]), builder.load(place))
            builder.store(sum_, places[i])

    return _each(count, (None, U32, U32, U32, U32, U32), "add rows", make, first)


def store_sums(count: int, out: int, paired: bool, first: int = 0) -> Function:
    """``f(sums, pointer, place, step, left, inside, next_inside)``: to ``pointer[place + step (8 k + j) + h]``.

    Which ones: as in :func:`add_rows`. ``out``: the type, 0 float32, 1 float16, 2 bfloat16; rounded once. ``paired``:
    both rows at once; places and steps are even, and if one row is inside, so is the other.
    """
    half = ir.IntType(16)
    text = {1: "cvt.rn.f16.f32 $0, $1;", 2: "cvt.rn.bf16.f32 $0, $1;"}.get(out, "")
    narrow = ir.InlineAsm(ir.FunctionType(half, [_SINGLE]), text, "=h,f")
    kind = half if out else _SINGLE

    def make(context: Any, builder: Any, places: list[Any], kinds: Any, values: Any) -> None:
        def value(i: int) -> Any:
            found = builder.load(places[i])
            return builder.call(narrow, [found]) if out else found

        for i, place in _wanted(context, builder, count, kinds, values, kind, paired):
            if paired:
                vector = ir.VectorType(kind, 2)
                both = ir.Constant(vector, ir.Undefined)
                for h in range(2):
                    both = builder.insert_element(both, value(i + 2 * h), ir.Constant(_WORD, h))
                builder.store(both, builder.bitcast(place, ir.PointerType(vector, 1)), align=4 if out else 8)
            else:
                builder.store(value(i), place)

    return _each(count, (None, U32, U32, U32, U32, U32), f"store sums {out} {paired}", make, first)


def _wanted(context: Any, builder: Any, count: int, kinds: Any, values: Any, kind: Any, paired: bool = False) -> Any:
    """(number of a sum, its place in a matrix), each inside a branch that is taken where it exists.

    ``paired``: only of the first row.
    """
    base, (first, step, left, *inside) = address(context, builder, kinds[0], values[0]), values[1:]
    size = ir.Constant(ir.IntType(64), 2 if kind == ir.IntType(16) else 4)
    zero = ir.Constant(_WORD, 0)
    rows = [builder.icmp_unsigned("!=", word, zero) for word in inside]
    for k in range(count // 4):
        for j in range(2):
            vector = ir.Constant(_WORD, 8 * k + j)
            exists = builder.icmp_unsigned("<", vector, left)
            for h in range(1 if paired else 2):
                with builder.if_then(builder.and_(exists, rows[h])):
                    at = builder.add(builder.add(first, builder.mul(step, vector)), ir.Constant(_WORD, h))
                    place = builder.add(base, builder.mul(builder.zext(at, ir.IntType(64)), size))
                    yield 4 * k + 2 * h + j, builder.inttoptr(place, ir.PointerType(kind, 1))


def looked_up(stride: int, span: int, planes: int) -> Function:
    """``f(words, table, lane, part)``: the sum of ``span`` look-ups for each of ``planes``; ``part`` is a constant.

    Step t, of which this is the ``part``-th ``span``, takes byte ``lane ^ t`` (modulo 4) of word ``8 plane + t / 4`` of
    an array, and adds the float32 in that row, of ``stride`` bytes, and column ``lane ^ t`` of a table.
    """
    kind = ir.FunctionType(_WORD, [_WORD, _WORD])
    pick = ir.InlineAsm(kind, "prmt.b32 $0, $1, 0, $2;", "=r,r,r")

    def typing(context: Any, words: Any, table: Any, lane: Any, part: Any) -> Any:
        found = constants([part], 1)
        if found is None:
            return None

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
            totals = [ir.Constant(_SINGLE, -0.0)] * planes
            for t in range(found[0] * span, (found[0] + 1) * span):
                column = builder.xor(values[2], ir.Constant(_WORD, t))
                chosen = builder.or_(builder.and_(column, ir.Constant(_WORD, 3)), ir.Constant(_WORD, 0x4440))
                start = builder.add(values[1], builder.shl(column, ir.Constant(_WORD, 2)))
                for i in range(planes):
                    held = builder.load(builder.gep(data, [ir.Constant(_WORD, 8 * i + t // 4)]))
                    entry = builder.mul(builder.call(pick, [held, chosen]), ir.Constant(_WORD, stride))
                    place = builder.inttoptr(builder.add(entry, start), ir.PointerType(_SINGLE, 3))
                    totals[i] = builder.fadd(totals[i], builder.load(place, align=4))
            return context.make_tuple(builder, signature.return_type, totals)

        return types.UniTuple(F32, planes)(words, U32, U32, part), codegen

    return intrinsic_of(typing, f"look up {span} x{planes}", 4)
