"""The dense matrix of any weight on a GPU, the bits of the normative decoder: checks, choice of kernels, launches.

`kernel` decodes 32 columns at a time to 16-bit numbers (`decoders`, `rows`), `elements` anything element by element.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.operands.device import DeviceOperand, DeviceSegment
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT, PROCESSORS, ROW_LIMIT


def dequantize(operand: DeviceOperand, dtype: Any = None, *, out: Any = None, twice: bool = False) -> Any:
    """The dense matrix (out, in) in ``dtype`` (by default the logical one), the bits of the normative decoder.

    ``out``: where to write it, contiguous and 16-byte aligned. ``twice``: rounded to the logical dtype first and then
    to ``dtype``, as in a dense copy that is loaded in another type.
    """
    device.require_cuda()
    from . import rows as dense_rows
    from .kernel import decoding_of, rows_kernel
    from .values import PATCHES

    if operand.layout != "canonical":
        raise error("BCQ-E552", found=f"an operand in layout {operand.layout}", expected="canonical")
    name = operand.dtype if dtype is None else device.dtype_name(dtype)
    rows, columns = operand.shape
    planes = operand.segments[0].planes
    if out is None and rows * columns > LIMIT:
        raise error("BCQ-E554", found=f"{rows * columns} elements", expected=f"at most {LIMIT}")
    dense = device.empty_like(planes, operand.shape, name) if out is None else out
    check_array("out", dense, (name,), operand.shape, 16)
    check_same_device(out=dense, weight=planes)
    twice = twice and name != operand.dtype
    quick, together = in_words(operand, name), dense_rows.rows_together(columns)
    fused = operand.perm is not None and quick == [True]  # reordered in the same launch
    for segment, fast in zip(operand.segments, quick, strict=True):
        if not fast:
            _elements(operand, segment, dense, name, 0, twice)
            continue
        decoding = decoding_of(segment, KINDS[operand.dtype], KINDS[name], twice, fused)
        warps = dense_rows.THREADS // 32
        grid = (-(-rows // together),) if fused else (-(-rows // warps), -(-segment.words // 32))
        rows_kernel(decoding).launch(
            grid, dense_rows.THREADS,
            segment.planes, segment.first, segment.second, dense, operand.stored if fused else dense, rows,
            columns, segment.start, segment.width, segment.words, segment.groups, segment.group_size // decoding.unit,
            together, shared=dense_rows.shared_bytes(columns, together) if fused else dense_rows.PIECE * warps,
        )  # fmt: skip
    if operand.perm is not None and all(quick) and not fused:
        dense_rows.reorder_columns().launch(
            (-(-rows // together),), dense_rows.THREADS, dense, operand.stored, rows, columns, together,
            shared=2 * columns * together,
        )  # fmt: skip
    if operand.count:
        for segment in operand.segments:
            _elements(operand, segment, dense, name, PATCHES[operand.mode], twice)
    return dense


def in_words(operand: DeviceOperand, dtype: str) -> list[bool]:
    """Which segments are decoded 32 columns at a time; all or none of a reordered weight."""
    if dtype not in ("F16", "BF16"):
        return [False] * len(operand.segments)
    if operand.perm is not None:
        eights = all(_in_eights(s, operand.columns) for s in operand.segments)
        return [eights and 2 * operand.columns <= ROW_LIMIT] * len(operand.segments)
    return [s.words <= 32 * 65535 and _in_eights(s, operand.columns) for s in operand.segments]


def _in_eights(segment: Any, columns: int) -> bool:
    """Whether a segment can be decoded 32 columns at a time: its start, width and groups are multiples of 8 columns."""
    return segment.formula != "table" and not (
        segment.group_size % 8 or segment.start % 8 or segment.width % 8 or columns % 8
    )


def _elements(
    operand: DeviceOperand, segment: DeviceSegment, dense: Any, name: str, patch: int, twice: bool
) -> None:  # fmt: skip
    from .elements import Elements, elements
    from .rows import THREADS
    from .values import FORMULAS

    formula, numbers = FORMULAS[segment.formula], "f64" if segment.numbers == "F64" else "f32"
    reordered = operand.perm is not None
    order = operand.stored if reordered else segment.planes
    csr = (operand.indptr, operand.indices, operand.values) if patch else (segment.planes,) * 3
    wide = 1 if patch else -(-(operand.columns if reordered else segment.width) // THREADS)
    tall = 65535 if patch else max(1, 32 * PROCESSORS // wide)  # several rows a thread share what it computes
    kinds = KINDS[operand.dtype], KINDS[name]
    elements(Elements(segment.bits, formula, numbers, *kinds, reordered, patch, twice)).launch(
        (wide, min(operand.rows, tall)), 32 if patch else THREADS,
        segment.planes, segment.first, segment.second, order, *csr, dense, operand.rows, operand.columns,
        segment.start, segment.width, segment.group_size, operand.count if patch else 0,
    )  # fmt: skip
