"""The fast product: weights in the layout of `bit_layout` on a device, and the launch with its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bcqfmt.errors import error
from bcqfmt.kernels.operands import Operand
from bcqfmt.kernels.operands.outliers import NONE, Beside, Entries, arguments, entries_of, needs
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.launch import LIMIT, Kernel, Plans, check_array, check_product, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS

from .byte_shape import BATCH
from .layout import BitLayout, layout_of, pack_numbers, pack_planes
from .product_shape import AnyShape, at_once, product_shape
from .shape import BitShape
from .short_shape import ShortShape

__all__ = [
    "BATCH", "FUSED", "BitOperand", "Step", "bit_gemv", "bit_operand", "carry_out", "in_one", "kernel_of", "most_of",
    "plan_of",
]  # fmt: skip

_FLOATS = tuple(KINDS)
_ROTATION = 3
FUSED = 4  # vectors that outliers are added to in the same launch; for more, one for outliers alone is faster


class Step(NamedTuple):
    """The launch for one segment: what is the same whenever as many vectors of the same types are multiplied."""

    kernel: Kernel
    grid: tuple[int]
    threads: int
    shared: int
    room: int = 0  # bytes for the outliers of a tile, where the step adds them up


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BitSegment:
    """A segment on a device: ``planes`` and ``numbers`` as flat int32, columns ``start`` .. of the stored order."""

    layout: BitLayout
    planes: Any
    numbers: Any
    start: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BitOperand:
    """A matrix (out, in) for :func:`bit_gemv`.

    ``settled``: all work that wrote these tensors has finished. Only then may a product fetch them while the kernel in
    front of it still runs, for that kernel could be the one that writes them.
    """

    shape: tuple[int, int]
    segments: tuple[BitSegment, ...]
    perm: Any
    outliers: Entries | None = None
    settled: bool = False
    plans: Plans = field(default_factory=Plans, init=False, repr=False)


def bit_operand(operand: Operand, target: Any = None) -> BitOperand:
    """The operand on a device in the fast layout, outliers included; BCQ-E553 where a group size has none."""
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
    outliers = entries_of(operand.outliers, *operand.shape, target)
    device.settle(segments[-1].planes)
    return BitOperand(shape=operand.shape, segments=tuple(segments), perm=perm, outliers=outliers, settled=True)


def bit_gemv(operand: BitOperand, x: Any, *, out: Any = None, addend: Any = None, shapes: Any = None) -> Any:
    """``x W^T`` for x (batch, in) with batch 1..8, float16, bfloat16 or float32, on a GPU of capability 9.0.

    One launch a segment for up to 8 vectors: 4 of float32 or in groups of 16 columns, 2 in groups of 8 (of float32 2
    and 1), and as many as fit into shared memory. ``out``: (batch, out) in any of these types, by default new and of
    x's; float32 as above. ``addend``: (batch, out) float32, added to the product before it is rounded. Outliers of more
    vectors than four are added to the rounded product, by a launch of their own. ``shapes``: how each segment is
    carried out, by default what was measured to be best. Same bits at every call.
    """
    device.require_capability(9, 0, device.gpu_of(operand.segments[0].planes))
    rows, _ = operand.shape
    batch, dtype, y, result = check_product(operand.shape, x, out, dtypes=_FLOATS, results=_FLOATS, most=BATCH)
    if addend is not None:
        check_array("addend", addend, ("F32",), (batch, rows))
    check_same_device(x=x, out=y, addend=addend, weight=operand.segments[0].planes)
    if shapes:
        carry_out(operand, _steps(operand, shapes), batch, x, y, addend)
        return y
    if operand.outliers is not None and not in_one(operand, batch, dtype, result):
        from bcqfmt.kernels.outliers import add_entries

        bit_gemv(_bare(operand), x, out=y, addend=addend)
        add_entries(y, operand.outliers, x)
        return y
    step = min(batch, most_of(operand, dtype, result) or batch)  # where not one fits, the plan says so
    for begin in range(0, batch, step):
        part = slice(begin, begin + step)
        count, plus = min(step, batch - begin), None if addend is None else addend[part]
        plan = plan_of(operand, count, dtype, result, added=addend is not None)
        carry_out(operand, plan, count, x[part], y[part], plus)
    return y


def most_of(operand: BitOperand, dtype: str, result: str) -> int:
    """How many vectors one launch takes, x of ``dtype`` and y of ``result``, outliers apart; 0 where not one fits."""
    return _at_once(operand, dtype, result, NONE)


def in_one(operand: BitOperand, batch: int, dtype: str, result: str) -> bool:
    """Whether that many vectors are multiplied by one launch a segment, outliers included."""
    if operand.outliers is None:
        return batch <= most_of(operand, dtype, result)
    return batch <= min(FUSED, _at_once(operand, dtype, result, _beside(operand, True)))


def _at_once(operand: BitOperand, dtype: str, result: str, beside: Beside) -> int:
    """Found once."""
    key = (dtype, result, beside)
    if key not in operand.plans:
        layouts = tuple(segment.layout for segment in operand.segments)
        operand.plans[key] = at_once(
            layouts, KINDS[dtype], KINDS[result], reordered=operand.perm is not None, beside=beside
        )
    found: int = operand.plans[key]
    return found


def _bare(operand: BitOperand) -> BitOperand:
    """The operand without its outliers, made once for the plans that it finds."""
    if () not in operand.plans:
        operand.plans[()] = replace(operand, outliers=None)
    found: BitOperand = operand.plans[()]
    return found


def plan_of(operand: BitOperand, batch: int, dtype: str, result: str, *, added: bool = False) -> tuple[Step, ...]:
    """A step for every segment, found once; ``dtype`` of x, ``result`` of y, ``added``: with an addend.

    BCQ-E553 where x does not fit, BCQ-E551 where the weight's GPU is not of capability 9.0.
    """
    key = (batch, dtype, result, added)
    if key not in operand.plans:
        device.require_capability(9, 0, device.gpu_of(operand.segments[0].planes))
        precise, last = "F32" in (dtype, result), len(operand.segments) - 1
        shapes = [
            _shape(operand, k, batch, KINDS[dtype], KINDS[result] if k == last else 0, added or k > 0, precise)
            for k in range(last + 1)
        ]
        operand.plans[key] = _steps(operand, shapes)
    found: tuple[Step, ...] = operand.plans[key]
    return found


def carry_out(operand: BitOperand, plan: tuple[Step, ...], batch: int, x: Any, y: Any, addend: Any = None) -> None:
    """The launches of a plan, for arrays that were checked: x and y may have any dimensions of that many elements."""
    (rows, columns), held, tiles = operand.shape, addend, -(-operand.shape[0] // 16)
    left = len(plan)
    for step, segment in zip(plan, operand.segments, strict=True):
        left -= 1
        target = device.empty_like(x, (batch, rows), "F32") if left else y
        indptr, entries, count = arguments(None if left else operand.outliers, segment.planes)
        step.kernel.launch(
            step.grid, step.threads,
            segment.planes, segment.numbers, x, segment.planes if operand.perm is None else operand.perm,
            target if held is None else held, target, indptr, entries, rows, tiles, columns, segment.start, _ROTATION,
            count, step.room, shared=step.shared, early=operand.settled,
        )  # fmt: skip
        held = target


def _steps(operand: BitOperand, shapes: Sequence[AnyShape]) -> tuple[Step, ...]:
    grid = (min(device.processors(device.gpu_of(operand.segments[0].planes)), -(-operand.shape[0] // 16)),)
    steps, last = [], len(shapes) - 1
    for k, (segment, shape) in enumerate(zip(operand.segments, shapes, strict=True)):
        beside = _beside(operand, k == last)
        if shape.slices > segment.layout.chunks:
            raise error("BCQ-E552", found=f"{shape.slices} slices", expected=f"at most {segment.layout.chunks}")
        if shape.outliers != beside.size:
            raise error(
                "BCQ-E552", found=f"a shape for outliers of {shape.outliers} bytes", expected=f"{beside.size} bytes"
            )
        shared = shape.shared_bytes + beside.bytes(shape.batch, shape.kind, shape.tiles)
        steps.append(Step(kernel_of(shape), grid, shape.ring.threads, shared, beside.room))
    return tuple(steps)


def _beside(operand: BitOperand, last: bool) -> Beside:
    """What a segment's product needs for outliers: they go with the last."""
    return needs(operand.outliers, operand.shape[1]) if last else NONE


def kernel_of(shape: AnyShape) -> Kernel:
    """The kernel for a shape."""
    from .binary_kernel import bit_gemv_kernel
    from .integer_kernel import byte_gemv_kernel
    from .short_kernel import short_gemv_kernel

    if isinstance(shape, ShortShape):
        return short_gemv_kernel(shape)
    return bit_gemv_kernel(shape) if isinstance(shape, BitShape) else byte_gemv_kernel(shape)


def _shape(operand: BitOperand, k: int, batch: int, kind: int, out: int, added: bool, precise: bool) -> AnyShape:
    layout, last = operand.segments[k].layout, k == len(operand.segments) - 1
    found = product_shape(
        layout, batch, kind, out, reordered=operand.perm is not None, added=added, precise=precise,
        beside=_beside(operand, last),
    )  # fmt: skip
    if found is None:
        raise error(
            "BCQ-E553",
            found=f"{operand.shape[1]} columns, {batch} vectors",
            expected="vectors that fit into shared memory",
        )
    return found
