"""The compiled loops of round-to-nearest: range, scale and zero point of a group, its codes, the clipping search.

A grid is (s, zp): the values s * (code - zp) for codes 0..2^q-1. s is rounded to the type that it is stored in before
anything else follows from it. Its rules:

- asymmetric: the range [lo, hi] of the group, widened to hold zero; s = (hi - lo) / (2^q - 1), zp = round(-lo / s)
- symmetric: zp = 2^(q-1); s = m / (2^(q-1) - 1/2) with m the largest size; for q = 1, whose grid is {-s, 0}, s = -x
  with x the value of the largest size, so that x is on the grid
- all zero: s = 1 and every code is zp, so zeros are exact
- all equal to x: s = |x|, one step away from zp (for q = 1 symmetric as above): exact when x fits the scale's type
- s that would round to zero becomes the smallest number of its type
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner
from bcqfmt.compiled.rounding import QUANTA, rounded

_COARSE = (
    9  # the clipping search tries 1, 0.9, ... 0.2 of the group's range, then near the best in steps of 0.05, 0.025
)
_TRIES = 13
_HALF = 6755399441055744.0  # 1.5 * 2^52: adding and subtracting it rounds a small float64 to an integer, ties to even


@inner
def extremes(values: Any) -> Any:
    """Smallest and largest number of a float32 vector; four of each in parallel, or every step waits for the last."""
    a = b = c = d = values[0]
    e = f = g = h = values[0]
    for k in range(values.size >> 2):
        i = 4 * k
        a, e = min(a, values[i]), max(e, values[i])
        b, f = min(b, values[i + 1]), max(f, values[i + 1])
        c, g = min(c, values[i + 2]), max(g, values[i + 2])
        d, h = min(d, values[i + 3]), max(h, values[i + 3])
    for i in range(values.size & ~3, values.size):
        a, e = min(a, values[i]), max(e, values[i])
    return np.float64(min(a, b, c, d)), np.float64(max(e, f, g, h))


@inner
def grid(low: Any, high: Any, bits: Any, symmetric: Any, kind: Any) -> Any:
    """(s, zp) for numbers between ``low`` and ``high``, by the rules above."""
    middle = np.float64(1 << (bits - 1))
    top = np.float64((1 << bits) - 1)
    size = max(-low, high)
    if size == 0.0:
        return 1.0, middle if symmetric else 0.0
    if symmetric and bits == 1:
        scale = -low if -low >= high else -high
    elif low == high:
        scale = size
    elif symmetric:
        scale = size / (middle - 0.5)
    else:
        low = min(low, 0.0)
        high = max(high, 0.0)
        scale = (high - low) / top
    stored = rounded(scale, kind)
    if stored == 0.0:
        stored = np.copysign(QUANTA[kind], scale)
    if symmetric:
        return stored, middle
    if low == high:
        return stored, 1.0 if low < 0.0 else 0.0
    return stored, (min(max(-low / stored, 0.0), top) + _HALF) - _HALF


@inner
def error_on(values: Any, weights: Any, scale: Any, zero: Any, bits: Any, squares: Any) -> Any:
    """Sum of weighted squared distances of a vector to the grid. ``squares``: float64 scratch as long as the vector."""
    inverse = 1.0 / scale
    low = -zero
    high = np.float64((1 << bits) - 1) - zero
    for i in range(values.size):
        value = np.float64(values[i])
        steps = value * inverse
        steps = steps if steps > low else low  # noqa: FURB136 - max() would also look for NaN
        steps = steps if steps < high else high  # noqa: FURB136
        steps = (steps + _HALF) - _HALF
        distance = value - steps * scale
        squares[i] = distance * distance * weights[i]
    return total(squares, values.size)


@inner
def total(terms: Any, count: Any) -> Any:
    """Sum of the first terms by halves, in place: the same order of additions on every machine."""
    while count > 8 and count & 3 == 0:  # two halvings at once
        count >>= 2
        a, b, c, d = terms[:count], terms[count : 2 * count], terms[2 * count : 3 * count], terms[3 * count : 4 * count]
        for i in range(count):
            a[i] = (a[i] + c[i]) + (b[i] + d[i])
    while count > 8:
        half = count >> 1
        kept = count - half
        left = terms[:half]
        right = terms[kept:count]
        for i in range(half):
            left[i] += right[i]
        count = kept
    result = 0.0
    for i in range(count):
        result += terms[i]
    return result


@inner
def best_grid(values: Any, weights: Any, bits: Any, symmetric: Any, search: Any, kind: Any, squares: Any) -> Any:
    """(s, zp) of a group; with ``search`` the one of least squared error among shrunken ranges, the wider in a tie.

    ``weights``: float64, what the squared error of every number is multiplied with. A scale that the type cannot hold
    comes back as infinity.
    """
    low, high = extremes(values)
    scale, zero = grid(low, high, bits, symmetric, kind)
    if not search or low == high or not np.isfinite(scale):
        return scale, zero
    least = error_on(values, weights, scale, zero, bits, squares)
    best = centre = 0.0
    for turn in range(1, _TRIES):
        steps = float(turn)
        if turn >= _COARSE:
            near = turn - _COARSE  # 0 and 1 half a step below and above, 2 and 3 a quarter
            if near & 1 == 0:
                centre = best
            steps = centre + ((near & 1) - 0.5) * (1.0 if near < 2 else 0.5)
        if steps < 0.0:
            continue
        factor = 1.0 - steps * 0.1
        other, shifted = grid(low * factor, high * factor, bits, symmetric, kind)
        error = error_on(values, weights, other, shifted, bits, squares)
        if error < least:
            least, best, scale, zero = error, steps, other, shifted
    return scale, zero


@inner
def codes_on(values: Any, scale: Any, zero: Any, bits: Any, codes: Any) -> None:
    """The nearest code of every number; uint8."""
    inverse = 1.0 / scale
    low = -zero
    high = np.float64((1 << bits) - 1) - zero
    for i in range(values.size):
        steps = np.float64(values[i]) * inverse
        steps = max(steps, low)
        steps = min(steps, high)
        codes[i] = np.uint8(np.int32((steps + _HALF) - _HALF + zero))


@compiled
def quantize_rows(
    weight: Any, group_size: Any, bits: Any, symmetric: Any, search: Any, kind: Any, codes: Any, scales: Any,
    zeros: Any, ones: Any, squares: Any, first: Any, stop: Any,
) -> None:  # fmt: skip
    """Rows ``first..stop`` of weight float32 [out, in]; codes uint8 [out, in], scales float32, zeros uint8 [out, G].

    ones: float64 [group_size], all 1; squares: as long, scratch.
    """
    columns = weight.shape[1]
    for row in range(first, stop):
        for j in range(scales.shape[1]):
            start = j * group_size
            end = min(start + group_size, columns)
            values = weight[row, start:end]
            scale, zero = best_grid(values, ones, bits, symmetric, search, kind, squares)
            scales[row, j] = scale
            zeros[row, j] = np.uint8(zero)
            codes_on(values, scale, zero, bits, codes[row, start:end])
