"""SHA-256 of one stream or of two in one compiled loop, with the processor's own SHA instructions.

The rounds of one stream wait for each other and leave the unit idle for a third of the time: two streams at once cost
three quarters of what they cost one after the other. The state of a stream is eight words in the order of `ORDER`, as
these instructions keep them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.converters.digests_constants import CONSTANTS, START
from bcqfmt.converters.words_kernels import compiled, operation, types

__all__ = ["ORDER", "advance", "advance_two", "fresh_state"]

ORDER = [5, 4, 1, 0, 7, 6, 3, 2]
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_FOUR = ir.VectorType(_WORD, 4)


def fresh_state() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The state before the first byte, uint32 [8]."""
    return START[ORDER]


def _build(builder: Any, states: list[Any], constants: Any, blocks: Any, places: list[Any]) -> None:
    """So many blocks, at least one, of each stream; all are addresses but the number."""
    first = [_load(builder, state, 16 * i) for state in states for i in range(2)]
    begin, loop, end = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, *before = (builder.phi(value.type) for value in (blocks, *first))
    at = builder.mul(number, _LONG(64))
    pairs = [before[i : i + 2] for i in range(0, len(before), 2)]
    rounds = _block(builder, pairs, constants, [builder.add(place, at) for place in places])
    after = [builder.add(x, y) for x, y in zip(before, (half for pair in rounds for half in pair), strict=True)]
    done = builder.add(number, _LONG(1))
    for name, zero, value in zip((number, *before), (_LONG(0), *first), (done, *after), strict=True):
        name.add_incoming(zero, begin)
        name.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", done, blocks), loop, end)
    builder.position_at_end(end)
    for i, value in enumerate(after):
        builder.store(value, _at(builder, states[i // 2], 16 * (i % 2)), align=4)


def _block(builder: Any, states: list[list[Any]], constants: Any, places: list[Any]) -> list[list[Any]]:
    """The 64 rounds of a block of each stream, in turn, four at a time."""
    states = [list(pair) for pair in states]
    words = [[_swapped(builder, _load(builder, place, 16 * i)) for i in range(4)] for place in places]
    for t in range(16):
        constant = _load(builder, constants, 16 * t)
        for s, w in zip(states, words, strict=True):
            known = builder.add(w[t % 4], constant)
            s[1] = _sha(builder, "rnds2", s[1], s[0], known)
            s[0] = _sha(builder, "rnds2", s[0], s[1], _pick(builder, known, known, (2, 3, 2, 3)))
            if t < 12:
                oldest, far, middle, near = (w[(t + i) % 4] for i in range(4))
                some = builder.add(_sha(builder, "msg1", oldest, far), _pick(builder, middle, near, (1, 2, 3, 4)))
                w[t % 4] = _sha(builder, "msg2", some, near)
    return states


def _build_one(builder: Any, state: Any, constants: Any, blocks: Any, place: Any) -> None:
    _build(builder, [state], constants, blocks, [place])


def _build_two(builder: Any, state: Any, other: Any, constants: Any, blocks: Any, place: Any, another: Any) -> None:
    _build(builder, [state, other], constants, blocks, [place, another])


def _at(builder: Any, first: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(first, _LONG(offset)), _FOUR.as_pointer())


def _load(builder: Any, first: Any, offset: int) -> Any:
    return builder.load(_at(builder, first, offset), align=4)


def _sha(builder: Any, name: str, *values: Any) -> Any:
    return _call(builder, f"llvm.x86.sha256{name}", *values)


def _swapped(builder: Any, x: Any) -> Any:
    return _call(builder, "llvm.bswap.v4i32", x)


def _call(builder: Any, name: str, *values: Any) -> Any:
    kind = ir.FunctionType(_FOUR, [_FOUR] * len(values))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), list(values))


def _pick(builder: Any, x: Any, y: Any, order: tuple[int, ...]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(_FOUR, list(order)))


_one, _two = operation(_build_one), operation(_build_two)


def _advance(state: Any, constants: Any, blocks: Any, place: Any) -> None:
    _one(state, constants, blocks, place)


def _advance_two(state: Any, other: Any, constants: Any, blocks: Any, place: Any, another: Any) -> None:
    _two(state, other, constants, blocks, place, another)


@cache
def _loops() -> tuple[Any, Any]:
    """Compiled when first needed: other processors cannot."""
    return compiled(_advance, types.void, *(types.uint64,) * 4), compiled(
        _advance_two, types.void, *(types.uint64,) * 6
    )


def advance(state: Any, place: int, blocks: int) -> None:
    """A state, uint32 [8], after so many blocks (at least one) from an address on."""
    _loops()[0](state.ctypes.data, CONSTANTS.ctypes.data, blocks, place)


def advance_two(state: Any, place: int, other: Any, another: int, blocks: int) -> None:
    """Two states after as many blocks each."""
    _loops()[1](state.ctypes.data, other.ctypes.data, CONSTANTS.ctypes.data, blocks, place, another)
