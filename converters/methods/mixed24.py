"""2/4-bit mixed precision inside a weight (ICCAD'24): sensitive column groups get four bits, the others two.

Segment 0: 2-bit groups of 16 with second-order scales. Segment 1: 4-bit groups of 128 with F16 scales. ``perm`` brings
the columns there. A few elements of the 2-bit groups may be outliers: they leave the ranges and are added as CSR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.errors import error
from bcqfmt.weight.weight import BcqWeight

from .assemble import affine_weight
from .compensated import compensated_codes
from .gptq import DAMPENING, UniformRule
from .hessian import compensation, damped, hessian_of, importance_of
from .matrix import checked, group_columns, is_identity, largest_first, refuse_overflow
from .mixed24_choice import Sensitivity, by_hessian, by_range, csr_of, largest_scores
from .parameters import MethodBase, setting
from .protocol import Job, Quantized
from .second_order import SecondOrderFit

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_LARGEST = 65504 / 2  # of F16, and a range is twice as wide
_SCALE_BITS = 4
_WHY = "rounding = gptq compensates errors with the Hessian of the layer's inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed24Settings:
    """What can be chosen."""

    four_bit_ratio: float = setting(0.25, "share of column groups that get 4 bits", low=0.0, high=1.0)
    group_size: int = setting(16, "columns of a 2-bit group", choices=(16, 8))
    scale_rows: int = setting(16, "rows that share a second-order scale", low=1, high=65536)
    four_bit_group_size: int = setting(128, "columns of a 4-bit group", low=8)
    sensitivity: str = setting(
        "auto", "`hessian` (equation 9), `range` without statistics; auto: whichever there is",
        choices=("auto", "hessian", "range"),
    )  # fmt: skip
    clip: str = setting(
        "search", "`search`: scales of least squared error; `none`: from ranges", choices=("search", "none")
    )
    outliers: float = setting(0.002, "share of elements kept apart in 16 bit; 0: none", low=0.0, high=0.1)
    outlier_choice: str = setting(
        "error", "`error`: largest quantization error times sensitivity; `magnitude`: largest size",
        choices=("error", "magnitude"),
    )  # fmt: skip
    rounding: str = setting("nearest", "`gptq`: compensate rounding errors", choices=("nearest", "gptq"))
    dampening: float = setting(0.01, DAMPENING, low=0.0, high=1.0)
    layout: str = setting(
        "canonical", "`aligned64`: tiles for GPUs, two of three groups with 3-bit scale codes",
        choices=("canonical", "aligned64"),
    )  # fmt: skip


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


class Mixed24(MethodBase[Mixed24Settings]):
    """``mixed24``."""

    name = "mixed24"
    settings_type = Mixed24Settings

    def __init__(self, settings: Mixed24Settings) -> None:
        if settings.layout == "aligned64" and settings.group_size != 16:
            raise error("BCQ-E620", found="mixed24: layout = aligned64 with group_size = 8", expected="group_size = 16")
        super().__init__(settings)

    def needs_stats(self) -> str | None:
        """Only where the Hessian is asked for by name."""
        s = self._settings
        if s.rounding == "gptq":
            return "mixed24 with rounding = gptq compensates errors with the Hessian of the layer's inputs."
        if s.sensitivity == "hessian":
            return "mixed24 with sensitivity = hessian ranks column groups by the Hessian of the layer's inputs."
        return None

    def check_shape(self, name: str, shape: tuple[int, int]) -> None:
        """BCQ-E621 where a segment cannot be formed, or the layout not kept."""
        check_split(name, shape[1], self._settings)

    def quantize(self, job: Job) -> Quantized:
        """Two segments, perm, outliers where asked for; one segment where all groups have the same bits."""
        weight, s = checked(job), self._settings
        largest = max(float(weight.max()), -float(weight.min()))
        if largest > _LARGEST:
            raise error(
                "BCQ-E621", tensor=job.name, found=f"weights up to {largest:g}", expected="F16 scales and outliers"
            )
        sensitivity = self._sensitivity(job)
        columns = columns_of(job, s, sensitivity.groups)
        mask = choose_outliers(job, s, weight, columns, sensitivity) if s.outliers else None
        made = round_all(job, s, weight, columns, mask)
        notes = self._notes(weight.shape[1], columns, sensitivity, mask)
        return Quantized(assembled(job, s, columns, made, mask), notes)

    def _sensitivity(self, job: Job) -> Sensitivity:
        s = self._settings
        known = job.stats is not None and job.stats.hessian is not None
        if s.sensitivity == "hessian" or (s.sensitivity == "auto" and known):
            return by_hessian(job, job.weight, s.group_size, s.dampening)
        return by_range(job.weight, s.group_size)

    def _notes(self, width: int, columns: Columns, sensitivity: Sensitivity, mask: Any) -> dict[str, Any]:
        s = self._settings
        ratio = columns.four.size / width
        count = 0 if mask is None else int(np.count_nonzero(mask))
        fraction = count / mask.size if count else 0.0
        return {
            "sensitivity": sensitivity.kind,
            "four_bit_columns": int(columns.four.size),
            "outliers": count,
            "equation_10_bits": equation_10(ratio, s.group_size, s.scale_rows) + outlier_bits(fraction, width),
        }


def equation_6(bits: int, group_size: int, scale_bits: int | None = None, rows: int = 16) -> float:
    """Bits per weight of a uniform group: codes, zero and a 16-bit scale, or a second-order scale of ``scale_bits``.

    ICCAD'24 equation 6: N + (N + 16) / g1, and N + (N + N_s) / g1 + (N_s + 16) / (g1 g2).
    """
    if scale_bits is None:
        return bits + (bits + 16) / group_size
    return bits + (bits + scale_bits) / group_size + (scale_bits + 16) / (group_size * rows)


def equation_10(four_bit_ratio: float, group_size: int = 16, rows: int = 16, scale_bits: int = 4) -> float:
    """Bits per weight of the 2/4-bit mix, ICCAD'24 equation 10: scales of the 4-bit part are not counted."""
    return (1 - four_bit_ratio) * equation_6(2, group_size, scale_bits, rows) + four_bit_ratio * 4


def outlier_bits(fraction: float, columns: int) -> float:
    """What CSR outliers add: 32 bits for each, and a 32-bit pointer a row; nothing when there are none."""
    return 32 * fraction + 32 / columns if fraction else 0.0


class Split(NamedTuple):
    """groups: whole groups of a row; four: how many of them get 4 bits; tail: columns after the last whole group."""

    groups: int
    four: int
    tail: int


def split(columns: int, group_size: int, ratio: float) -> Split:
    """How many groups get four bits: the nearest number to ``ratio``, at least one of each kind when 0 < ratio < 1.

    Columns that fill no group are always 4-bit: only the last group of the last segment may be short.
    """
    groups, tail = divmod(columns, group_size)
    four = math.floor(ratio * groups + 0.5)
    if 0 < ratio < 1 and groups > 1:
        four = min(max(four, 1), groups - 1)
    return Split(groups, four, tail)


def check_split(name: str, width: int, s: Mixed24Settings) -> Split:
    """The split of a row; BCQ-E621 where a segment cannot be formed, or the layout not kept."""
    found = split(width, s.group_size, s.four_bit_ratio)
    last = found.four * s.group_size + found.tail
    if 0 < last < 8:
        told = f"{last} columns for the 4-bit segment ({width} columns, groups of {s.group_size})"
        raise error("BCQ-E621", tensor=name, found=told, expected="none, or at least 8, the smallest group")
    if s.layout == "aligned64" and (width % 64 or last * 4 != width):
        raise error(
            "BCQ-E621",
            tensor=name,
            found=f"widths [{width - last}, {last}] of {width} columns",
            expected="three quarters and one quarter of a multiple of 64, for aligned64; layout = canonical takes any",
        )
    return found


def columns_of(job: Job, s: Mixed24Settings, groups: F64) -> Columns:
    """The most sensitive groups to segment 1, both in their old order; BCQ-E621 where a segment cannot be formed."""
    width = job.weight.shape[1]
    count, four, tail = check_split(job.name, width, s)
    chosen = np.zeros(count, np.bool_)
    chosen[largest_first(groups)[:four]] = True
    two = group_columns(np.flatnonzero(~chosen), s.group_size, width)
    last = np.concatenate([group_columns(np.flatnonzero(chosen), s.group_size, width), np.arange(width - tail, width)])
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
