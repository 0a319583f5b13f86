"""SHA-256 (FIPS 180-4) of sixteen streams in one compiled loop.

The rounds of one stream wait for each other; those of sixteen do not. On a processor with 512-bit vectors a byte costs
half of what hashlib takes with the processor's own SHA instructions; on others it is no gain. A vector has a word of
every stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.converters.words_kernels import address, aligned, compiled, operation, types
from bcqfmt.converters.words_shuffle import copy_run, turn

__all__ = ["BLOCK", "LANES", "Lanes"]

LANES, BLOCK = 16, 64  # streams; bytes of a block
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_LINE = ir.VectorType(_WORD, LANES)
_SIZE = 4 * LANES
_0, _4, _8, _16, _64 = (np.uint64(i) for i in (0, 4, 8, 16, 64))


def _build_turn_bytes(builder: Any, x: Any) -> None:
    """Most significant byte first, as SHA-256 reads them."""
    kind = ir.FunctionType(_LINE, [_LINE])
    swap = builder.module.globals.get("llvm.bswap.v16i32") or ir.Function(builder.module, kind, "llvm.bswap.v16i32")
    _store(builder, builder.call(swap, [_load(builder, x, 0)]), x, 0)


def _build_schedule(builder: Any, x: Any) -> None:
    """Word t of the message schedule, for t >= 16; ``x`` is its place, the earlier ones lie before it."""
    near, far = _load(builder, x, -2), _load(builder, x, -15)
    small1 = _xor(builder, _turned(builder, near, 17), _turned(builder, near, 19), builder.lshr(near, _all(10)))
    small0 = _xor(builder, _turned(builder, far, 7), _turned(builder, far, 18), builder.lshr(far, _all(3)))
    early = builder.add(_load(builder, x, -16), _load(builder, x, -7))
    _store(builder, builder.add(builder.add(early, small0), small1), x, 0)


def _build_rounds(builder: Any, state: Any, words: Any, constants: Any) -> None:
    """Eight rounds."""
    a, b, c, d, e, f, g, h = (_load(builder, state, i) for i in range(8))
    for t in range(8):
        constant = builder.load(_at(builder, builder.add(constants, _LONG(4 * t)), _WORD), align=4)
        known = builder.add(_load(builder, words, t), _splat(builder, constant))
        large1 = _xor(builder, _turned(builder, e, 6), _turned(builder, e, 11), _turned(builder, e, 25))
        choice = builder.xor(builder.and_(e, builder.xor(f, g)), g)
        first = builder.add(builder.add(h, known), builder.add(large1, choice))
        large0 = _xor(builder, _turned(builder, a, 2), _turned(builder, a, 13), _turned(builder, a, 22))
        majority = builder.or_(builder.and_(a, b), builder.and_(c, builder.or_(a, b)))
        a, b, c, d, e, f, g, h = (
            *(builder.add(first, builder.add(large0, majority)), a, b, c),
            *(builder.add(d, first), e, f, g),
        )
    for i, value in enumerate((a, b, c, d, e, f, g, h)):
        _store(builder, value, state, i)


def _build_finish(builder: Any, state: Any, after: Any, counts: Any, block: Any) -> None:
    """The state of every stream that has such a block becomes the sum of what it was and what it is ``after`` it."""
    number = _splat(builder, builder.trunc(block, _WORD))
    live = builder.icmp_unsigned("<", number, _load(builder, counts, 0))
    for i in range(8):
        old = _load(builder, state, i)
        _store(builder, builder.select(live, builder.add(old, _load(builder, after, i)), old), state, i)


def _at(builder: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(place, kind.as_pointer())


def _load(builder: Any, first: Any, i: int) -> Any:
    return builder.load(_at(builder, builder.add(first, _LONG(_SIZE * i)), _LINE), align=4)


def _store(builder: Any, value: Any, first: Any, i: int) -> None:
    builder.store(value, _at(builder, builder.add(first, _LONG(_SIZE * i)), _LINE), align=4)


def _all(number: int) -> Any:
    return ir.Constant(_LINE, [number] * LANES)


def _splat(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LINE, ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(first, first, _all(0))


def _turned(builder: Any, x: Any, by: int) -> Any:
    """Rotated right; LLVM knows the pattern."""
    return builder.or_(builder.lshr(x, _all(by)), builder.shl(x, _all(32 - by)))


def _xor(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.xor(builder.xor(x, y), z)


def _fraction(prime: int, root: int) -> int:
    """The first 32 bits of the fraction of a prime's square or cube root: where SHA-256 has its constants from."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**root <= prime << 32 * root else (low, middle - 1)
    return low & 0xFFFFFFFF


_PRIMES = [n for n in range(2, 312) if all(n % d for d in range(2, n))]
_CONSTANTS = np.array([_fraction(prime, 3) for prime in _PRIMES], np.uint32)
_START = np.array([_fraction(prime, 2) for prime in _PRIMES[:8]], np.uint32)

_bytes, _schedule = operation(_build_turn_bytes), operation(_build_schedule)
_rounds, _finish = operation(_build_rounds), operation(_build_finish)


def _advance(states: Any, counts: Any, constants: Any, data: Any, room: Any) -> None:
    """``counts[i]`` blocks of row i of the data go into column i of the states (8 words)."""
    state = address(states)
    words = address(room)
    after = words + _64 * _64
    row = np.uint64(data.shape[1])
    most = _0
    for lane in range(_16):
        most = max(most, np.uint64(counts[lane]))
    for block in range(most):
        at = address(data) + block * _64
        for i in range(_0, _16, _8):
            for j in range(_0, _16, _8):
                turn(words + j * _64 + i * _4, _64, at + i * row + j * _4, row)
        for t in range(_16):
            _bytes(words + t * _64)
        for t in range(_16, _64):
            _schedule(words + t * _64)
        copy_run(after, state, _8 * _64)
        for t in range(_0, _64, _8):
            _rounds(after, words + t * _64, address(constants) + t * _4)
        _finish(state, after, address(counts), block)


_WORDS = types.uint32[::1]
_advance_all = compiled(
    _advance,
    types.void,
    *(types.uint32[:, ::1], _WORDS, types.Array(types.uint32, 1, "C", readonly=True), types.uint8[:, ::1], _WORDS),
)


class Lanes:
    """Room for a block or more of each of sixteen streams: ``data`` uint8 [16, room], ``states`` uint32 [8, 16]."""

    def __init__(self, room: int) -> None:
        """``room``: bytes of a stream at once, a multiple of 64."""
        self.data: npt.NDArray[np.uint8] = aligned(LANES * room // 4).view(np.uint8).reshape(LANES, room)
        self.states: npt.NDArray[np.uint32] = aligned(8 * LANES).reshape(8, LANES)
        self.counts: npt.NDArray[np.uint32] = np.zeros(LANES, np.uint32)
        self.start = _START
        self._words = aligned((64 + 8) * LANES)

    def advance(self) -> None:
        """The first ``counts[i]`` blocks of row i go into column i of the states, for every i."""
        if int(self.counts.max()) * BLOCK > self.data.shape[1]:
            raise ValueError("more blocks than there is room for")
        _advance_all(self.states, self.counts, _CONSTANTS, self.data, self._words)
