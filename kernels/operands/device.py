"""Operands on a device: the same numbers, in the order a kernel wants them.

Two layouts, for the kernels that take any weight:

===========  ======================  =====================================  ======================
layout       planes                  first                                  second
===========  ======================  =====================================  ======================
canonical    (p, out, words)         (out, G), for bcq (p, out, G)          (out, G), for tables (2^p)
lut-gemm     (2 tiles, p, out, 4)    alpha (G, p, out)                      z (G, out)
===========  ======================  =====================================  ======================

The first is the exact reading of an operand, the second its linear one, with neighbouring rows next to each other for
neighbouring threads. There every group begins at a byte: whatever stands between two groups does not matter. Eight
words of a row are a tile; word k of them is at place ``k ^ row / 4 % 8``, zeros after the last. Numbers are float32; in
the exact reading float64 where float32 would lose something, in the linear one float16 where that loses nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from bcqfmt.errors import error
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import LIMIT

from . import Operand, OperandSegment


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DeviceSegment:
    """A segment on a device; arrays as the layout says, ``formula`` as in `operands`."""

    planes: Any
    first: Any
    second: Any
    start: int
    width: int
    group_size: int
    bits: int
    formula: str
    numbers: str = "F32"
    finite: bool = False  # known to hold no infinity and no NaN

    @property
    def words(self) -> int:
        return -(-self.width // 32)

    @property
    def tiles(self) -> int:
        whole, rest = divmod(self.width, self.group_size)
        return -(-(whole * -(-self.group_size // 8) + -(-rest // 8)) // 32)

    @property
    def groups(self) -> int:
        return -(-self.width // self.group_size)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DeviceOperand:
    """A weight on a device.

    ``perm`` and its inverse ``stored`` (in) int32 or None; CSR outliers ``indptr``, ``indices`` int32, ``values``
    (canonical) or ``added`` (lut-gemm) float32, or None, with their ``mode``.
    """

    shape: tuple[int, int]
    dtype: str
    layout: str
    segments: tuple[DeviceSegment, ...]
    perm: Any = None
    stored: Any = None
    indptr: Any = None
    indices: Any = None
    values: Any = None
    added: Any = None
    mode: str = "add"

    @property
    def count(self) -> int:
        return 0 if self.indices is None else device.describe(self.indices).size

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]


def to_device(operand: Operand, layout: str, target: Any = None) -> DeviceOperand:
    """Upload an operand: to torch's device ``target`` ("cuda:1"), by default the current GPU."""
    if layout not in ("canonical", "lut-gemm"):
        raise error("BCQ-E552", found=f"layout {layout!r}", expected="canonical or lut-gemm")
    _check_sizes(operand)
    if target is None:
        device.require_cuda()

    def up(array: Any) -> Any:
        return None if array is None else device.upload(array, target)

    outliers = operand.outliers
    made = DeviceOperand(
        shape=operand.shape,
        dtype=operand.dtype,
        layout=layout,
        segments=tuple(_segment(segment, layout, up) for segment in operand.segments),
        perm=up(operand.perm),
        stored=up(operand.stored if operand.perm is not None else None),
        indptr=up(outliers.indptr if outliers else None),
        indices=up(outliers.indices if outliers else None),
        values=up(outliers.values if outliers and layout == "canonical" else None),
        added=up(outliers.added if outliers and layout == "lut-gemm" else None),
        mode=outliers.mode if outliers else "add",
    )
    check_operand(made)
    return made


def _segment(segment: OperandSegment, layout: str, up: Any) -> DeviceSegment:
    if layout == "canonical":
        planes, first, second, formula = segment.planes, segment.first, segment.second, segment.formula
    else:
        tiles = in_tiles(device.tensor(segment.planes, "cpu"), segment.width, segment.group_size)
        planes, formula = tiles.numpy().view(np.uint32), "bcq"
        first, second = _shorter(segment.alpha.transpose(2, 0, 1), segment.z.T)
    return DeviceSegment(
        planes=up(planes),
        first=up(first),
        second=up(second),
        start=segment.start,
        width=segment.width,
        group_size=segment.group_size,
        bits=segment.bits,
        formula=formula,
        numbers={8: "F64", 4: "F32", 2: "F16"}[first.dtype.itemsize],
        finite=bool(np.isfinite(first).all() and np.isfinite(second).all()),
    )


def in_tiles(planes: Any, width: int, group_size: int) -> Any:
    """Planes (p, out, words), a torch tensor of int32, in the order of the layout lut-gemm, on their device."""
    torch, (p, rows, _) = importlib.import_module("torch"), planes.shape
    g = min(group_size, width)
    starts = (np.arange(0, width, g)[:, None] + np.arange(0, g, 8)).reshape(-1)  # of bytes; every group begins one
    columns = torch.as_tensor(starts[starts < width], device=planes.device)
    found = planes.view(torch.uint8)
    full = found.new_zeros(p, rows, -(-len(columns) // 32) * 32)
    if (columns % 8).any():
        low, high = columns // 8, (columns // 8 + 1).clamp(max=found.shape[2] - 1)
        found = (found[:, :, low] | found[:, :, high].short() << 8) >> (columns % 8).short() & 255
    full[:, :, : len(columns)] = found[:, :, : len(columns)]
    places = torch.arange(max(8, rows), device=planes.device)
    order = places[:8] ^ places[:rows, None] // 4 % 8
    tiled = torch.take_along_dim(full.view(torch.int32).reshape(p, rows, -1, 8), order[None, :, None], 3)
    return tiled.reshape(p, rows, -1, 4).permute(2, 0, 1, 3).contiguous()


def _shorter(*arrays: Any) -> list[Any]:
    """All in float16 if that changes none of their numbers."""
    with np.errstate(over="ignore"):
        halves = [array.astype(np.float16) for array in arrays]
    return halves if all(map(np.array_equal, halves, arrays)) else list(arrays)


def _check_sizes(operand: Operand) -> None:
    """BCQ-E554 before anything is copied."""
    for segment in operand.segments:
        largest = max(segment.planes.size, segment.bits * operand.rows * segment.groups, *operand.shape)
        if largest > LIMIT:
            found = f"{largest} words"
            raise error("BCQ-E554", tensor=operand.name, found=found, expected=f"at most {LIMIT} in one array")


def check_operand(operand: DeviceOperand) -> None:
    """BCQ-E552 or BCQ-E554 unless every array is what the layout calls for, all on one device."""
    rows, columns = operand.shape
    canonical = operand.layout == "canonical"
    arrays: dict[str, Any] = {}
    for k, segment in enumerate(operand.segments):
        p = segment.bits
        if not 1 <= p <= 8 or segment.width < 1 or segment.group_size < 1 or segment.start + segment.width > columns:
            raise error(
                "BCQ-E552",
                found=f"segment {k}: {p} planes of {segment.width} columns from {segment.start} on, groups of "
                f"{segment.group_size}",
                expected=f"1..8 planes of some of {columns} columns",
            )
        words, groups = segment.words, segment.groups
        plane_shape = (p, rows, words) if canonical else (2 * segment.tiles, p, rows, 4)
        check_array(f"planes of segment {k}", segment.planes, ("I32", "U32"), plane_shape, 16)
        per_plane = (p, rows, groups) if canonical else (groups, p, rows)
        per_group = (rows, groups) if canonical else (groups, rows)
        first = per_plane if segment.formula == "bcq" else per_group
        check_array(f"scales of segment {k}", segment.first, (segment.numbers,), first, 8)
        second = (2**p,) if segment.formula == "table" else per_group
        check_array(f"biases of segment {k}", segment.second, (segment.numbers,), second, 8)
        arrays |= {f"planes {k}": segment.planes, f"scales {k}": segment.first, f"biases {k}": segment.second}
    if operand.perm is not None:
        check_array("perm", operand.perm, ("I32",), (columns,))
        arrays["perm"] = operand.perm
        if canonical and operand.stored is None:
            raise error("BCQ-E552", found="perm without its inverse", expected="both: stored[perm[j]] = j")
    if operand.stored is not None:
        check_array("inverse of perm", operand.stored, ("I32",), (columns,), 16 if canonical else 4)
        arrays["stored"] = operand.stored
    if operand.indptr is not None:
        check_array("outlier rows", operand.indptr, ("I32",), (rows + 1,))
        count = check_array("outlier columns", operand.indices, ("I32",), (None,)).shape[0]
        for name, array in (("values", operand.values), ("added", operand.added)):
            if array is not None:
                check_array(f"outlier {name}", array, ("F32",), (count,))
                arrays[name] = array
        arrays |= {"outlier rows": operand.indptr, "outlier columns": operand.indices}
    check_same_device(**arrays)
