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

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters import words
from bcqfmt.converters.words.arrays import new_planes
from bcqfmt.converters.words.buffers import new_array

from .kinds import KINDS, Kind
from .scales import PACK, UNPACK
from .ternary import bytes_of_trits, trits_of_bytes

__all__ = ["blocks_of", "numbers_of", "planes_of"]

Array = npt.NDArray[Any]
Fields = dict[str, Array]
_NUMBERS = {"d": "scale", "m": "offset", "dd": "scale_scale", "dmin": "offset_scale", "e": "scale"}
_SIGN = np.uint16(0x8000)


def planes_of(name: str, rows: Array, order: str = "<", threads: int = 1) -> Array:
    """The planes of blocks uint8 [N, row bytes]; ``order``: the byte order of the file."""
    kind, blocks = KINDS[name], _blocks(name, rows, order)
    if name == "TQ1_0":
        packed = np.concatenate([blocks["qs"], blocks["qh"]], axis=-1)
        return words.codes_to_planes(trits_of_bytes(packed).reshape(len(rows), -1), 2, threads=threads)
    planes = new_planes(kind.bits, len(rows), blocks.shape[1] * kind.elements)
    for field, layout, first, stop in kind.codes:
        words.field_to_planes(_bytes(blocks[field]), layout, planes[first:stop], threads)
    if name == "Q8_0":
        np.invert(planes[0], out=planes[0])  # signed bytes to codes: 128 more
    return planes


def numbers_of(name: str, rows: Array, order: str = "<") -> Fields:
    """All fields but the planes, of blocks uint8 [N, row bytes]."""
    blocks = _blocks(name, rows, order)
    found: Fields = {}
    for field, part in _NUMBERS.items():
        if field in blocks.dtype.fields:
            found[part] = _little(blocks[field]).reshape(len(rows), -1)
    if "offset_scale" in found:
        found["offset_scale"] = (found["offset_scale"].view(np.uint16) ^ _SIGN).view(np.float16)
    if name in UNPACK:
        packed = {field: _little(blocks[field]) for field in ("s", "sh") if field in blocks.dtype.fields}
        codes = UNPACK[name](packed)
        found |= {part: code.reshape(len(rows), -1) for part, code in codes.items()}
    return found


def blocks_of(name: str, fields: Fields, order: str = "<", threads: int = 1) -> Array:
    """The inverse of both: uint8 [N, row bytes]."""
    kind, planes = KINDS[name], fields["planes"]
    _, n, width = planes.shape
    block = kind.block(order)
    count = 32 * width // (256 if name == "TQ1_0" else kind.elements)
    blocks = new_array((n, count * block.itemsize), np.uint8).view(block)
    if name == "TQ1_0":
        packed = bytes_of_trits(words.planes_to_codes(planes, 32 * width, threads=threads).reshape(n, count, 256))
        blocks["qs"], blocks["qh"] = packed[..., :48], packed[..., 48:]
    elif name == "Q8_0":
        planes = np.concatenate([~planes[:1], planes[1:]])
    for field, layout, first, stop in kind.codes:
        stored = words.planes_to_field(planes[first:stop], layout, threads)
        blocks[field] = stored.view(_native(block[field])).reshape(blocks[field].shape)
    for field, part in _NUMBERS.items():
        if field in block.names and part in fields:
            number = fields[part]
            if field == "dmin":
                number = (np.ascontiguousarray(number).view(np.uint16) ^ _SIGN).view(np.float16)
            blocks[field] = number.reshape(blocks[field].shape)
    if name in PACK:
        codes = {part: code.reshape(n, count, -1) for part, code in fields.items() if part.endswith("_codes")}
        for field, stored in PACK[name](codes).items():
            blocks[field] = stored
    return blocks.view(np.uint8).reshape(n, -1)


def _blocks(name: str, rows: Array, order: str) -> Array:
    kind: Kind = KINDS[name]
    return np.ascontiguousarray(rows).view(kind.block(order))


def _native(field: np.dtype[Any]) -> np.dtype[Any]:
    return field.base.newbyteorder("<")


def _little(field: Array) -> Array:
    """Contiguous, little-endian."""
    return np.ascontiguousarray(field, field.dtype.newbyteorder("<"))


def _bytes(field: Array) -> Array:
    """The bytes [N, any] of a field of all blocks of a row, one after the other."""
    return _little(field).view(np.uint8).reshape(len(field), -1)
