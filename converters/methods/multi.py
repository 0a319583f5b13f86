"""Nested planes for several precisions (AnyBCQ): q planes once, and plane scales of their own for every precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import float64_of
from bcqfmt.errors import error

from .assemble import bcq_weight
from .bcq import (
    F32,
    F64,
    Compensation,
    Numbers,
    PlaneNumbers,
    Solved,
    new_numbers,
    solve,
    solve_compensated,
    weighted_blocks,
)  # fmt: skip
from .compensated import fit_numbers, missed, product, rows_at_a_time
from .errors import decoded_square_sums
from .gptq import DAMPENING, ROUNDING, TURNS, WEIGHTING
from .hessian import importance_of, stats_of
from .loops.bcq_levels import new_work
from .loops.gptq import accumulate, descend_nested, round_nested
from .loops.multi import extend_rows
from .loops.multi_joint import new_joint_work
from .matrix import checked, stored_size
from .parameters import GROUP_SIZE, ROW, MethodBase, setting
from .protocol import Job, Quantized

Codes = npt.NDArray[np.uint8]

_NEXT = 1.0  # what squared errors of the second precision above the seed count, of the first 1; from there they double
_GROUPS, _PART = 512, 64  # a sample: at least this many groups, and one group in this many
_GOALS = (1.1, 1.1, 1.25)  # of the joint search, times the error of planes made for the lowest precision, the next ...
_TRIES, _STEP = 6, 5.0  # weights tried for it; one grows by this power of how far its error is above its goal
_WHY = "weighting = activations multiplies squared errors with the layer's squared inputs"
_WHY_HESSIAN = "rounding = gptq compensates errors with the Hessian of the layer's inputs"
_BLOCK = 128  # columns that take up earlier errors at once
_SHARES = (1.0, 2.0)  # what output errors count at the lowest precision, and above: decision 22
_PASSES = 4  # over all codes with the others fixed, before and after every fit of numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiSettings:
    """What can be chosen."""

    bits: int = setting(4, "planes per weight, the highest precision", low=1, high=8)
    lowest_bits: int = setting(2, "the lowest precision", low=1, high=8)
    nested: str = setting(
        "seed", "`seed`: the planes of the lowest precision are those of `bcq`; `joint`: all precisions share the loss",
        choices=("seed", "joint"),
    )  # fmt: skip
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    bias: bool = setting(True, "a number z per group and precision, next to the plane scales")
    rounds: int = setting(15, "turns of refinement per precision at most", low=0, high=1000)
    starts: int = setting(16, "starts of the joint search for all precisions; 0: plane by plane only", low=0, high=1000)
    scale_dtype: str = setting("F16", "type of plane scales and biases", choices=("F16", "BF16", "F32"))
    weighting: str = setting("none", WEIGHTING, choices=("none", "activations"))
    rounding: str = setting("nearest", ROUNDING, choices=("nearest", "gptq"))
    turns: int = setting(1, f"{TURNS}; with rounding = gptq", low=0, high=100)
    dampening: float = setting(0.01, f"{DAMPENING}, for rounding = gptq", low=0.0, high=1.0)


class Multi(MethodBase[MultiSettings]):
    """``multi``: q planes, and scales of their own for every precision. No group's error grows with the precision.

    With ``nested = seed`` the first ``lowest_bits`` planes and their scale set are what `bcq` gives for that many bits,
    bit for bit. Every plane above is found by itself (``loops.multi``), then together with those before it
    (``loops.multi_joint``). There errors are weighted so that the first precision above the seed loses at most 3 % to
    those above it. A plane more brings errors down to about a quarter, so with weights 1 and 4 both would count the
    same.

    With ``nested = joint`` no bits are fixed: the sum over precisions of the errors, each divided by that of planes
    made for it alone, is minimised over all planes and scales, beginning with those and with the planes above.

    ``rounding = gptq`` rounds for the layer's output (:func:`nested_fitted`), and output errors count twice above the
    lowest precision; single groups may then get worse. Each can have inputs and a target of its own (``Job.lower``).
    """

    name = "multi"
    settings_type = MultiSettings

    def __init__(self, settings: MultiSettings) -> None:
        if settings.lowest_bits > settings.bits:
            raise error(
                "BCQ-E620",
                found=f"multi: lowest_bits = {settings.lowest_bits}",
                expected=f"at most bits, which is {settings.bits}",
            )
        super().__init__(settings)

    def needs_stats(self) -> str | None:
        """Only for weighting and compensated rounding."""
        if self._settings.rounding == "gptq":
            return f"multi with {_WHY_HESSIAN}."
        return None if self._settings.weighting == "none" else f"multi with {_WHY}."

    def quantize(self, job: Job) -> Quantized:
        """A bcq weight with a scale set for each precision; notes: the mean squared error of each."""
        weight, s = checked(job), self._settings
        codes, precisions, size = self._found(job, weight, self._layers(job) if s.rounding == "gptq" else [])
        sets = {s.lowest_bits + i: (one.alpha, one.z if s.bias else None) for i, one in enumerate(precisions)}
        alpha, z = sets.pop(s.bits)
        made = bcq_weight(
            codes, alpha, z, group_size=stored_size(s.group_size, size), dtype=job.dtype, scale_sets=sets,
            threads=job.threads,
        )  # fmt: skip
        mse = {str(p): decoded_square_sums(weight, made, p)[1] / weight.size for p in range(s.lowest_bits, s.bits + 1)}
        return Quantized(made, {"mse_by_precision": mse})

    @property
    def lower_precisions(self) -> tuple[int, ...]:
        """Planes of the precisions below the highest whose own inputs matter."""
        s = self._settings
        return tuple(range(s.lowest_bits, s.bits)) if s.rounding == "gptq" else ()

    def _layers(self, job: Job) -> list[Compensation]:
        """For every precision, the lowest first; without inputs of their own, that of the highest.

        All have the order of the highest, but for a seed, which is made by itself.
        """
        s, highest = self._settings, Compensation.of(job, self._settings.dampening, _WHY_HESSIAN)
        made = []
        for i, one in enumerate(job.lower):
            order = None if s.nested == "seed" and i == 0 else highest.order
            own = replace(job, weight=one.weight, stats=one.stats)
            made.append(Compensation.of(own, s.dampening, _WHY_HESSIAN, order))
        return [*(made or [highest] * len(self.lower_precisions)), highest]

    def _found(self, job: Job, weight: F32, layers: list[Compensation]) -> tuple[Codes, list[Numbers], int]:
        """Codes, the numbers of each precision, the group size; layers: of every precision, to compensate errors."""
        s, importance = self._settings, None
        if layers:
            importance = layers[-1].importance
        elif s.weighting == "activations":
            importance = importance_of(stats_of(job, _WHY))
        targets = [*(one.weight for one in job.lower), weight] if job.lower else [weight] * len(layers)
        fixed = None
        if s.nested == "joint" and not layers:
            alone = [solve(job, weight, p, s, importance) for p in range(s.lowest_bits, s.bits + 1)]
            seed, weights = alone[0], self._shared(job, weight, alone, importance)
            codes, numbers, _ = self._extended(job, weight, seed, weights, importance, alone[1:] or alone)
        elif s.nested == "joint":  # numbers to begin with
            seed = solve(job, weight, s.lowest_bits, s, importance)
            codes, numbers, _ = self._extended(job, weight, seed, np.ones(s.bits), importance, starts=0)
        else:
            if layers:
                seed = solve_compensated(job, targets[0], s.lowest_bits, s, layers[0])
            else:
                seed = solve(job, weight, s.lowest_bits, s, importance)
            fixed = seed.codes
            weights = np.array([_NEXT * 2.0 ** (t - 1) if t else 1.0 for t in range(s.bits - s.lowest_bits)])
            codes, numbers, _ = self._extended(job, weight, seed, weights, importance)
        free = 0 if fixed is None else 1  # the numbers of the seed stay
        if layers and len(numbers) > free:
            planes = [PlaneNumbers.of(one, seed.group_size, seed.stored, s.bias) for one in numbers[free:]]
            shares = np.array([_SHARES[min(i, 1)] for i in range(free, len(numbers))], np.float32)
            codes = nested_fitted(targets[free:], layers[free:], planes, shares, s.turns, fixed, job.threads)
            numbers = [*numbers[:free], *(one.as_stored() for one in planes)]
        return codes, numbers, seed.group_size

    def _shared(self, job: Job, weight: F32, alone: list[Solved], importance: F64 | None) -> F64:
        """What squared errors count in the joint search, ``[bits]``: 0 below the lowest precision.

        Of some tried on a sample those with which the error furthest above its goal is the least above it.
        """
        rows = _sample(alone[0])
        some = [replace(one, numbers=one.numbers.rows(rows), errors=one.errors[rows]) for one in alone]
        own = np.array([float(one.errors.sum()) for one in some])
        weights, best = np.zeros(self._settings.bits), (np.inf, np.zeros(0))
        goals = own * np.array([_GOALS[min(i, 2)] for i in range(own.size)])
        goals = np.maximum(goals, max(1e-9 * goals[0], np.finfo(np.float64).tiny))
        shares = np.where(np.arange(own.size) < 2, 1.0, 0.5)
        for _ in range(_TRIES if self._settings.starts else 1):
            weights[-own.size :] = shares * (goals[0] / goals)
            errors = self._extended(job, weight[rows], some[0], weights, importance, some[1:] or some)[2].sum(axis=0)
            worst = float((errors / goals).max())
            best = min(best, (worst, weights.copy()), key=lambda pair: pair[0])
            shares = shares * (errors / goals / worst) ** _STEP if worst else shares
            shares = np.maximum(shares / shares.max(), 1e-3)
        return best[1]

    def _extended(
        self, job: Job, weight: F32, seed: Solved, weights: F64, importance: F64 | None = None,
        given: Sequence[Solved] = (), starts: int | None = None,
    ) -> tuple[Codes, list[Numbers], F64]:  # fmt: skip
        """Codes ``[out, in]``, the numbers of each precision, squared errors ``[out, precisions]``.

        ``given``: planes from which a search for all bits begins too; without any, those of the seed stay. ``starts``:
        by default as many as set.
        """
        s, size, (rows, groups) = self._settings, seed.group_size, seed.numbers.z.shape
        more = s.bits - s.lowest_bits
        first = 1 - bool(given)  # of the precisions whose numbers are found here
        found_here = [new_numbers(s.lowest_bits + i, rows, groups, seed.stored) for i in range(first, more + 1)]
        errors, tries = np.empty((rows, more + 1)), s.starts if starts is None else starts
        codes = np.empty(weight.shape, np.uint8)
        kinds = np.array([KINDS[kind] for kind in (*seed.stored, job.dtype, "F64")])
        begun = np.stack([_scales(one, s.bits) for one in given], axis=2) if given else np.empty((rows, groups, 0, 1))

        def work(begin: int, stop: int) -> None:
            scratch = new_work(size, s.bits)
            fixed = new_joint_work(s.lowest_bits, s.bits, weights[-more:] if more else np.empty(0))
            free = new_joint_work(0, s.bits, weights)
            for block, ordered, own_weights in weighted_blocks(weight, importance, size, begin, stop):
                found = np.zeros((len(ordered), groups, more + 1, s.bits + 1))
                found[:, :, 0] = _scales(seed, s.bits)[block]
                own = np.zeros((len(ordered), groups, more + 1))
                extend_rows(
                    weight[block], ordered, own_weights, size, s.rounds, s.bias, tries, kinds, s.lowest_bits,
                    begun[block], codes[block], found, own, scratch, fixed, free,
                )  # fmt: skip
                for i, one in enumerate(found_here, first):
                    one.fill(job, block, found[:, :, i], seed.stored)
                errors[block] = own.sum(axis=1)

        each_share(work, rows, 1, job.threads)
        return codes, found_here if given else [seed.numbers, *found_here], errors


def _sample(solved: Solved) -> npt.NDArray[np.intp]:
    """Some rows, evenly spread."""
    rows, groups = solved.numbers.z.shape
    count = max(_GROUPS, rows * groups // _PART) // groups + 1
    return np.unique(np.linspace(0, rows - 1, count).astype(np.intp))


def _scales(solved: Solved, planes: int) -> F64:
    """Float64 ``[out, G, planes + 1]``: plane scales, each missing one half of the one before it, then z."""
    alpha, z = solved.numbers.alpha, solved.numbers.z
    made = np.empty((*z.shape, planes + 1))
    for i in range(planes):
        made[:, :, i] = float64_of(alpha[i]) if i < len(alpha) else 0.5 * made[:, :, i - 1]
    made[:, :, planes] = float64_of(z)
    return made


def nested_fitted(
    targets: Sequence[F32], layers: Sequence[Compensation], numbers: list[PlaneNumbers], shares: F32,
    turns: int, fixed: Codes | None = None, threads: int = 1,
) -> Codes:  # fmt: skip
    """``compensated.fitted`` for several precisions: codes ``[out, in]`` of the highest; ``numbers`` get what belongs.

    A code is chosen for the sum of the output errors of all precisions, times shares float32 ``[precisions]``: first
    column by column, the errors of every precision compensated by later columns, then for all others as they stand.
    targets float32 ``[out, in]``, layers: of every precision, all in one order of columns. fixed: the first bits of
    codes, which stay, or None.
    """
    out, columns = targets[0].shape
    made, q = np.empty((out, columns), np.uint8), numbers[-1].planes
    hessians, factors = _singles(one.hessian for one in layers), _singles(one.factor for one in layers)

    def share(first: int, stop: int) -> None:
        for rows in rows_at_a_time(out, columns, threads, first, stop):
            parts, own = [one[rows] for one in targets], [one.rows(rows) for one in numbers]
            kept = np.empty((0, 0), np.uint8) if fixed is None else fixed[rows]
            codes = _nested_codes(parts, layers, factors, own, shares, kept)
            pulls = np.empty((len(own), *codes.shape), np.float32)
            for one, part, hessian, pull in zip(own, parts, hessians, pulls, strict=True):
                missing = missed(part, one, codes >> np.uint8(q - one.planes))
                pull[:] = product(missing.astype(np.float32), hessian, 1)
            for turn in range(turns + 1):
                _descend(codes, hessians, own, shares, kept, pulls)
                if turn < turns:
                    for one, hessian, pull in zip(own, hessians, pulls, strict=True):
                        fit_numbers(hessian, one, codes >> np.uint8(q - one.planes), pull, 1, in_turn=True)
            made[rows] = codes
            for one, other in zip(numbers, own, strict=True):
                one.take(rows, other)

    each_share(share, out, 8, threads)
    return made


def _singles(matrices: Iterable[F64]) -> tuple[F32, ...]:
    """As float32; what several precisions share is there once."""
    found: dict[int, F32] = {}
    return tuple(found.setdefault(id(one), one.astype(np.float32)) for one in matrices)


def _descend(
    codes: Codes, hessians: tuple[F32, ...], numbers: list[PlaneNumbers], shares: F32, fixed: Codes, pulls: F32
) -> None:  # fmt: skip
    """Every code in turn the best for all others as they are, until none changes, or some times; in place."""
    which, levels = np.arange(codes.shape[1]) // numbers[0].size, _levels(numbers)
    diagonals, costs = np.stack([np.diagonal(one) for one in hessians]), np.empty(levels.shape[3], np.float32)
    for _ in range(_PASSES):
        if not descend_nested(hessians, diagonals, shares, levels, fixed, _free(numbers), which, codes, pulls, costs):
            break


def _levels(numbers: list[PlaneNumbers]) -> F32:
    """What the codes of the highest precision are worth at every one, ``[precisions, rows, groups, codes]``."""
    q = numbers[-1].planes
    return np.stack([np.repeat(one.levels(), 2 ** (q - one.planes), axis=2) for one in numbers]).astype(np.float32)


def _free(numbers: list[PlaneNumbers]) -> int:
    """Bits below those of a seed, whose precision is not among the numbers."""
    return numbers[-1].planes - numbers[0].planes + 1


def _nested_codes(
    targets: Sequence[F32], layers: Sequence[Compensation], factors: tuple[F32, ...], numbers: list[PlaneNumbers],
    shares: F32, fixed: Codes,
) -> Codes:  # fmt: skip
    """Codes ``[rows, in]``, rounded column by column, errors of every precision compensated by later columns."""
    rows, n = targets[0].shape
    back = layers[0].order[::-1]  # as the factors have them: rounding runs from the last column to the first
    given, which = (
        np.stack([one[:, back] for one in targets]).astype(np.float32),
        np.ascontiguousarray(back // numbers[0].size),
    )
    weights = np.stack([one.importance[back] for one in layers]).astype(np.float32) * shares[:, None]
    levels, free, first = (
        _levels(numbers),
        _free(numbers),
        np.ascontiguousarray(fixed[:, back] if fixed.size else fixed),
    )
    missing, codes = np.zeros(given.shape, np.float32), np.empty((rows, n), np.uint8)
    costs = np.empty(levels.shape[3], np.float32)
    for high in range(n, 0, -_BLOCK):
        low = max(high - _BLOCK, 0)
        target = np.ascontiguousarray(given[:, :, low:high])
        for own, left, factor in zip(target, missing, factors, strict=True):
            accumulate(own, 0, 0, left, 0, high, factor, high, low, rows, n - high, high - low, np.float32(-1.0))
        round_nested(target, low, high, factors, weights, levels, first, free, which, codes, missing, costs)
    made = np.empty_like(codes)
    made[:, back] = codes
    return made
