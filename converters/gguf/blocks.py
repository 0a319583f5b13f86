"""Blocks of GGUF to fields and back, exactly, for any bytes (but see `ternary`).

| field | type, shape | |
|---|---|---|
| planes | uint32 [bits, N, K/32] | codes, plane 0 the most significant |
| scale, offset | float16 [N, G]; uint8 for E8M0 and UE4M3 | G = K / group size |
| scale_codes, offset_codes | uint8 [N, G] | |
| scale_scale, offset_scale | float16 [N, K/256] | |

``offset_scale`` is the stored dmin with its sign flipped: ggml subtracts, BCQ adds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters import words
from bcqfmt.converters.words.arrays import new_planes
from bcqfmt.converters.words.buffers import new_array
from bcqfmt.converters.words.gguf import Field

from .kinds import KINDS, Kind
from .scales import PACK, UNPACK
from .ternary import bytes_of_trits, trits_of_bytes

__all__ = ["blocks_of", "numbers_of", "planes_of"]

Array = npt.NDArray[Any]
Fields = dict[str, Array]
_NUMBERS = {"d": "scale", "m": "offset", "dd": "scale_scale", "dmin": "offset_scale", "e": "scale"}
_PACKED = ("s", "sh")
_SIGN = np.uint16(0x8000)


def planes_of(name: str, rows: Array, order: str = "<", threads: int = 1) -> Array:
    """The planes of blocks uint8 [N, row bytes]; ``order``: the byte order of the file."""
    kind, rows = KINDS[name], in_order(name, rows, order)
    if name == "TQ1_0":
        codes = trits_of_bytes(rows.reshape(-1, kind.nbytes)).reshape(len(rows), -1)
        return words.codes_to_planes(codes, 2, threads=threads)
    planes = new_planes(kind.bits, len(rows), rows.shape[1] // kind.nbytes * kind.elements)
    for field, (first, stop) in _fields(name):
        words.field_to_planes(rows, field, planes[first:stop], threads)
    return planes


def numbers_of(name: str, rows: Array, order: str = "<") -> Fields:
    """All fields but the planes, of blocks uint8 [N, row bytes]."""
    kind, blocks = KINDS[name], _Blocks(KINDS[name], in_order(name, rows, order))
    found = {part: blocks[field].reshape(len(rows), -1) for field, part in _NUMBERS.items() if field in kind.names}
    if "offset_scale" in found:
        found["offset_scale"] = _negated(found["offset_scale"])
    if name in UNPACK:
        codes = UNPACK[name]({field: blocks[field] for field in _PACKED if field in kind.names})
        found |= {part: code.reshape(len(rows), -1) for part, code in codes.items()}
    return found


def blocks_of(name: str, fields: Fields, order: str = "<", threads: int = 1) -> Array:
    """The inverse of both: uint8 [N, row bytes]."""
    kind, planes = KINDS[name], fields["planes"]
    _, n, width = planes.shape
    count = 32 * width // kind.elements
    rows = new_array((n, count * kind.nbytes), np.uint8)
    blocks = _Blocks(kind, rows)
    if name == "TQ1_0":
        codes = words.planes_to_codes(planes, 32 * width, threads=threads)
        bytes_of_trits(codes.reshape(-1, 256), rows.reshape(-1, kind.nbytes))
    for field, (first, stop) in _fields(name):
        words.planes_to_field(planes[first:stop], field, rows, threads)
    for stored, part in _NUMBERS.items():
        if stored in kind.names:
            blocks[stored] = _negated(fields[part]) if stored == "dmin" else fields[part]
    if name in PACK:
        split = {part: code.reshape(n, count, -1) for part, code in fields.items() if part.endswith("_codes")}
        for stored, packed in PACK[name](split).items():
            blocks[stored] = packed
    return in_order(name, rows, order)


def in_order(name: str, rows: Array, order: str) -> Array:
    """Blocks uint8 [N, row bytes] with their numbers in the other byte order if ``order`` is ">", contiguous."""
    rows = np.ascontiguousarray(rows)
    if order == "<":
        return rows
    swapped, block = rows.copy(), KINDS[name].block()
    for field in KINDS[name].names:
        if block[field].base.itemsize > 1:
            swapped.view(block)[field].byteswap(inplace=True)
    return swapped


@cache
def _fields(name: str) -> list[tuple[Field, tuple[int, int]]]:
    """The fields of codes of a block, and the planes that each of them holds."""
    kind, block, found, at = KINDS[name], KINDS[name].block(), [], 0
    places = {}
    for field in kind.names:
        places[field], at = at, at + block[field].itemsize
    for codes in kind.codes:
        size = block[codes.field].itemsize
        field_of_codes = Field(codes.order, places[codes.field], size, kind.nbytes, name == "Q8_0")
        found.append((field_of_codes, (codes.first, codes.stop)))
    return found


class _Blocks:
    """The fields of blocks uint8 [N, row bytes], read or written as a whole: arrays [N, blocks, any]."""

    def __init__(self, kind: Kind, rows: Array) -> None:
        self._runs, self._block, self._n = rows.view(kind.runs()), kind.block(), len(rows)

    def __getitem__(self, field: str) -> Array:
        run = np.ascontiguousarray(self._runs[field])
        return run.view(self._block[field].base).reshape(*self._runs.shape, -1)

    def __setitem__(self, field: str, array: Array) -> None:
        run = np.ascontiguousarray(array).reshape(-1).view(self._runs.dtype[field])
        self._runs[field] = run.reshape(self._runs.shape)


def _negated(numbers: Array) -> Array:
    """The same F16 numbers with the other sign, NaNs included."""
    found: Array = (np.ascontiguousarray(numbers).view(np.uint16) ^ _SIGN).view(np.float16)
    return found
