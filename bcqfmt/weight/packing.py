"""packed(b): the only code that knows the bit order (spec section 6.1).

Words are ``uint32`` in memory and I32 bit containers on disk. Fields run along the last axis, least significant
bit first, each row padded with zero bits to a whole word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]


def words_for(fields: int, bits: int) -> int:
    """Words of a row of ``fields`` fields."""
    return -(-fields * bits // 32)


def pack(fields: Array, bits: int) -> Words:
    """Unsigned integers (..., n) below ``2**bits`` to words (..., words_for(n, bits)) uint32."""
    n = fields.shape[-1]
    lead = fields.shape[:-1]
    shifts = np.arange(bits, dtype=np.uint16)
    stream = ((fields[..., None].astype(np.uint16) >> shifts) & 1).astype(np.uint8).reshape(*lead, n * bits)
    return _words_of_bits(stream)


def unpack(words: Array, bits: int, n: int) -> npt.NDArray[np.uint16]:
    """Words (..., w) to the first ``n`` fields (..., n) uint16."""
    words = words.view(np.uint32)
    start = np.arange(n) * bits
    word, shift = start // 32, (start % 32).astype(np.uint32)
    fields = words[..., word] >> shift
    cut = shift + bits > 32  # the rest of these fields is in the next word
    fields[..., cut] |= words[..., word[cut] + 1] << (32 - shift[cut])
    return (fields & np.uint32(2**bits - 1)).astype(np.uint16)


def pack_planes(codes: Array, bits: int) -> Words:
    """Codes (..., rows, n) to planes (..., bits, rows, words) uint32, plane 0 the most significant."""
    planes = [_words_of_bits(((codes >> (bits - 1 - i)) & 1).astype(np.uint8)) for i in range(bits)]
    return np.stack(planes, axis=-3)


def unpack_codes(planes: Array, n: int) -> npt.NDArray[np.uint8]:
    """Planes (..., q, rows, words) to codes (..., rows, n) uint8; of the first p planes only, p-bit prefixes."""
    codes = unpack_bits(planes[..., 0, :, :], n)
    for i in range(1, planes.shape[-3]):
        codes <<= 1
        codes |= unpack_bits(planes[..., i, :, :], n)
    return codes


def unpack_bits(words: Array, n: int) -> npt.NDArray[np.uint8]:
    """Words (..., w) to their first ``n`` bits (..., n) uint8, least significant first."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, count=n, bitorder="little")


def padding_is_zero(words: Array, bits: int, n: int) -> bool:
    """Whether the bits after field ``n - 1`` of every row are zero."""
    used = n * bits % 32
    if used == 0:
        return True
    return not bool((words[..., -1].view(np.uint32) >> np.uint32(used)).any())


def _words_of_bits(stream: npt.NDArray[np.uint8]) -> Words:
    packed = np.packbits(stream, axis=-1, bitorder="little")
    short = -packed.shape[-1] % 4
    if short:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, short)])
    return np.ascontiguousarray(packed).view("<u4")
