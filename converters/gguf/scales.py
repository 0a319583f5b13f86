"""Scale codes and offset codes of K-quants and IQ4_XS: ``uint8 [..., groups]``, and the bytes they are packed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["PACK", "UNPACK"]

Array = npt.NDArray[Any]
Fields = dict[str, Array]
_LOW: Final = 0x0F0F0F0F  # the low four bits of four codes in a word
_TOP: Final = 0x30303030  # the top two of their six


def _from_nibbles(fields: Fields) -> Fields:
    """Q2_K: the scale of a group in the low nibble, the offset in the high one."""
    return {"scale_codes": fields["s"] & 15, "offset_codes": fields["s"] >> 4}


def _to_nibbles(codes: Fields) -> Fields:
    return {"s": codes["scale_codes"] | codes["offset_codes"] << 4}


def _from_pairs(fields: Fields) -> Fields:
    """Q4_K, Q5_K: 6 bits each; of the last four groups the top two bits lie above the codes of the first four."""
    first, second, third = _words(fields["s"])
    scale = _joined(first & 0x3F3F3F3F, third & _LOW | first >> 2 & _TOP)
    offset = _joined(second & 0x3F3F3F3F, third >> 4 & _LOW | second >> 2 & _TOP)
    return {"scale_codes": scale, "offset_codes": offset}


def _to_pairs(codes: Fields) -> Fields:
    (low, high), (low_m, high_m) = (_words(codes[name]) for name in ("scale_codes", "offset_codes"))
    return {"s": _joined(low | (high & _TOP) << 2, low_m | (high_m & _TOP) << 2, high & _LOW | (high_m & _LOW) << 4)}


def _from_thirds(fields: Fields) -> Fields:
    """Q3_K: the low 4 bits of 16 scales in 8 bytes, the top 2 bits in 4 more."""
    first, second, third = _words(fields["s"])
    low = (first & _LOW, second & _LOW, first >> 4 & _LOW, second >> 4 & _LOW)
    return {"scale_codes": _joined(*(part | (third >> 2 * i << 4) & _TOP for i, part in enumerate(low)))}


def _to_thirds(codes: Fields) -> Fields:
    a, b, c, d = _words(codes["scale_codes"])
    tops = (a & _TOP) >> 4 | (b & _TOP) >> 2 | (c & _TOP) | (d & _TOP) << 2
    return {"s": _joined(a & _LOW | (c & _LOW) << 4, b & _LOW | (d & _LOW) << 4, tops)}


def _words(codes: Array) -> list[Array]:
    """Bytes [..., 4n] as n arrays of words of four."""
    words = np.ascontiguousarray(codes).view("<u4")
    return [np.ascontiguousarray(words[..., i]) for i in range(words.shape[-1])]


def _joined(*words: Array) -> Array:
    return np.stack(words, axis=-1).view(np.uint8)


def _from_signed(fields: Fields) -> Fields:
    """Q6_K: signed bytes; the code is 128 more."""
    return {"scale_codes": fields["s"] ^ 128}


def _to_signed(codes: Fields) -> Fields:
    return {"s": codes["scale_codes"] ^ 128}


_SHIFTS: Final = np.arange(0, 16, 2, dtype=np.uint16)


def _from_split(fields: Fields) -> Fields:
    """IQ4_XS: the low 4 bits of 8 scales in 4 bytes, the top 2 bits in a 16-bit number."""
    low = np.stack([fields["s"] & 15, fields["s"] >> 4], axis=-1).reshape(*fields["s"].shape[:-1], 8)
    return {"scale_codes": low | (fields["sh"] >> _SHIFTS & 3).astype(np.uint8) << 4}


def _to_split(codes: Fields) -> Fields:
    code = codes["scale_codes"]
    high = ((code >> 4).astype(np.uint16) << _SHIFTS).sum(axis=-1, keepdims=True, dtype=np.uint16)
    return {"s": code[..., 0::2] & 15 | code[..., 1::2] << 4, "sh": high}


Convert = Callable[[Fields], Fields]
UNPACK: Final[dict[str, Convert]] = {
    "Q2_K": _from_nibbles,
    "Q3_K": _from_thirds,
    "Q4_K": _from_pairs,
    "Q5_K": _from_pairs,
    "Q6_K": _from_signed,
    "IQ4_XS": _from_split,
}
PACK: Final[dict[str, Convert]] = {
    "Q2_K": _to_nibbles,
    "Q3_K": _to_thirds,
    "Q4_K": _to_pairs,
    "Q5_K": _to_pairs,
    "Q6_K": _to_signed,
    "IQ4_XS": _to_split,
}
