"""Compiled fitting of 2-bit groups whose scales are themselves quantized: s = scale_scale * scale_code.

Rows that share a scale_scale are fitted together. All sums are weighted: a weight of 0 leaves an outlier out of the
range and out of the error. Scale zeros are 0 throughout, because a grid with a negative scale is one with another zero
point: only positive scales are needed, and every code is one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner
from bcqfmt.compiled.rounding import QUANTA, rounded

_TOP = 3.0  # largest 2-bit code
_SIZES = 11  # first scales tried, as shares of the largest number: 0.2, 0.28 ... 1
_NEAR = 2  # scale codes tried on either side of the nearest
_STARTS = 2  # scale_scales tried: for the whole range of scales, and for 0.85 of it
_ROUNDS = 2  # least-squares corrections of each


@inner
def errors_at(values: Any, weights: Any, scale: Any, errors: Any) -> Any:
    """Weighted squared error on the grids of ``scale`` for the zero points 0, 1, 2, 3; gives the best of them."""
    inverse = 1.0 / scale
    e0 = e1 = e2 = e3 = 0.0
    for i in range(values.size):
        value = values[i]
        weight = weights[i]
        steps = np.rint(value * inverse)
        d0 = value - scale * min(max(steps, 0.0), 3.0)
        d1 = value - scale * min(max(steps, -1.0), 2.0)
        d2 = value - scale * min(max(steps, -2.0), 1.0)
        d3 = value - scale * min(max(steps, -3.0), 0.0)
        e0 += weight * d0 * d0
        e1 += weight * d1 * d1
        e2 += weight * d2 * d2
        e3 += weight * d3 * d3
    errors[0], errors[1], errors[2], errors[3] = e0, e1, e2, e3
    best = 0
    for z in range(1, 4):
        if errors[z] < errors[best]:
            best = z
    return best


@inner
def range_of(values: Any, weights: Any) -> Any:
    """Smallest and largest number of weight above 0, widened to hold zero."""
    low = 0.0
    high = 0.0
    for i in range(values.size):
        if weights[i] > 0.0:
            low = min(low, values[i])
            high = max(high, values[i])
    return low, high


@inner
def free_scale(values: Any, weights: Any, errors: Any) -> Any:
    """The best of some scales for a row on its own; 0 for a row of zeros."""
    low, high = range_of(values, weights)
    size = max(-low, high)
    best = 0.0
    least = np.inf
    if size > 0.0:
        for k in range(_SIZES):
            scale = size * (1.0 - 0.08 * k)
            error = errors[errors_at(values, weights, scale, errors)]
            if error < least:
                least, best = error, scale
    return best


@inner
def choose(values: Any, weights: Any, unit: Any, wanted: Any, limit: Any, errors: Any) -> Any:
    """(scale code, zero point, error) of a row for a given scale_scale; codes near ``wanted`` / unit are tried."""
    if wanted == 0.0:
        return 0.0, 0.0, 0.0
    middle = np.rint(wanted / unit)
    code = zero = 0.0
    least = np.inf
    for c in range(max(1, min(limit, middle - _NEAR)), min(limit, max(1, middle + _NEAR)) + 1):
        z = errors_at(values, weights, unit * c, errors)
        if errors[z] < least:
            least, code, zero = errors[z], float(c), float(z)
    return code, zero, least


@inner
def better_unit(values: Any, weights: Any, unit: Any, codes: Any, zeros: Any, first: Any, stop: Any) -> Any:
    """scale_scale of least squared error for the chosen scale codes and zero points, rounding as it is now."""
    above = below = 0.0
    for r in range(first, stop):
        if codes[r] > 0.0:
            inverse = 1.0 / (unit * codes[r])
            for i in range(values.shape[1]):
                steps = min(max(np.rint(values[r, i] * inverse), -zeros[r]), _TOP - zeros[r]) * codes[r]
                above += weights[r, i] * values[r, i] * steps
                below += weights[r, i] * steps * steps
    return above / below if below > 0.0 else unit


@inner
def stored_unit(unit: Any, kind: Any) -> Any:
    """Rounded to the type it is stored in, never to zero."""
    return max(rounded(unit, kind), QUANTA[kind])


@inner
def fit_by_range(
    values: Any, weights: Any, limit: Any, kind: Any, codes: Any, zeros: Any, first: Any, stop: Any
) -> Any:
    """scale_scale, scale codes and zero points from ranges: s = (high - low) / 3 to the nearest code, zp = -low / s."""
    largest = 0.0
    for r in range(first, stop):
        low, high = range_of(values[r], weights[r])
        largest = max(largest, (high - low) / _TOP)
    unit = stored_unit(largest / limit, kind)
    for r in range(first, stop):
        low, high = range_of(values[r], weights[r])
        codes[r] = zeros[r] = 0.0
        if high > low:
            codes[r] = min(max(np.rint((high - low) / _TOP / unit), 1.0), limit)
            zeros[r] = min(max(np.rint(-low / (unit * codes[r])), 0.0), _TOP)
    return unit


@inner
def fit_by_error(
    values: Any, weights: Any, limit: Any, kind: Any, codes: Any, zeros: Any, trial: Any, errors: Any, first: Any,
    stop: Any,
) -> Any:  # fmt: skip
    """scale_scale of the rows first..stop, and their scale codes and zero points: the best of several starts.

    Never worse than :func:`fit_by_range`.
    """
    wanted, trial_codes, trial_zeros = trial[0], trial[1], trial[2]
    for r in range(first, stop):  # the scales that the rows would have on their own
        wanted[r] = free_scale(values[r], weights[r], errors)
    largest = 0.0
    for r in range(first, stop):
        largest = max(largest, wanted[r])
    best = fit_by_range(values, weights, limit, kind, codes, zeros, first, stop)
    least = 0.0
    for r in range(first, stop):
        if codes[r] > 0.0:
            errors_at(values[r], weights[r], best * codes[r], errors)
            least += errors[int(zeros[r])]
    for start in range(_STARTS):
        unit = stored_unit((1.0 - 0.15 * start) * largest / limit, kind)
        for _ in range(_ROUNDS + 1):
            total = 0.0
            for r in range(first, stop):
                trial_codes[r], trial_zeros[r], error = choose(values[r], weights[r], unit, wanted[r], limit, errors)
                total += error
            if total < least:
                least, best = total, unit
                for r in range(first, stop):
                    codes[r], zeros[r] = trial_codes[r], trial_zeros[r]
            unit = stored_unit(better_unit(values, weights, unit, trial_codes, trial_zeros, first, stop), kind)
    return best


@compiled
def fit_rows(
    values: Any, weights: Any, limit: Any, kind: Any, search: Any, row_step: Any, units: Any, codes: Any, zeros: Any,
    trial: Any, errors: Any, first: Any, stop: Any,
) -> None:  # fmt: skip
    """A column group, row group after row group from ``first``, a multiple of ``row_step``, to ``stop``.

    values, weights: float64 ``[rows, g]``; units ``[ceil(rows / row_step)]``, codes and zeros ``[rows]`` are filled.
    ``limit``: largest scale code; ``kind``: type of the units; ``search``: by error instead of by range.
    trial: float64 ``[3, rows]``, errors: float64 ``[4]``, scratch.
    """
    for start in range(first, stop, row_step):
        end = min(start + row_step, values.shape[0])
        if search:
            units[start // row_step] = fit_by_error(
                values, weights, limit, kind, codes, zeros, trial, errors, start, end
            )
        else:
            units[start // row_step] = fit_by_range(values, weights, limit, kind, codes, zeros, start, end)
