"""Binary-coding quantization (LUT-GEMM, nuQmm): a scale per plane and group, and a bias.

:func:`solve` finds the planes of a whole matrix by the compiled search of ``loops.bcq``: groups are sorted block by
block, rows are shared among threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import float64_of, numpy_dtype, round_to

from .assemble import bcq_weight
from .compensated import FixedLevels, fitted, replace_worse
from .gptq import DAMPENING, ROUNDING, TURNS, WEIGHTING
from .hessian import compensation_in, damped, hessian_of, importance_of, stats_of
from .loops.bcq import STARTS, solve_rows
from .loops.bcq_levels import new_work
from .matrix import checked, groups_of, largest_first, refuse_overflow, stored_size
from .parameters import GROUP_SIZE, ROW, MethodBase, setting
from .protocol import Job, Quantized

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_BLOCK = 1 << 18  # numbers sorted at a time
_WHY = "weighting = activations multiplies squared errors with the layer's squared inputs"
_WHY_HESSIAN = "rounding = gptq compensates errors with the Hessian of the layer's inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class BcqSettings:
    """What can be chosen."""

    bits: int = setting(3, "planes per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    bias: bool = setting(True, "a number z per group, next to the plane scales")
    rounds: int = setting(15, "turns of refinement at most, fewer when the error no longer falls", low=0, high=1000)
    scale_dtype: str = setting("F16", "type of plane scales and bias", choices=("F16", "BF16", "F32"))
    weighting: str = setting("none", WEIGHTING, choices=("none", "activations"))
    rounding: str = setting("nearest", ROUNDING, choices=("nearest", "gptq"))
    turns: int = setting(1, f"{TURNS}; with rounding = gptq", low=0, high=100)
    dampening: float = setting(0.01, f"{DAMPENING}, for rounding = gptq", low=0.0, high=1.0)


class Bcq(MethodBase[BcqSettings]):
    """``bcq``; how alpha and z are found is in ``loops.bcq``.

    After rounding, no group has a larger squared error than greedy's (and, with a bias, than that of `rtn`'s grid in
    the same types), and with F16 or BF16 numbers and a bias no matrix has a larger one than `rtn` gives it. With
    weighting the same holds for the weighted errors, and not for the others.
    """

    name = "bcq"
    settings_type = BcqSettings

    def needs_stats(self) -> str | None:
        """Only for weighting and compensated rounding."""
        if self._settings.rounding == "gptq":
            return f"bcq with {_WHY_HESSIAN}."
        return None if self._settings.weighting == "none" else f"bcq with {_WHY}."

    def quantize(self, job: Job) -> Quantized:
        """A bcq weight, plane 0 with the largest scale; notes: how many groups come from which start."""
        weight, s = checked(job), self._settings
        if s.rounding == "gptq":
            solved = solve_compensated(job, weight, s.bits, s, Compensation.of(job, s.dampening, _WHY_HESSIAN))
        else:
            importance = importance_of(stats_of(job, _WHY)) if s.weighting == "activations" else None
            solved = solve(job, weight, s.bits, s, importance)
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

    def rows(self, which: npt.NDArray[np.intp]) -> Numbers:
        """A copy of some rows, in the same layout: loops need not be compiled again."""
        return Numbers(np.ascontiguousarray(self.alpha[:, which]), self.z[which])


@dataclass(frozen=True, slots=True)
class Solved:
    """The planes of a matrix: codes uint8 ``[out, in]`` (highest bit: plane 0) and their numbers."""

    codes: npt.NDArray[np.uint8]
    numbers: Numbers
    errors: F64  # [out], squared (times the columns' importance), measured on rounded values
    starts: dict[str, int]  # how many groups come from which start
    stored: tuple[str, str]  # types of alpha and z
    group_size: int


class PlaneNumbers:
    """Plane scales and biases as :class:`compensated.GroupNumbers`: float64 ``[out, groups, k]``, the bias last."""

    def __init__(self, numbers: F64, size: int, planes: int, stored: tuple[str, str]) -> None:
        """``stored``: the types of plane scales and bias; k is ``planes``, or one more with a bias."""
        self.numbers, self.size, self.planes, self.stored_as = numbers, size, planes, stored

    @classmethod
    def of(cls, found: Numbers, size: int, stored: tuple[str, str], bias: bool) -> Self:
        """Those that a search has found for groups of ``size``."""
        parts = [*found.alpha, *([found.z] if bias else [])]
        stacked = np.stack([float64_of(part) for part in parts], axis=2)
        return cls(stacked, size, len(found.alpha), stored)

    def rows(self, which: Any) -> Self:
        return type(self)(self.numbers[which].copy(), self.size, self.planes, self.stored_as)

    def take(self, which: Any, other: Self) -> None:
        self.numbers[which] = other.numbers

    def levels(self) -> F64:
        """What every code is worth, ``[out, groups, 2^planes]``."""
        codes = np.arange(2**self.planes, dtype=np.uint8)[None]
        return np.asarray(np.einsum("kc,rgk->rgc", self.basis(codes, 0)[:, 0], self.numbers))

    def rule(self) -> FixedLevels:
        """The sums of all signs, rising."""
        levels = self.levels()
        labels = np.argsort(levels, axis=2, kind="stable")
        return FixedLevels(np.take_along_axis(levels, labels, axis=2), labels.astype(np.uint8))

    def basis(self, codes: npt.NDArray[np.uint8], group: int) -> F64:
        """The signs of the planes, and 1 for the bias."""
        made = np.ones((self.numbers.shape[2], *codes.shape))
        for plane in range(self.planes):
            made[plane] = 2.0 * (codes >> (self.planes - 1 - plane) & 1) - 1.0
        return made

    def get(self, group: int) -> F64:
        return self.numbers[:, group]

    def put(self, group: int, numbers: F64) -> None:
        """Other numbers; a plane scale below zero stands until :meth:`sort`."""
        self.numbers[:, group] = numbers

    def stored(self, group: int, numbers: F64) -> F64:
        """Rounded to their types; all of a row stay where one does not fit."""
        made = float64_of(round_to(numbers, self.stored_as[0]))
        made[:, self.planes :] = float64_of(round_to(numbers[:, self.planes :], self.stored_as[1]))
        fits = np.isfinite(made).all(axis=1, keepdims=True)
        return np.where(fits, made, self.numbers[:, group])

    def sort(self, codes: npt.NDArray[np.uint8]) -> None:
        """Plane scales at least zero and falling, codes ``[out, in]`` changed so that no value is; both in place."""
        planes = self.planes
        order = np.argsort(-np.abs(self.numbers[:, :, :planes]), axis=2, kind="stable")
        ordered = np.take_along_axis(self.numbers[:, :, :planes], order, axis=2)
        for group in range(self.numbers.shape[1]):
            run = slice(group * self.size, (group + 1) * self.size)
            bits = np.zeros(codes[:, run].shape, np.uint8)
            for plane in range(planes):
                shift = (planes - 1 - order[:, group, plane, None]).astype(np.uint8)
                bit = codes[:, run] >> shift & np.uint8(1) ^ (ordered[:, group, plane, None] < 0)
                bits |= bit.astype(np.uint8) << np.uint8(planes - 1 - plane)
            codes[:, run] = bits
        self.numbers[:, :, :planes] = np.abs(ordered)

    def as_stored(self) -> Numbers:
        """In their types; without a bias z is zero."""
        rows, groups, count = self.numbers.shape
        alpha, z = self.stored_as
        made = new_numbers(self.planes, rows, groups, self.stored_as)
        for plane in range(self.planes):
            made.alpha[plane] = round_to(self.numbers[:, :, plane], alpha)
        made.z[:] = round_to(self.numbers[:, :, -1], z) if count > self.planes else 0
        return made


def solve(job: Job, weight: F32, bits: int, s: Any, importance: F64 | None) -> Solved:
    """The best planes found for ``weight``; ``s``: settings, `BcqSettings` or others that have the same.

    ``importance``: float64 ``[in]``, what squared errors of a column are multiplied with; None: with 1.

    Where the matrix as a whole would come out worse than with `rtn`, because z has too few bits for its grid (weights
    that were quantized before), z and if need be alpha are stored in F32, which has enough.
    """
    for stored in dict.fromkeys([(s.scale_dtype, s.scale_dtype), (s.scale_dtype, "F32"), ("F32", "F32")]):
        solved, uniform_error = _solved(job, weight, bits, s, stored, importance)
        if not s.bias or float(solved.errors.sum()) <= uniform_error:
            break
    return solved


class Compensation(NamedTuple):
    """What rounding with compensated errors needs to know about a layer; see `hessian`."""

    hessian: F64  # [in, in], damped
    order: npt.NDArray[np.intp]  # the columns as they are rounded
    factor: F64
    costs: F64  # [in], of a squared error

    @property
    def importance(self) -> F64:
        """The costs, their mean 1."""
        return np.asarray(self.costs / self.costs.mean())

    @classmethod
    def of(cls, job: Job, dampening: float, why: str, order: npt.NDArray[np.intp] | None = None) -> Self:
        """From the statistics of a job; ``why``: what they are needed for. order: by default, large inputs first."""
        hessian = damped(hessian_of(job, why), dampening, None, job.name)
        order = largest_first(np.diagonal(hessian)) if order is None else order
        factor, costs = compensation_in(hessian, order, job.threads, job.name)
        return cls(hessian, order, factor, costs)


def solve_compensated(job: Job, weight: F32, bits: int, s: Any, layer: Compensation) -> Solved:
    """:func:`solve` for the layer's output: rounded with compensated errors; ``errors`` are those of the search."""
    solved = solve(job, weight, bits, s, layer.importance)
    first = PlaneNumbers.of(solved.numbers, solved.group_size, solved.stored, s.bias)
    numbers = first.rows(slice(None))
    hessian, known = layer.hessian, (layer.factor, layer.costs, layer.order)
    codes, errors = fitted(weight, hessian, *known, numbers, 2**bits - 1, s.turns, threads=job.threads)
    replace_worse(weight, hessian, codes, errors, numbers, first, lambda rows: solved.codes[rows], job.threads)
    numbers.sort(codes)
    return replace(solved, codes=codes, numbers=numbers.as_stored())


def new_numbers(planes: int, rows: int, groups: int, stored: tuple[str, str]) -> Numbers:
    """To be filled in."""
    return Numbers(
        np.empty((planes, rows, groups), numpy_dtype(stored[0])), np.empty((rows, groups), numpy_dtype(stored[1]))
    )


def _sorted_blocks(weight: F32, size: int, first: int, stop: int) -> Iterator[tuple[slice, F32]]:
    """Rows ``first..stop`` in blocks that fit the cache, each with the numbers of every group in rising order."""
    columns = weight.shape[1]
    whole = columns // size * size
    for rows in _blocks(columns, first, stop):
        block = weight[rows]
        ordered = np.empty_like(block)
        ordered[:, :whole] = np.sort(block[:, :whole].reshape(len(block), -1, size), axis=-1).reshape(len(block), whole)
        ordered[:, whole:] = np.sort(block[:, whole:], axis=-1)
        yield rows, ordered


def weighted_blocks(
    weight: F32, importance: F64 | None, size: int, first: int, stop: int
) -> Iterator[tuple[slice, F32, F64]]:
    """The same with the importance of every sorted number, ``[0, 0]`` if there is none."""
    if importance is None:
        for rows, ordered in _sorted_blocks(weight, size, first, stop):
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
    job: Job, weight: F32, bits: int, s: Any, stored: tuple[str, str], importance: F64 | None
) -> tuple[Solved, float]:
    size, groups = groups_of(weight.shape[1], s.group_size)
    rows = weight.shape[0]
    codes = np.empty(weight.shape, np.uint8)
    numbers = new_numbers(bits, rows, groups, stored)
    errors, uniform = np.empty(rows), np.empty(rows)
    starts: Counter[int] = Counter()
    kinds = np.array([KINDS[kind] for kind in (*stored, job.dtype, s.scale_dtype, "F64")])

    def work(first: int, stop: int) -> None:
        scratch = new_work(size, bits)
        for block, ordered, weights in weighted_blocks(weight, importance, size, first, stop):
            found = np.empty((len(ordered), groups, bits + 1))
            own, other = np.empty((len(ordered), groups)), np.empty((len(ordered), groups))
            origin = np.empty((len(ordered), groups), np.uint8)
            solve_rows(
                weight[block], ordered, weights, size, s.rounds, s.bias, kinds, codes[block], found, own, other,
                origin, scratch,
            )  # fmt: skip
            numbers.fill(job, block, found, stored)
            errors[block], uniform[block] = own.sum(axis=1), other.sum(axis=1)
            starts.update(origin.reshape(-1).tolist())

    each_share(work, rows, 1, job.threads)
    return Solved(codes, numbers, errors, _named(starts), stored, size), float(uniform.sum())


def _named(starts: Counter[int]) -> dict[str, int]:
    return {STARTS[kind % 128] + ", refined" * (kind >= 128): starts[kind] for kind in sorted(starts)}
