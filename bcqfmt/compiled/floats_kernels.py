"""Rounding to the format's floating-point types inside compiled loops; the same results as ``dtypes.round_to``."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .compiling import inner

__all__ = ["HALVES", "KINDS", "LARGEST", "QUANTA", "rounded"]

KINDS: Final = {"F16": 0, "BF16": 1, "F32": 2, "F64": 3}
LARGEST: Final = {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38}

QUANTA: Final = np.array([2.0**-24, 2.0**-133, 2.0**-149])  # by kind: the smallest number above zero
HALVES: Final = np.array([2.0**-11, 2.0**-8, 2.0**-24])  # by kind: the largest relative error of a normal number
# by kind: bits of binary64's significand that are dropped, smallest normal number, first number that becomes infinity
_DROPPED = np.array([42, 45, 29], np.int64)
_NORMAL = np.array([2.0**-14, 2.0**-126, 2.0**-126])
_TOO_LARGE = np.array([65520.0, 2.0**128 - 2.0**119, 2.0**128 - 2.0**103])


@inner
def rounded(x: Any, kind: Any) -> Any:
    """A finite float64 rounded once to ``kind``, ties to even; infinity where it does not fit."""
    if kind == 3:
        return x
    size = abs(x)
    if size >= _TOO_LARGE[kind]:
        return np.copysign(np.inf, x)
    if size < _NORMAL[kind]:
        quantum = QUANTA[kind]
        return np.copysign(np.rint(size / quantum) * quantum, x)
    bits = np.float64(x).view(np.int64)
    dropped = _DROPPED[kind]
    odd = (bits >> dropped) & np.int64(1)
    bits = ((bits + (np.int64(1) << (dropped - 1)) - 1 + odd) >> dropped) << dropped
    return np.int64(bits).view(np.float64)
