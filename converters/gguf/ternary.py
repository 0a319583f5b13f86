"""TQ1_0: five codes of 0, 1, 2 in a byte, as a fraction of 243; a quantizer writes 243 of the 256 byte values."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["bytes_of_trits", "trits_of_bytes"]

Bytes = npt.NDArray[np.uint8]
_SIZES: Final = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes first..stop hold 5 or 4 codes, byte after byte
_BYTES: Final = np.array([min((n * 256 + 242) // 243, 255) for n in range(256)], np.uint8)  # of every number below 243


def trits_of_bytes(packed: Bytes) -> Bytes:
    """Codes [..., 256] of blocks of 52 bytes [..., 52]."""
    codes = np.empty((*packed.shape[:-1], 256), np.uint8)
    at = 0
    for first, stop, count in _SIZES:
        for n in range(count):
            rest = packed[..., first:stop] * np.uint8(3**n)  # modulo 256
            codes[..., at : at + stop - first] = rest.astype(np.uint16) * 3 >> 8
            at += stop - first
    return codes


def bytes_of_trits(codes: Bytes) -> Bytes:
    """The bytes that the quantizer writes for codes [..., 256]."""
    packed = np.empty((*codes.shape[:-1], 52), np.uint8)
    at = 0
    for first, stop, count in _SIZES:
        number = np.zeros((*codes.shape[:-1], stop - first), np.uint8)
        for n in range(count):
            number += codes[..., at : at + stop - first] * np.uint8(3 ** (4 - n))
            at += stop - first
        packed[..., first:stop] = _BYTES[number]
    return packed
