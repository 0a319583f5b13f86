"""The compiled least squares of binary-coding quantization: plane scales and bias for given bits.

The equations come from a Walsh-Hadamard transform of counts and sums by code. Every unknown's diagonal is the number of
numbers (or their weights), and the matrix is symmetric.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.compiled.loops import inner

_FEW = 4
_SINGULAR = 1e-9  # a pivot below this share of its diagonal: the plane adds nothing that the ones before it lack


@inner
def fit(alpha: Any, z: Any, bias: Any, work: Any) -> Any:
    """Least squares for alpha (in place) and z (returned) with the codes of ``gather``; z stays without ``bias``.

    A plane that the ones before it determine keeps its scale.
    """
    q = alpha.size
    size = 1 << q
    transform(work.counts, work.sums, size)
    if not bias:
        for i in range(q):
            work.sums[size >> (i + 1)] -= z * work.counts[size >> (i + 1)]
    unknowns = q + 1 if bias else q
    if unknowns <= _FEW:
        found = solve_few(alpha, z, unknowns, work.counts, work.sums)
    else:
        found = solve_many(alpha, z, unknowns, work)
    return found if bias else z


@inner
def transform(counts: Any, sums: Any, size: Any) -> None:
    """In place: term s becomes the sum over codes c of terms[c] times -1 for every zero bit of c within s."""
    step = 1
    while step < size:
        for i in range(size >> 1):
            at = i + (i & -step)
            low, high = counts[at], counts[at + step]
            counts[at] = low + high
            counts[at + step] = high - low
            low, high = sums[at], sums[at + step]
            sums[at] = low + high
            sums[at + step] = high - low
        step *= 2


@inner
def solve_few(alpha: Any, z: Any, unknowns: Any, counts: Any, sums: Any) -> Any:
    """Elimination for up to four unknowns without a matrix in memory, six times as fast; alpha in place, returns z.

    Unknowns that are not there have equations of their own: they do not touch the others.
    """
    q = alpha.size
    size = 1 << q
    i, j, k, m = size >> 1, size >> 2, size >> 3, size >> 4  # planes as sets of bits; the empty one is z
    n = counts[0]
    a01 = counts[i ^ j] if unknowns > 1 else 0.0
    a02 = counts[i ^ k] if unknowns > 2 else 0.0
    a12 = counts[j ^ k] if unknowns > 2 else 0.0
    a03 = counts[i ^ m] if unknowns > 3 else 0.0
    a13 = counts[j ^ m] if unknowns > 3 else 0.0
    a23 = counts[k ^ m] if unknowns > 3 else 0.0
    b0 = sums[i]
    b1 = sums[j] if unknowns > 1 else 0.0
    b2 = sums[k] if unknowns > 2 else 0.0
    b3 = sums[m] if unknowns > 3 else 0.0
    least = _SINGULAR * n
    inverse0 = 1.0 / n
    f1, f2, f3 = a01 * inverse0, a02 * inverse0, a03 * inverse0
    d1, d2, d3 = n - f1 * a01, n - f2 * a02, n - f3 * a03
    a12, a13, a23 = a12 - f1 * a02, a13 - f1 * a03, a23 - f2 * a03
    b1, b2, b3 = b1 - f1 * b0, b2 - f2 * b0, b3 - f3 * b0
    inverse1 = 1.0 / d1 if d1 > least else 0.0
    f2, f3 = a12 * inverse1, a13 * inverse1
    d2, d3 = d2 - f2 * a12, d3 - f3 * a13
    a23, b2, b3 = a23 - f2 * a13, b2 - f2 * b1, b3 - f3 * b1
    inverse2 = 1.0 / d2 if d2 > least else 0.0
    f3 = a23 * inverse2
    d3, b3 = d3 - f3 * a23, b3 - f3 * b2
    x3, x2, x1 = z, z, z  # what a plane without a pivot keeps
    if d3 > least:
        x3 = b3 / d3
    elif q > 3:
        x3 = alpha[3]
    if d2 > least:
        x2 = (b2 - a23 * x3) * inverse2
    elif q > 2:
        x2 = alpha[2]
    if d1 > least:
        x1 = (b1 - a12 * x2 - a13 * x3) * inverse1
    elif q > 1:
        x1 = alpha[1]
    alpha[0] = (b0 - a01 * x1 - a02 * x2 - a03 * x3) * inverse0
    if q > 1:
        alpha[1] = x1
    if q > 2:
        alpha[2] = x2
    if q > 3:
        alpha[3] = x3
    return x1 if q == 1 else x2 if q == 2 else x3


@inner
def solve_many(alpha: Any, z: Any, unknowns: Any, work: Any) -> Any:
    """Elimination in ``equations``; alpha in place, returns z."""
    q = alpha.size
    size = 1 << q
    counts, m = work.counts, work.equations
    for i in range(unknowns):  # the last unknown is z, whose sign is + in every code
        own = size >> (i + 1)
        for j in range(unknowns):
            m[i, j] = counts[own ^ (size >> (j + 1))]
        m[i, unknowns] = work.sums[own]
    for i in range(unknowns):
        pivot = m[i, i]
        if pivot <= _SINGULAR * counts[0]:
            for j in range(unknowns):
                m[i, j] = 0.0
            m[i, i] = 1.0
            m[i, unknowns] = alpha[i] if i < q else z
            continue
        inverse = 1.0 / pivot
        m[i, i] = inverse
        for k in range(i + 1, unknowns):
            factor = m[k, i] * inverse
            for j in range(i + 1, unknowns + 1):
                m[k, j] -= factor * m[i, j]
    for i in range(unknowns - 1, -1, -1):
        value = m[i, unknowns]
        for j in range(i + 1, unknowns):
            value -= m[i, j] * m[j, unknowns]
        m[i, unknowns] = value * m[i, i]
    for i in range(q):
        alpha[i] = m[i, unknowns]
    return m[unknowns - 1, unknowns]
