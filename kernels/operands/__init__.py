"""A weight as arrays for kernels: planes, plane scales, reordering, outliers; one matrix, checked, in memory.

An operand has two readings of the same planes:

- *exact*: ``formula`` with its numbers ``first`` and ``second``, from which the value of every element follows bit by
  bit as in section 8 of the specification. `dequant` uses it.
- *linear*: ``alpha`` and ``z`` in float32 with ``E = z + sum of +-alpha``, for products. They are the weight's own
  numbers in bcq segments and in affine ones with first-order F16 or BF16 scales. Everything else is rounded to float32
  once (F32 and second-order scales, offsets). Of float-zero segments the rounding inside the formula is left out:
  ``scale * (code - zero)`` instead of ``scale * RN(code - zero)``. Tables have no such reading: BCQ-E553, and products
  take the values of the exact one.

Making an operand checks the content of the weight (BCQ-V401 to V409); kernels rely on that, never on the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.weight import decode
from bcqfmt.weight.weight import BcqWeight

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Float = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class OperandSegment:
    """A run of stored columns.

    ``planes`` (p, out, words) uint32, plane 0 the most significant; ``start`` its first stored column; G groups of
    ``group_size`` columns, the last one may be short. ``formula`` is "affine", "float-zero", "offset", "table" or
    "bcq"; ``first`` is the scale (out, G), for bcq alpha (p, out, G); ``second`` the zero (point), offset or bias
    (out, G), for tables the number of each code (2^p). Both are float32 where that is exact, else float64.
    """

    planes: Words
    start: int
    width: int
    group_size: int
    formula: str
    first: Array
    second: Array

    @property
    def bits(self) -> int:
        return int(self.planes.shape[0])

    @property
    def groups(self) -> int:
        return -(-self.width // self.group_size)

    @property
    def alpha(self) -> Float:
        """Plane scales (p, out, G) of the linear reading."""
        return self._linear[0]

    @property
    def z(self) -> Float:
        """Bias (out, G) of the linear reading."""
        return self._linear[1]

    @cached_property
    def _linear(self) -> tuple[Float, Float]:
        first, second = self.first.astype(np.float64), self.second.astype(np.float64)
        if self.formula == "bcq":
            return _single(first), _single(second)
        if self.formula == "table":
            hint = "dequantize it: that works with any weight"
            raise error("BCQ-E553", found="codes of a table", expected="codes that are numbers", hint=hint)
        q = self.bits
        with np.errstate(over="ignore", invalid="ignore"):
            alpha = np.stack([first * 2.0 ** (q - 2 - i) for i in range(q)])
            middle = (2.0**q - 1) * 0.5
            z = first * middle + second if self.formula == "offset" else first * (middle - second)
        return _single(alpha), _single(z)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outliers:
    """CSR over original columns: ``indptr`` (out + 1) int32, ``indices`` (nnz) int32, ``values`` (nnz) float32."""

    indptr: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    values: Float
    mode: str
    beneath: Callable[[], Array]  # the linear reading of the same elements, float64

    @property
    def count(self) -> int:
        return int(self.indices.size)

    @cached_property
    def added(self) -> Float:
        """What a product has to add to the linear reading (nnz) float32.

        The values themselves, or in mode "replace" their difference from the linear reading.
        """
        if self.mode == "add":
            return self.values
        with np.errstate(over="ignore", invalid="ignore"):
            return _single(self.values.astype(np.float64) - self.beneath())


@dataclass(frozen=True, kw_only=True, eq=False)
class Operand:
    """One matrix (out, in), its content checked. ``perm[j]`` (int32) is the column that stored column j holds."""

    name: str
    shape: tuple[int, int]
    dtype: str
    segments: tuple[OperandSegment, ...]
    perm: npt.NDArray[np.int32] | None
    outliers: Outliers | None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    @cached_property
    def stored(self) -> npt.NDArray[np.int32]:
        """The stored column (in) int32 of every original column: the inverse of ``perm``."""
        place = np.arange(self.columns, dtype=np.int32)
        if self.perm is None:
            return place
        inverse = np.empty_like(place)
        inverse[self.perm] = place
        return inverse


def operand(weight: BcqWeight, *, planes: int | None = None, index: int | None = None) -> Operand:
    """The operand of a weight, or of matrix ``index`` of a stack; ``planes``: of its first planes only (section 8.1).

    Reads and checks the whole weight.
    """
    weight = weight.to_canonical()
    weight.check()
    spec = weight.spec
    if (index is None) == (len(spec.shape) == 3) or not 0 <= (index or 0) < spec.stack:
        found = f"matrix {index} of a weight of shape {list(spec.shape)}"
        raise error("BCQ-E552", tensor=weight.name, found=found, expected="index= for a stack, and only for a stack")
    if planes is not None:
        decode.refuse_truncation(spec, planes)
    numbers = decode.load_rows(spec, weight.parts(), index or 0, (0, spec.out), planes)
    segments = tuple(_segment(numbers, k, sum(spec.widths[:k])) for k in range(len(spec.widths)))
    made = Operand(
        name=weight.name,
        shape=(spec.out, spec.columns),
        dtype=spec.dtype,
        segments=segments,
        perm=numbers.arrays["perm"].astype(np.int32) if spec.scheme.perm else None,
        outliers=None,
    )
    return made if spec.scheme.outliers is None else replace(made, outliers=_outliers(made, numbers))


def _segment(numbers: decode.Numbers, k: int, start: int) -> OperandSegment:
    spec = numbers.spec
    segment = spec.scheme.segments[k]
    planes = np.ascontiguousarray(numbers.arrays[f"s{k}_planes"]).view(np.uint32)
    cut = planes.shape[0] < segment.bits
    if segment.encoding == "bcq" or cut:
        formula = "bcq"
        first, second = decode.alpha_z(numbers, k)
    else:
        formula = segment.encoding
        first, zero = decode.scale_of(numbers, k), decode.zero_of(numbers, k)
        second = np.full(first.shape, zero) if isinstance(zero, float) else zero
        if formula == "table":
            second = decode.levels_of(segment)
    first, second = _both_single(first, second)
    return OperandSegment(
        planes=planes,
        start=start,
        width=spec.widths[k],
        group_size=segment.group_size,
        formula=formula,
        first=first,
        second=second,
    )


def _both_single(first: Array, second: Array) -> tuple[Array, Array]:
    """Both as float32 if that loses nothing, else both as they are."""
    with np.errstate(over="ignore", invalid="ignore"):
        short = first.astype(np.float32), second.astype(np.float32)
    for full, half in zip((first, second), short, strict=True):
        if not np.array_equal(full, half.astype(np.float64), equal_nan=True):
            return np.ascontiguousarray(first), np.ascontiguousarray(second)
    return np.ascontiguousarray(short[0]), np.ascontiguousarray(short[1])


def _single(numbers: Array) -> Float:
    """Rounded to float32; BCQ-E553 where a finite number would become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        short = numbers.astype(np.float32)
    if (np.isfinite(numbers) & ~np.isfinite(short)).any():
        found = "a scale or bias beyond the range of float32"
        expected = "numbers that float32 can hold"
        raise error("BCQ-E553", found=found, expected=expected, hint="dequantize it: that works with any number")
    return np.ascontiguousarray(short)


def _outliers(made: Operand, numbers: decode.Numbers) -> Outliers:
    rule = numbers.spec.scheme.outliers
    assert rule is not None
    rows, columns = numbers.arrays["outlier_rows"], numbers.arrays["outlier_indices"]
    with np.errstate(invalid="ignore"):  # a signalling NaN is a legal bit pattern
        values = numbers.arrays["outlier_values"].astype(np.float32)
    indptr = np.zeros(made.rows + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=made.rows), out=indptr[1:])
    return Outliers(
        indptr=indptr,
        indices=columns.astype(np.int32),
        values=values,
        mode=rule.mode,
        beneath=lambda: _linear_at(made, rows, columns),
    )


def _linear_at(made: Operand, rows: Array, columns: Array) -> Array:
    """The linear reading at some elements, float64."""
    found = np.empty(rows.shape, np.float64)
    place = made.stored[columns]
    for segment in made.segments:
        inside = (place >= segment.start) & (place < segment.start + segment.width)
        r, j = rows[inside], place[inside] - segment.start
        group = j // segment.group_size
        value = segment.z[r, group].astype(np.float64)
        for i in range(segment.bits):
            bit = segment.planes[i, r, j // 32] >> (j % 32).astype(np.uint32) & np.uint32(1)
            alpha = segment.alpha[i, r, group].astype(np.float64)
            value += np.where(bit, alpha, -alpha)
        found[inside] = value
    return found
