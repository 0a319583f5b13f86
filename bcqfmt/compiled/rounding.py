"""The format's one correct rounding (spec section 8) inside compiled loops; the same results as ``dtypes.round_to``.

Free of branches but for the kind of number, so that loops over it become vector code. A kind is a number of KINDS.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .loops import inner

KINDS: Final = {"F16": 0, "BF16": 1, "F32": 2, "F64": 3}
LARGEST: Final = {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38}

QUANTA: Final = np.array([2.0**-24, 2.0**-133, 2.0**-149])  # by kind: the smallest number above zero
HALVES: Final = np.array([2.0**-11, 2.0**-8, 2.0**-24])  # by kind: the largest relative error of a normal number

_SIGN = np.int64(-(2**63))
_MAGNITUDE = np.int64(2**63 - 1)
_52, _1023, _2047 = np.int64(52), np.int64(1023), np.int64(2047)


@inner
def nearest(value: Any, digits: Any, low: Any, high: Any) -> Any:
    """A float64 rounded to ``digits`` binary digits, exponents ``low`` .. ``high``; half to even, once.

    Adding one and a half times 2^52 units in the last place rounds to a multiple of such a unit.
    """
    bits = np.float64(value).view(np.int64)
    exponent = min(max((bits >> _52 & _2047) - _1023, low), high + np.int64(1))
    magic = np.int64((exponent - digits + np.int64(1 + 52 + 1023)) << _52).view(np.float64) * 1.5
    size = np.float64((value + magic) - magic).view(np.int64) & _MAGNITUDE
    beyond = (high + np.int64(1 + 1023)) << _52
    infinite = _2047 << _52
    if beyond <= size <= infinite:
        size = infinite
    return np.int64(size | bits & _SIGN).view(np.float64)


@inner
def rounded(value: Any, kind: Any) -> Any:
    """A float64 rounded once to ``kind``, ties to even, as float64; infinity where it does not fit."""
    if kind == 0:
        return nearest(value, np.int64(11), np.int64(-14), np.int64(15))
    if kind == 1:
        return nearest(value, np.int64(8), np.int64(-126), np.int64(127))
    if kind == 2:
        return np.float64(np.float32(value))
    return np.float64(value)


@inner
def pattern(value: Any, kind: Any) -> Any:
    """A float64 rounded once to F16, BF16 or F32, as a pattern of bits, uint32; NaN as 0x7E00, 0x7FC0, 0x7FC00000."""
    found = rounded(value, kind)
    if kind == 0:  # 2^-112 moves the exponent of binary32 to that of binary16
        sign = np.uint32(np.float64(value).view(np.int64) >> np.int64(48)) & np.uint32(0x8000)
        bits = (np.float32(found * 2.0**-112).view(np.uint32) & np.uint32(0x7FFFFFFF)) >> np.uint32(13)
        bits = min(bits, np.uint32(0x7C00)) | sign
        return np.uint32(0x7E00) if found != found else bits
    bits = np.float32(found).view(np.uint32)
    if found != found:
        bits = np.uint32(0x7FC00000)
    return bits >> np.uint32(16) if kind == 1 else bits


@inner
def pattern64(value: Any) -> Any:
    """The pattern of a float64."""
    return np.float64(value).view(np.uint64)
