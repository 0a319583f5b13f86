"""The normative decoder: parts to values, in the order of operations of spec section 8.

``Numbers`` are the parts of some rows of one matrix, loaded; :func:`evaluate` turns them into E in binary64.
Everything is elementwise in float64 numpy, so the order written here is the order performed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error

from . import arguments
from .aligned64 import tile_codes, tile_meta_fields
from .packing import unpack, unpack_codes
from .scheme import PackedZero, SecondOrder, Segment, WeightSpec

Array = npt.NDArray[Any]
Float = npt.NDArray[np.float64]

_WHOLE = ("float-zero", "offset", "table")  # need all planes
_BLOCK = 1 << 15  # elements evaluated at a time: the float64 temporaries stay in the cache
_LOAD = 1 << 25  # elements whose parts are held in memory at a time


@dataclass(slots=True)
class Numbers:
    """Parts of rows ``first_row .. first_row + rows`` of matrix ``index``; arrays by suffix, without the stack axis."""

    spec: WeightSpec
    first_row: int
    rows: int
    planes: int | None
    arrays: dict[str, Array]


def load_rows(
    spec: WeightSpec,
    parts: Mapping[str, StoredTensor],
    index: int,
    rows: tuple[int, int],
    planes: int | None = None,
) -> Numbers:
    """Read what rows ``rows`` of matrix ``index`` need, and of the planes only the first ``planes``.

    ``parts`` are those of a `BcqWeight`, whose indices are checked when they are first read.
    """
    lead = ((index, index + 1),) if len(spec.shape) == 3 else ()
    arrays: dict[str, Array] = {}
    for suffix, part in parts.items():
        if suffix.startswith("outlier_"):
            continue
        block = part.read(*lead, *row_ranges(spec, suffix, part.shape[len(lead)], rows, planes))
        arrays[suffix] = block[0] if lead else block
    arrays.update(_load_outliers(spec, parts, index, rows))
    return Numbers(spec, rows[0], rows[1] - rows[0], planes, arrays)


def row_ranges(
    spec: WeightSpec, suffix: str, first: int, rows: tuple[int, int], planes: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Ranges along the leading axes of a part that hold ``rows``; ``first``: length of its first axis, E apart."""
    kind = suffix.partition("_")[2]
    if suffix == "perm":
        return ()
    if kind == "planes":
        return (0, min(first, planes or first)), rows
    if kind.startswith("alpha"):
        return (0, first), rows
    if kind.endswith(("_scale", "_zero")):
        order = getattr(spec.scheme.segments[int(suffix[1 : suffix.index("_")])], kind.partition("_")[0])
        assert isinstance(order, SecondOrder)
        return ((rows[0] // order.rows, -(-rows[1] // order.rows)),)
    return (rows,)


def _load_outliers(
    spec: WeightSpec, parts: Mapping[str, StoredTensor], index: int, rows: tuple[int, int]
) -> dict[str, Array]:
    """Entries of the rows."""
    if spec.scheme.outliers is None:
        return {}
    start = index * spec.out
    indptr = parts["outlier_indptr"].read((start + rows[0], start + rows[1] + 1)).astype(np.int64)
    span = (int(indptr[0]), int(indptr[-1]))
    return {
        "outlier_rows": np.repeat(np.arange(rows[1] - rows[0]), np.diff(indptr)),
        "outlier_indices": parts["outlier_indices"].read(span).astype(np.int64),
        "outlier_values": parts["outlier_values"].read(span),
    }


def decode_matrix(
    spec: WeightSpec,
    parts: Mapping[str, StoredTensor],
    index: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    planes: int | None,
    dtype: str,
    out: Array,
) -> None:
    """Fill ``out`` (rows, columns) with E rounded once to ``dtype``; memory stays bounded whatever the size."""
    if planes is not None:
        refuse_truncation(spec, planes)
    load = max(1, _LOAD // spec.columns)
    step = max(1, _BLOCK // spec.columns)
    for top in range(rows[0], rows[1], load):
        numbers = load_rows(spec, parts, index, (top, min(top + load, rows[1])), planes)
        context = _Context(numbers)
        for r in range(0, numbers.rows, step):
            stop = min(r + step, numbers.rows)
            values = context.evaluate(r, stop)[:, columns[0] : columns[1]]
            out[top - rows[0] + r : top - rows[0] + stop] = round_to(values, dtype)


def refuse_truncation(spec: WeightSpec, planes: int) -> None:
    """BCQ-E302 for no number of planes; BCQ-E304 for float-zero, offset and table segments at fewer (section 8.1)."""
    arguments.integer(planes, "planes", 1, unit="planes")
    for k, segment in enumerate(spec.scheme.segments):
        if planes < segment.bits and segment.encoding in _WHOLE:
            found = f"segment {k} is {segment.encoding} with {segment.bits} planes, {planes} asked for"
            raise error("BCQ-E304", found=found)


class _Context:
    """Loaded numbers with everything per row and group already in float64."""

    def __init__(self, numbers: Numbers) -> None:
        self.spec = numbers.spec
        self.arrays = numbers.arrays
        self.segments = [_SegmentNumbers(numbers, k) for k in range(len(self.spec.scheme.segments))]
        self.perm = self.arrays.get("perm")
        self.outlier_rows = self.arrays.get("outlier_rows")

    def evaluate(self, start: int, stop: int) -> Float:
        """E of rows ``start..stop`` (of the loaded ones) in original column order, float64 (rows, in)."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            pieces = [
                segment.evaluate(self.codes(k, start, stop), start, stop) for k, segment in enumerate(self.segments)
            ]
            values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
            if self.perm is not None:
                stored, values = values, np.empty_like(values)
                values[:, self.perm] = stored
            self._outliers(values, start, stop)
        return values

    def codes(self, k: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Codes of segment ``k`` (rows, width) uint8; of the loaded planes only."""
        if self.spec.scheme.aligned64:
            pair = tile_codes(self.arrays["tile"][start:stop], self.arrays["tile_extra"][start:stop])
            return pair[k] >> np.uint8(self.segments[k].dropped)
        return unpack_codes(self.arrays[f"s{k}_planes"][:, start:stop], self.spec.widths[k])

    def _outliers(self, values: Float, start: int, stop: int) -> None:
        if self.outlier_rows is None:
            return
        a, b = np.searchsorted(self.outlier_rows, (start, stop))
        rows = self.outlier_rows[a:b] - start
        columns = self.arrays["outlier_indices"][a:b]
        added = float64_of(self.arrays["outlier_values"][a:b])
        assert self.spec.scheme.outliers is not None
        if self.spec.scheme.outliers.mode == "add":
            values[rows, columns] += added
        else:
            values[rows, columns] = added


class _SegmentNumbers:
    """The numbers of one segment: scale and zero, or alpha and z, as float64 (rows, G) or (planes, rows, G)."""

    def __init__(self, numbers: Numbers, k: int) -> None:
        self.segment = segment = numbers.spec.scheme.segments[k]
        self.width = numbers.spec.widths[k]
        self.groups = numbers.spec.groups(k)
        self.dtype = numbers.spec.dtype
        self.used = min(numbers.planes or segment.bits, segment.bits)
        self.dropped = segment.bits - self.used
        if segment.encoding == "bcq" or self.dropped:
            self.alpha, self.z = _plane_numbers(numbers, k, self.used)
        else:
            self.scale = scale_of(numbers, k)
            self.zero = zero_of(numbers, k)

    def evaluate(self, codes: npt.NDArray[np.uint8], start: int, stop: int) -> Float:
        """E of the segment (rows, width) float64, without outliers."""
        g, rows = self.segment.group_size, stop - start
        short = self.groups * g - self.width
        if short:
            codes = np.pad(codes, ((0, 0), (0, short)))
        grouped = codes.reshape(rows, self.groups, g)
        if self.segment.encoding == "bcq" or self.dropped:
            values = self._planes_sum(grouped, start, stop)
        else:
            values = self._affine(grouped, start, stop)
        flat = values.reshape(rows, self.groups * g)
        return flat[:, : self.width] if short else flat

    def _affine(self, codes: npt.NDArray[np.uint8], start: int, stop: int) -> Float:
        scale = self.scale[start:stop, :, None]
        zero = self.zero if isinstance(self.zero, float) else self.zero[start:stop, :, None]
        if self.segment.encoding == "offset":
            values = np.multiply(codes, scale, dtype=np.float64)
            values += zero
            return values
        if self.segment.encoding == "table":
            return scale * levels_of(self.segment)[codes]
        values = np.subtract(codes, zero, dtype=np.float64)
        if self.segment.encoding == "float-zero":
            values = float64_of(round_to(values, self.dtype))
        values *= scale
        return values

    def _planes_sum(self, codes: npt.NDArray[np.uint8], start: int, stop: int) -> Float:
        values = np.empty(codes.shape, np.float64)
        values[...] = self.z[start:stop, :, None]
        for i in range(self.used):
            alpha = self.alpha[i, start:stop, :, None]
            bit = (codes >> np.uint8(self.used - 1 - i)) & np.uint8(1)
            values += np.where(bit, alpha, -alpha)
        return values


def scale_of(numbers: Numbers, k: int) -> Float:
    """s (rows, G) float64."""
    return _number_of(numbers, k, "scale")


def _number_of(numbers: Numbers, k: int, name: str) -> Float:
    """Scale or offset (rows, G) float64."""
    kind = getattr(numbers.spec.scheme.segments[k], name)
    if isinstance(kind, str):
        return _floats(numbers.arrays[f"s{k}_{name}"], kind)
    codes, scale, zero = coded_numbers(numbers, k, name)
    first = numbers.first_row // kind.rows
    row_group = (numbers.first_row + np.arange(numbers.rows)) // kind.rows - first
    with np.errstate(over="ignore", invalid="ignore"):
        found: Float = scale[row_group] * (codes - zero[row_group])
    return found


def coded_numbers(numbers: Numbers, k: int, name: str = "scale") -> tuple[Float, Float, Float]:
    """Codes (rows, G), scale and zero (row-groups, G) of a second-order scale or offset, float64."""
    order = getattr(numbers.spec.scheme.segments[k], name)
    assert isinstance(order, SecondOrder)
    groups, arrays, prefix = numbers.spec.groups(k), numbers.arrays, f"s{k}_{name}"
    column = np.arange(groups) // order.groups
    scale = float64_of(arrays[f"{prefix}_scale"])[:, column]
    if k == 0 and numbers.spec.scheme.aligned64:
        return tile_meta_fields(arrays["tile_meta"])[1].astype(np.float64), scale, float64_of(arrays["s0_scale_zero"])
    if isinstance(order.bits, str):
        return _floats(arrays[f"{prefix}_codes"], order.bits), scale, np.zeros_like(scale)
    codes = unpack(arrays[f"{prefix}_codes"], order.bits, groups).astype(np.float64)
    if isinstance(order.zero, int):
        return codes, scale, np.full_like(scale, order.zero)
    stored = arrays[f"{prefix}_zero"]
    zero = unpack(stored, order.bits, int(column[-1]) + 1) if order.zero == "packed" else stored
    return codes, scale, float64_of(zero)[:, column]


def _floats(stored: Array, kind: str) -> Float:
    """The numbers of a part of type ``kind``, float64."""
    if kind == "E8M0":
        return np.ldexp(1.0, stored.astype(np.int32) - 127)
    if kind == "UE4M3":  # subnormal numbers have no leading 1 and the exponent of the smallest normal ones
        exponent, fraction = stored.astype(np.int32) >> 3, stored & 7
        found: Float = np.ldexp(np.where(exponent > 0, fraction + 8.0, fraction), np.maximum(exponent, 1) - 10)
        return found
    return float64_of(stored)


def levels_of(segment: Segment) -> Float:
    """The number of each code of a table segment (2^q), float64."""
    return np.ldexp(np.array(segment.table, np.float64), segment.table_exponent)


def zero_of(numbers: Numbers, k: int) -> float | Float:
    """zp, zero or offset: one number, or (rows, G) float64."""
    segment = numbers.spec.scheme.segments[k]
    if segment.encoding == "offset":
        return _number_of(numbers, k, "offset")
    if segment.encoding == "table":
        return 0.0
    if isinstance(segment.zero, int):
        return float(segment.zero)
    if k == 0 and numbers.spec.scheme.aligned64:
        return tile_meta_fields(numbers.arrays["tile_meta"])[0].astype(np.float64)
    stored = numbers.arrays[f"s{k}_zero"]
    if isinstance(segment.zero, PackedZero):
        return unpack(stored, segment.zero.bits, numbers.spec.groups(k)).astype(np.float64)
    return float64_of(stored)


def _plane_numbers(numbers: Numbers, k: int, planes: int) -> tuple[Float, Float]:
    """alpha (planes, rows, G) and z (rows, G) for the first ``planes`` planes, float64."""
    segment = numbers.spec.scheme.segments[k]
    if segment.encoding == "bcq":
        suffix = f"_p{planes}" if planes in segment.precisions else ""
        alpha = float64_of(numbers.arrays[f"s{k}_alpha{suffix}"][:planes])
        bias = numbers.arrays.get(f"s{k}_bias{suffix}")
        return alpha, np.zeros(alpha.shape[1:]) if bias is None else float64_of(bias)
    scale, zero, q = scale_of(numbers, k), zero_of(numbers, k), segment.bits
    with np.errstate(over="ignore", invalid="ignore"):
        alpha = np.stack([scale * 2.0 ** (q - 2 - i) for i in range(planes)])
        z: Float = scale * ((float(2**q - 1) - 2.0 * zero) * 0.5)
    return alpha, z


def alpha_z(numbers: Numbers, k: int) -> tuple[Float, Float]:
    """The plane scales and the bias of segment ``k``, stored or derived (section 8.1), float64."""
    segment = numbers.spec.scheme.segments[k]
    if segment.encoding in _WHOLE:
        raise error("BCQ-E304", found=f"segment {k} is {segment.encoding}: it has no alpha and z that give its values")
    return _plane_numbers(numbers, k, min(numbers.planes or segment.bits, segment.bits))
