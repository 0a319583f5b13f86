"""Compiled loops of error-compensated rounding: a blocked Cholesky factor, its inverse, and the rounding itself.

All matrices are float64 in C order, those of nested planes float32. Every loop adds in an order that depends on neither
threads nor blocks of rows, so the result is the same however the rows are shared out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner

from .rtn import best_grid

_TILE = 256  # columns and rows of P used at a time: they fit the second-level cache, a row of the sum the first
_DEPTH = 128


@inner
def _eight(x: Any, k: Any, sign: Any) -> Any:
    return (
        sign * x[k], sign * x[k + 1], sign * x[k + 2], sign * x[k + 3],
        sign * x[k + 4], sign * x[k + 5], sign * x[k + 6], sign * x[k + 7],
    )  # fmt: skip


@compiled
def accumulate(
    C: Any, c_row: Any, c_col: Any, X: Any, x_row: Any, x_col: Any, P: Any, p_row: Any, p_col: Any,
    rows: Any, depth: Any, cols: Any, sign: Any,
) -> None:  # fmt: skip
    """C += sign * X P on blocks that begin at the given rows and columns: rows x depth times depth x cols."""
    for tile in range(0, cols, _TILE):
        width = min(_TILE, cols - tile)
        pj, cj = p_col + tile, c_col + tile
        for floor in range(0, depth, _DEPTH):
            ceiling = min(floor + _DEPTH, depth)
            deep = ceiling - (ceiling - floor) % 8
            for i in range(0, rows, 2):
                pair = i + 1 < rows  # two rows share what is loaded of P
                c, d = C[c_row + i, cj : cj + width], C[c_row + i + pair, cj : cj + width]
                x, y = X[x_row + i, x_col : x_col + depth], X[x_row + i + pair, x_col : x_col + depth]
                for k in range(floor, deep, 8):
                    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x, k, sign)
                    y0, y1, y2, y3, y4, y5, y6, y7 = _eight(y, k, sign)
                    p0 = P[p_row + k, pj : pj + width]
                    p1 = P[p_row + k + 1, pj : pj + width]
                    p2 = P[p_row + k + 2, pj : pj + width]
                    p3 = P[p_row + k + 3, pj : pj + width]
                    p4 = P[p_row + k + 4, pj : pj + width]
                    p5 = P[p_row + k + 5, pj : pj + width]
                    p6 = P[p_row + k + 6, pj : pj + width]
                    p7 = P[p_row + k + 7, pj : pj + width]
                    if pair:
                        for j in range(width):
                            low = (x0 * p0[j] + x1 * p1[j]) + (x2 * p2[j] + x3 * p3[j])
                            high = (x4 * p4[j] + x5 * p5[j]) + (x6 * p6[j] + x7 * p7[j])
                            under = (y0 * p0[j] + y1 * p1[j]) + (y2 * p2[j] + y3 * p3[j])
                            over = (y4 * p4[j] + y5 * p5[j]) + (y6 * p6[j] + y7 * p7[j])
                            c[j] += low + high
                            d[j] += under + over
                    else:
                        for j in range(width):
                            low = (x0 * p0[j] + x1 * p1[j]) + (x2 * p2[j] + x3 * p3[j])
                            high = (x4 * p4[j] + x5 * p5[j]) + (x6 * p6[j] + x7 * p7[j])
                            c[j] += low + high
                for k in range(deep, ceiling):
                    p0, x0, y0 = P[p_row + k, pj : pj + width], sign * x[k], sign * y[k]
                    for j in range(width):
                        c[j] += x0 * p0[j]
                    if pair:
                        for j in range(width):
                            d[j] += y0 * p0[j]


@compiled
def factor_block(A: Any, start: Any, stop: Any) -> bool:
    """Cholesky factor of a diagonal block, in its lower triangle; False when it is not positive definite."""
    for i in range(start, stop):
        for j in range(start, i + 1):
            total = A[i, j]
            for k in range(start, j):
                total -= A[i, k] * A[j, k]
            if i > j:
                A[i, j] = total / A[j, j]
            elif total > 0.0 and np.isfinite(total):
                A[i, i] = np.sqrt(total)
            else:
                return False
    return True


@compiled
def solve_rows(A: Any, start: Any, stop: Any, block: Any, panel: Any, first: Any, last: Any) -> None:
    """Rows first..last of the panel left of the diagonal block: A L^-T; ``panel`` gets its transpose.

    ``block``: the factor's diagonal block, transposed, ``[stop - start, stop - start]``.
    """
    n = stop - start
    for i in range(first, last):
        a = A[i, start:stop]
        for k in range(n):
            x = a[k] / block[k, k]
            a[k] = x
            panel[k, i] = x
            rest, known = a[k + 1 :], block[k, k + 1 :]
            for m in range(n - k - 1):
                rest[m] -= x * known[m]


@compiled
def invert_block(A: Any, start: Any, stop: Any, block: Any) -> None:
    """The inverse of a lower triangular block, zeros above; ``block`` keeps the triangle itself."""
    n = stop - start
    for i in range(n):
        for j in range(n):
            block[i, j] = A[start + i, start + j] if j <= i else 0.0
            A[start + i, start + j] = 1.0 if i == j else 0.0
    for i in range(n):
        for m in range(i):
            for j in range(n):
                A[start + i, start + j] -= block[i, m] * A[start + m, start + j]
        for j in range(n):
            A[start + i, start + j] /= block[i, i]


@compiled
def solve_tile(A: Any, start: Any, stop: Any, block: Any, first: Any, last: Any) -> None:
    """Columns first..last of the rows start..stop: the triangle ``block`` is divided out from the left."""
    for i in range(stop - start):
        a = A[start + i, first:last]
        for m in range(i):
            x, known = block[i, m], A[start + m, first:last]
            for j in range(last - first):
                a[j] -= x * known[j]
        for j in range(last - first):
            a[j] /= block[i, i]


@compiled
def round_columns(
    target: Any, t_col: Any, first: Any, last: Any, factor: Any, scale: Any, zero: Any, which: Any, tops: Any,
    exact: Any, codes: Any, wanted: Any, missed: Any, row: Any, stop_row: Any,
) -> None:  # fmt: skip
    """Round columns last-1 down to first; what each one misses is taken back at the columns of ``target`` below it.

    target ``[rows, width]``: the weights as compensated so far, of the columns from ``t_col`` on. factor: unit lower
    triangle. ``which``: column -> group; scale, zero ``[rows, groups]``; tops: group -> largest code. Where ``exact``
    is set, nothing is missed and the code is the nearest one. codes uint8, wanted (the compensated weight) and missed
    (wanted - value), all ``[rows, in]``.
    """
    for r in range(row, stop_row):
        for c in range(last - 1, first - 1, -1):
            group = which[c]
            s = scale[r, group]
            z = zero[r, group]
            t = target[r, c - t_col]
            steps = 0.0 if s == 0.0 else t * (1.0 / s)  # as round-to-nearest has it: equal where nothing is passed on
            code = np.rint(min(max(steps, -z), tops[group] - z)) + z
            codes[r, c] = np.uint8(np.int32(code))
            wanted[r, c] = t
            miss = 0.0 if exact[r, c] else t - s * (code - z)
            missed[r, c] = miss
            below, shares = target[r, : c - t_col], factor[c, t_col:c]
            for j in range(c - t_col):
                below[j] -= miss * shares[j]


@compiled
def round_to_levels(
    target: Any, t_col: Any, first: Any, last: Any, factor: Any, levels: Any, labels: Any, which: Any, codes: Any,
    missed: Any, row: Any, stop_row: Any,
) -> None:  # fmt: skip
    """:func:`round_columns` for any levels: levels float64 and labels (their codes) uint8, ``[rows, groups, L]``.

    Levels rise within a group; a number half-way between two gets the lower.
    """
    count = levels.shape[2]
    for r in range(row, stop_row):
        for c in range(last - 1, first - 1, -1):
            own = levels[r, which[c]]
            t = target[r, c - t_col]
            low, high = 0, count - 1
            while low < high:
                middle = (low + high) >> 1
                if t - own[middle] > own[middle + 1] - t:
                    low = middle + 1
                else:
                    high = middle
            codes[r, c] = labels[r, which[c], low]
            miss = t - own[low]
            missed[r, c] = miss
            below, shares = target[r, : c - t_col], factor[c, t_col:c]
            for j in range(c - t_col):
                below[j] -= miss * shares[j]


@compiled
def round_nested(
    target: Any, t_col: Any, last: Any, factors: Any, weights: Any, levels: Any, fixed: Any, free: Any, which: Any,
    codes: Any, missed: Any, costs: Any,
) -> None:  # fmt: skip
    """:func:`round_columns` down to ``t_col`` for P precisions at once, each with targets and errors of its own.

    A number gets the code of least weighted sum of squared errors, the lowest of equal ones. target ``[P, rows,
    width]``, missed ``[P, rows, in]``; factors: a tuple, one for each precision; weights ``[P, in]``; levels ``[P,
    rows, groups, L]`` by code. fixed: uint8 ``[rows, in]``, what codes are without their ``free`` lowest bits, or
    ``[0, 0]``. costs: scratch, ``[L]``. All other numbers are float32.
    """
    count = weights.shape[0]
    for r in range(codes.shape[0]):
        for c in range(last - 1, t_col - 1, -1):
            group = which[c]
            at = c - t_col
            low = 0
            high = levels.shape[3]
            if fixed.size > 0:
                low = np.int64(fixed[r, c]) << free
                high = low + (1 << free)
            for code in range(costs.size):
                costs[code] = 0.0
            for p in range(count):
                table = levels[p, r, group]
                wanted, weight = target[p, r, at], weights[p, c]
                for code in range(costs.size):
                    distance = wanted - table[code]
                    costs[code] += weight * (distance * distance)
            best = low
            for code in range(low + 1, high):
                if costs[code] < costs[best]:
                    best = code
            codes[r, c] = np.uint8(best)
            for p in range(count):
                shares = factors[p][c, t_col:c]
                miss = target[p, r, at] - levels[p, r, group, best]
                missed[p, r, c] = miss
                below = target[p, r, :at]
                for j in range(at):
                    below[j] -= miss * shares[j]


@compiled
def descend_nested(
    hessians: Any, diagonals: Any, shares: Any, levels: Any, fixed: Any, free: Any, which: Any, codes: Any, pull: Any,
    costs: Any,
) -> bool:  # fmt: skip
    """One pass over all columns: each gets the code of least weighted sum of output errors, the others as they are.

    hessians: a tuple, one for each precision; diagonals: theirs, ``[P, in]``; shares: what their errors count, ``[P]``.
    codes uint8 ``[rows, in]`` and pull (what is missed, times hessian) ``[P, rows, in]`` are kept up to date. costs:
    scratch, ``[L]``. The rest as in :func:`round_nested`, columns in the order of the hessians. Returns whether a code
    has changed.
    """
    changed = False
    count = levels.shape[0]
    for r in range(codes.shape[0]):
        for c in range(codes.shape[1]):
            group = which[c]
            low = 0
            high = levels.shape[3]
            if fixed.size > 0:
                low = np.int64(fixed[r, c]) << free
                high = low + (1 << free)
            now: Any = np.int64(codes[r, c])
            for code in range(costs.size):
                costs[code] = 0.0
            for p in range(count):
                table = levels[p, r, group]
                level, half, own = table[now], shares[p] * pull[p, r, c], shares[p] * diagonals[p, c]
                for code in range(costs.size):
                    step = level - table[code]
                    costs[code] += step * (half + half + step * own)
            best = now
            least = costs[now]  # zero
            for code in range(low, high):
                if costs[code] < least:
                    least, best = costs[code], code
            if best == now:
                continue
            changed = True
            codes[r, c] = np.uint8(best)
            for p in range(count):
                across = hessians[p][c]
                step = levels[p, r, group, now] - levels[p, r, group, best]
                if step != 0.0:
                    mine = pull[p, r]
                    for j in range(mine.size):
                        mine[j] += step * across[j]
    return changed


@compiled
def grids(
    values: Any, weights: Any, bits: Any, symmetric: Any, search: Any, kind: Any, scale: Any, zero: Any, squares: Any,
    first: Any, stop: Any,
) -> None:  # fmt: skip
    """Scale and zero point ``[rows]`` of rows first..stop, each a group of ``values`` float64 ``[rows, width]``.

    weights: float64 ``[width]``, what squared errors count in the search; squares: as long, scratch.
    """
    for row in range(first, stop):
        scale[row], zero[row] = best_grid(values[row], weights, bits, symmetric, search, kind, squares)
