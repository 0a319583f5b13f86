"""TQ1_0: five codes of 0, 1, 2 in a byte, as a fraction of 243; a quantizer writes 243 of the 256 byte values."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.loops import compiled, types
from bcqfmt.converters.words.buffers import new_array

Bytes = npt.NDArray[np.uint8]
_SIZES: Final = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes first..stop hold 5 or 4 codes, byte after byte
_BYTES: Final = np.array([min((n * 256 + 242) // 243, 255) for n in range(256)], np.uint8)  # of every number below 243
_POWERS: Final = (1, 3, 9, 27, 81)


def trits_of_bytes(blocks: Bytes) -> Bytes:
    """Codes [B, 256] of blocks [B, 54]."""
    codes: Bytes = new_array((len(blocks), 256), np.uint8)
    _loops()[0](blocks, codes)
    return codes


def bytes_of_trits(codes: Bytes, blocks: Bytes) -> None:
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
