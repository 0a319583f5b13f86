"""Row and column ranges of a weight as weights of their own, for tensor parallelism. Exact or refused.

A row range cuts every part along ``out``. A column range keeps the stored columns whose original column lies in
the range: groups that are kept whole stay groups; a group that is cut becomes a segment of its own (of at least 8
columns), which the format can express up to 16 segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error

from .decode import row_ranges
from .packing import pack, pack_planes, unpack, unpack_bits
from .scheme import OutlierRule, Scheme, SecondOrder, Segment, WeightSpec

Array = npt.NDArray[Any]
Parts = Mapping[str, StoredTensor]
Built = tuple[WeightSpec, dict[str, Array]]


class _Piece(NamedTuple):
    """A new segment: the old segment it comes from, its stored columns there, its groups there, its group size."""

    k: int
    columns: Array
    groups: Array
    group_size: int


def slice_rows(spec: WeightSpec, parts: Parts, start: int, stop: int) -> Built:
    """Rows ``start..stop`` of every matrix: whole row groups of second-order numbers, or rows within one."""
    for segment in spec.scheme.segments:
        for order in segment.numbers().values():
            rows = order.rows if isinstance(order, SecondOrder) else 1
            if (start % rows or (stop % rows and stop != spec.out)) and start // rows != (stop - 1) // rows:
                found = f"rows {start}..{stop}"
                raise error("BCQ-E303", found=found, expected=f"multiples of {rows}, the second-order row group")
    lead = [(0, spec.stack)] if len(spec.shape) == 3 else []
    arrays: dict[str, Array] = {}
    for suffix, part in parts.items():
        if not suffix.startswith("outlier_"):
            arrays[suffix] = part.read(*lead, *row_ranges(spec, suffix, part.shape[len(lead)], (start, stop)))
    if spec.scheme.outliers is not None:
        indptr, keep = _outlier_rows(spec, parts, start, stop)
        arrays["outlier_indptr"] = indptr
        arrays["outlier_indices"] = np.concatenate([parts["outlier_indices"].read(run) for run in keep])
        arrays["outlier_values"] = np.concatenate([parts["outlier_values"].read(run) for run in keep])
    shape = (*spec.shape[:-2], stop - start, spec.columns)
    return _within_outlier_limit(replace(spec, shape=shape), arrays, f"rows {start}..{stop}")


def slice_columns(spec: WeightSpec, parts: Parts, start: int, stop: int) -> Built:
    """Original columns ``start..stop`` of every matrix, canonical layout."""
    perm = parts["perm"].array().reshape(-1, spec.columns) if spec.scheme.perm else None
    kept = np.arange(start, stop)
    if perm is not None:
        inside = (perm >= start) & (perm < stop)
        if (inside != inside[0]).any():
            raise error("BCQ-E303", found="a stack whose matrices keep different stored columns")
        kept = np.flatnonzero(inside[0])
    pieces = _pieces(spec, kept, f"columns {start}..{stop}")
    arrays: dict[str, Array] = {}
    for new, piece in enumerate(pieces):
        for suffix, array in _piece_arrays(spec, parts, piece).items():
            arrays[f"s{new}_{suffix}"] = array
    scheme = Scheme(
        segments=tuple(_segment(spec.scheme.segments[piece.k], piece) for piece in pieces),
        nonfinite=spec.scheme.nonfinite,
    )
    if perm is not None:
        local = perm[:, kept] - start
        if (local != np.arange(kept.size)).any():
            scheme = replace(scheme, perm=True)
            arrays["perm"] = local.reshape(*spec.shape[:-2], kept.size).astype(np.int32)
    if spec.scheme.outliers is not None:
        allowed = tuple(new for new, piece in enumerate(pieces) if piece.k in spec.scheme.outliers.segments)
        outliers = _outlier_columns(parts, start, stop)  # read, and so checked, even where none can be left
        if allowed:
            rule = OutlierRule(spec.scheme.outliers.mode, spec.scheme.outliers.dtype, allowed)
            scheme = replace(scheme, outliers=rule)
            arrays.update(outliers)
    built = replace(
        spec,
        scheme=scheme,
        shape=(*spec.shape[:-1], stop - start),
        widths=tuple(len(piece.columns) for piece in pieces),
    )
    return _within_outlier_limit(built, arrays, f"columns {start}..{stop}")


def _within_outlier_limit(spec: WeightSpec, arrays: dict[str, Array], asked: str) -> Built:
    """Outliers of the whole may be too many for a slice of it (BCQ-V410)."""
    nnz = arrays["outlier_indices"].size if "outlier_indices" in arrays else 0
    if nnz * limits.OUTLIER_SHARE > spec.stack * spec.out * spec.columns:
        raise error("BCQ-E303", found=f"{asked} hold {nnz} outliers", expected="at most one eighth of the elements")
    return spec, arrays


def _pieces(spec: WeightSpec, kept: Array, asked: str) -> list[_Piece]:
    """The new segments for the stored columns ``kept`` (rising)."""
    pieces: list[_Piece] = []
    begin = 0
    for k, (segment, width) in enumerate(zip(spec.scheme.segments, spec.widths, strict=True)):
        columns = kept[(kept >= begin) & (kept < begin + width)] - begin
        begin += width
        groups, counts = np.unique(columns // segment.group_size, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts)])
        run = 0
        for i, count in enumerate(counts):
            last = begin > kept[-1] and i == len(counts) - 1
            if count == segment.group_size and not last:
                continue
            if count != segment.group_size and not (last and i > run):
                if i > run:
                    pieces.append(_cut(k, segment, columns, groups, starts, run, i))
                if count < 8:
                    raise _inexpressible(
                        asked, f"group {int(groups[i])} of segment {k} would keep {int(count)} columns"
                    )
                pieces.append(_Piece(k, columns[starts[i] : starts[i + 1]], groups[i : i + 1], int(count)))
                run = i + 1
            else:
                pieces.append(_cut(k, segment, columns, groups, starts, run, i + 1))
                run = i + 1
        if run < len(counts):
            pieces.append(_cut(k, segment, columns, groups, starts, run, len(counts)))
    if len(pieces) > limits.MAX_SEGMENTS:
        raise _inexpressible(asked, f"{len(pieces)} segments would be needed")
    return pieces


def _cut(k: int, segment: Segment, columns: Array, groups: Array, starts: Array, a: int, b: int) -> _Piece:
    return _Piece(k, columns[starts[a] : starts[b]], groups[a:b], segment.group_size)


def _inexpressible(asked: str, why: str) -> Exception:
    expected = "whole groups, or cuts of at least 8 columns and at most 16 segments"
    return error("BCQ-E303", found=f"{asked}: {why}", expected=expected)


def _shared(order: Any, piece: _Piece) -> int:
    """How many neighbouring groups of a piece share second-order numbers: as many as possible, 1 if need be."""
    if not isinstance(order, SecondOrder):
        return 1
    changes = np.flatnonzero(np.diff(piece.groups // order.groups)) + 1
    return int(np.gcd.reduce(changes)) if changes.size else order.groups


def _segment(segment: Segment, piece: _Piece) -> Segment:
    """The segment of a piece; groups that shared second-order numbers still do where the cut lets them."""
    changed: dict[str, Any] = {
        name: order._replace(groups=_shared(order, piece))
        for name, order in segment.numbers().items()
        if isinstance(order, SecondOrder)
    }
    return replace(segment, group_size=piece.group_size, **changed)


def _piece_arrays(spec: WeightSpec, parts: Parts, piece: _Piece) -> dict[str, Array]:
    """The parts of one new segment; names without the segment."""
    arrays: dict[str, Array] = {}
    prefix = f"s{piece.k}_"
    wanted = spec.parts()
    for suffix, part in parts.items():
        if not suffix.startswith(prefix):
            continue
        kind, want = suffix.removeprefix(prefix), wanted[suffix]
        array, groups = part.array(), piece.groups
        if kind.endswith(("_scale", "_zero")):
            order = getattr(spec.scheme.segments[piece.k], kind.partition("_")[0])
            groups = groups[:: _shared(order, piece)] // order.groups
        if kind == "planes":
            arrays[kind] = _take_bits(array, piece.columns, spec.widths[piece.k])
        elif want.bits:
            arrays[kind] = pack(unpack(array, want.bits, want.fields)[..., groups], want.bits)
        else:
            arrays[kind] = array[..., groups]
    return arrays


def _take_bits(planes: Array, columns: Array, width: int) -> Array:
    first, count = int(columns[0]), len(columns)
    words = planes.view(np.uint32)
    if first % 32 == 0 and int(columns[-1]) - first + 1 == count and (count % 32 == 0 or first + count == width):
        return words[..., first // 32 : -(-(first + count) // 32)]
    flat = words.reshape(-1, 1, words.shape[-1])
    taken = [pack_planes(unpack_bits(row, width)[:, columns], 1)[0, 0] for row in flat]
    return np.stack(taken).reshape(*words.shape[:-1], -1)


def _outlier_rows(spec: WeightSpec, parts: Parts, start: int, stop: int) -> tuple[Array, list[tuple[int, int]]]:
    """New row pointers, and the runs of entries that stay, one per matrix."""
    indptr = parts["outlier_indptr"].array().astype(np.int64)
    runs, counts = [], [np.zeros(1, np.int64)]
    for e in range(spec.stack):
        rows = indptr[e * spec.out + start : e * spec.out + stop + 1]
        runs.append((int(rows[0]), int(rows[-1])))
        counts.append(np.diff(rows))
    return np.cumsum(np.concatenate(counts)).astype(np.int32), runs


def _outlier_columns(parts: Parts, start: int, stop: int) -> dict[str, Array]:
    indptr = parts["outlier_indptr"].array().astype(np.int64)
    indices = parts["outlier_indices"].array().astype(np.int64)
    keep = (indices >= start) & (indices < stop)
    before = np.concatenate([[0], np.cumsum(keep)])
    columns = indices[keep] - start
    return {
        "outlier_indptr": before[indptr].astype(np.int32),
        "outlier_indices": columns.astype(np.uint16 if stop - start <= 65536 else np.int32),
        "outlier_values": parts["outlier_values"].array()[keep],
    }
