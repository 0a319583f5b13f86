"""Scale and offset codes of K-quants and IQ4_XS: from where a block has their bits to LE(bits) words, and back.

Every code is spread over bytes of a block in a way of its type's own; as words they lie one after the other along a row
(specification, section 6.1). All bits that move by the same distance move together: a shift and a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.intrinsics import Emit, intrinsic, ir
from bcqfmt.compiled.loops import compiled, stamp_of, types

from . import kinds
from .kinds import KINDS

Array = npt.NDArray[Any]
Words = dict[str, npt.NDArray[np.uint32]]
_UNIT: Final = 16  # bits: what a block has of the codes of a row is a multiple of it


def _sixth(first: int, nibble: int) -> Callable[[int, int], int]:
    """Q4_K, Q5_K: 6 bits each; of the last four groups the top two bits lie above the codes of the first four."""
    return lambda j, i: (
        8 * (first + j) + i if j < 4 else 8 * (4 + j) + nibble + i if i < 4 else 8 * (first + j - 4) + 2 + i
    )


# The bit of the packed field where bit i of the code of group j lies.
_PLACES: Final[dict[str, dict[str, Callable[[int, int], int]]]] = {
    "Q2_K": {"scale_codes": lambda j, i: 8 * j + i, "offset_codes": lambda j, i: 8 * j + 4 + i},
    "Q3_K": {"scale_codes": lambda j, i: 8 * (j % 8) + j // 8 * 4 + i if i < 4 else 60 + 8 * (j % 4) + j // 4 * 2 + i},
    "Q4_K": {"scale_codes": _sixth(0, 0), "offset_codes": _sixth(4, 4)},
    "Q5_K": {"scale_codes": _sixth(0, 0), "offset_codes": _sixth(4, 4)},
    "Q6_K": {"scale_codes": lambda j, i: 8 * j + i},  # signed: the highest bit is stored inverted
    "IQ4_XS": {"scale_codes": lambda j, i: 16 + 4 * j + i if i < 4 else 2 * j + i - 4},
}
_NAMES: Final = list(_PLACES)
_FLIP: Final = {"Q6_K": int.from_bytes(b"\x80" * 16, "little")}


def new_code_words(name: str, rows: int, count: int) -> Words:
    """Words for the codes of ``rows`` of ``count`` blocks, uint32 [N, ceil(G*bits/32)]; none for types without them."""
    width = -(-count * KINDS[name].groups * KINDS[name].scale_bits // 32)
    return {part: np.zeros((rows, width), np.uint32) for part in _PLACES.get(name, ())}


def code_words(name: str, rows: Array, words: dict[str, Array], proof: list[bool] | None = None) -> None:
    """Fill ``words`` with the codes of blocks uint8 [N, row bytes]; ``proof``: gets whether they give these back."""
    if name in _PLACES:
        good = _run(name, True, rows, {part: words[part] for part in _PLACES[name]})
        if proof is not None:
            proof.append(good)


def fill_codes(name: str, fields: dict[str, Array], rows: Array) -> None:
    """The inverse: fill the packed field of all blocks of ``rows`` uint8 [N, row bytes], contiguous."""
    if name in _PLACES:
        words = {part: np.require(fields[part], requirements=["C", "A"]) for part in _PLACES[name]}
        _run(name, False, rows, words)


def _run(name: str, to_words: bool, rows: Array, words: Words) -> bool:
    scale, *offset = (array.reshape(-1).view(np.uint16) for array in words.values())
    place, _ = _field(name)
    about = len(rows), rows.shape[1] // KINDS[name].nbytes, KINDS[name].nbytes, place, scale.size // len(rows)
    return _loop(name, to_words)(rows.reshape(-1), scale, *(offset or [scale]), *about)


@cache
def _field(name: str) -> tuple[int, int]:
    """The first byte and the number of bytes of the packed field in a block."""
    sizes = {field: count * np.dtype(kind).itemsize for field, kind, count in KINDS[name].fields}
    names = list(sizes)
    packed = [field for field in names if field in ("sh", "s")]
    return sum(sizes[field] for field in names[: names.index(packed[0])]), sum(sizes[field] for field in packed)


class _Bits(Emit):
    """Numbers of any size."""

    def moved(self, number: Any, places: list[tuple[int, int]], target: Any) -> Any:
        """A number of type ``target`` with bit a of ``number`` at b, for all (a, b); zeros elsewhere."""
        wide = ir.IntType(max(number.type.width, target.width))
        number, found = self.builder.zext(number, wide), wide(0)
        for by in sorted({b - a for a, b in places}):
            bits = self.builder.and_(number, wide(sum(1 << a for a, b in places if b - a == by)))
            shift = self.builder.shl if by > 0 else self.builder.lshr
            found = self.builder.or_(found, shift(bits, wide(abs(by))))
        return self.builder.trunc(found, target)

    def packed(self, name: str) -> Any:
        """The field of a block, made from its codes; the arguments are those of ``_there``."""
        target = ir.IntType(8 * _field(name)[1])
        found = target(_FLIP.get(name, 0))
        for argument, (kind, places) in enumerate(_of_block(name), 3):
            codes = self.load(self.at(argument, self.values[5], kind), 2)
            for step in _to_bytes(name):
                codes = self.moved(codes, step, ir.IntType(8 * KINDS[name].groups))
            found = self.builder.xor(found, self.moved(codes, [(b, a) for a, b in places], target))
        return found


def _of_block(name: str) -> list[tuple[Any, list[tuple[int, int]]]]:
    """For each part the type of what a block has of it, and all bits: (in the field, among codes of a byte each)."""
    kind = KINDS[name]
    bits = [(j, i) for j in range(kind.groups) for i in range(kind.scale_bits)]
    whole = ir.IntType(len(bits))
    return [(whole, [(place(j, i), 8 * j + i) for j, i in bits]) for place in _PLACES[name].values()]


def _to_bytes(name: str) -> list[list[tuple[int, int]]]:
    """Steps from codes without gaps to codes of a byte each: half of a run moves, then half of each half, and so on.

    So few distances are left from there to the field that moving bits takes a quarter of the time.
    """
    kind, found, run = KINDS[name], [], KINDS[name].groups

    def place(j: int, run: int) -> int:
        return j // run * 8 * run + j % run * kind.scale_bits

    while run > 1:
        moves = [(place(j, run), place(j, run // 2)) for j in range(kind.groups)]
        found.append([(a + i, b + i) for a, b in moves for i in range(kind.scale_bits)])
        run //= 2
    return found


def _there(number: Any, blocks: Any, at: Any, scale: Any, offset: Any, to: Any) -> Any:
    """The codes of the field at byte ``at`` of ``blocks``, to unit ``to`` of ``scale`` and ``offset``."""
    name = _NAMES[number.literal_value]

    def write(emit: _Bits) -> None:
        packed = emit.load(emit.at(1, emit.values[2], ir.IntType(8 * _field(name)[1])), 1)
        packed = emit.builder.xor(packed, packed.type(_FLIP.get(name, 0)))
        for argument, (kind, places) in enumerate(_of_block(name), 3):
            codes = emit.moved(packed, places, ir.IntType(8 * KINDS[name].groups))
            for step in reversed(_to_bytes(name)):
                codes = emit.moved(codes, [(b, a) for a, b in step], codes.type)
            emit.store(emit.builder.trunc(codes, kind), emit.at(argument, emit.values[5], kind), 2)

    return None, write


def _back(number: Any, blocks: Any, at: Any, scale: Any, offset: Any, to: Any) -> Any:
    """The inverse of ``_there``."""

    def write(emit: _Bits) -> None:
        packed = emit.packed(_NAMES[number.literal_value])
        emit.store(packed, emit.at(1, emit.values[2], packed.type), 1)

    return None, write


def _same(number: Any, blocks: Any, at: Any, scale: Any, offset: Any, to: Any) -> Any:
    """Whether the field is what ``_back`` would store."""

    def write(emit: _Bits) -> Any:
        packed = emit.packed(_NAMES[number.literal_value])
        return emit.builder.icmp_unsigned("==", packed, emit.load(emit.at(1, emit.values[2], packed.type), 1))

    return types.boolean, write


there, back, same = (intrinsic(function, _Bits) for function in (_there, _back, _same))


@cache
def _loop(name: str, to_words: bool) -> Callable[..., bool]:
    """The loop of a type: blocks uint8, scale and offset codes uint16, all flat; numbers as ``_run`` gives them.

    Whether the words give back the fields, which is seen while they are in the cache.
    """
    stamp, number = stamp_of(intrinsics, kinds), _NAMES.index(name)
    units = KINDS[name].groups * KINDS[name].scale_bits // _UNIT

    def loop(blocks: Any, scale: Any, offset: Any, rows: Any, count: Any, size: Any, place: Any, width: Any) -> Any:
        good = True
        for r in range(rows if stamp else 0):
            for again in range(2 if to_words else 1):
                for b in range(count):
                    at, to = (r * count + b) * size + place, r * width + b * units
                    if not to_words:
                        back(number, blocks, at, scale, offset, to)
                    elif again == 0:
                        there(number, blocks, at, scale, offset, to)
                    else:
                        good &= same(number, blocks, at, scale, offset, to)
        return good

    def flat(kind: Any, read: bool) -> Any:
        return types.Array(kind, 1, "C", readonly=read)

    codes = flat(types.uint16, not to_words)
    return compiled(loop, types.boolean, flat(types.uint8, to_words), codes, codes, *(types.int64,) * 5)
