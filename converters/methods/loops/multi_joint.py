"""The compiled search for nested planes of all precisions at once, on one group whose numbers are sorted.

Plane by plane (`multi`) a precision gets the bits that are best for it alone, and they are fixed for the next one. Here
all bits beyond the seed's are chosen together: a number x takes those for which the sum over precisions p of
weight_p * (x - level_p)^2 is least; then the scales of every precision follow by least squares; and so on while it
falls. Weights are the same for all groups, so that a matrix has the least weighted sum of its errors. The first start
is the result so far, then come scales that are given, and each later one is the best so far with its scales disturbed
by fixed shares. Without a seed (`improve` with seed 0) no bits are fixed.

For given bits the sum is a parabola in x whose x^2 has the same factor for all bits. So where one choice is better than
another is a matter of one bound, and the numbers of one choice are a run, as everywhere in these loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bcqfmt.compiled.loops import inner
from bcqfmt.compiled.rounding import rounded

from .bcq_fit import fit
from .bcq_levels import by_code, copy, edge

_FALL = 1e-4  # a smaller decrease, as a share of the weighted error, counts as none
_GOLDEN = 0.6180339887498949
_FAR = 0.4  # the largest share by which a start disturbs a scale; every other start twice as much


class JointWork(NamedTuple):
    """Scratch of one thread; ``[precisions]`` are counted from seed + 1."""

    tables: Any  # float64 [precisions, 2^q]: levels by code
    weights: Any  # float64 [precisions]: what a squared error counts; 0: the precision is not stored
    slopes: Any  # float64 [2^(q-seed)]: by choice of bits, weighted sum of levels
    heights: Any  # float64 [2^(q-seed)]: weighted sum of squared levels
    order: Any  # int64 [2^(q-seed)]
    hints: Any  # int64 [2^q]: where the run of a code ended last
    edges: Any  # int64 [2^q + 1]: runs
    labels: Any  # int64 [2^q]: their codes
    counts: Any  # float64 [2^q], by code
    sums: Any  # float64 [2^q], by code
    trial: Any  # float64 [precisions, q + 1]: alpha, then z at the end
    kept: Any  # the same, of the best turn so far
    errors: Any  # float64 [precisions]
    seed_edges: Any  # int64 [2^seed + 1]: the seed's runs
    seed_labels: Any  # int64 [2^seed]
    final_edges: Any  # int64 [2^q + 1]: the runs of the result
    final_labels: Any  # int64 [2^q]
    found: Any  # float64 [precisions + 1, q + 1]: alpha, then z at the end, of the seed and of every precision
    found_errors: Any  # float64 [precisions + 1]


def new_joint_work(seed: int, q: int, weights: Any) -> JointWork:
    """Empty scratch; weights: float64 [q - seed]."""
    planes, size, choices, i64 = q - seed, 1 << q, 1 << (q - seed), np.int64
    return JointWork(
        tables=np.zeros((planes, size)), weights=weights,
        slopes=np.zeros(choices), heights=np.zeros(choices), order=np.zeros(choices, i64),
        hints=np.zeros(size, i64), edges=np.zeros(size + 1, i64), labels=np.zeros(size, i64),
        counts=np.zeros(size), sums=np.zeros(size),
        trial=np.zeros((planes, q + 1)), kept=np.zeros((planes, q + 1)), errors=np.zeros(planes),
        seed_edges=np.zeros((1 << seed) + 1, i64), seed_labels=np.zeros(1 << seed, i64),
        final_edges=np.zeros(size + 1, i64), final_labels=np.zeros(size, i64),
        found=np.zeros((planes + 1, q + 1)), found_errors=np.zeros(planes + 1),
    )  # fmt: skip


@inner
def tables_of(joint: Any, seed: Any, planes: Any, kind: Any) -> Any:
    """Levels of every precision for the scales in ``trial``, rounded to ``kind``; False when one is infinite."""
    q = joint.trial.shape[1] - 1
    for t in range(planes):
        p = seed + 1 + t
        table = joint.tables[t]
        by_code(joint.trial[t, :p], joint.trial[t, q], table)
        if kind != 3:
            for code in range(1 << p):
                table[code] = rounded(table[code], kind)
                if not np.isfinite(table[code]):
                    return False
    return True


@inner
def weigh(code: Any, planes: Any, joint: Any) -> None:
    """Slope, height and rising order of slopes of every choice of bits under a seed's code."""
    slopes, heights, order = joint.slopes, joint.heights, joint.order
    slopes[0] = 0.0
    heights[0] = 0.0
    for t in range(planes):
        table, weight = joint.tables[t], joint.weights[t]
        base = code << (t + 1)
        for node in range((1 << t) - 1, -1, -1):
            slope, height = slopes[node], heights[node]
            for bit in range(1, -1, -1):
                level = table[base + 2 * node + bit]
                slopes[2 * node + bit] = slope + weight * level
                heights[2 * node + bit] = height + weight * level * level
    for i in range(1 << planes):
        j = i
        while j > 0 and (
            slopes[order[j - 1]] > slopes[i]
            or (slopes[order[j - 1]] == slopes[i] and heights[order[j - 1]] > heights[i])
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@inner
def bound(joint: Any, low: Any, high: Any) -> Any:
    """Where choice ``high``, of the larger slope, becomes the better one."""
    return 0.5 * (joint.heights[high] - joint.heights[low]) / (joint.slopes[high] - joint.slopes[low])


@inner
def cut(values: Any, planes: Any, joint: Any, work: Any) -> Any:
    """Cut the seed's runs by the best choices; returns their number and the weighted error less a constant."""
    order, edges, labels = joint.order, joint.seed_edges, joint.seed_labels
    done = 0
    cost = 0.0
    for k in range(labels.size):
        at, last = edges[k], edges[k + 1]
        if at == last:
            continue
        weigh(labels[k], planes, joint)
        size = 0  # of the lower envelope, kept in the front of ``order``
        for i in range(1 << planes):
            leaf = order[i]
            if size > 0 and joint.slopes[leaf] == joint.slopes[order[size - 1]]:
                continue
            while size > 1 and bound(joint, order[size - 2], order[size - 1]) >= bound(joint, order[size - 1], leaf):
                size -= 1
            order[size] = leaf
            size += 1
        for i in range(size):
            leaf = order[i]
            code = labels[k] << planes | leaf
            end = last
            if i + 1 < size:
                end = edge(values, last, bound(joint, leaf, order[i + 1]), at, joint.hints[code])
                joint.hints[code] = end
            if end > at:
                joint.edges[done] = at
                joint.labels[done] = code
                done += 1
                added, mass = work.prefix[end] - work.prefix[at], work.mass[end] - work.mass[at]
                cost += mass * joint.heights[leaf] - 2.0 * added * joint.slopes[leaf]
                at = end
    joint.edges[done] = values.size
    return done, cost


@inner
def refit(runs: Any, seed: Any, planes: Any, bias: Any, joint: Any, work: Any) -> None:
    """Scales of every precision in ``trial`` by least squares."""
    z, q = joint.trial.shape[1] - 1, seed + planes
    for code in range(1 << q):
        joint.counts[code] = 0.0
        joint.sums[code] = 0.0
    for k in range(runs):
        code = joint.labels[k]
        joint.counts[code] = work.mass[joint.edges[k + 1]] - work.mass[joint.edges[k]]
        joint.sums[code] = work.prefix[joint.edges[k + 1]] - work.prefix[joint.edges[k]]
    for p in range(q, seed, -1):
        size = 1 << p
        if p < q:  # codes without their last bit
            for code in range(size):
                joint.counts[code] = joint.counts[2 * code] + joint.counts[2 * code + 1]
                joint.sums[code] = joint.sums[2 * code] + joint.sums[2 * code + 1]
        copy(joint.counts, work.counts, size)
        copy(joint.sums, work.sums, size)
        row = joint.trial[p - seed - 1]
        row[z] = fit(row[:p], row[z], bias, work)


@inner
def begin(found: Any, given: Any, seed: Any, planes: Any, start: Any, joint: Any) -> None:
    """``trial``: the scales found so far; then those of ``given``; then the best so far, each moved by a share."""
    q = joint.trial.shape[1] - 1
    for t in range(planes):
        p = seed + 1 + t
        if 0 < start <= given.shape[0]:  # a precision has the first planes of all
            copy(given[start - 1], joint.trial[t], q + 1)
            continue
        copy(found[t + 1], joint.trial[t], q + 1)
        for i in range(p):
            turn = start * (_GOLDEN * (1 + i) + 0.37 * p)
            share = 2.0 * (turn - np.floor(turn)) - 1.0
            joint.trial[t, i] *= 1.0 + share * (0.0 if start == 0 else _FAR * (1 + (start & 1)))


@inner
def round_kept(joint: Any, planes: Any, kinds: Any) -> Any:
    """The kept scales, rounded, in ``trial``; False when one does not fit its type."""
    q = joint.trial.shape[1] - 1
    for t in range(planes):
        for i in range(q + 1):
            number = rounded(joint.kept[t, i], kinds[1] if i == q else kinds[0]) + 0.0  # no negative zero
            if not np.isfinite(number):
                return False
            joint.trial[t, i] = number
    return True


@inner
def errors_of(values: Any, runs: Any, planes: Any, joint: Any, work: Any) -> Any:
    """Fill ``errors`` with the squared error of every precision, number by number; returns their weighted sum."""
    total = 0.0
    for t in range(planes):
        error = 0.0
        for k in range(runs):
            level = joint.tables[t, joint.labels[k] >> (planes - 1 - t)]
            for i in range(joint.edges[k], joint.edges[k + 1]):
                distance = np.float64(values[i]) - level
                error += work.weights[i] * (distance * distance)
        joint.errors[t] = error
        total += joint.weights[t] * error
    return total


@inner
def keep_runs(runs: Any, size: Any, n: Any, joint: Any) -> None:
    """The runs become the final ones; codes that no number has follow as empty runs."""
    edges, labels, seen = joint.final_edges, joint.final_labels, joint.counts
    for code in range(size):
        seen[code] = 0.0
    for k in range(runs):
        edges[k] = joint.edges[k]
        labels[k] = joint.labels[k]
        seen[labels[k]] = 1.0
    for code in range(size):
        if seen[code] == 0.0:
            edges[runs] = n
            labels[runs] = code
            runs += 1
    edges[size] = n


@inner
def improve(
    values: Any, found: Any, errors: Any, rounds: Any, bias: Any, given: Any, starts: Any, kinds: Any, seed: Any,
    planes: Any, joint: Any, work: Any,
) -> None:  # fmt: skip
    """Replace found, errors (rows 1 to ``planes``) and the final runs of ``planes`` precisions by better ones, if any.

    No precision's error may be above that of the one below. given: float64 [any, q + 1], scales to begin with as well.
    """
    least = 0.0
    for t in range(planes):
        if joint.weights[t] == 0.0:
            continue
        if errors[t + 1] == 0.0:
            return  # nothing to gain at this precision, and it could be lost
        least += joint.weights[t] * errors[t + 1]
    for start in range(starts):
        begin(found, given, seed, planes, start, joint)
        lowest = np.inf
        for turn in range(rounds + 1):
            tables_of(joint, seed, planes, kinds[3])
            runs, cost = cut(values, planes, joint, work)
            if not cost < lowest - _FALL * least:
                break
            lowest = cost
            for t in range(planes):
                copy(joint.trial[t], joint.kept[t], found.shape[1])
            if turn < rounds:
                refit(runs, seed, planes, bias, joint, work)
        if not (round_kept(joint, planes, kinds) and tables_of(joint, seed, planes, kinds[2])):
            continue
        runs, cost = cut(values, planes, joint, work)
        cost = errors_of(values, runs, planes, joint, work)
        falls = joint.errors[0] <= errors[0]
        for t in range(1, planes):
            falls = falls and (joint.weights[t - 1] == 0.0 or joint.errors[t] <= joint.errors[t - 1])
        if falls and cost < least:
            least = cost
            for t in range(planes):
                copy(joint.trial[t], found[t + 1], found.shape[1])
                errors[t + 1] = joint.errors[t]
            keep_runs(runs, 1 << (seed + planes), values.size, joint)
