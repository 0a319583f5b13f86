"""The rules about one weight: its shape and segments, its parts, their content (spec sections 5 and 6, annex A).

Each check reports to a sink; the reader and the constructors pass one that raises, the validator one that collects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import Finding, Sink, refuse

from . import aligned64
from .packing import padding_is_zero, unpack
from .scheme import PackedZero, PartSpec, SecondOrder, WeightSpec, byte_type

Array = npt.NDArray[Any]
Parts = Mapping[str, StoredTensor]
_INDICES = ("perm", "outlier_indptr", "outlier_indices")
_ROWS = 1 << 24  # elements of a part checked at a time


class Place:
    """Where findings belong: a file and a weight, and the sink they go to."""

    def __init__(self, sink: Sink, file: str = "", weight: str = "") -> None:
        self.sink, self.file, self.weight, self.faults = sink, file, weight, 0

    def __call__(self, code: str, found: str, expected: str = "", part: str = "") -> None:
        """Report ``code``; the place is the part where one is given, else the weight."""
        finding = Finding(code, self.file, part or self.weight, found, expected)
        self.faults += finding.severity == "error"
        self.sink(finding)


def check_spec(spec: WeightSpec, place: Place) -> bool:
    """BCQ-V210, V211, V212, V215; False when the weight cannot be read on."""
    before = place.faults
    shape, scheme = list(spec.shape), spec.scheme
    if len(shape) not in (2, 3) or not all(1 <= dim <= limits.MAX_DIM for dim in shape):
        place("BCQ-V210", f"shape {shape}", "2 or 3 dimensions, each in 1..2^31-1")
        return False
    bits = max(segment.bits for segment in scheme.segments)
    if spec.stack * spec.out * spec.columns * bits > limits.MAX_WEIGHT_BITS:
        place("BCQ-V210", f"shape {shape} at {bits} planes", "at most 2^40 bits")
        return False
    if (
        len(spec.widths) != len(scheme.segments)
        or not all(1 <= width <= limits.MAX_DIM for width in spec.widths)
        or sum(spec.widths) != spec.columns
    ):
        place("BCQ-V211", f"widths {list(spec.widths)}", f"{len(scheme.segments)} that sum up to {spec.columns}")
        return False
    last = len(spec.widths) - 1
    for k, (segment, width) in enumerate(zip(scheme.segments, spec.widths, strict=True)):
        g = segment.group_size
        if not 8 <= g <= width:
            place("BCQ-V212", f"group size {g} in segment {k} of {width} columns", f"8..{width}")
        elif k != last and width % g:
            place("BCQ-V212", f"segment {k} of {width} columns", f"a multiple of its group size {g}")
    if scheme.aligned64 and (reason := aligned64.misfit(spec)):
        place("BCQ-V215", reason)
    return place.faults == before


def check_parts(spec: WeightSpec, found: Mapping[str, tuple[str, str, tuple[int, ...]]], place: Place) -> bool:
    """BCQ-V301, V303, V304, V410. ``found``: suffix -> (tensor name, dtype, shape). False when unreadable."""
    before = place.faults
    expected = spec.parts()
    nnz = found["outlier_indices"][2] if "outlier_indices" in found else ()
    for suffix, want in expected.items():
        if suffix not in found:
            place("BCQ-V301", f"no part {suffix}", f"{want.dtype} {_shape(want.shape)}")
            continue
        name, dtype, shape = found[suffix]
        if dtype != want.dtype:
            place("BCQ-V303", dtype, want.dtype, name)
        if want.shape == (-1,):
            if len(shape) != 1 or shape != nnz:
                place("BCQ-V304", _shape(shape), "[nnz], the same for indices and values", name)
        elif shape != want.shape:
            place("BCQ-V304", _shape(shape), _shape(want.shape), name)
    if len(nnz) == 1 and nnz[0] * limits.OUTLIER_SHARE > spec.stack * spec.out * spec.columns:
        count = spec.stack * spec.out * spec.columns
        place("BCQ-V410", f"{nnz[0]} outliers", f"at most {count // limits.OUTLIER_SHARE}, one eighth of {count}")
    return place.faults == before


def check_content(spec: WeightSpec, parts: Parts, place: Place) -> bool:
    """BCQ-V401 to V409, V411: every number of the parts except the codes themselves, which are all legal."""
    before = place.faults
    for suffix, want in spec.parts().items():
        part = parts[suffix]
        if want.bits:
            _check_padding(part, want, place)
        if want.dtype in ("F16", "BF16", "F32"):
            _check_finite(spec, part, place)
    for k, segment in enumerate(spec.scheme.segments):
        if isinstance(segment.zero, PackedZero) and not (spec.scheme.aligned64 and k == 0):
            fields = unpack(parts[f"s{k}_zero"].array(), segment.zero.bits, spec.groups(k))
            high = int(fields.max())
            if high > 2**segment.bits:
                place("BCQ-V404", f"zero point {high}", f"0..{2**segment.bits}", parts[f"s{k}_zero"].name)
        for name, kind in segment.numbers().items():
            if byte_type(kind) == "UE4M3":
                _check_bytes(parts[f"s{k}_{name}_codes" if isinstance(kind, SecondOrder) else f"s{k}_{name}"], place)
    if spec.scheme.aligned64 and (parts["s0_scale_zero"].array() > 15).any():
        place("BCQ-V401", "a second-order zero above 15", "upper four bits zero", parts["s0_scale_zero"].name)
    _check_indices(spec, parts, place)
    return place.faults == before


def guard_indices(spec: WeightSpec, parts: Parts, weight: str) -> dict[str, StoredTensor]:
    """The parts; those that lead to a column or a row give out numbers only once BCQ-V406 to V409 were found to hold.

    So no loop, kernel or slice can be led out of bounds by a weight that nobody has validated.
    """
    raw = {suffix: part.guarded(None) for suffix, part in parts.items() if suffix in _INDICES}
    check = _IndexCheck(spec, raw, weight)
    return {suffix: part.guarded(check) if suffix in raw else part for suffix, part in parts.items()}


class _IndexCheck:
    """BCQ-V406 to V409 of one weight, checked when it is first called."""

    def __init__(self, spec: WeightSpec, parts: Parts, weight: str) -> None:
        self._todo: tuple[WeightSpec, Parts] | None = (spec, parts)
        self._weight = weight

    def __call__(self) -> None:
        if self._todo is not None:
            spec, parts = self._todo
            file = next((part.file.name for part in parts.values() if part.file is not None), "")
            _check_indices(spec, parts, Place(refuse, file, self._weight))
            self._todo = None


def _check_indices(spec: WeightSpec, parts: Parts, place: Place) -> None:
    """BCQ-V406 to V409: everything that leads to a column or a row."""
    perm = parts["perm"].array().reshape(-1, spec.columns) if spec.scheme.perm else None
    fine = perm is None or _check_perm(perm, parts["perm"].name, place)
    if spec.scheme.outliers is not None:
        _check_outliers(spec, parts, perm, place, segments=fine)


def _check_padding(part: StoredTensor, want: PartSpec, place: Place) -> None:
    if want.fields * want.bits % 32 == 0:
        return
    for block in _blocks(part):
        if not padding_is_zero(block, want.bits, want.fields):
            place("BCQ-V401", f"bits after field {want.fields - 1} of a row", "zero", part.name)
            return


def _check_finite(spec: WeightSpec, part: StoredTensor, place: Place) -> None:
    bad, first, seen = 0, -1, 0
    for block in _blocks(part):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a finding, not a warning
            wrong = ~np.isfinite(block.reshape(-1))
        if wrong.any():
            first = seen + int(np.argmax(wrong)) if first < 0 else first
            bad += int(np.count_nonzero(wrong))
        seen += wrong.size
    if bad:
        where = "x".join(str(i) for i in np.unravel_index(first, part.shape))
        code = "BCQ-E503" if spec.scheme.nonfinite else "BCQ-V405"
        place(code, f"{bad} of {seen} numbers, the first at {where}", "finite numbers", part.name)


def _check_bytes(part: StoredTensor, place: Place) -> None:
    largest = max(int(block.max()) for block in _blocks(part))
    if largest > 0x7E:
        place("BCQ-V411", f"the byte 0x{largest:02X}", "UE4M3 numbers, 0x00..0x7E", part.name)


def _check_perm(perm: Array, name: str, place: Place) -> bool:
    """BCQ-V406 for ``perm`` (E, columns)."""
    columns = perm.shape[1]
    for row in perm:
        if int(row.min()) < 0 or int(row.max()) >= columns:
            place("BCQ-V406", f"an entry outside 0..{columns - 1}", "a permutation", name)
            return False
        counts = np.bincount(row, minlength=columns)
        if (counts != 1).any():
            place("BCQ-V406", f"column {int(np.argmax(counts > 1))} occurs twice", "a permutation", name)
            return False
    return True


def _check_outliers(spec: WeightSpec, parts: Parts, perm: Array | None, place: Place, *, segments: bool) -> None:
    indptr = parts["outlier_indptr"].array().astype(np.int64)
    indices = parts["outlier_indices"].array().astype(np.int64)
    falls = np.diff(indptr) < 0
    if falls.any():
        row = int(np.argmax(falls))
        found = f"falls from {indptr[row]} to {indptr[row + 1]} at row {row}"
        place("BCQ-V407", found, "a rising sequence", parts["outlier_indptr"].name)
        return
    if indptr[0] != 0 or indptr[-1] != indices.size:
        place(
            "BCQ-V407",
            f"from {indptr[0]} to {indptr[-1]}",
            f"rising from 0 to {indices.size}",
            parts["outlier_indptr"].name,
        )
        return
    if not indices.size:
        return
    name = parts["outlier_indices"].name
    if indices.min() < 0 or indices.max() >= spec.columns:
        place("BCQ-V408", f"column {int(indices.max())}", f"0..{spec.columns - 1}", name)
        return
    rising = np.diff(indices) > 0
    starts = indptr[1:-1]
    rising[starts[(starts > 0) & (starts < indices.size)] - 1] = True
    if not rising.all():
        entry = int(np.argmin(rising)) + 1
        row = int(np.searchsorted(indptr, entry, "right")) - 1
        found = f"column {indices[entry]} after column {indices[entry - 1]} in row {row}"
        place("BCQ-V408", found, "strictly rising", name)
        return
    if segments:
        _check_segments(spec, indptr, indices, perm, place, name)


def _check_segments(
    spec: WeightSpec, indptr: Array, indices: Array, perm: Array | None, place: Place, name: str
) -> None:
    assert spec.scheme.outliers is not None
    stored_segment = np.repeat(np.arange(len(spec.widths)), spec.widths)
    for e in range(spec.stack):
        of_column = stored_segment
        if perm is not None:
            of_column = np.empty_like(stored_segment)
            of_column[perm[e]] = stored_segment
        a, b = indptr[e * spec.out], indptr[(e + 1) * spec.out]
        wrong = ~np.isin(of_column[indices[a:b]], spec.scheme.outliers.segments)
        if wrong.any():
            column = int(indices[a + int(np.argmax(wrong))])
            segments = ", ".join(str(k) for k in spec.scheme.outliers.segments)
            place("BCQ-V409", f"column {column} in segment {int(of_column[column])}", f"segment {segments}", name)
            return


def _blocks(part: StoredTensor) -> list[Array] | Any:
    """The part in pieces along its first axes, so that a check never holds much more than ``_ROWS`` elements."""
    count = int(np.prod(part.shape, dtype=object))
    if count <= _ROWS or len(part.shape) < 2:
        return [part.array()]
    axis = 1 if len(part.shape) > 2 else 0
    step = max(1, part.shape[axis] * _ROWS * (part.shape[0] if axis else 1) // count)
    return (
        part.read(*(((i, i + 1),) if axis else ()), (r, min(r + step, part.shape[axis])))
        for i in (range(part.shape[0]) if axis else (0,))
        for r in range(0, part.shape[axis], step)
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("nnz" if dim < 0 else str(dim) for dim in shape) + "]"
