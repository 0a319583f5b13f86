"""The product of many vectors: a weight in the order of `layout` on a device, and its launches.

For any number of vectors on sm_90, for hundreds on every other GPU since sm_80; where the fast products of `bits` take
a weight, they are faster for one vector or some (`matmul_weight`), except of affine weights with 4 bits and groups of
32 or more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bcqfmt.errors import error
from bcqfmt.kernels.operands import Operand
from bcqfmt.kernels.operands.outliers import Entries, entries_of
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.launch import Kernel, Plans
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT
from bcqfmt.kernels.runtime.tensor_map import TensorMap
from bcqfmt.kernels.runtime.tickets import TICKETS, new_tickets, tickets

from .layout import GemmLayout, layout_of, obstacle
from .shape import GemmShape, blocks_for, gemm_shape, whole_for

__all__ = [
    "GemmOperand", "GemmSegment", "engine_of", "gemm", "gemm_operand", "least_part", "multiply", "obstacle", "parts_of",
]  # fmt: skip

# Vectors of one launch, at least and less than twice as many: x is read again for every few rows, and of more vectors
# it does not stay in the cache; NARROW_PART where x and y together have at most NARROW numbers for each.
# Each begins at a multiple of ROUNDED, so that y does at one of 8 bytes.
PART, NARROW_PART, NARROW, ROUNDED = 1024, 1536, 8192, 128


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GemmSegment:
    """A segment on a device: flat int32 ``codes`` and ``numbers``, ``row_scale`` float32, as in `layout`."""

    layout: GemmLayout
    codes: Any
    numbers: Any
    row_scale: Any
    start: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GemmOperand:
    """A matrix (out, in) for :func:`gemm`. ``settled``: all work that wrote these tensors has finished."""

    shape: tuple[int, int]
    segments: tuple[GemmSegment, ...]
    tickets: Any
    perm: Any = None
    outliers: Entries | None = None
    settled: bool = False
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it is on; None on the host."""
        return device.gpu_of(self.segments[0].codes)


def gemm_operand(operand: Operand, number: str, target: Any = None) -> GemmOperand:
    """The operand on a device in the layout for x of type ``number``; arrays of numpy or tensors on the device.

    BCQ-E553 where it has an :func:`obstacle`, or a bias or zero that is too large for its row's scales.
    """
    if unfit := obstacle(operand, number):
        raise error("BCQ-E553", tensor=operand.name, found=unfit)
    from .pack import pack_codes, pack_numbers

    segments = []
    for segment in operand.segments:
        layout = layout_of(segment, number)
        planes, first, second = (
            device.tensor(array, target) for array in (segment.planes, segment.first, segment.second)
        )
        numbers, row_scale = pack_numbers(layout, first, second, offset=segment.formula == "offset")
        if not bool(row_scale.isfinite().all()):
            raise error(
                "BCQ-E553",
                tensor=operand.name,
                found=f"a row whose bias or zero, relative to its scales, is too large for {number}",
            )
        codes = pack_codes(layout, planes)
        if codes.numel() > LIMIT:
            raise error("BCQ-E554", tensor=operand.name, found=f"{codes.numel()} words", expected=f"at most {LIMIT}")
        made = GemmSegment(layout=layout, codes=codes, numbers=numbers, row_scale=row_scale, start=segment.start)
        segments.append(made)
    perm = None if operand.perm is None else device.tensor(operand.perm, target)
    outliers = entries_of(operand.outliers, *operand.shape, target)
    device.settle(segments[-1].codes)
    return GemmOperand(
        shape=operand.shape, segments=tuple(segments), tickets=new_tickets(target, math.prod(operand.shape)),
        perm=perm, outliers=outliers,
        settled=True,
    )  # fmt: skip


def engine_of(gpu: int | None) -> str:
    """The instruction that multiplies on a GPU: "wgmma" on capability 9.0, "mma" on all others."""
    return "wgmma" if device.capability(gpu) == (9, 0) else "mma"


def least_part(shape: tuple[int, int]) -> int:
    """At least how many vectors each launch multiplies, where several do, for a matrix (out, in)."""
    return NARROW_PART if sum(shape) <= NARROW else PART


def parts_of(count: int, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Where the vectors that are multiplied in one launch begin and end, for ``count`` and a matrix (out, in)."""
    parts = max(1, count // least_part(shape))
    begins = [k * count // parts // ROUNDED * ROUNDED for k in range(parts)]
    return list(itertools.pairwise([*begins, count]))


def gemm(
    operand: GemmOperand, x: Any, *, out: Any = None, addend: Any = None, shapes: Sequence[GemmShape] | None = None
) -> Any:
    """``x W^T`` for x (count, in) of the type that the operand was made for, in 16 bits.

    ``out``: (count, out) of x's dtype or float32, by default new and of x's. ``addend``: (out) float32, added to every
    vector's product before it is rounded. ``shapes``: how each segment is carried out, in one launch. Same bits at
    every call.
    """
    number = operand.segments[0].layout.number
    count = check_array("x", x, (number,), (None, operand.shape[1]), 16).shape[0]
    y = device.empty_like(x, (count, operand.shape[0])) if out is None else out
    found = check_array("out", y, (number, "F32"), (count, operand.shape[0]), 2)
    if addend is not None:
        check_array("addend", addend, ("F32",), (operand.shape[0],))
    check_same_device(x=x, out=y, addend=addend, weight=operand.segments[0].codes)
    aligned = found.address % 8 == 0
    if shapes is None:
        _in_parts(operand, x, y, number, found.dtype, addend, aligned)
    else:
        _launch(operand, _steps(operand, shapes, count, aligned), x, y, addend)
    return y


def multiply(operand: GemmOperand, x: Any, y: Any, addend: Any = None) -> None:
    """:func:`gemm` for arrays that were checked: x (..., in), y (..., out) of the same type.

    y starts at a multiple of 8 bytes. ``addend``: (8, out), eight times the same row, or None.
    """
    number, (rows, columns) = operand.segments[0].layout.number, operand.shape
    if len(x.shape) != 2:
        x, y = x.reshape(-1, columns), y.reshape(-1, rows)
    _in_parts(operand, device.aligned(x), y, number, number, None if addend is None else addend[0])


def _in_parts(
    operand: GemmOperand, x: Any, y: Any, number: str, result: str, addend: Any, aligned: bool = True
) -> None:
    """A launch of every segment for each of :func:`parts_of`. ``aligned``: y starts at a multiple of 8 bytes."""
    for begin, end in parts_of(count := x.shape[0], operand.shape):
        plan = _plan(operand, end - begin, number, result, addend is not None, aligned)
        part = (x, y) if end - begin == count else (x[begin:end], y[begin:end])  # slices of a tensor take time
        _launch(operand, plan, *part, addend)


class GemmStep(NamedTuple):
    """The launch of one segment: what is the same whenever as many vectors are multiplied.

    ``units``: stages that the blocks share evenly, after ``whole`` tiles that one has alone. ``split``: tiles that
    several blocks add up, 0 where none are; ``partial``: float32 numbers for their parts. ``box``: vectors of a box of
    x, which the kernel takes as a tensor map, or 0.
    """

    kernel: Kernel
    grid: int
    threads: int
    shared: int
    early: bool
    vector_tiles: int
    units: int
    whole: int
    split: int
    partial: int
    box: int


def _plan(operand: GemmOperand, count: int, number: str, result: str, added: bool, aligned: bool) -> Sequence[GemmStep]:
    """A step for every segment, computed once for each number of vectors."""
    key = (count, result, added, aligned)
    found: Sequence[GemmStep] | None = operand.plans.get(key)
    if found is None:
        found = _steps(operand, _shapes(operand, count, number, result, added), count, aligned)
        operand.plans[key] = found
    return found


def _shapes(operand: GemmOperand, count: int, number: str, result: str, added: bool) -> Sequence[GemmShape]:
    engine, last = engine_of(operand.gpu), len(operand.segments) - 1
    return [
        gemm_shape(
            segment.layout, count, operand.shape[0], KINDS[number], KINDS[result] if k == last else 0, engine,
            added=added or k > 0,
        )
        for k, segment in enumerate(operand.segments)
    ]  # fmt: skip


def _steps(operand: GemmOperand, shapes: Sequence[GemmShape], count: int, aligned: bool) -> Sequence[GemmStep]:
    return tuple(_step(operand, shape if aligned else replace(shape, paired=False), count) for shape in shapes)


def _step(operand: GemmOperand, shape: GemmShape, count: int) -> GemmStep:
    from .kernel import gemm_kernel

    vector_tiles = -(-count // shape.vectors)
    tiles = -(-operand.shape[0] // shape.rows) * vector_tiles
    most = shape.blocks * device.processors(operand.gpu)
    grid = whole_for(tiles, most) if shape.engine == "wgmma" else tiles if shape.engine == "few" else 0
    whole = tiles
    if not grid:
        grid = blocks_for(tiles, shape.steps, most)
        # what blocks share is more than a tile for each: few blocks have parts of the same one
        whole = max(0, tiles // grid - (tiles % grid > 0)) * grid if shape.engine == "wgmma" and grid else 0
    units = (tiles - whole) * shape.steps
    split = units // shape.steps if grid and (units % grid or units // grid % shape.steps) else 0
    if (units + 1) * grid > LIMIT or count * max(operand.shape) > LIMIT or split > TICKETS:
        raise error("BCQ-E554", found=f"{count} vectors", expected="fewer in one product")
    return GemmStep(
        kernel=gemm_kernel(shape), grid=grid, threads=shape.threads, shared=shape.shared_bytes,
        early=operand.settled and (shape.early or shape.engine == "wgmma"), vector_tiles=vector_tiles,
        units=units, whole=whole, split=split, partial=2 * grid * shape.partial_words,
        box=shape.vectors if shape.engine == "wgmma" else 0,
    )  # fmt: skip


def _launch(operand: GemmOperand, plan: Sequence[GemmStep], x: Any, y: Any, addend: Any) -> None:
    """Each segment adds its product to that of the previous one; only the last result has the type of y."""
    count, (rows, columns) = x.shape[0], operand.shape  # len() of a tensor takes ten times as long
    if not count:
        return
    taken = x if operand.perm is None else device.columns(x, operand.perm)
    total, addend_step = addend, 0
    for k, (segment, step) in enumerate(zip(operand.segments, plan, strict=True)):
        target = y if k == len(plan) - 1 else device.empty_like(x, (count, rows), "F32")
        own, partials = operand.tickets, segment.row_scale
        if step.split:
            own = tickets(operand.tickets, step.split)
            partials = device.empty_like(x, (step.partial,), "F32")
        given = TensorMap(taken, segment.start, segment.layout.width, step.box) if step.box else taken
        step.kernel.launch(
            (step.grid,), step.threads, segment.codes, segment.numbers, segment.row_scale, given,
            segment.row_scale if total is None else total, target, partials, own,
            rows, -(-rows // 64), columns, segment.start, count, step.units, step.vector_tiles, addend_step, step.whole,
            shared=step.shared, early=step.early,
        )  # fmt: skip
        total, addend_step = target, rows
    if operand.outliers is not None:
        from bcqfmt.kernels.outliers import add_entries

        add_entries(y, operand.outliers, x)
