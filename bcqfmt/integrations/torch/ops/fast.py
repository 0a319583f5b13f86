"""The fast products as torch operators: ``bit_gemv``, ``mixed_gemv`` and ``csr_outliers`` in ``torch.ops.bcqfmt``.

Operators like those of `ops.lut`: tensors and numbers only, the shape of the result known without running, launched on
the current stream, no wait for the device, no gradient; once each has run it can be captured in a CUDA graph. The
functions here spell a :class:`~bcqfmt.kernels.bits.BitOperand` and a :class:`~bcqfmt.kernels.mixed.MixedOperand` out
for them. All arguments are checked in full before the launch (BCQ-E552), but for ``settled``, the promise that nothing
still writes the weight; False is always safe.

Importing this module registers the operators and needs torch; nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bcqfmt.errors import error
from bcqfmt.kernels import bits as bit_kernels
from bcqfmt.kernels import mixed as mixed_kernels
from bcqfmt.kernels.bits import BitOperand, BitSegment
from bcqfmt.kernels.bits.layout import BitLayout
from bcqfmt.kernels.mixed import MixedOperand
from bcqfmt.kernels.mixed.layout import FOUR_BYTES, FOUR_COLUMNS, TWO_BYTES, TWO_COLUMNS
from bcqfmt.kernels.operands.outliers import Entries
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import ROWS

_FORMULAS = ("bcq", "affine", "offset")
_NUMBERS = ("F16", "BF16", "F32")


def bit_gemv(x: Tensor, weight: BitOperand, addend: Tensor | None = None) -> Tensor:
    """``x W^T`` (batch, out) in the dtype of x, for x (batch, in), batch 1..8, float16, bfloat16 or float32.

    Outliers included. ``addend`` (batch, out) float32 is added before the sum is rounded.
    """
    layouts = [segment.layout for segment in weight.segments]
    result: Tensor = torch.ops.bcqfmt.bit_gemv(
        x,
        [segment.planes for segment in weight.segments],
        [segment.numbers for segment in weight.segments],
        weight.shape[0],
        [layout.bits for layout in layouts],
        [layout.width for layout in layouts],
        [layout.group_size for layout in layouts],
        ",".join(layout.formula for layout in layouts),
        ",".join(layout.number for layout in layouts),
        weight.perm,
        addend,
        *_spelled_out(weight.outliers),
        weight.settled,
    )
    return result


def mixed_gemv(x: Tensor, weight: MixedOperand) -> Tensor:
    """``x W^T`` (batch, out) in the dtype of x, for x (batch, in), batch 1 or 2, float16, bfloat16 or float32.

    ``weight`` of 2 and 4 bits, outliers included. Needs a GPU of capability 9.0.
    """
    result: Tensor = torch.ops.bcqfmt.mixed_gemv(
        x,
        weight.units,
        weight.perm,
        weight.shape[0],
        weight.shape[1],
        weight.twos,
        weight.fours,
        *_spelled_out(weight.outliers),
        weight.settled,
    )
    return result


def csr_outliers(y: Tensor, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """``y += S x`` in place, and y itself: y (batch, out), x (batch, in), S in CSR.

    indptr (out + 1) and indices (n) int32, values (n); y, x and values float16, bfloat16 or float32, each its own.
    """
    torch.ops.bcqfmt.csr_outliers(y, indptr, indices, values, x)
    return y


def _spelled_out(outliers: Entries | None) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """indptr, entries, count, bytes of an entry, most bytes of a tile."""
    if outliers is None:
        return None, None, 0, 0, 0
    return outliers.indptr, outliers.entries, outliers.count, outliers.size, outliers.most


@torch.library.custom_op("bcqfmt::bit_gemv", mutates_args=())
def _bit_gemv(
    x: Tensor,
    planes: Sequence[Tensor],
    numbers: Sequence[Tensor],
    rows: int,
    bits: Sequence[int],
    widths: Sequence[int],
    group_sizes: Sequence[int],
    formulas: str,
    number_types: str,
    perm: Tensor | None,
    addend: Tensor | None,
    indptr: Tensor | None,
    entries: Tensor | None,
    count: int,
    entry: int,
    most: int,
    settled: bool = False,
) -> Tensor:
    device.require_cuda()
    parts = (numbers, bits, widths, group_sizes, formulas.split(","), number_types.split(","))
    if not planes or any(len(part) != len(planes) for part in parts):
        shown = ", ".join(str(len(part)) for part in (planes, *parts))
        raise error("BCQ-E552", found=f"lists of {shown} entries", expected="one entry per segment in each")
    if rows < 1:
        raise error("BCQ-E552", found=f"a weight of {rows} rows", expected="at least one")
    segments = []
    for k, (words, floats, q, width, g, formula, kind) in enumerate(zip(planes, *parts, strict=True)):
        layout = BitLayout(q, width, g, formula, kind)
        _check_bits(k, layout, rows, words, floats)
        segments.append(BitSegment(layout=layout, planes=words, numbers=floats, start=sum(widths[:k])))
    if perm is not None:
        check_array("perm", perm, ("I32",), (sum(widths),))
    named = {f"planes {k}": s.planes for k, s in enumerate(segments)}
    named |= {f"numbers {k}": s.numbers for k, s in enumerate(segments)}
    check_same_device(x=x, perm=perm, addend=addend, indptr=indptr, entries=entries, **named)
    outliers = _checked_entries(rows, indptr, entries, count, entry, most)
    shape = (rows, sum(widths))
    operand = BitOperand(shape=shape, segments=tuple(segments), perm=perm, outliers=outliers, settled=settled)
    result: Tensor = bit_kernels.bit_gemv(operand, x, addend=addend)
    return result


@_bit_gemv.register_fake
def _(x: Tensor, _planes: Any, _numbers: Any, rows: int, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _check_bits(k: int, layout: BitLayout, rows: int, planes: Tensor, numbers: Tensor) -> None:
    """BCQ-E552 unless the layout is one that there is, and both arrays have its size."""
    g = layout.group_size
    if not 1 <= layout.bits <= 8 or layout.width < 1 or (g not in (8, 16, 32, 64) and (g < 1 or g % 128)):
        found = f"segment {k}: {layout.bits} planes of {layout.width} columns, groups of {g}"
        expected = "1..8 planes of at least one column, groups of 8, 16, 32, 64 or a multiple of 128"
        raise error("BCQ-E552", found=found, expected=expected)
    if layout.formula not in _FORMULAS or layout.number not in _NUMBERS:
        raise error(
            "BCQ-E552",
            found=f"segment {k}: formula {layout.formula!r} with numbers of {layout.number!r}",
            expected=f"{', '.join(_FORMULAS)}; {', '.join(_NUMBERS)}",
        )
    tiles = -(-rows // ROWS)
    check_array(f"planes of segment {k}", planes, ("I32",), (tiles * layout.chunks * layout.bits * 128,), 16)
    check_array(f"numbers of segment {k}", numbers, ("I32",), (tiles * layout.sets * layout.set_bytes // 4,), 16)


@torch.library.custom_op("bcqfmt::mixed_gemv", mutates_args=())
def _mixed_gemv(
    x: Tensor,
    units: Tensor,
    perm: Tensor,
    rows: int,
    columns: int,
    twos: int,
    fours: int,
    indptr: Tensor | None,
    entries: Tensor | None,
    count: int,
    entry: int,
    most: int,
    settled: bool = False,
) -> Tensor:
    device.require_cuda()
    outliers = _checked_entries(rows, indptr, entries, count, entry, most)
    operand = MixedOperand(
        shape=(rows, columns), twos=twos, fours=fours, units=units, perm=perm, outliers=outliers, settled=settled
    )
    _check_mixed(operand)
    check_same_device(x=x, units=units, perm=perm, indptr=indptr, entries=entries)
    result: Tensor = mixed_kernels.mixed_gemv(operand, x)
    return result


@_mixed_gemv.register_fake
def _(x: Tensor, _units: Any, _perm: Any, rows: int, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _check_mixed(weight: MixedOperand) -> None:
    """BCQ-E552 unless the counts go together, and all arrays have the sizes that follow from them."""
    rows, columns = weight.shape
    padded = weight.twos * TWO_COLUMNS + weight.fours * FOUR_COLUMNS
    if rows < 1 or min(weight.twos, weight.fours) < 0 or not 1 <= columns <= min(padded, 65535):
        found = f"{rows} x {columns}, {weight.twos} units of {TWO_COLUMNS} columns, {weight.fours} of {FOUR_COLUMNS}"
        expected = "at least one row, and units that hold all columns, at most 65535"
        raise error("BCQ-E552", found=found, expected=expected)
    tiles = -(-rows // ROWS)
    words = (weight.twos * TWO_BYTES + weight.fours * FOUR_BYTES) // 4
    check_array("units", weight.units, ("I32",), (tiles * words,), 16)
    check_array("perm", weight.perm, ("I32",), (padded // 2,), 16)


def _checked_entries(
    rows: int, indptr: Tensor | None, entries: Tensor | None, count: int, entry: int, most: int
) -> Entries | None:
    """The outliers of an operator; BCQ-E552 unless their numbers go together, and both arrays have the right size."""
    given = indptr is not None and entries is not None
    half = (indptr is None) != (entries is None)
    if half or ((entry not in (4, 8) or count < 1) if given else (entry or count)):
        found = f"{count} outliers of {entry} bytes, {'with' if given else 'without'} their tensors"
        expected = "outliers of 4 or 8 bytes with indptr and entries, or none at all"
        raise error("BCQ-E552", found=found, expected=expected)
    least = 16 if given else 0  # a copy of no bytes would never be reported as complete
    if most < least:
        raise error("BCQ-E552", found=f"{most} bytes of outliers in a tile", expected=f"at least {least}")
    if not given:
        return None
    check_array("outlier rows", indptr, ("I32",), (-(-rows // ROWS) * ROWS + 1,))
    check_array("outliers", entries, ("I32",), (-(-count * entry // 16) * 4,), 16)
    return Entries(indptr=indptr, entries=entries, count=count, size=entry, most=most)


@torch.library.custom_op("bcqfmt::csr_outliers", mutates_args=("y",))
def _csr_outliers(y: Tensor, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> None:
    device.require_cuda()
    from bcqfmt.kernels import outliers

    outliers.csr_outliers(y, indptr, indices, values, x)


@_csr_outliers.register_fake
def _(*_: Any) -> None:
    """No result."""
