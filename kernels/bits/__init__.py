"""The fast product: a weight in the order of `layout` on a device, the plan of its launches, the checks before them.

``plan_of`` picks a kernel and its shape for a number of vectors once (`shape`); ``launch`` starts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bcqfmt.errors import error
from bcqfmt.kernels.operands import Operand
from bcqfmt.kernels.operands.outliers import NO_OUTLIERS, Entries, OutlierNeeds, arguments, entries_of
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_product, check_same_device
from bcqfmt.kernels.runtime.launch import Kernel, Plans, Step
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT

from .layout import BitLayout, layout_of, pack_numbers, pack_planes
from .shape import BATCH, AnyShape, BitShape, ByteShape, Chip, ShortShape, Wanted, at_once, product_shape

__all__ = [
    "BATCH", "FUSED", "USUAL", "BitOperand", "BitSegment", "batch_limit", "bit_gemv", "bit_operand",
    "fits", "fused_limit", "kernel_of", "launch", "multiply", "multiply_padded", "plan_of",
]  # fmt: skip

_ROTATION = 3  # blocks start at different places of their rows
# Kernels are compiled for these numbers of vectors only, because each takes seconds to compile; other numbers are
# padded with zero vectors.
USUAL = (1, 2, 4, 8)
FUSED = 4  # vectors that outliers are added to in the same launch; for more, a launch for outliers alone is faster


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

    ``settled``: all work that wrote these tensors has finished. Only then may a product fetch them while the
    previous kernel of the stream still runs, because that kernel could be the one that writes them.
    """

    shape: tuple[int, int]
    segments: tuple[BitSegment, ...]
    perm: Any
    outliers: Entries | None = None
    settled: bool = False
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it is on; None on the host."""
        return device.gpu_of(self.segments[0].planes)

    def needs(self, k: int) -> OutlierNeeds:
        """What the product of segment ``k`` needs for outliers, which go with the last segment."""
        return OutlierNeeds.of(self.outliers if k == len(self.segments) - 1 else None, self.shape[1])


def bit_operand(operand: Operand, target: Any = None) -> BitOperand:
    """The operand on a device in the fast layout, outliers included; BCQ-E553 where a segment has none."""
    segments = []
    for segment in operand.segments:
        layout = layout_of(segment)
        if layout is None:
            found = f"{segment.formula}, groups of {segment.group_size} columns"
            expected = "no table; 8, 16, 32, 64, a multiple of 128, or whole rows"
            raise error("BCQ-E553", tensor=operand.name, found=found, expected=expected)
        arrays = segment.planes, segment.first, segment.second
        stored, first, second = (device.tensor(array, "cpu") for array in arrays)
        planes = pack_planes(layout, stored).numpy().view(np.uint32)
        numbers = pack_numbers(layout, first, second).numpy().view(np.uint32)
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
    """``x W^T`` for x (batch, in) with batch 1..8, float16, bfloat16 or float32.

    One launch a segment for up to 8 vectors: 4 of float32 or in groups of 16 columns, 2 in groups of 8 (of float32 2
    and 1), and as many as fit into shared memory. ``out``: (batch, out) in any of these types, by default new and of
    x's; float32 as above. ``addend``: (batch, out) float32, added to the product before it is rounded. Outliers of more
    vectors than four, and all before sm_90, are added to the rounded product, by a launch of their own. ``shapes``: how
    each segment is carried out, by default what was measured to be best. Same bits at every call.
    """
    device.require_cuda()
    batch, dtype, y, result = check_product(operand.shape, x, out, BATCH)
    if addend is not None:
        check_array("addend", addend, ("F32",), (batch, operand.shape[0]))
    check_same_device(x=x, out=y, addend=addend, weight=operand.segments[0].planes)
    if shapes:
        launch(operand, _steps(operand, shapes), batch, x, y, addend)
    else:
        multiply(operand, x, y, addend, batch=batch, dtype=dtype, result=result)
    return y


def multiply(operand: BitOperand, x: Any, y: Any, addend: Any, *, batch: int, dtype: str, result: str) -> None:
    """The launches of :func:`bit_gemv` for arrays that were checked: x (batch, in), y and addend (batch, out)."""
    if batch > fused_limit(operand, dtype, result) and operand.outliers is not None:
        from bcqfmt.kernels.outliers import add_entries

        multiply(_bare(operand), x, y, addend, batch=batch, dtype=dtype, result=result)
        add_entries(y, operand.outliers, x)
        return
    step = min(batch, batch_limit(operand, dtype, result) or batch)  # if not even one fits, `plan_of` raises
    for begin in range(0, batch, step):
        part = slice(begin, begin + step)
        count, plus = min(step, batch - begin), None if addend is None else addend[part]
        launch(operand, plan_of(operand, count, dtype, result, added=plus is not None), count, x[part], y[part], plus)


def multiply_padded(operand: BitOperand, dtype: str, x: Any, y: Any, addend: Any) -> None:
    """:func:`multiply` for x (1..8, in) and y (1..8, out) of one dtype, with zeros up to a :data:`USUAL` number.

    ``addend``: (8, out), eight times the same row, or None.
    """
    count = len(x)
    batch = next(size for size in USUAL if size >= count)
    plus = None if addend is None else addend[:batch]
    if batch == count:
        multiply(operand, device.aligned(x), y, plus, batch=batch, dtype=dtype, result=dtype)
        return
    rows, columns = operand.shape
    padded, full = device.empty_like(x, (batch, columns)), device.empty_like(y, (batch, rows))
    padded[:count], padded[count:] = x, 0
    multiply(operand, padded, full, plus, batch=batch, dtype=dtype, result=dtype)
    y[:] = full[:count]


def batch_limit(operand: BitOperand, dtype: str, result: str) -> int:
    """How many vectors one launch takes, x of ``dtype`` and y of ``result``, outliers apart; 0 where not one fits."""
    return _limits(operand, dtype, result)[0]


def fused_limit(operand: BitOperand, dtype: str, result: str) -> int:
    """The same with the operand's outliers, if it has any, in the same launch."""
    return _limits(operand, dtype, result)[1]


def _limits(operand: BitOperand, dtype: str, result: str) -> tuple[int, int]:
    """Both limits, computed once."""
    found: tuple[int, int] | None = operand.plans.get((dtype, result))
    if found is None:
        layouts, chip = tuple(segment.layout for segment in operand.segments), _chip(operand.gpu)
        alone, fused = (
            at_once(layouts, KINDS[dtype], KINDS[result], needs=needs, chip=chip)
            for needs in (NO_OUTLIERS, operand.needs(len(layouts) - 1))
        )
        most = FUSED if chip.bulk else 0
        found = operand.plans[dtype, result] = alone, fused if operand.outliers is None else min(most, fused)
    return found


def fits(layouts: Sequence[BitLayout | None], gpu: int | None) -> bool:
    """Whether there is a layout for every segment, and a GPU has the shared memory for one 16-bit vector."""
    known = tuple(layout for layout in layouts if layout is not None)
    kind = KINDS["F16"]
    return len(known) == len(layouts) and at_once(known, kind, kind, chip=_chip(gpu)) > 0


def _chip(gpu: int | None) -> Chip:
    """What the GPU of this number offers."""
    return Chip(device.capability(gpu) >= (9, 0), device.shared_limit(gpu))


def _bare(operand: BitOperand) -> BitOperand:
    """The operand without its outliers; made once, so that its plans are computed once."""
    if () not in operand.plans:
        operand.plans[()] = replace(operand, outliers=None)
    found: BitOperand = operand.plans[()]
    return found


def plan_of(operand: BitOperand, batch: int, dtype: str, result: str, *, added: bool = False) -> tuple[Step, ...]:
    """A step for every segment, computed once; ``dtype`` of x, ``result`` of y, ``added``: with an addend.

    BCQ-E553 where x does not fit.
    """
    key = (batch, dtype, result, added)
    if key not in operand.plans:
        chip = _chip(operand.gpu)
        precise, last = "F32" in (dtype, result), len(operand.segments) - 1
        reordered, shapes = operand.perm is not None, []
        for k, segment in enumerate(operand.segments):
            kinds = KINDS[dtype], KINDS[result] if k == last else 0
            needs = operand.needs(k)
            shapes.append(
                product_shape(Wanted(segment.layout, batch, *kinds, reordered, added or k > 0, precise, needs, chip))
            )
        if None in shapes:
            found = f"{operand.shape[1]} columns, {batch} vectors"
            raise error("BCQ-E553", found=found, expected="vectors that fit into shared memory")
        operand.plans[key] = _steps(operand, [shape for shape in shapes if shape is not None])
    plan: tuple[Step, ...] = operand.plans[key]
    return plan


def _steps(operand: BitOperand, shapes: Sequence[AnyShape]) -> tuple[Step, ...]:
    grid = (min(device.processors(operand.gpu), -(-operand.shape[0] // 16)),)
    steps = []
    for k, (segment, shape) in enumerate(zip(operand.segments, shapes, strict=True)):
        needs, chunks = operand.needs(k), segment.layout.chunks
        if shape.bulk:
            device.require_capability(9, 0, operand.gpu)
        if shape.slices > chunks:
            raise error("BCQ-E552", found=f"{shape.slices} slices", expected=f"at most {chunks}")
        if shape.outliers != needs.size or (shape.outliers and not shape.bulk):
            found = f"a shape for outliers of {shape.outliers} bytes"
            raise error("BCQ-E552", found=found, expected=f"{needs.size} bytes, and bulk copies")
        shared = shape.shared_bytes + needs.shared_bytes(shape.batch, shape.kind, shape.tiles)
        steps.append(Step(kernel_of(shape), grid, shape.ring.threads, shared, needs.room, shape.bulk))
    return tuple(steps)


def kernel_of(shape: AnyShape) -> Kernel:
    """The kernel for a shape."""
    from .binary_kernel import bit_gemv_kernel
    from .integer_kernel import byte_gemv_kernel
    from .short_kernel import short_gemv_kernel

    factories: dict[type, Any] = {
        BitShape: bit_gemv_kernel, ByteShape: byte_gemv_kernel, ShortShape: short_gemv_kernel,
    }  # fmt: skip
    found: Kernel = factories[type(shape)](shape)
    return found


def launch(operand: BitOperand, plan: tuple[Step, ...], batch: int, x: Any, y: Any, addend: Any = None) -> None:
    """Start the kernels of a plan, for arrays that were checked: x and y may have any dimensions of that many elements.

    Each segment adds its product to that of the previous one; only the last result has the type of y.
    """
    (rows, columns), total, tiles = operand.shape, addend, -(-operand.shape[0] // 16)
    left = len(plan)
    for step, segment in zip(plan, operand.segments, strict=True):
        left -= 1
        target = device.empty_like(x, (batch, rows), "F32") if left else y
        indptr, entries, count = arguments(None if left else operand.outliers, segment.planes)
        step.kernel.launch(
            step.grid, step.threads,
            segment.planes, segment.numbers, x, segment.planes if operand.perm is None else operand.perm,
            target if total is None else total, target, indptr, entries, rows, tiles, columns, segment.start, _ROTATION,
            count, step.room, shared=step.shared, early=operand.settled and step.early,
        )  # fmt: skip
        total = target
