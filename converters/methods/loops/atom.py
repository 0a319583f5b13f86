"""Compiled scales of Atom's symmetric groups.

A group's values are s * (code - 2^(n-1)), s = step * m * c with m the largest size and c the clipping factor:

- rule `paper`: step = 2 / (2^n - 1); rule `code` (the authors' program): step = 1 / (2^(n-1) - 1)
- search: c is the one of 1, 0.975, ... 0.5 with the least squared error
- all zero: s = 1; s that would round to zero becomes the smallest number of its type
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner
from bcqfmt.compiled.rounding import QUANTA, rounded

_TRIALS = 21
_STEP = 0.025


@inner
def squared_error(values: Any, scale: Any, half: Any) -> Any:
    """Sum of squared distances to the grid of ``scale`` with codes -half..half-1."""
    inverse = 1.0 / scale
    total = 0.0
    for i in range(values.size):
        distance = values[i] - scale * np.rint(min(max(values[i] * inverse, -half), half - 1.0))
        total += distance * distance
    return total


@compiled
def symmetric_scales(
    values: Any, bits: Any, step: Any, clip: Any, search: Any, kind: Any, scale: Any, first: Any, stop: Any
) -> None:
    """``scale`` ``[rows]`` of rows first..stop, each a group of ``values`` float64 ``[rows, width]``."""
    half = np.float64(1 << (bits - 1))
    for row in range(first, stop):
        size = 0.0
        for i in range(values.shape[1]):
            size = max(size, abs(values[row, i]))
        if size == 0.0:
            scale[row] = 1.0
            continue
        best = max(rounded(step * size * (1.0 if search else clip), kind), QUANTA[kind])
        if search and np.isfinite(best):
            least = squared_error(values[row], best, half)
            for k in range(1, _TRIALS):
                other = max(rounded(step * size * (1.0 - _STEP * k), kind), QUANTA[kind])
                error = squared_error(values[row], other, half)
                if error < least:
                    least, best = error, other
        scale[row] = best
