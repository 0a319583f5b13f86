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
_PACKED = ("s", "sh")
_SIGN = np.uint16(0x8000)


def planes_of(name: str, rows: Array, order: str = "<", threads: int = 1) -> Array:
    """The planes of blocks uint8 [N, row bytes]; ``order``: the byte order of the file."""
    kind, blocks = KINDS[name], _Blocks(KINDS[name], np.ascontiguousarray(rows), order)
    if name == "TQ1_0":
        packed = np.concatenate([blocks["qs"], blocks["qh"]], axis=-1)
        return words.codes_to_planes(trits_of_bytes(packed).reshape(len(rows), -1), 2, threads=threads)
    planes = new_planes(kind.bits, len(rows), blocks.count * kind.elements)
    for field, layout, first, stop in kind.codes:
        stored = blocks[field].view(np.uint8).reshape(len(rows), -1)
        words.field_to_planes(stored, layout, planes[first:stop], threads)
    if name == "Q8_0":
        np.invert(planes[0], out=planes[0])  # signed bytes to codes: 128 more
    return planes


def numbers_of(name: str, rows: Array, order: str = "<") -> Fields:
    """All fields but the planes, of blocks uint8 [N, row bytes]."""
    kind, blocks = KINDS[name], _Blocks(KINDS[name], np.ascontiguousarray(rows), order)
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
    count = 32 * width // (256 if name == "TQ1_0" else kind.elements)
    rows = new_array((n, count * kind.block().itemsize), np.uint8)
    blocks = _Blocks(kind, rows, order)
    if name == "TQ1_0":
        packed = bytes_of_trits(words.planes_to_codes(planes, 32 * width, threads=threads).reshape(n, count, 256))
        blocks["qs"], blocks["qh"] = packed[..., :48], packed[..., 48:]
    for field, layout, first, stop in kind.codes:
        stored = planes[first:stop]
        if name == "Q8_0":
            stored = np.concatenate([~stored[:1], stored[1:]])
        blocks[field] = words.planes_to_field(stored, layout, threads)
    for field, part in _NUMBERS.items():
        if field in kind.names:
            blocks[field] = _negated(fields[part]) if field == "dmin" else fields[part]
    if name in PACK:
        codes = {part: code.reshape(n, count, -1) for part, code in fields.items() if part.endswith("_codes")}
        for field, packed in PACK[name](codes).items():
            blocks[field] = packed
    return rows


class _Blocks:
    """The fields of blocks uint8 [N, row bytes], read or written as a whole: little-endian arrays [N, blocks, any]."""

    def __init__(self, kind: Kind, rows: Array, order: str) -> None:
        self._runs, self._block, self._n = rows.view(kind.runs()), kind.block(order), len(rows)
        self.count = self._runs.shape[1]

    def __getitem__(self, field: str) -> Array:
        run = np.ascontiguousarray(self._runs[field])
        stored = run.view(self._block[field].base).reshape(self._n, self.count, -1)
        return np.ascontiguousarray(stored, stored.dtype.newbyteorder("<"))

    def __setitem__(self, field: str, array: Array) -> None:
        kind = self._block[field].base
        little = np.ascontiguousarray(array).reshape(-1).view(kind.newbyteorder("<"))
        run = little.astype(kind, copy=False).view(self._runs.dtype[field])
        self._runs[field] = run.reshape(self._runs.shape)


def _negated(numbers: Array) -> Array:
    """The same F16 numbers with the other sign, NaNs included."""
    found: Array = (np.ascontiguousarray(numbers).view(np.uint16) ^ _SIGN).view(np.float16)
    return found
