"""SHA-256 of one stream in a compiled loop, with the processor's own SHA instructions.

No faster than hashlib, but a state can come from `digests_kernel`, or go to `digests_along_kernel` and back. It is
eight words in the order in which these instructions keep them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import compiled, operation, types

from .constants import CONSTANTS, START, end_message

__all__ = ["advance", "digest_of", "natural", "ordered"]

_ORDER = [5, 4, 1, 0, 7, 6, 3, 2]
State = npt.NDArray[np.uint32]
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_FOUR = ir.VectorType(_WORD, 4)


def ordered(state: State | None) -> State:
    """A state, or that before the first byte, in the order of the instructions."""
    return (START if state is None else state)[_ORDER]


def natural(state: State) -> State:
    """A state in the order of the standard."""
    found = np.empty(8, np.uint32)
    found[_ORDER] = state
    return found


def digest_of(state: State, rest: npt.NDArray[np.uint8], size: int) -> str:
    """The digest when the last bytes, less than a block, have come; ``size``: of all of them."""
    last = np.empty(128, np.uint8)
    last[: rest.size] = rest
    advance(state, last.ctypes.data, end_message(last, rest.size, size))
    return natural(state).astype(">u4").tobytes().hex()


def _build(builder: Any, state: Any, constants: Any, blocks: Any, place: Any) -> None:
    """So many blocks, at least one; all are addresses but the number."""
    first = [_load(builder, state, 16 * i) for i in range(2)]
    begin, loop, end = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, *before = (builder.phi(value.type) for value in (blocks, *first))
    rounds = _block(builder, before, constants, builder.add(place, builder.mul(number, _LONG(64))))
    after = [builder.add(x, y) for x, y in zip(before, rounds, strict=True)]
    done = builder.add(number, _LONG(1))
    for name, zero, value in zip((number, *before), (_LONG(0), *first), (done, *after), strict=True):
        name.add_incoming(zero, begin)
        name.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", done, blocks), loop, end)
    builder.position_at_end(end)
    for i, value in enumerate(after):
        builder.store(value, _at(builder, state, 16 * i), align=4)


def _block(builder: Any, state: list[Any], constants: Any, place: Any) -> list[Any]:
    """The 64 rounds of a block, four at a time."""
    s = list(state)
    w = [_swapped(builder, _load(builder, place, 16 * i)) for i in range(4)]
    for t in range(16):
        known = builder.add(w[t % 4], _load(builder, constants, 16 * t))
        s[1] = _sha(builder, "rnds2", s[1], s[0], known)
        s[0] = _sha(builder, "rnds2", s[0], s[1], _pick(builder, known, known, (2, 3, 2, 3)))
        if t < 12:
            oldest, far, middle, near = (w[(t + i) % 4] for i in range(4))
            some = builder.add(_sha(builder, "msg1", oldest, far), _pick(builder, middle, near, (1, 2, 3, 4)))
            w[t % 4] = _sha(builder, "msg2", some, near)
    return s


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


_rounds = operation(_build)


def _advance(state: Any, constants: Any, blocks: Any, place: Any) -> None:
    _rounds(state, constants, blocks, place)


@cache
def _loop() -> Any:
    """Compiled when first needed: other processors cannot."""
    return compiled(_advance, types.void, *(types.uint64,) * 4)


def advance(state: Any, place: int, blocks: int) -> None:
    """A state, uint32 [8], after so many blocks (at least one) from an address on."""
    _loop()(state.ctypes.data, CONSTANTS.ctypes.data, blocks, place)
