"""The least error that one or two more planes can have under two given ones, with a proof: branch and bound.

The levels of code c are around a base b_c: z - t, z - u, z + u, z + t for c = 0..3, where t and u are any numbers and z
is 0 without a bias. One more plane: b_c +- a. Two: b_c +- a +- a', where a >= a' >= 0 can be asked for, as the planes
may change places. So a code's sorted numbers are cut at b_c, or at b_c - a, b_c and b_c + a, whatever a' is, and all
choices of bits that can be best belong to some (z, t, u, a).

Boxes of these are halved. In a box most numbers are on one side of every cut; a number x that may be on either side of
a cut at c, where the levels beside it are c - d and c + d, has the squared error

    (|x - c| - d)^2 = (x - c)^2 + d^2 - 2 d |x - c|,

and summed over such numbers |x - c| is at most what it is at one of the two ends that the box gives c. With that all is
quadratic in z, the four scales and nothing else: its least value bounds the box from below. Numbers near two cuts count
nothing. A box whose bound is not below the best error found is done; one with few choices of cuts left is tried out.
Not looked at are bases that are further from the numbers than these are from each other.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["least_error"]

_FEW = 16  # choices of cuts that are tried out
_MANY = 1 << 16  # the same where a box cannot be halved any more
_NARROW = 1e-9  # of the numbers' range: such a box
_DEPTH = 512

compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


def least_error(
    values: Any, codes: Any, more: int, bias: bool, known: float = np.inf, share: float = 0.0, boxes: int = 1 << 24
) -> tuple[float, float]:
    """Bounds of the least squared error of a group [g] with ``more`` planes (1 or 2) beside those in ``codes`` [g].

    The second is reached by some bits and scales (or is ``known``), the first is proven: at least ``share`` below it,
    or less where more than so many ``boxes`` would be needed.
    """
    order = np.lexsort((values, codes))
    numbers = np.asarray(values, np.float64)[order]
    ends = np.searchsorted(np.asarray(codes)[order], np.arange(5))
    if more == 2:  # a good error from the beginning saves most of the work
        known = min(known, least_error(values, codes, 1, bias, known, 0.01)[1])
    proven, found = _search(numbers, ends, more, bias, min(known, float(np.square(numbers).sum())), share, boxes)
    return float(proven), float(found)


@compiled
def _above(numbers: Any, low: Any, high: Any, bound: Any) -> Any:
    """Where sorted numbers ``low..high`` begin to be above ``bound``."""
    while low < high:
        middle = (low + high) >> 1
        if numbers[middle] <= bound:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _count(matrix: Any, right: Any, signs: Any, count: Any, total: Any) -> None:
    """Add the squared errors of ``count`` numbers at the level with these signs of z and the scales."""
    for i in range(right.size):
        right[i] += signs[i] * total
        for j in range(i + 1):
            matrix[i, j] += signs[i] * signs[j] * count


@compiled
def _least(matrix: Any, right: Any, squares: Any, count: Any) -> Any:
    """Least value of squares - 2 right x + x matrix x (lower triangle), by elimination."""
    for i in range(right.size):
        pivot = matrix[i, i]
        if pivot > 1e-9 * count:
            squares -= right[i] * right[i] / pivot
            for j in range(i + 1, right.size):
                factor = matrix[j, i] / pivot
                right[j] -= factor * right[i]
                for k in range(j, right.size):
                    matrix[k, j] -= factor * matrix[k, i]
    return squares


@compiled
def _signs(code: Any, part: Any, more: Any, bias: Any, signs: Any) -> None:
    """Of z and the scales at the ``part``-th level, counted from below, of a code."""
    signs[0] = 1.0 if bias else 0.0
    signs[1] = 1.0 if code & 2 else -1.0
    signs[2] = 1.0 if code & 1 else -1.0
    for i in range(more):
        signs[3 + i] = 1.0 if part >> (more - 1 - i) & 1 else -1.0


@compiled
def _error(
    sums: Any, squares: Any, ends: Any, more: Any, bias: Any, cuts: Any, matrix: Any, right: Any, signs: Any
) -> Any:
    """The least squared error with these cuts [4, 3]."""
    matrix[:] = 0.0
    right[:] = 0.0
    for code in range(4):
        at = ends[code]
        for part in range(1 << more):
            stop = ends[code + 1] if part + 1 == 1 << more else max(cuts[code, part], at)
            _signs(code, part, more, bias, signs)
            _count(matrix, right, signs, stop - at, sums[stop] - sums[at])
            at = stop
    return _least(matrix, right, squares[-1], sums.size - 1)


@compiled
def _bound(
    numbers: Any, sums: Any, squares: Any, ends: Any, more: Any, bias: Any, low: Any, high: Any, first: Any, last: Any,
    matrix: Any, right: Any, signs: Any,
) -> Any:  # fmt: skip
    """What no error in the box ``low..high`` of (z, t, u, a) is below; where its cuts can be: ``first``, ``last``."""
    matrix[:] = 0.0
    right[:] = 0.0
    size = (1 << more) - 1
    known = 0.0
    near, far = np.empty(3), np.empty(3)
    for code in range(4):
        k = 1 if code in (0, 3) else 2
        below = low[0] + low[k] if code & 2 else low[0] - high[k]
        above = high[0] + high[k] if code & 2 else high[0] - low[k]
        begin, end = ends[code], ends[code + 1]
        for i in range(size):
            side = i - (size >> 1)
            near[i] = below + (side * high[3] if side < 0 else side * low[3])
            far[i] = above + (side * low[3] if side < 0 else side * high[3])
            first[code, i] = _above(numbers, begin, end, near[i])
            last[code, i] = _above(numbers, first[code, i], end, far[i])
        at = begin
        for i in range(size + 1):
            stop = first[code, i] if i < size else end
            if stop > at:
                _signs(code, i, more, bias, signs)
                _count(matrix, right, signs, stop - at, sums[stop] - sums[at])
                known += squares[stop] - squares[at]
            if i == size:
                break
            start = max(stop, at)
            stop = min(last[code, i], first[code, i + 1]) if i + 1 < size else last[code, i]
            at = max(at, last[code, i])
            if stop <= start:
                continue
            count, total = stop - start, sums[stop] - sums[start]
            known += squares[stop] - squares[start]
            _signs(code, 0, more, bias, signs)
            signs[3:] = 0.0
            signs[3] = i - (size >> 1)
            _count(matrix, right, signs, count, total)  # (x - c)^2
            signs[:] = 0.0
            signs[3] = 1.0 if more == 1 or i == 1 else 0.0
            if more == 2:
                signs[4] = -1.0 if i == 1 else 1.0
            _count(
                matrix, right, signs, count, max(total - count * near[i], count * far[i] - total)
            )  # d^2 - 2 d |x - c|
    return max(_least(matrix, right, known, sums.size - 1), 0.0)


@compiled
def _choices(first: Any, last: Any, equal: Any, size: Any) -> Any:
    """How many ways there are to put the cuts."""
    ways = 1
    for code in range(4):
        for i in range(size):
            at, own = first[code, i], 1
            while at < last[code, i]:
                at = equal[at]
                own += 1
            ways = min(ways * own, _MANY)
    return ways


@compiled
def _next(cuts: Any, first: Any, last: Any, equal: Any, size: Any) -> Any:
    """Another way to put the cuts; False after the last."""
    for code in range(4):
        for i in range(size):
            if cuts[code, i] < last[code, i]:
                cuts[code, i] = equal[cuts[code, i]]
                return True
            cuts[code, i] = first[code, i]
    return False


@compiled
def _put(cuts: Any, first: Any, last: Any) -> None:
    """Every cut in the middle of where it can be."""
    for code in range(4):
        for i in range(3):
            cuts[code, i] = (first[code, i] + last[code, i]) >> 1


@compiled
def _search(numbers: Any, ends: Any, more: Any, bias: Any, best: Any, share: Any, boxes: Any) -> Any:
    """Depth first, the more promising half of a box before the other."""
    n = numbers.size
    sums, squares = np.zeros(n + 1), np.zeros(n + 1)
    equal = np.arange(1, n + 2)  # by place: where the numbers of this code that are equal end
    smallest = largest = numbers[0]
    for i in range(n):
        smallest, largest = min(smallest, numbers[i]), max(largest, numbers[i])
        sums[i + 1] = sums[i] + numbers[i]
        squares[i + 1] = squares[i] + numbers[i] * numbers[i]
    for i in range(n - 2, -1, -1):
        if numbers[i] == numbers[i + 1] and i + 1 not in ends:
            equal[i] = equal[i + 1]
    matrix, right, signs = np.zeros((3 + more, 3 + more)), np.zeros(3 + more), np.zeros(3 + more)
    first, last, cuts = np.zeros((4, 3), np.int64), np.zeros((4, 3), np.int64), np.zeros((4, 3), np.int64)
    size, slack = (1 << more) - 1, 1e-7 * squares[n]
    lows, highs, bounds = np.zeros((_DEPTH, 4)), np.zeros((_DEPTH, 4)), np.zeros(_DEPTH)
    width = largest - smallest
    lows[0, 0], highs[0, 0] = (smallest - width, largest + width) if bias else (0.0, 0.0)
    reach = 1.5 * width if bias else 2.0 * max(-smallest, largest)
    lows[0, 1] = lows[0, 2] = -reach
    highs[0, 1] = highs[0, 2] = reach
    proven = np.inf
    none = more - more  # of the type of `more`: a constant, like a part of an array, would be compiled separately
    two = _error(sums, squares, ends, none, bias, cuts, np.zeros((3, 3)), np.zeros(3), signs)
    highs[0, 3] = width * (more - 1)
    pull = np.array([2.0, 1.0, 1.4, 2.0])  # how much a side of the box blurs the cuts
    pull[3] *= more - 1
    low, high = np.zeros(4), np.zeros(4)
    top = 1 if best > slack else 0
    proven = proven if top else 0.0
    while top > 0:
        top -= 1
        if bounds[top] >= best * (1.0 - share) - slack:
            proven = min(proven, bounds[top])
            continue
        if more == 2:  # levels are at most 2a from their base, so a small a leaves an error near that of two planes
            away = np.sqrt(max(two, 0.0)) - 2.0 * np.sqrt(n) * highs[top, 3]
            if away > 0.0 and away * away >= best * (1.0 - share) - slack:
                proven = min(proven, away * away)
                continue
        if boxes == 0:
            for i in range(top + 1):
                proven = min(proven, bounds[i])
            break
        boxes -= 1
        k = 0
        for i in range(4):  # loops: an assignment of arrays takes a second to compile
            low[i], high[i] = lows[top, i], highs[top, i]
            k = i if (high[i] - low[i]) * pull[i] > (high[k] - low[k]) * pull[k] else k
        narrow = high[k] - low[k] < _NARROW * width
        before = top
        for half in range(2):
            for i in range(4):
                lows[top, i], highs[top, i] = low[i], high[i]
            (highs if half == 0 else lows)[top, k] = 0.5 * (low[k] + high[k])
            bound = _bound(
                numbers, sums, squares, ends, more, bias, lows[top], highs[top], first, last, matrix, right, signs
            )
            if bound >= best * (1.0 - share) - slack:
                proven = min(proven, bound)
                continue
            ways = _choices(first, last, equal, size)
            if ways > _FEW and not (narrow and ways < _MANY):
                if narrow:
                    proven = min(proven, bound)
                    continue
                _put(cuts, first, last)
                best = min(best, _error(sums, squares, ends, more, bias, cuts, matrix, right, signs))
                bounds[top] = bound
                top += 1
                continue
            _put(cuts, first, first)
            while True:
                error = _error(sums, squares, ends, more, bias, cuts, matrix, right, signs)
                best, proven = min(best, error), min(proven, error)
                if not _next(cuts, first, last, equal, size):
                    break
        if top - before == 2 and bounds[before] < bounds[before + 1]:
            for table in (lows, highs):
                for i in range(4):
                    table[before, i], table[before + 1, i] = table[before + 1, i], table[before, i]
            bounds[before], bounds[before + 1] = bounds[before + 1], bounds[before]
    return min(proven, best), best
