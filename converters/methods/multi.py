"""Nested planes for several precisions (AnyBCQ): q planes once, and plane scales of their own for every precision."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.errors import error

from .assemble import bcq_weight
from .bcq import F32, F64, Numbers, Solved, new_numbers, solve, sorted_blocks
from .loops.bcq_levels import new_work
from .loops.multi import extend_rows
from .loops.multi_joint import new_joint_work
from .matrix import checked, stored_size
from .parameters import GROUP_SIZE, ROW, MethodBase, setting
from .protocol import Job, Quantized

__all__ = ["Multi", "MultiSettings"]

_NEXT = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_NEAR = 1.485  # times the error of planes found for one precision; the goal is 1.5, and only a sample is measured
_GROUPS, _PART = 512, 64  # the sample: at least this many groups, and one group in this many


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiSettings:
    """What can be chosen."""

    bits: int = setting(4, "planes per weight, the highest precision", low=1, high=8)
    lowest_bits: int = setting(2, "the lowest precision, whose planes are those of `bcq`", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    bias: bool = setting(True, "a number z per group and precision, next to the plane scales")
    rounds: int = setting(15, "turns of refinement per precision at most", low=0, high=1000)
    starts: int = setting(16, "starts of the joint search for all precisions; 0: plane by plane only", low=0, high=1000)
    scale_dtype: str = setting("F16", "type of plane scales and biases", choices=("F16", "BF16", "F32"))


class Multi(MethodBase[MultiSettings]):
    """``multi``: the first ``lowest_bits`` planes and their scale set are what `bcq` gives for that many bits.

    They are equal bit for bit. No group's error grows with the precision. Every plane above is found by itself
    (``loops.multi``), then together with those before it (``loops.multi_joint``). There the precision after the seed
    gets the largest weight with which the error of the next one stays within ``_NEAR`` times that of planes found for
    it alone (``_weights``).
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

    def quantize(self, job: Job) -> Quantized:
        """A bcq weight with a scale set for each precision from the seed on; notes: the mean squared error of each."""
        weight, s = checked(job), self._settings
        seed = solve(job, weight, s.lowest_bits, s.group_size, bias=s.bias, rounds=s.rounds, dtype=s.scale_dtype)
        codes, precisions, errors = self._extended(job, weight, seed, self._weights(job, weight, seed))
        sets = {s.lowest_bits + i: (one.alpha, one.z if s.bias else None) for i, one in enumerate(precisions)}
        alpha, z = sets.pop(s.bits)
        size = stored_size(s.group_size, seed.group_size)
        made = bcq_weight(codes, alpha, z, group_size=size, dtype=job.dtype, scale_sets=sets, threads=job.threads)
        mse = {str(s.lowest_bits + i): float(sums) / weight.size for i, sums in enumerate(errors.sum(axis=0))}
        return Quantized(made, {"mse_by_precision": mse})

    def _weights(self, job: Job, weight: F32, seed: Solved) -> F64:
        """What squared errors count, ``[precisions]`` above the seed: 1 for the first, then one of ``_NEXT``.

        It is the least with which some rows stay within ``_NEAR`` at the second, or the last. A plane more brings
        errors down to about a quarter, so with 4 both count the same. From there on weights double.
        """
        s = self._settings
        chosen = _NEXT[0]
        if s.bits > s.lowest_bits + 1 and s.starts:
            groups = seed.numbers.z.shape[1]
            count = max(_GROUPS, weight.shape[0] * groups // _PART) // groups + 1
            rows = np.unique(np.linspace(0, weight.shape[0] - 1, count).astype(np.intp))
            some = weight[rows]
            alpha = np.ascontiguousarray(seed.numbers.alpha[:, rows])  # another layout would compile the loops again
            start = replace(seed, numbers=Numbers(alpha, seed.numbers.z[rows]))
            alone = solve(job, some, s.lowest_bits + 2, s.group_size, bias=s.bias, rounds=s.rounds, dtype=s.scale_dtype)
            limit = _NEAR * float(alone.errors.sum())

            def near(weight_of_next: float) -> bool:
                _, _, errors = self._extended(job, some, start, self._rising(weight_of_next))
                return float(errors[:, 2].sum()) <= limit

            chosen = _NEXT[bisect_left(_NEXT[:-1], True, key=near)]
        return self._rising(chosen)

    def _rising(self, weight_of_next: float) -> F64:
        more = self._settings.bits - self._settings.lowest_bits
        return np.array([weight_of_next * 2.0 ** (t - 1) if t else 1.0 for t in range(more)])

    def _extended(self, job: Job, weight: F32, seed: Solved, weights: F64) -> tuple[Any, list[Numbers], F64]:
        """Codes ``[out, in]``, the numbers of each precision, squared errors ``[out, precisions]``."""
        s, size, (rows, groups) = self._settings, seed.group_size, seed.numbers.z.shape
        more = s.bits - s.lowest_bits
        precisions = [new_numbers(s.lowest_bits + i, rows, groups, seed.stored) for i in range(1, more + 1)]
        errors = np.empty((rows, more + 1))
        codes = np.empty(weight.shape, np.uint8)
        kinds = np.array([KINDS[kind] for kind in (*seed.stored, job.dtype, "F64")])

        def work(first: int, stop: int) -> None:
            scratch, joint = new_work(size, s.bits), new_joint_work(s.lowest_bits, s.bits, weights)
            for block, ordered in sorted_blocks(weight, size, first, stop):
                found = np.zeros((len(ordered), groups, more + 1, s.bits + 1))
                for i in range(s.lowest_bits):
                    found[:, :, 0, i] = seed.numbers.alpha[i, block]
                found[:, :, 0, s.bits] = seed.numbers.z[block]
                own = np.zeros((len(ordered), groups, more + 1))
                extend_rows(
                    weight[block], ordered, size, s.rounds, s.bias, s.starts, kinds, s.lowest_bits, codes[block], found,
                    own, scratch, joint,
                )  # fmt: skip
                for i, one in enumerate(precisions, 1):
                    one.fill(job, block, found[:, :, i], seed.stored)
                errors[block] = own.sum(axis=1)

        each_share(work, rows, 1, job.threads)
        return codes, [seed.numbers, *precisions], errors
