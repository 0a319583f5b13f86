"""The parts of a 2/4-bit weight: which columns go where, outliers, rounding of both segments, the weight itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.errors import error
from bcqfmt.weight.weight import BcqWeight

from .assemble import affine_weight
from .columns import group_columns, is_identity, largest_first
from .gptq import UniformRule
from .gptq_rounding import compensated_codes
from .hessian import compensation, damped, hessian_of, importance_of
from .matrix import refuse_overflow
from .mixed24_bits import split
from .mixed24_sensitivity import Sensitivity
from .outliers import csr_of, largest_scores
from .protocol import Job
from .second_order import SecondOrderFit

if TYPE_CHECKING:
    from .mixed24 import Mixed24Settings

__all__ = ["Columns", "assembled", "choose_outliers", "columns_of", "round_all"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
_SCALE_BITS = 4
_WHY = "rounding = gptq compensates errors with the Hessian of the layer's inputs"


class Columns(NamedTuple):
    """Original columns of the 2-bit and of the 4-bit segment, in stored order."""

    two: Indices
    four: Indices

    @property
    def perm(self) -> Indices:
        """The original column at every stored position."""
        return np.concatenate([self.two, self.four])


class Rounded(NamedTuple):
    """Codes of both segments, their numbers, and the dense and the wanted value of every outlier."""

    two: Codes
    four: Codes
    fit: SecondOrderFit
    scale: F64
    zero: F64
    dense: F64
    wanted: F64


def columns_of(job: Job, s: Mixed24Settings, groups: F64) -> Columns:
    """The most sensitive groups to segment 1, both in their old order; BCQ-E621 where a segment cannot be formed."""
    width = job.weight.shape[1]
    count, four, tail = split(width, s.group_size, s.four_bit_ratio)
    chosen = np.zeros(count, np.bool_)
    chosen[largest_first(groups)[:four]] = True
    two = group_columns(np.flatnonzero(~chosen), s.group_size, width)
    last = np.concatenate([group_columns(np.flatnonzero(chosen), s.group_size, width), np.arange(width - tail, width)])
    if 0 < last.size < 8:
        raise error(
            "BCQ-E621",
            tensor=job.name,
            found=f"{last.size} columns for the 4-bit segment ({width} columns, groups of {s.group_size})",
            expected="none, or at least 8, the smallest group",
        )
    if s.layout == "aligned64" and (width % 64 or last.size * 4 != width):
        raise error(
            "BCQ-E621",
            tensor=job.name,
            found=f"widths [{two.size}, {last.size}] of {width} columns",
            expected="three quarters and one quarter of a multiple of 64, for aligned64; layout = canonical takes any",
        )
    return Columns(two, last)


def choose_outliers(job: Job, s: Mixed24Settings, weight: F32, columns: Columns, sensitivity: Sensitivity) -> Mask:
    """The elements kept apart, ``[out, in]`` in original columns; all of them in 2-bit groups."""
    if s.outlier_choice == "magnitude":
        scores = weight[:, columns.two]
        np.abs(scores, out=scores)
    else:
        fit = _fit(job, s, columns, None)
        codes = fit.nearest_codes(weight, columns.two)
        weights = sensitivity.columns / sensitivity.columns.max()  # their sizes are those of activations: any
        scores = np.empty(codes.shape, np.float32)
        for group, start in enumerate(range(0, columns.two.size, s.group_size)):
            run = slice(start, start + s.group_size)
            missed = weight[:, columns.two[run]] - fit.values(codes[:, run], group)
            scores[:, run] = np.square(missed) * weights[columns.two[run]]
        del codes, fit
    mask = np.zeros(weight.shape, np.bool_)
    mask[:, columns.two] = largest_scores(scores, int(s.outliers * weight.size))
    return mask


def round_all(job: Job, s: Mixed24Settings, weight: F32, columns: Columns, mask: Mask | None) -> Rounded:
    """Codes of both segments against their final numbers, nearest or with compensated errors."""
    without = None if mask is None else mask[:, columns.two]
    fit = _fit(job, s, columns, without)
    uniform = UniformRule(4, False, s.clip == "search", KINDS["F16"], job.threads)
    if s.rounding == "gptq":
        return _compensated(job, s, weight, columns, mask, fit, uniform)
    two = fit.nearest_codes(weight, columns.two)
    four, scale, zero = _nearest_four(weight[:, columns.four], min(s.four_bit_group_size, columns.four.size), uniform)
    wanted = np.empty(0) if mask is None else weight[mask].astype(np.float64)
    return Rounded(two, four, fit, scale, zero, _dense_at(fit, two, columns, mask), wanted)


def assembled(job: Job, s: Mixed24Settings, columns: Columns, made: Rounded, mask: Mask | None) -> BcqWeight:
    """The weight of one or two segments, reordered, with its outliers, in the layout asked for."""
    refuse_overflow(job, made.fit.units, "second-order scale", "F16")
    refuse_overflow(job, made.scale, "scale", "F16")
    pieces = []
    if columns.two.size:
        pieces.append(made.fit.weight(made.two, _SCALE_BITS, job.dtype, job.threads))
    if columns.four.size:
        pieces.append(
            affine_weight(
                made.four, made.scale, made.zero, bits=4, group_size=min(s.four_bit_group_size, columns.four.size),
                stored="F16", dtype=job.dtype, threads=job.threads,
            )
        )  # fmt: skip
    weight = BcqWeight.from_segments(pieces, perm=None if is_identity(columns.perm) else columns.perm)
    if mask is not None and columns.two.size:
        csr = csr_of(mask, made.wanted, made.dense)
        if not np.isfinite(csr.values).all():
            raise error("BCQ-E621", tensor=job.name, found="an outlier above 65504, the largest number of F16")
        weight = weight.with_outliers(csr.indptr, csr.indices, csr.values, segments=[0])
    return weight.to_aligned64() if s.layout == "aligned64" else weight


def _fit(job: Job, s: Mixed24Settings, columns: Columns, without: Mask | None) -> SecondOrderFit:
    """Scale codes go up to 15; in aligned64 the second and third group of a tile have three bits, up to 7."""
    groups = columns.two.size // s.group_size
    limits = np.full(groups, 2**_SCALE_BITS - 1)
    if s.layout == "aligned64":
        limits[np.arange(groups) % 3 > 0] = 7
    importance = importance_of(job.stats)
    if importance is None:
        importance = np.ones(job.weight.shape[1])
    return SecondOrderFit(
        job.weight.shape[0], s.group_size, limits, importance=importance[columns.two], row_step=s.scale_rows,
        search=s.clip == "search", without=without, threads=job.threads,
    )  # fmt: skip


def _nearest_four(part: F32, size: int, rule: UniformRule) -> tuple[Codes, F64, F64]:
    if not part.size:
        return np.empty(part.shape, np.uint8), np.empty((part.shape[0], 0)), np.empty((part.shape[0], 0))
    grid = rule.fixed(part, size)
    codes = np.empty(part.shape, np.uint8)
    for group, start in enumerate(range(0, part.shape[1], size)):
        steps = part[:, start : start + size].astype(np.float64) * (1.0 / grid.scale[:, group, None])
        codes[:, start : start + size] = np.clip(np.rint(steps) + grid.zero[:, group, None], 0, 15)
    return codes, grid.scale, grid.zero


def _compensated(
    job: Job, s: Mixed24Settings, weight: F32, columns: Columns, mask: Mask | None, fit: SecondOrderFit,
    uniform: UniformRule,
) -> Rounded:  # fmt: skip
    """2-bit columns first: the 4-bit ones, finer and more sensitive, make up for their errors."""
    order = columns.perm
    factor = compensation(damped(hessian_of(job, _WHY), s.dampening, order[::-1], job.name), job.threads, job.name)
    low, size = fit.limits.size, max(1, min(s.four_bit_group_size, columns.four.size))
    high = -(-columns.four.size // size)

    def rule(group: int, first_row: int, target: F64) -> tuple[Any, Any]:
        return fit(group, first_row, target) if group < low else uniform(group, first_row, target)

    groups = np.concatenate([np.arange(columns.two.size) // s.group_size, low + np.arange(columns.four.size) // size])
    tops = np.repeat([3, 15], [low, high])
    made = compensated_codes(
        weight, factor, order, groups, tops, rule, exact=mask, row_step=s.scale_rows, threads=job.threads
    )
    two, four = made.codes[:, : columns.two.size], np.ascontiguousarray(made.codes[:, columns.two.size :])
    two = np.ascontiguousarray(two)
    return Rounded(
        two, four, fit, made.scale[:, low:], made.zero[:, low:], _dense_at(fit, two, columns, mask), made.kept
    )


def _dense_at(fit: SecondOrderFit, codes: Codes, columns: Columns, mask: Mask | None) -> F64:
    """What the dense part decodes to at every outlier, row by row in original columns."""
    if mask is None:
        return np.empty(0)
    stored = np.zeros(mask.shape[1], np.intp)
    stored[columns.two] = np.arange(columns.two.size)
    rows, found = np.nonzero(mask)
    place = stored[found]
    group = place // fit.group_size
    steps = np.subtract(codes[rows, place], fit.zeros[rows, group], dtype=np.float64)
    return np.asarray(fit.scales()[rows, group] * steps)
