"""TQ1_0: five codes of 0, 1, 2 in a byte, as a fraction of 243; a quantizer writes 243 of the 256 byte values."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["bytes_of_trits", "trits_of_bytes"]

Bytes = npt.NDArray[np.uint8]
_SIZES: Final = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes first..stop hold 5 or 4 codes, byte after byte
_POWERS: Final = 3 ** np.arange(5)
_TRITS: Final = ((np.arange(256)[:, None] * _POWERS % 256 * 3) >> 8).astype(np.uint8)  # [256, 5]


def trits_of_bytes(packed: Bytes) -> Bytes:
    """Codes [..., 256] of blocks of 52 bytes [..., 52]."""
    parts = []
    for first, stop, count in _SIZES:
        trits = _TRITS[packed[..., first:stop]][..., :count]
        parts.append(np.swapaxes(trits, -1, -2).reshape(*packed.shape[:-1], -1))
    return np.concatenate(parts, axis=-1)


def bytes_of_trits(codes: Bytes) -> Bytes:
    """The bytes that the quantizer writes for codes [..., 256]."""
    parts, at = [], 0
    for first, stop, count in _SIZES:
        width = stop - first
        trits = codes[..., at : at + count * width].reshape(*codes.shape[:-1], count, width).astype(np.uint16)
        total = (trits * _POWERS[::-1][:count, None].astype(np.uint16)).sum(axis=-2, dtype=np.uint16)
        parts.append(((total.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8))
        at += count * width
    return np.concatenate(parts, axis=-1)
