"""The compiled search for alpha and z of a group: several starts, each refined in turns, the best kept after rounding.

| start | alpha, z |
|---|---|
| greedy | z = 0; plane by plane the mean size of what is left |
| greedy around the mean | the same for the numbers less their mean z (with a bias only) |
| rtn | the uniform grid of `rtn` with clipping search, asymmetric and symmetric (with a bias only) |
| centred | a uniform grid around zero (without a bias only) |
| rtn, whole range | the grid of `rtn` without clipping search (with a bias and weights only) |

A start and what refinement made of it are both candidates. A candidate is rounded to the types it is stored in, its
numbers get the nearest of the levels that a reader will see, and then its error counts. So the result is never worse
than greedy's. It is never worse than that of `rtn` either where alpha and z can hold its grid; the caller compares.

Errors are squared, and where columns have weights, multiplied with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner
from bcqfmt.compiled.rounding import HALVES, QUANTA, rounded

from .bcq_fit import fit
from .bcq_levels import codes_by, copy, gather, levels_of, measure_nearest, move_levels, place, prefix_sums
from .rtn import best_grid, total

STARTS = ("greedy", "greedy around the mean", "rtn", "rtn symmetric", "centred", "rtn, whole range")
_NOISE = 1e-12  # of the numbers' squares: far more than cancellation can hide
_FALLS = 1.0 - 1e-4  # a smaller decrease of the error counts as none: the result would not show it


@inner
def greedy(values: Any, z: Any, alpha: Any, work: Any) -> None:
    """alpha of the greedy start: weighted means of sizes."""
    n = values.size
    rest, sizes = work.rest, work.squares
    for i in range(n):
        rest[i] = np.float64(values[i]) - z
    for plane in range(alpha.size):
        for i in range(n):
            sizes[i] = work.weights[i] * abs(rest[i])
        step = total(sizes, n) / work.mass[n]
        alpha[plane] = step
        for i in range(n):
            rest[i] -= step if rest[i] >= 0.0 else -step


@inner
def uniform(scale: Any, zero: Any, alpha: Any) -> Any:
    """alpha of the grid s * (code - zp), in place; returns its z."""
    q = alpha.size
    for i in range(q):
        alpha[i] = abs(scale) * 2.0 ** (q - 2 - i)
    return scale * (0.5 * ((1 << q) - 1) - zero)


@inner
def refine(values: Any, power: Any, alpha: Any, z: Any, bias: Any, rounds: Any, kinds: Any, work: Any) -> Any:
    """Alternate least squares and nearest levels while the error falls; alpha in place.

    Returns z, the error before and the error after.
    """
    size = 1 << alpha.size
    trial = work.trial
    least = first = np.inf
    kept = z
    for turn in range(rounds + 1):
        changed = True
        if turn == 0:
            copy(alpha, trial, alpha.size)
            levels_of(trial, z, kinds[4], work)
        else:
            changed = move_levels(trial, z, work)
        changed = place(values, work, size) or changed
        error = gather(work, size, power)
        if turn == 0:
            first = error
        if not error < least * _FALLS:
            break
        least = error
        copy(trial, alpha, alpha.size)
        kept = z
        if not changed:  # the same bits would give the same scales
            break
        if turn < rounds:
            z = fit(trial, z, bias, work)
            for i in range(trial.size):  # the other sign turns the plane's bits over, and they are found anew
                trial[i] = abs(trial[i])
    return kept, first, least


@inner
def store(alpha: Any, z: Any, kinds: Any, stored: Any) -> Any:
    """alpha, the largest first, and then z in ``stored``, rounded to their types; False where one does not fit.

    kinds: the types of alpha, of z, of the values and of the scales that `rtn` would have, then F64.
    """
    q = alpha.size
    stored[q] = rounded(z, kinds[1]) + 0.0  # no negative zero
    fits = np.isfinite(stored[q])
    for i in range(q):
        step = rounded(abs(alpha[i]), kinds[0])
        fits = fits and np.isfinite(step)
        j = i
        while j > 0 and stored[j - 1] < step:  # insertion sort, falling
            stored[j] = stored[j - 1]
            j -= 1
        stored[j] = step
    return fits


@inner
def place_levels(values: Any, stored: Any, kind: Any, work: Any) -> None:
    """Levels of stored numbers as a reader sees them, and the runs nearest to them."""
    q = stored.size - 1
    levels_of(stored[:q], stored[q], kind, work)
    place(values, work, 1 << q)


@inner
def grid_error(values: Any, scale: Any, zero: Any, q: Any, kind: Any, work: Any) -> Any:
    """The squared error on the grid s * (code - zp) whose values are rounded to ``kind``."""
    size = 1 << q
    for code in range(size):
        at = code if scale > 0.0 else size - 1 - code
        work.levels[at] = rounded(scale * (code - zero), kind)
    place(values, work, size)
    return measure_nearest(values, work, size)


@inner
def assign(values: Any, codes: Any, work: Any) -> None:
    """The code of the nearest of the ``levels`` for numbers in their own order; a tie goes to the lower level."""
    q = work.alpha.size
    for k in range((1 << q) - 1):
        work.spare[k] = 0.5 * (work.levels[k] + work.levels[k + 1])
    codes_by(values, work.spare, work.labels, q, codes)


@inner
def shift(alpha: Any, z: Any, kinds: Any) -> Any:
    """How far rounding can move a level at most: that of alpha, of z, and of the level itself."""
    total = abs(z)
    moved = HALVES[kinds[1]] * abs(z) + QUANTA[kinds[1]]
    for i in range(alpha.size):
        total += alpha[i]
        moved += HALVES[kinds[0]] * alpha[i] + QUANTA[kinds[0]]
    return moved + HALVES[kinds[2]] * (total + moved) + QUANTA[kinds[2]]


@inner
def least_after(error: Any, moved: Any, power: Any, mass: Any) -> Any:
    """The least error of numbers that weigh ``mass`` when levels move by up to ``moved`` (triangle inequality)."""
    length = np.sqrt(max(error - _NOISE * power, 0.0)) - np.sqrt(mass) * moved
    return length * length if length > 0.0 else 0.0


@inner
def begin(kind: Any, values: Any, bias: Any, weighted: Any, kinds: Any, work: Any) -> Any:
    """A start: whether it applies, z, and the grid of `rtn` where it is one (else s = 0); alpha goes to ``work``."""
    alpha = work.alpha
    if kind == 0 or (kind == 1 and bias):
        z = work.prefix[values.size] / work.mass[values.size] if kind == 1 else 0.0
        greedy(values, z, alpha, work)
        return True, z, 0.0, 0.0
    if kind < 2 or bias != (kind != 4) or (kind == 5 and not weighted):
        return False, 0.0, 0.0, 0.0
    symmetric = kind == 3 or kind == 4
    scale, zero = best_grid(values, work.weights, alpha.size, symmetric, kind != 5, kinds[3], work.squares)
    if not np.isfinite(scale):
        return False, 0.0, 0.0, 0.0
    z = uniform(scale, zero, alpha)
    if not bias:
        return True, 0.0, 0.0, 0.0
    return True, z, scale, zero


@inner
def solve(values: Any, rounds: Any, bias: Any, weighted: Any, kinds: Any, found: Any, work: Any) -> Any:
    """alpha and z of a sorted group to ``found``; returns its error, that of `rtn`, and the start it comes from.

    What rounding cannot bring below the best so far is not tried, and errors are added up number by number only where
    sums over runs cannot tell which is smaller. The error of `rtn` is exact where it is below that of the result, else
    some number between the two; without a bias that of the result.
    """
    power = prefix_sums(values, work)
    mass = work.mass[values.size]
    slack = _NOISE * power
    q = work.alpha.size
    size = 1 << q
    found[0] = np.inf
    low = high = exact = np.inf  # the best error so far is between the first two
    origin = 0
    for kind in range(len(STARTS)):
        applies, z, scale, zero = begin(kind, values, bias, weighted, kinds, work)
        if not applies:
            continue
        copy(work.alpha, work.start, q)
        moved = shift(work.start, z, kinds)
        offset, first, last = refine(values, power, work.alpha, z, bias, rounds, kinds, work)
        limit = least_after(last, shift(work.alpha, offset, kinds), power, mass)
        for refined in range(1, -1, -1):
            if refined == 0:
                copy(work.start, work.alpha, q)
                offset, limit = z, least_after(first, moved, power, mass)
            if not (limit < high and store(work.alpha, offset, kinds, work.stored)):
                continue
            place_levels(values, work.stored, kinds[2], work)
            error = gather(work, size, power)
            if error - slack >= high:
                continue
            if error + slack < low:
                low, high = error - slack, error + slack
            else:
                error = measure_nearest(values, work, size)
                if low < high:
                    place_levels(values, found, kinds[2], work)
                    low = high = measure_nearest(values, work, size)
                if not error < high:
                    continue
                low = high = error
            copy(work.stored, found, q + 1)
            origin = kind + 128 * refined
        if scale != 0.0:
            if limit < high:
                limit = grid_error(values, scale, zero, q, kinds[2], work)
            exact = min(exact, limit)
    if not np.isfinite(high):
        return np.inf, np.inf, origin
    place_levels(values, found, kinds[2], work)
    error = measure_nearest(values, work, size)
    return error, exact if np.isfinite(exact) else error, origin


@compiled
def solve_rows(
    weight: Any, ordered: Any, importance: Any, group_size: Any, rounds: Any, bias: Any, kinds: Any, codes: Any,
    best: Any, errors: Any, uniform_errors: Any, starts: Any, work: Any,
) -> None:  # fmt: skip
    """Some rows of a matrix, weight float32 [rows, in].

    ordered: the same with every group sorted. importance: float64 of the same shape, the weights of the sorted numbers,
    or [0, 0] where all count the same. codes: uint8 [rows, in]. best: float64 [rows, G, q + 1], alpha and z,
    infinite where nothing fits the types. errors: of the result; uniform_errors: of `rtn`, see ``solve``; both
    float64 [rows, G]. starts: uint8 [rows, G], where the result comes from, + 128 if refined. work: scratch for groups
    of this size and q.
    """
    columns = weight.shape[1]
    weighted = importance.size > 0
    for row in range(weight.shape[0]):
        for j in range(best.shape[1]):
            start = j * group_size
            end = min(start + group_size, columns)
            if weighted:
                copy(importance[row, start:end], work.weights, end - start)
            least, exact, origin = solve(ordered[row, start:end], rounds, bias, weighted, kinds, best[row, j], work)
            errors[row, j] = least
            uniform_errors[row, j] = exact
            starts[row, j] = origin
            if np.isfinite(least):
                assign(weight[row, start:end], codes[row, start:end], work)
