"""The one correct rounding of spec section 8 for compiled code, and the bits of numbers.

Everything here is free of branches, so that loops over it become vector code.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bcqfmt.kernels.cpu.lanes import Emit, intrinsic, ir, types

__all__ = ["bits_of", "nearest", "pattern", "pattern64"]


def _cast(result: Any, element: Any) -> Any:
    def declare(value: Any) -> Any:
        return result, lambda emit: emit.builder.bitcast(emit.values[0], element)

    return intrinsic(declare)


bits_of = _cast(types.int64, Emit.i64)  # float64 -> int64
_number = _cast(types.float64, ir.DoubleType())  # int64 -> float64
_short_bits = _cast(types.uint32, Emit.i32)  # float32 -> uint32

_SIGN = np.int64(-(2**63))
_MAGNITUDE = np.int64(2**63 - 1)
_52, _1023, _2047 = np.int64(52), np.int64(1023), np.int64(2047)


def _nearest(value: Any, digits: Any, low: Any, high: Any) -> Any:
    """A float64 rounded to ``digits`` binary digits, exponents ``low`` .. ``high``; half to even, once.

    Adding one and a half times 2^52 units in the last place rounds to a multiple of such a unit.
    """
    bits = bits_of(value)
    exponent = min(max((bits >> _52 & _2047) - _1023, low), high + np.int64(1))
    magic = _number((exponent - digits + np.int64(1 + 52 + 1023)) << _52) * 1.5
    rounded = bits_of((value + magic) - magic) & _MAGNITUDE
    beyond = (high + np.int64(1 + 1023)) << _52
    infinite = _2047 << _52
    if beyond <= rounded <= infinite:
        rounded = infinite
    return _number(rounded | bits & _SIGN)


def _njit(function: Any) -> Any:
    return numba.njit(error_model="numpy")(function)


nearest = _njit(_nearest)


def _float16_bits(value: Any) -> Any:
    """RN to F16; the pattern as uint32, NaN as 0x7E00. 2^-112 moves the exponent of binary32 to that of binary16."""
    rounded = nearest(value, np.int64(11), np.int64(-14), np.int64(15))
    sign = np.uint32(bits_of(value) >> np.int64(48)) & np.uint32(0x8000)
    pattern = (_short_bits(np.float32(rounded * 2.0**-112)) & np.uint32(0x7FFFFFFF)) >> np.uint32(13)
    if pattern > np.uint32(0x7C00):
        pattern = np.uint32(0x7C00)
    pattern |= sign
    if rounded != rounded:
        pattern = np.uint32(0x7E00)
    return pattern


def _bfloat16_bits(value: Any) -> Any:
    """RN to BF16; the pattern as uint32, NaN as 0x7FC0."""
    rounded = nearest(value, np.int64(8), np.int64(-126), np.int64(127))
    pattern = _short_bits(np.float32(rounded)) >> np.uint32(16)
    if rounded != rounded:
        pattern = np.uint32(0x7FC0)
    return pattern


def _float32_bits(value: Any) -> Any:
    """RN to F32; the pattern as uint32, NaN as 0x7FC00000."""
    pattern = _short_bits(np.float32(value))
    if value != value:
        pattern = np.uint32(0x7FC00000)
    return pattern


float16_bits, bfloat16_bits, float32_bits = map(_njit, (_float16_bits, _bfloat16_bits, _float32_bits))


def _pattern(value: Any, kind: Any) -> Any:
    """RN of a float64 to F16 (0), BF16 (1) or F32 (2), as a pattern of bits, uint32."""
    if kind == 0:
        return float16_bits(value)
    if kind == 1:
        return bfloat16_bits(value)
    return float32_bits(value)


def _pattern64(value: Any) -> Any:
    """The pattern of a float64."""
    return np.uint64(bits_of(value))


pattern, pattern64 = map(_njit, (_pattern, _pattern64))
