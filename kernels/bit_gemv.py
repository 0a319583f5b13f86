"""The fast product: weights in the layout of `bit_layout` on a device, and the launch with its checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels import device
from bcqfmt.kernels.bit_layout import BitLayout, layout_of, pack_numbers, pack_planes
from bcqfmt.kernels.bit_shape import BitShape
from bcqfmt.kernels.byte_shape import BATCH, ByteShape, product_shape
from bcqfmt.kernels.launch import LIMIT, Kernel, check_array, check_product, check_same_device
from bcqfmt.kernels.operands import Operand

__all__ = ["BATCH", "BitOperand", "bit_gemv", "bit_operand", "kernel_of"]

_KINDS = {"F32": 0, "F16": 1, "BF16": 2}
_ROTATION = 3


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BitSegment:
    """A segment on a device: ``planes`` and ``numbers`` as flat int32, columns ``start`` .. of the stored order."""

    layout: BitLayout
    planes: Any
    numbers: Any
    start: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BitOperand:
    """A matrix (out, in) for :func:`bit_gemv`."""

    shape: tuple[int, int]
    segments: tuple[BitSegment, ...]
    perm: Any


def bit_operand(operand: Operand, target: Any = None) -> BitOperand:
    """The operand on a device in the fast layout; BCQ-E553 where a group size has none, or where there are outliers."""
    if operand.outliers is not None:
        raise error("BCQ-E553", tensor=operand.name, found="outliers", expected="a weight without")
    segments = []
    for segment in operand.segments:
        layout = layout_of(segment)
        if layout is None:
            raise error(
                "BCQ-E553",
                tensor=operand.name,
                found=f"groups of {segment.group_size} columns",
                expected="8, 16, 32, 64, a multiple of 128, or whole rows",
            )
        planes = pack_planes(layout, segment.planes)
        numbers = pack_numbers(layout, segment.first, segment.second)
        if max(planes.size, numbers.size) > LIMIT:
            raise error("BCQ-E554", tensor=operand.name, found=f"{planes.size} words", expected=f"at most {LIMIT}")
        segments.append(
            BitSegment(
                layout=layout,
                planes=device.upload(planes, target),
                numbers=device.upload(numbers, target),
                start=segment.start,
            )
        )
    perm = None if operand.perm is None else device.upload(operand.perm, target)
    return BitOperand(shape=operand.shape, segments=tuple(segments), perm=perm)


def bit_gemv(operand: BitOperand, x: Any, *, out: Any = None, addend: Any = None, shapes: Any = None) -> Any:
    """``x W^T`` for x (batch, in) with batch 1..8, float16, bfloat16 or float32, on a GPU of capability 9.0.

    At most 4 of float32, in groups of 8 or 16 columns, and where more do not fit into shared memory. ``out``: (batch,
    out) in any of these types, by default new and of x's; float32 counts as above. ``addend``: (batch, out) float32,
    added to the product before it is rounded. ``shapes``: how each segment is carried out, by default what was measured
    to be best. Same bits at every call.
    """
    device.require_capability(9, 0)
    rows, columns = operand.shape
    batch, dtype, y, result = check_product(
        operand.shape, x, out, dtypes=tuple(_KINDS), results=tuple(_KINDS), most=BATCH
    )
    if addend is not None:
        check_array("addend", addend, ("F32",), (batch, rows))
    check_same_device(x=x, out=y, addend=addend, weight=operand.segments[0].planes)
    tiles = -(-rows // 16)
    held = addend
    for k, segment in enumerate(operand.segments):
        final = k == len(operand.segments) - 1
        target = y if final else device.empty_like(x, (batch, rows), "F32")
        kind = _KINDS[result] if final else 0
        precise, added = "F32" in (dtype, result), held is not None
        shape = shapes[k] if shapes else _shape(operand, segment, batch, _KINDS[dtype], kind, added, precise)
        if shape.slices > segment.layout.chunks:
            raise error("BCQ-E552", found=f"{shape.slices} slices", expected=f"at most {segment.layout.chunks}")
        launched = kernel_of(shape)
        grid = min(device.processors(), tiles)
        launched.launch(
            (grid,), shape.ring.threads,
            segment.planes, segment.numbers, x, segment.planes if operand.perm is None else operand.perm,
            target if held is None else held, target, rows, tiles, columns, segment.start, _ROTATION,
            shared=shape.shared_bytes,
        )  # fmt: skip
        held = target
    return y


def kernel_of(shape: BitShape | ByteShape) -> Kernel:
    """The kernel for a shape."""
    from bcqfmt.kernels.cuda_bit_gemv import bit_gemv_kernel
    from bcqfmt.kernels.cuda_byte_gemv import byte_gemv_kernel

    return bit_gemv_kernel(shape) if isinstance(shape, BitShape) else byte_gemv_kernel(shape)


def _shape(
    operand: BitOperand, segment: BitSegment, batch: int, kind: int, out: int, added: bool, precise: bool
) -> BitShape | ByteShape:
    reordered = operand.perm is not None
    found = product_shape(segment.layout, batch, kind, out, reordered=reordered, added=added, precise=precise)
    if found is None:
        raise error(
            "BCQ-E553",
            found=f"{operand.shape[1]} columns, {batch} vectors",
            expected="vectors that fit into shared memory; fewer at once",
        )
    return found
