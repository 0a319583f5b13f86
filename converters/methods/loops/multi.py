"""The compiled search for nested planes: one more plane under fixed ones, with new scales for all of them.

Numbers of a sorted group with equal bits so far are a run. A new plane cuts each run in two, where the two levels that
its sign makes of the run's level are equally near; the other bits stay. So the leaves are runs again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled, inner
from bcqfmt.compiled.rounding import rounded

from .bcq_fit import fit
from .bcq_levels import by_code, codes_by, copy, edge, gather, levels_of, measure, place, prefix_sums
from .multi_joint import improve

_FALLS = 1.0 - 1e-4  # a smaller decrease of the error counts as none: the result would not show it
_STARTS = 4


@inner
def split(values: Any, alpha: Any, z: Any, kind: Any, edges: Any, labels: Any, work: Any) -> None:
    """Cut the runs ``edges`` with codes ``labels`` by the last plane; leaves and their levels go to ``work``."""
    runs = 1 << (alpha.size - 1)
    by_code(alpha, z, work.spare)
    for k in range(runs):
        code = labels[k] << 1
        low = rounded(work.spare[code], kind)
        high = rounded(work.spare[code | 1], kind)
        middle = 0.5 * (low + high)
        hint = work.edges[2 * k + 1]
        work.edges[2 * k] = edges[k]
        work.edges[2 * k + 1] = edge(values, edges[k + 1], middle, edges[k], hint)
        work.levels[2 * k] = low
        work.levels[2 * k + 1] = high
        work.labels[2 * k] = code
        work.labels[2 * k + 1] = code | 1
    work.edges[2 * runs] = values.size


@inner
def halve(edges: Any, labels: Any, runs: Any, work: Any) -> None:
    """Cut every run where the squared error around the two means is least; leaves go to ``work``, without levels."""
    for k in range(runs):
        first, last = edges[k], edges[k + 1]
        best, cut = -1.0, first
        for at in range(first + 1, last):
            left = work.prefix[at] - work.prefix[first]
            right = work.prefix[last] - work.prefix[at]
            before, after = work.mass[at] - work.mass[first], work.mass[last] - work.mass[at]
            gain = left * left / before + right * right / after
            if gain > best:
                best, cut = gain, at
        work.edges[2 * k] = first
        work.edges[2 * k + 1] = cut
        work.labels[2 * k] = labels[k] << 1
        work.labels[2 * k + 1] = labels[k] << 1 | 1
    work.edges[2 * runs] = edges[runs]


@inner
def turn_up(alpha: Any) -> None:
    """The last alpha without its sign: the last plane's bits are found anew."""
    alpha[alpha.size - 1] = abs(alpha[alpha.size - 1])


@inner
def refine(
    values: Any, power: Any, alpha: Any, z: Any, bias: Any, rounds: Any, kinds: Any, edges: Any, labels: Any, work: Any
) -> Any:
    """Alternate least squares and the cuts of the last plane while the error falls; alpha in place, returns z."""
    size = 1 << alpha.size
    trial = work.trial[: alpha.size]
    least = np.inf
    kept = z
    copy(alpha, trial, alpha.size)
    for turn in range(rounds + 1):
        split(values, trial, z, kinds[3], edges, labels, work)
        error = gather(work, size, power)
        if not error < least * _FALLS:
            break
        least = error
        copy(trial, alpha, alpha.size)
        kept = z
        if turn < rounds:
            z = fit(trial, z, bias, work)
            turn_up(trial)
    return kept


@inner
def start(
    kind: Any, values: Any, power: Any, alpha: Any, z: Any, bias: Any, kinds: Any, edges: Any, labels: Any, work: Any
) -> Any:
    """alpha and z to begin with, from those of the planes so far: alpha in place with the last one to be filled in.

    0: the new plane adds nothing. 1: the mean size of what is left. 2: half of that. 3: the best cut of every run.
    """
    p = alpha.size
    size = 1 << p
    alpha[p - 1] = 0.0
    if kind == 0:
        return z
    split(values, alpha, z, kinds[3], edges, labels, work)
    rest = 0.0
    for k in range(size):
        for i in range(work.edges[k], work.edges[k + 1]):
            rest += work.weights[i] * abs(np.float64(values[i]) - work.levels[k])
    alpha[p - 1] = rest / work.mass[values.size]
    if kind == 2:
        alpha[p - 1] *= 0.5
    if kind == 3:
        halve(edges, labels, size >> 1, work)
        gather(work, size, power)
        z = fit(alpha, z, bias, work)
        turn_up(alpha)
    return z


@inner
def offer(
    values: Any, alpha: Any, z: Any, kinds: Any, edges: Any, labels: Any, found: Any, least: Any, work: Any
) -> Any:
    """The candidate's error after rounding; below ``least`` it replaces ``found`` (alphas, then z at the end)."""
    p = alpha.size
    offset = rounded(z, kinds[1]) + 0.0  # no negative zero
    if not np.isfinite(offset):
        return least
    for i in range(p):
        work.stored[i] = rounded(alpha[i], kinds[0]) + 0.0
        if not np.isfinite(work.stored[i]):
            return least
    split(values, work.stored[:p], offset, kinds[2], edges, labels, work)
    error = measure(values, work, 1 << p)
    if error < least:
        copy(work.stored, found, p)
        found[found.size - 1] = offset
        return error
    return least


@compiled
def extend_rows(
    weight: Any, ordered: Any, importance: Any, group_size: Any, rounds: Any, bias: Any, starts: Any, kinds: Any,
    seed: Any, given: Any, codes: Any, found: Any, errors: Any, work: Any, joint: Any, free: Any,
) -> None:  # fmt: skip
    """Some rows of a matrix, weight float32 [rows, in]; ``ordered``: the same with every group sorted.

    importance: float64 of the same shape, the weights of the sorted numbers, or [0, 0] where all count the same.
    found: float64 [rows, G, q - seed + 1, q + 1], alphas (the first p) and z of each precision p; the seed's are given.
    codes: uint8 [rows, in], filled with q bits. errors: float64 [rows, G, q - seed + 1], squared.
    starts: of the search for all precisions at once, and after each plane before the last half as many of that for
    those so far; none if 0.
    given: float64 [rows, G, any, q + 1]: scales for q planes and z. Where there are any, the seed's bits are not kept:
    all are searched from there as well, and only that search has starts.
    work, joint, free: scratch of this thread for this group size, seed and q; ``free`` for a seed of 0 planes.
    """
    columns = weight.shape[1]
    q = found.shape[3] - 1
    for row in range(weight.shape[0]):
        for j in range(found.shape[1]):
            begin = j * group_size
            end = min(begin + group_size, columns)
            values = ordered[row, begin:end]
            if importance.size > 0:
                copy(importance[row, begin:end], work.weights, end - begin)
            power = prefix_sums(values, work)
            group = found[row, j]
            levels_of(group[0, :seed], group[0, q], kinds[2], work)
            place(values, work, 1 << seed)
            errors[row, j, 0] = measure(values, work, 1 << seed)
            copy(work.edges, joint.seed_edges, (1 << seed) + 1)
            copy(work.labels, joint.seed_labels, 1 << seed)
            edges, labels = joint.final_edges, joint.final_labels
            for p in range(seed, q + 1):
                t = p - seed
                if t > 0:
                    add_plane(values, power, p, group, errors[row, j], t, rounds, bias, kinds, edges, labels, work)
                copy(work.edges, edges, (1 << p) + 1)
                copy(work.labels, labels, 1 << p)
                if t > 0 and given.shape[2] == 0:
                    tried = starts if p == q else (starts + 1) >> 1
                    improve(
                        values, group, errors[row, j], rounds, bias, given[row, j], tried, kinds, seed, t, joint, work
                    )
            if given.shape[2] > 0:
                copy(edges, free.final_edges, (1 << q) + 1)
                copy(labels, free.final_labels, 1 << q)
                free_all(values, group, errors[row, j], rounds, bias, given[row, j], starts, kinds, seed, free, work)
                edges, labels = free.final_edges, free.final_labels
            for k in range(1, 1 << q):
                work.spare[k - 1] = np.float64(values[edges[k] - 1]) if edges[k] > 0 else -np.inf
            codes_by(weight[row, begin:end], work.spare, labels, q, codes[row, begin:end])


@inner
def free_all(
    values: Any, group: Any, errors: Any, rounds: Any, bias: Any, given: Any, starts: Any, kinds: Any, seed: Any,
    free: Any, work: Any,
) -> None:  # fmt: skip
    """Replace the numbers and errors of all precisions from the seed's on by better ones whose bits are free."""
    q = group.shape[1] - 1
    for p in range(q + 1):
        t = max(p - seed, 0)
        copy(group[t], free.found[p], q + 1)
        free.found_errors[p] = errors[t] if p >= seed else np.inf
    free.seed_edges[0] = 0
    free.seed_edges[1] = values.size
    free.seed_labels[0] = 0
    improve(values, free.found, free.found_errors, rounds, bias, given, starts, kinds, 0, q, free, work)
    for p in range(seed, q + 1):
        copy(free.found[p], group[p - seed], q + 1)
        errors[p - seed] = free.found_errors[p]


@inner
def add_plane(
    values: Any, power: Any, p: Any, group: Any, errors: Any, t: Any, rounds: Any, bias: Any, kinds: Any, edges: Any,
    labels: Any, work: Any,
) -> None:  # fmt: skip
    """Plane p - 1 under the runs ``edges``, ``labels``: row t of ``group`` and ``errors``; leaves go to ``work``."""
    q = group.shape[1] - 1
    result = group[t]
    least = np.inf
    alpha = work.alpha[:p]
    for kind in range(_STARTS):
        copy(group[t - 1], alpha, p - 1)
        z = start(kind, values, power, alpha, group[t - 1, q], bias, kinds, edges, labels, work)
        if kind > 0:
            z = refine(values, power, alpha, z, bias, rounds, kinds, edges, labels, work)
        least = offer(values, alpha, z, kinds, edges, labels, result, least, work)
        if least == 0.0:
            break
    errors[t] = least
    split(values, result[:p], result[q], kinds[2], edges, labels, work)
