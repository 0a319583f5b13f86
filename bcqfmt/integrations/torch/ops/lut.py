"""Products with BCQ weights as torch operators: ``torch.ops.bcqfmt.lut_gemv`` and ``torch.ops.bcqfmt.dequantize``.

They take tensors and numbers only, know the shape of their result without running (fake tensors, ``torch.compile``),
launch on the current stream, never wait for the device, and can be captured in a CUDA graph once each has run.
:func:`lut_gemv` and :func:`dequantize` spell a :class:`~bcqfmt.kernels.operands.device.DeviceOperand` out for them.
There is no gradient.

Importing this module registers the operators and needs torch; nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bcqfmt.errors import error
from bcqfmt.kernels import dequant, lut
from bcqfmt.kernels.operands.device import DeviceOperand, DeviceSegment, check_operand

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_NUMBERS = {"F16": torch.float16, "F64": torch.float64}


def lut_gemv(x: Tensor, weight: DeviceOperand) -> Tensor:
    """``x W^T`` for x (batch, in), batch 1..8, float16, bfloat16 or float32; ``weight`` in the layout lut-gemm."""
    result: Tensor = torch.ops.bcqfmt.lut_gemv(
        x,
        *_lists(weight),
        weight.perm,
        weight.indptr,
        weight.indices,
        weight.added,
    )
    return result


def dequantize(weight: DeviceOperand, dtype: torch.dtype | None = None) -> Tensor:
    """The dense matrix (out, in), by default in the logical dtype; ``weight`` in the layout canonical."""
    result: Tensor = torch.ops.bcqfmt.dequantize(
        *_lists(weight),
        ",".join(s.formula for s in weight.segments),
        all(s.finite for s in weight.segments),
        _DTYPES[weight.dtype],
        _DTYPES[weight.dtype] if dtype is None else dtype,
        weight.perm,
        weight.stored,
        weight.indptr,
        weight.indices,
        weight.values,
        weight.mode,
    )
    return result


def _lists(weight: DeviceOperand) -> list[list[Any]]:
    """Planes, first and second numbers, widths and group sizes of the segments, as the operators take them."""
    names = ("planes", "first", "second", "width", "group_size")
    return [[getattr(segment, name) for segment in weight.segments] for name in names]


def _operand(
    layout: str, planes: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], widths: Sequence[int],
    group_sizes: Sequence[int], formulas: Sequence[str], dtype: str, finite: bool, **others: Any,
) -> DeviceOperand:  # fmt: skip
    """The operand that these arrays are, checked."""
    axis, other = (1, "F16") if layout == "lut-gemm" else (0, "F64")  # of planes; the type of numbers that are not F32
    segments = [
        DeviceSegment(
            planes=words, first=a, second=b, start=sum(widths[:k]), width=widths[k], group_size=group_sizes[k],
            bits=words.shape[axis], formula=formula, finite=finite,
            numbers=other if a.dtype == _NUMBERS[other] else "F32",
        )
        for k, (words, a, b, formula) in enumerate(zip(planes, first, second, formulas, strict=True))
    ]  # fmt: skip
    shape = (planes[0].shape[axis + 1], sum(widths))
    operand = DeviceOperand(shape=shape, dtype=dtype, layout=layout, segments=tuple(segments), **others)
    check_operand(operand)
    return operand


def _check_lists(dimensions: int, planes: Sequence[Tensor], *others: Sequence[object]) -> None:
    """BCQ-E552 unless there is one entry per segment everywhere, and planes have that many ``dimensions``."""
    if not planes or any(len(other) != len(planes) for other in others) or any(p.dim() != dimensions for p in planes):
        shown = ", ".join(str(len(other)) for other in (planes, *others))
        found = f"lists of {shown} entries"
        raise error("BCQ-E552", found=found, expected=f"one entry per segment; planes of {dimensions} dimensions")


@torch.library.custom_op("bcqfmt::lut_gemv", mutates_args=())
def _lut_gemv(
    x: Tensor,
    planes: Sequence[Tensor],
    alpha: Sequence[Tensor],
    z: Sequence[Tensor],
    widths: Sequence[int],
    group_sizes: Sequence[int],
    perm: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    _check_lists(4, planes, alpha, z, widths, group_sizes)
    operand = _operand(
        "lut-gemm", planes, alpha, z, widths, group_sizes, ["bcq"] * len(planes), "F32", False,
        perm=perm, indptr=indptr, indices=indices, added=added,
    )  # fmt: skip
    result: Tensor = lut.lut_gemv(operand, x)
    return result


@_lut_gemv.register_fake
def _(x: Tensor, planes: Sequence[Tensor], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], planes[0].shape[2]))


@torch.library.custom_op("bcqfmt::dequantize", mutates_args=())
def _dequantize(
    planes: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    widths: Sequence[int],
    group_sizes: Sequence[int],
    formulas: str,
    finite: bool,
    logical: torch.dtype,
    dtype: torch.dtype,
    perm: Tensor | None,
    stored: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    values: Tensor | None,
    mode: str,
) -> Tensor:
    _check_lists(3, planes, first, second, widths, group_sizes, formulas.split(","))
    kind = next(name for name, kind in _DTYPES.items() if kind == logical)
    operand = _operand(
        "canonical", planes, first, second, widths, group_sizes, formulas.split(","), kind, finite,
        perm=perm, stored=stored, indptr=indptr, indices=indices, values=values, mode=mode,
    )  # fmt: skip
    result: Tensor = dequant.dequantize(operand, dtype)
    return result


@_dequantize.register_fake
def _(planes: Sequence[Tensor], *others: Any) -> Tensor:
    _first, _second, widths, _groups, _formulas, _finite, _logical, dtype = others[:8]
    return planes[0].new_empty((planes[0].shape[1], sum(widths)), dtype=dtype)
