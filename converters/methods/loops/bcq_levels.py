"""The compiled steps of binary-coding quantization on one group whose numbers are sorted.

The levels of a group are z +- alpha_0 +- ... In sorted numbers those nearest to a level are a run, so a round costs a
search per level instead of a look at every number: counts and sums per code come from the runs' ends and prefix sums.
A code's highest bit is plane 0. Numbers may have weights, by which their squared errors count; then a "count" is a sum
of weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bcqfmt.compiled.loops import inner
from bcqfmt.compiled.rounding import rounded

from .rtn import total

_FEW = 4  # planes up to which it pays to compare every number with every level, in vector code


class Work(NamedTuple):
    """Scratch of one thread for groups of up to n numbers and q planes."""

    prefix: Any  # float64 [n + 1]: sums of the first numbers, each times its weight
    mass: Any  # float64 [n + 1]: sums of the first weights
    weights: Any  # float64 [n]: of the numbers; all 1 unless set
    squares: Any  # float64 [n]
    rest: Any  # float64 [n]
    levels: Any  # float64 [2^q], rising
    labels: Any  # int64 [2^q]: the code of each level
    edges: Any  # int64 [2^q + 1]: the run of each level
    counts: Any  # float64 [2^q], by code
    sums: Any  # float64 [2^q], by code
    spare: Any  # float64 [2^q]
    spare_labels: Any  # int64 [2^q]
    equations: Any  # float64 [q + 1, q + 2]
    stored: Any  # float64 [q + 1]
    alpha: Any  # float64 [q]
    trial: Any  # float64 [q]
    start: Any  # float64 [q]


def new_work(n: int, q: int) -> Work:
    """Empty scratch."""
    size, i64 = 1 << q, np.int64
    return Work(
        prefix=np.zeros(n + 1), mass=np.zeros(n + 1), weights=np.ones(n), squares=np.zeros(n), rest=np.zeros(n),
        levels=np.zeros(size), labels=np.zeros(size, i64), edges=np.zeros(size + 1, i64),
        counts=np.zeros(size), sums=np.zeros(size), spare=np.zeros(size), spare_labels=np.zeros(size, i64),
        equations=np.zeros((q + 1, q + 2)), stored=np.zeros(q + 1),
        alpha=np.zeros(q), trial=np.zeros(q), start=np.zeros(q),
    )  # fmt: skip


@inner
def copy(source: Any, target: Any, count: Any) -> None:
    """The first items of one vector to another; compiled in a tenth of the time of a slice assignment."""
    for i in range(count):
        target[i] = source[i]


@inner
def prefix_sums(values: Any, work: Any) -> Any:
    """Fill ``prefix`` and ``mass`` for sorted float32 numbers; returns the weighted sum of their squares."""
    running = mass = power = 0.0
    work.prefix[0] = 0.0
    work.mass[0] = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        weighted = work.weights[i] * value
        mass += work.weights[i]
        running += weighted
        power += weighted * value
        work.prefix[i + 1] = running
        work.mass[i + 1] = mass
    return power


@inner
def levels_of(alpha: Any, z: Any, kind: Any, work: Any) -> None:
    """All levels in rising order, each added up in the decoder's order and rounded to ``kind``; alpha >= 0."""
    levels, labels, spare, spare_labels = work.levels, work.labels, work.spare, work.spare_labels
    levels[0] = z
    labels[0] = 0
    size = 1
    for i in range(alpha.size):
        step = alpha[i]
        for k in range(size):
            spare[k] = levels[k]
            spare_labels[k] = labels[k] << 1
        down = 0
        up = 0
        for k in range(2 * size):
            if up == size or (down < size and spare[down] - step <= spare[up] + step):
                levels[k] = spare[down] - step
                labels[k] = spare_labels[down]
                down += 1
            else:
                levels[k] = spare[up] + step
                labels[k] = spare_labels[up] | 1
                up += 1
        size *= 2
    if kind != 3:
        for k in range(size):
            levels[k] = rounded(levels[k], kind)


@inner
def by_code(alpha: Any, z: Any, levels: Any) -> None:
    """Fill ``levels`` in the order of the codes, each added up in the decoder's order; alpha of any sign."""
    size = 1
    levels[0] = z
    for i in range(alpha.size):
        step = alpha[i]
        for k in range(size - 1, -1, -1):
            base = levels[k]
            levels[2 * k] = base - step
            levels[2 * k + 1] = base + step
        size *= 2


@inner
def move_levels(alpha: Any, z: Any, work: Any) -> Any:
    """The levels for other alphas, not rounded; quick where their order is nearly that of the last levels.

    Returns whether the order is another one.
    """
    levels, labels, spare = work.levels, work.labels, work.spare
    by_code(alpha, z, spare)
    changed = False
    for k in range(1 << alpha.size):
        label = labels[k]
        level = spare[label]
        j = k
        while j > 0 and levels[j - 1] > level:
            levels[j] = levels[j - 1]
            labels[j] = labels[j - 1]
            j -= 1
            changed = True
        levels[j] = level
        labels[j] = label
    return changed


@inner
def place(values: Any, work: Any, size: Any) -> Any:
    """Fill ``edges``: numbers edges[k]..edges[k+1] are nearest to level k; a tie goes to the lower level.

    Each edge is looked for from where it was. Returns whether one is elsewhere now.
    """
    levels, edges = work.levels, work.edges
    n = values.size
    edges[0] = 0
    edges[size] = n
    changed = False
    for k in range(1, size):
        found = edge(values, n, 0.5 * (levels[k - 1] + levels[k]), edges[k - 1], edges[k])
        changed = changed or found != edges[k]
        edges[k] = found
    return changed


@inner
def edge(values: Any, n: Any, middle: Any, low: Any, hint: Any) -> Any:
    """Where sorted numbers ``low..n`` begin to be above ``middle``; near ``hint`` it is found at once."""
    at = min(max(hint, low), n)
    step = 1
    if at < n and values[at] <= middle:
        at += 1
        while at + step < n and values[at + step] <= middle:
            at += step + 1
            step *= 2
        high = min(at + step, n)
    else:
        high = at
        while high - step >= low and values[high - step] > middle:
            high -= step
            step *= 2
        at = max(high - step + 1, low)
    while at < high:
        half = (at + high) >> 1
        if values[half] <= middle:
            at = half + 1
        else:
            high = half
    return at


@inner
def gather(work: Any, size: Any, power: Any) -> Any:
    """Fill ``counts`` and ``sums`` by code from ``edges``; returns the weighted error, exact but for cancellation."""
    error = power
    for k in range(size):
        label = work.labels[k]
        count = work.mass[work.edges[k + 1]] - work.mass[work.edges[k]]
        added = work.prefix[work.edges[k + 1]] - work.prefix[work.edges[k]]
        work.counts[label] = count
        work.sums[label] = added
        level = work.levels[k]
        if count > 0.0:  # an infinite level may stand where nothing is near it
            error += level * (count * level - 2.0 * added)
    return error


@inner
def measure(values: Any, work: Any, size: Any) -> Any:
    """The weighted error by ``edges``, number by number: zero where every number is on its level."""
    squares = work.squares
    for k in range(size):
        level = work.levels[k]
        for i in range(work.edges[k], work.edges[k + 1]):
            distance = np.float64(values[i]) - level
            squares[i] = work.weights[i] * (distance * distance)
    return total(squares, values.size)


@inner
def measure_nearest(values: Any, work: Any, size: Any) -> Any:
    """The same where ``edges`` are those of the nearest levels, which few levels need not look at."""
    if size > 1 << _FEW:
        return measure(values, work, size)
    squares = work.squares
    level = work.levels[0]
    for i in range(values.size):
        distance = np.float64(values[i]) - level
        squares[i] = distance * distance
    for k in range(1, size):
        level = work.levels[k]
        for i in range(values.size):
            distance = np.float64(values[i]) - level
            distance *= distance
            squares[i] = distance if distance < squares[i] else squares[i]  # noqa: FURB136 - min() minds NaN
    for i in range(values.size):
        squares[i] *= work.weights[i]
    return total(squares, values.size)


@inner
def below(bound: Any) -> Any:
    """The largest float32 not above ``bound``: the same numbers of type float32 are above both."""
    found = np.float32(bound)
    return np.nextafter(found, np.float32(-np.inf)) if found > bound else found


@inner
def codes_by(values: Any, bounds: Any, labels: Any, q: Any, codes: Any) -> None:
    """The code of every number in its own order: ``labels`` of the number of rising ``bounds`` that it is above."""
    size = 1 << q
    none = np.uint8(0)
    if q <= _FEW:  # as many passes as there are bounds, each changing the bits in which two neighbouring labels differ
        first = np.uint8(labels[0])
        for i in range(values.size):
            codes[i] = first
        for k in range(size - 1):
            bound = below(bounds[k])
            change = np.uint8(labels[k] ^ labels[k + 1])
            for i in range(values.size):
                codes[i] ^= change if values[i] > bound else none
        return
    for i in range(values.size):
        at = np.int64(0)
        for bit in range(q - 1, -1, -1):
            at += np.int64(np.float64(values[i]) > bounds[at + (1 << bit) - 1]) << bit
        codes[i] = np.uint8(labels[at])
