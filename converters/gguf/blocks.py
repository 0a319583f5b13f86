"""Blocks of GGUF to fields and back, exactly, for any bytes (but TQ1_0 has bytes that no quantizer writes).

| field | type, shape | |
|---|---|---|
| planes | uint32 [bits, N, K/32] | codes, plane 0 the most significant |
| scale, offset | float16 [N, G]; uint8 for E8M0 and UE4M3 | G = K / group size |
| scale_codes, offset_codes | uint32 [N, ceil(G*bits/32)] | LE(bits), as the part of a weight has them |
| scale_scale, offset_scale | float16 [N, K/256] | |

``offset_scale`` is the stored dmin with its sign flipped: ggml subtracts, BCQ adds.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.loops import compiled, types
from bcqfmt.converters import words
from bcqfmt.converters.words.arrays import new_planes
from bcqfmt.converters.words.buffers import new_array
from bcqfmt.converters.words.gguf import Field

from .kinds import KINDS
from .scales import code_words, fill_codes, new_code_words

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Fields = dict[str, Array]
_NUMBERS = {"d": "scale", "m": "offset", "dd": "scale_scale", "dmin": "offset_scale", "e": "scale"}
_SIGN = 0x8000
# TQ1_0: five codes of 0, 1, 2 in a byte, as a fraction of 243; a quantizer writes 243 of the 256 byte values
_SIZES: Final = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes first..stop hold 5 or 4 codes, byte after byte
_BYTES: Final = np.array([min((n * 256 + 242) // 243, 255) for n in range(256)], np.uint8)  # of every number below 243
_POWERS: Final = (1, 3, 9, 27, 81)


def planes_of(name: str, rows: Array, planes: Array | None = None, proof: list[bool] | None = None) -> Array:
    """The planes of blocks uint8 [N, row bytes], little-endian; ``planes``: to be filled.

    ``proof``: gets whether they give back the codes of the blocks, as `numbers_of` tells of everything else.
    """
    kind, rows = KINDS[name], np.ascontiguousarray(rows)
    columns = rows.shape[1] // kind.nbytes * kind.elements
    planes = new_planes(kind.bits, len(rows), columns) if planes is None else planes
    if name == "TQ1_0":
        codes = _trits_of_bytes(rows.reshape(-1, kind.nbytes)).reshape(len(rows), columns)
        planes[...] = words.codes_to_planes(codes, 2)
        if proof is not None:
            again = rows.copy()
            _bytes_of_trits(words.planes_to_codes(planes, columns).reshape(-1, 256), again.reshape(-1, kind.nbytes))
            proof.append(np.array_equal(again, rows))
    for field, (first, stop) in _fields(name):
        words.field_to_planes(rows, field, planes[first:stop], proof)
    return planes


def new_numbers(name: str, rows: int, row_bytes: int) -> Fields:
    """All fields but the planes, to be filled."""
    count, kind, found = row_bytes // KINDS[name].nbytes, KINDS[name].block(), {}
    for stored, (_, part) in _numbers(name).items():
        number = kind[stored]
        found[part] = np.empty((rows, count * number.shape[0]), number.base)
    return found | new_code_words(name, rows, count)


def numbers_of(name: str, rows: Array, fields: Fields | None = None, proof: list[bool] | None = None) -> Fields:
    """All fields but the planes; arguments as for `planes_of`."""
    rows = np.ascontiguousarray(rows)
    found = new_numbers(name, *rows.shape) if fields is None else fields
    for stored, (field, part) in _numbers(name).items():
        words.field_to_numbers(rows, field, found[part], _SIGN if stored == "dmin" else 0, proof)
    code_words(name, rows, found, proof)
    return found


def blocks_of(name: str, fields: Fields, order: str = "<") -> Array:
    """The inverse of both: uint8 [N, row bytes]; ``order``: the byte order of the file."""
    kind, planes = KINDS[name], fields["planes"]
    _, n, width = planes.shape
    rows = new_array((n, 32 * width // kind.elements * kind.nbytes), np.uint8)
    if name == "TQ1_0":
        codes = words.planes_to_codes(planes, 32 * width)
        _bytes_of_trits(codes.reshape(-1, 256), rows.reshape(-1, kind.nbytes))
    for field, (first, stop) in _fields(name):
        words.planes_to_field(planes[first:stop], field, rows)
    runs = rows.view(kind.runs)
    for stored, (_, part) in _numbers(name).items():
        numbers = np.ascontiguousarray(fields[part])
        if stored == "dmin":  # with the other sign, NaNs too
            numbers = numbers.view(np.uint16) ^ np.uint16(_SIGN)
        runs[stored] = numbers.view(kind.runs[stored])
    fill_codes(name, fields, rows)
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
    return [(_field(name, field, order), (first, stop)) for field, order, first, stop in KINDS[name].codes]


@cache
def _numbers(name: str) -> dict[str, tuple[Field, str]]:
    """The fields of a block that are numbers, and the fields here that they become."""
    return {stored: (_field(name, stored), part) for stored, part in _NUMBERS.items() if stored in KINDS[name].names}


def _field(name: str, stored: str, order: str = "") -> Field:
    """Where a field of a block is."""
    block, at = KINDS[name].block(), KINDS[name].names.index(stored)
    offset = sum(block[before].itemsize for before in KINDS[name].names[:at])
    return Field(order, offset, block[stored].itemsize, block.itemsize, name == "Q8_0")


def _trits_of_bytes(blocks: Bytes) -> Bytes:
    """Codes [B, 256] of blocks [B, 54]."""
    codes: Bytes = new_array((len(blocks), 256), np.uint8)
    _loops()[0](blocks, codes)
    return codes


def _bytes_of_trits(codes: Bytes, blocks: Bytes) -> None:
    """The bytes that the quantizer writes for codes [B, 256], into the first 52 of blocks [B, 54]."""
    _loops()[1](np.ascontiguousarray(codes), blocks)


def _unpack(blocks: Any, codes: Any) -> None:
    for b in range(len(blocks)):
        at = 0
        for first, stop, count in _SIZES:
            for n in range(count):
                for j in range(stop - first):
                    rest = (np.uint32(blocks[b, first + j]) * np.uint32(_POWERS[n])) & np.uint32(255)
                    codes[b, at + j] = rest * np.uint32(3) >> np.uint32(8)
                at += stop - first


def _pack(codes: Any, blocks: Any) -> None:
    for b in range(len(blocks)):
        at = 0
        for first, stop, count in _SIZES:
            size = stop - first
            for j in range(size):
                number = np.uint32(0)
                for n in range(count):
                    number += np.uint32(codes[b, at + n * size + j]) * np.uint32(_POWERS[4 - n])
                blocks[b, first + j] = _BYTES[number & np.uint32(255)]
            at += count * size


@cache
def _loops() -> tuple[Any, Any]:
    """Both loops, compiled at their first use."""
    arrays = types.Array(types.uint8, 2, "C", readonly=True), types.uint8[:, ::1]
    return compiled(_unpack, types.void, *arrays), compiled(_pack, types.void, *arrays)
