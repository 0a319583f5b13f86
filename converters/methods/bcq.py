"""Binary-coding quantization (LUT-GEMM, nuQmm): a scale per plane and group, and a bias.

:func:`solve` finds the planes of a whole matrix by the compiled search of ``loops.bcq``: groups are sorted block by
block, rows are shared among threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import numpy_dtype, round_to

from .assemble import bcq_weight
from .hessian import importance_of, stats_of
from .loops.bcq import STARTS, solve_rows
from .loops.bcq_levels import new_work
from .matrix import checked, groups_of, refuse_overflow, stored_size
from .parameters import GROUP_SIZE, ROW, MethodBase, setting
from .protocol import Job, Quantized

__all__ = ["Bcq", "BcqSettings", "Numbers", "Solved", "new_numbers", "solve", "sorted_blocks"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_BLOCK = 1 << 18  # numbers sorted at a time
_WHY = "weighting = activations multiplies squared errors with the layer's squared inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class BcqSettings:
    """What can be chosen."""

    bits: int = setting(3, "planes per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    bias: bool = setting(True, "a number z per group, next to the plane scales")
    rounds: int = setting(15, "turns of refinement at most, fewer when the error no longer falls", low=0, high=1000)
    scale_dtype: str = setting("F16", "type of plane scales and bias", choices=("F16", "BF16", "F32"))
    weighting: str = setting(
        "none", "`activations`: errors count by the mean squared input of their column", choices=("none", "activations")
    )


class Bcq(MethodBase[BcqSettings]):
    """``bcq``; how alpha and z are found is in ``loops.bcq``.

    After rounding, no group has a larger squared error than greedy's (and, with a bias, than that of `rtn`'s grid in
    the same types), and with F16 or BF16 numbers and a bias no matrix has a larger one than `rtn` gives it. With
    weighting the same holds for the weighted errors, and not for the others.
    """

    name = "bcq"
    settings_type = BcqSettings

    def needs_stats(self) -> str | None:
        """Only for weighting."""
        return None if self._settings.weighting == "none" else f"bcq with {_WHY}."

    def quantize(self, job: Job) -> Quantized:
        """A bcq weight, plane 0 with the largest scale; notes: how many groups come from which start."""
        weight, s = checked(job), self._settings
        importance = None
        if s.weighting == "activations":
            importance = importance_of(stats_of(job, _WHY))
        solved = solve(
            job, weight, s.bits, s.group_size, bias=s.bias, rounds=s.rounds, dtype=s.scale_dtype, importance=importance
        )
        made = bcq_weight(
            solved.codes, solved.numbers.alpha, solved.numbers.z if s.bias else None,
            group_size=stored_size(s.group_size, solved.group_size), dtype=job.dtype, threads=job.threads,
        )  # fmt: skip
        return Quantized(made, {"starts": solved.starts})


@dataclass(frozen=True, slots=True)
class Numbers:
    """alpha ``[p, out, G]`` and z ``[out, G]`` in the types that they are stored in."""

    alpha: npt.NDArray[Any]
    z: npt.NDArray[Any]

    def fill(self, job: Job, rows: slice, found: npt.NDArray[np.float64], stored: tuple[str, str]) -> None:
        """Take over some rows; found: float64 ``[rows, G, any]``, alphas first, z last, infinite where none fits."""
        refuse_overflow(job, found[:, :, 0], "plane scale", stored[0], rows.start)
        for i in range(len(self.alpha)):
            self.alpha[i, rows] = round_to(found[:, :, i], stored[0])
        self.z[rows] = round_to(found[:, :, -1], stored[1])


@dataclass(frozen=True, slots=True)
class Solved:
    """The planes of a matrix: codes uint8 ``[out, in]`` (highest bit: plane 0) and their numbers."""

    codes: npt.NDArray[np.uint8]
    numbers: Numbers
    errors: F64  # [out], squared (times the columns' importance), measured on rounded values
    starts: dict[str, int]  # how many groups come from which start
    stored: tuple[str, str]  # types of alpha and z
    group_size: int


def solve(
    job: Job, weight: F32, bits: int, group_size: int, *, bias: bool, rounds: int, dtype: str,
    importance: F64 | None = None,
) -> Solved:  # fmt: skip
    """The best planes found for ``weight``, with numbers in type ``dtype``.

    ``importance``: float64 ``[in]``, what squared errors of a column are multiplied with; None: with 1.

    Where the matrix as a whole would come out worse than with `rtn`, because z has too few bits for its grid (weights
    that were quantized before), z and if need be alpha are stored in F32, which has enough.
    """
    for stored in dict.fromkeys([(dtype, dtype), (dtype, "F32"), ("F32", "F32")]):
        solved, uniform_error = _solved(job, weight, bits, group_size, bias, rounds, stored, dtype, importance)
        if not bias or float(solved.errors.sum()) <= uniform_error:
            break
    return solved


def new_numbers(planes: int, rows: int, groups: int, stored: tuple[str, str]) -> Numbers:
    """To be filled in."""
    return Numbers(
        np.empty((planes, rows, groups), numpy_dtype(stored[0])), np.empty((rows, groups), numpy_dtype(stored[1]))
    )


def sorted_blocks(weight: F32, size: int, first: int, stop: int) -> Iterator[tuple[slice, F32]]:
    """Rows ``first..stop`` in blocks that fit the cache, each with the numbers of every group in rising order."""
    columns = weight.shape[1]
    whole = columns // size * size
    for rows in _blocks(columns, first, stop):
        block = weight[rows]
        ordered = np.empty_like(block)
        ordered[:, :whole] = np.sort(block[:, :whole].reshape(len(block), -1, size), axis=-1).reshape(len(block), whole)
        ordered[:, whole:] = np.sort(block[:, whole:], axis=-1)
        yield rows, ordered


def _weighted_blocks(
    weight: F32, importance: F64 | None, size: int, first: int, stop: int
) -> Iterator[tuple[slice, F32, F64]]:
    """The same with the importance of every sorted number, ``[0, 0]`` if there is none."""
    if importance is None:
        for rows, ordered in sorted_blocks(weight, size, first, stop):
            yield rows, ordered, np.empty((0, 0))
        return
    columns = weight.shape[1]
    for rows in _blocks(columns, first, stop):
        block = weight[rows]
        places = np.empty(block.shape, np.intp)
        for start in range(0, columns, size):
            run = slice(start, start + size)
            places[:, run] = start + np.argsort(block[:, run], axis=-1, kind="stable")
        yield rows, np.take_along_axis(block, places, axis=1), importance[places]


def _blocks(columns: int, first: int, stop: int) -> Iterator[slice]:
    step = max(1, _BLOCK // columns)
    for start in range(first, stop, step):
        yield slice(start, min(start + step, stop))


def _solved(
    job: Job, weight: F32, bits: int, group_size: int, bias: bool, rounds: int, stored: tuple[str, str], dtype: str,
    importance: F64 | None,
) -> tuple[Solved, float]:  # fmt: skip
    size, groups = groups_of(weight.shape[1], group_size)
    rows = weight.shape[0]
    codes = np.empty(weight.shape, np.uint8)
    numbers = new_numbers(bits, rows, groups, stored)
    errors, uniform = np.empty(rows), np.empty(rows)
    starts: Counter[int] = Counter()
    kinds = np.array([KINDS[kind] for kind in (*stored, job.dtype, dtype, "F64")])

    def work(first: int, stop: int) -> None:
        scratch = new_work(size, bits)
        for block, ordered, weights in _weighted_blocks(weight, importance, size, first, stop):
            found = np.empty((len(ordered), groups, bits + 1))
            own, other = np.empty((len(ordered), groups)), np.empty((len(ordered), groups))
            origin = np.empty((len(ordered), groups), np.uint8)
            solve_rows(
                weight[block], ordered, weights, size, rounds, bias, kinds, codes[block], found, own, other, origin,
                scratch,
            )  # fmt: skip
            numbers.fill(job, block, found, stored)
            errors[block], uniform[block] = own.sum(axis=1), other.sum(axis=1)
            starts.update(origin.reshape(-1).tolist())

    each_share(work, rows, 1, job.threads)
    return Solved(codes, numbers, errors, _named(starts), stored, size), float(uniform.sum())


def _named(starts: Counter[int]) -> dict[str, int]:
    return {STARTS[kind % 128] + ", refined" * (kind >= 128): starts[kind] for kind in sorted(starts)}
