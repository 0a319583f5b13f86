"""Products of plain 4-bit weights with one to eight vectors: the weight on a device, the launch with its checks.

The weight is read once for all vectors, so eight cost little more than one: what GPTQ and AWQ checkpoints need while
several sequences are generated at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels import device
from bcqfmt.kernels.code_shape import BATCH, PREFERRED, CodeShape, space_for
from bcqfmt.kernels.launch import LIMIT, check_array, check_product, check_same_device
from bcqfmt.kernels.mixed_layout import FOUR_BYTES, FOUR_COLUMNS, ROWS, pack_units
from bcqfmt.kernels.mixed_numbers import segments_of
from bcqfmt.weight import BcqWeight

__all__ = ["BATCH", "CodeOperand", "code_gemv", "code_operand", "shape_for"]

_KINDS = {"F16": 1, "BF16": 2}
_RESULTS = {"F32": 0, "F16": 1, "BF16": 2}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CodeOperand:
    """A matrix (out, in) for :func:`code_gemv`: ``units`` of 128 columns in the order of `mixed_layout`, flat int32."""

    shape: tuple[int, int]
    units: Any

    @property
    def chunks(self) -> int:
        """Units of a tile."""
        return -(-self.shape[1] // FOUR_COLUMNS)


def code_operand(weight: BcqWeight, target: Any = None, *, index: int | None = None) -> CodeOperand:
    """A weight of one affine segment of 4 bits, in groups of multiples of 128 columns or whole rows, F16 scales, zero
    points 0..15, no perm, no outliers, a multiple of 4 columns; all else is refused with BCQ-E553.
    """
    scheme, columns = weight.scheme, weight.spec.columns
    said = [
        (len(scheme.segments) != 1 or scheme.segments[0].bits != 4, "other than one segment of 4 bits"),
        (scheme.perm, "reordered columns"),
        (scheme.outliers is not None, "outliers"),
        (columns % 4 != 0, f"{columns} columns"),
    ]
    for wrong, found in said:
        if wrong:
            expected = "4-bit codes in order, without outliers, a multiple of 4 columns"
            raise error("BCQ-E553", tensor=weight.name, found=found, expected=expected)
    _, four = segments_of(weight.to_canonical(), index or 0)
    assert four is not None
    units = pack_units(None, four)
    if units.size > LIMIT:
        raise error("BCQ-E554", tensor=weight.name, found=f"{units.size} words", expected=f"at most {LIMIT}")
    return CodeOperand(shape=(weight.spec.out, columns), units=device.upload(units, target))


def shape_for(operand: CodeOperand, batch: int, dtype: str, result: str) -> CodeShape | None:
    """The shape of a product, the first that fits; None where the vectors do not fit into shared memory, or their type
    is none that the kernel takes.
    """
    if dtype not in _KINDS or result not in _RESULTS or not 1 <= batch <= BATCH:
        return None
    for slices, tiles in PREFERRED:
        shape = CodeShape(batch, _KINDS[dtype], _RESULTS[result], slices, tiles)
        if slices <= operand.chunks and space_for(shape, operand.chunks) is not None:
            return shape
    return None


def code_gemv(operand: CodeOperand, x: Any, out: Any = None, *, shape: CodeShape | None = None) -> Any:
    """``x W^T`` for x (batch, in) with batch 1..8, float16 or bfloat16, on a GPU of capability 9.0.

    ``out``: (batch, out) float16, bfloat16 or float32, by default new and of x's type. ``shape``: by default what
    :func:`shape_for` says. Same bits at every call.
    """
    device.require_capability(9, 0)
    from bcqfmt.kernels.cuda_code_gemv import code_gemv_kernel

    rows, columns = operand.shape
    batch, dtype, y, result = check_product(
        operand.shape, x, out, dtypes=tuple(_KINDS), results=tuple(_RESULTS), most=BATCH
    )
    tiles = -(-rows // ROWS)
    check_array("units", operand.units, ("I32", "U32"), (tiles * operand.chunks * FOUR_BYTES // 4,), align=16)
    check_same_device(x=x, out=y, weight=operand.units)
    if shape is None:
        shape = shape_for(operand, batch, dtype, result)
    space = None if shape is None or shape.slices > operand.chunks else space_for(shape, operand.chunks)
    if shape is None or space is None:
        found = f"{columns} columns, {batch} vectors"
        raise error(
            "BCQ-E553", found=found, expected="vectors that fit into shared memory, a warp for no more than a unit"
        )
    code_gemv_kernel(shape).launch(
        (min(device.processors(), tiles),), shape.threads,
        operand.units, x, y, rows, tiles, columns, operand.chunks, space.stages, shared=space.shared_bytes,
    )  # fmt: skip
    return y
