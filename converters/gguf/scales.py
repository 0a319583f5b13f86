"""Scale codes and offset codes of K-quants and IQ4_XS: ``uint8 [..., groups]``, and the bytes they are packed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["PACK", "UNPACK"]

Bytes = npt.NDArray[np.uint8]
Fields = dict[str, npt.NDArray[Any]]


def _from_nibbles(fields: Fields) -> Fields:
    """Q2_K: the scale of a group in the low nibble, the offset in the high one."""
    return {"scale_codes": fields["s"] & 15, "offset_codes": fields["s"] >> 4}


def _to_nibbles(codes: Fields) -> Fields:
    return {"s": codes["scale_codes"] | codes["offset_codes"] << 4}


def _from_pairs(fields: Fields) -> Fields:
    """Q4_K, Q5_K: 6 bits each; of the last four groups the top two bits lie above the codes of the first four."""
    first, second, third = np.split(fields["s"], 3, axis=-1)
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    offset = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return {"scale_codes": scale, "offset_codes": offset}


def _to_pairs(codes: Fields) -> Fields:
    (low, high), (low_m, high_m) = (np.split(codes[name], 2, axis=-1) for name in ("scale_codes", "offset_codes"))
    parts = [low | high >> 4 << 6, low_m | high_m >> 4 << 6, high & 15 | (high_m & 15) << 4]
    return {"s": np.concatenate(parts, axis=-1)}


def _from_thirds(fields: Fields) -> Fields:
    """Q3_K: the low 4 bits of 16 scales in 8 bytes, the top 2 bits in 4 more."""
    nibbles, tops = fields["s"][..., :8], fields["s"][..., 8:]
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    high = np.concatenate([tops >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return {"scale_codes": low | high << 4}


def _to_thirds(codes: Fields) -> Fields:
    code = codes["scale_codes"]
    high = [part >> 4 << 2 * i for i, part in enumerate(np.split(code, 4, axis=-1))]
    return {"s": np.concatenate([code[..., :8] & 15 | code[..., 8:] << 4, high[0] | high[1] | high[2] | high[3]], -1)}


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
