"""Products with 2/4-bit weights (`mixed24`): the weight on a device, the launch with its checks.

::

    operand = mixed_operand(weight)                                     # BCQ-E553 where the kernel cannot take it
    y = mixed_gemv(operand, x)                                          # x (1, in) or (2, in)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bcqfmt.errors import error
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.outliers import Entries, OutlierNeeds, arguments, entries_of
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_product, check_same_device
from bcqfmt.kernels.runtime.launch import Plans, Step
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT, ROWS
from bcqfmt.weight.weight import BcqWeight

from .layout import FOUR_COLUMNS, TWO_COLUMNS, pack_units, segments_of
from .shape import MixedShape, MixedSpace, preferred, space_for

BATCH = 2  # vectors of one launch
_COLUMNS = 65535  # reordered columns are 16-bit numbers


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MixedOperand:
    """A matrix (out, in) for :func:`mixed_gemv`.

    ``units`` and ``perm`` are flat int32: what `layout` says, and two 16-bit columns in a word for every padded stored
    column. ``settled``: as in `bits.BitOperand`, all work that wrote these tensors has finished.
    """

    shape: tuple[int, int]
    twos: int
    fours: int
    units: Any
    perm: Any
    outliers: Entries | None = None
    settled: bool = False
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it is on; None on the host."""
        return device.gpu_of(self.units)


def mixed_operand(weight: BcqWeight, target: Any = None) -> MixedOperand:
    """A weight of a 2-bit segment with second-order scales, a 4-bit segment, or both, on a device.

    Groups of 16 columns with scale codes of at most 4 bits, second-order numbers for 16 rows (or multiples); 4-bit
    groups are multiples of 128 or the whole segment, with F16 scales; both layouts, with or without perm and outliers.
    Everything else is refused with BCQ-E553. Reads and checks the whole weight.
    """
    plain = weight.to_canonical()
    whole = operand(plain)
    two, four = segments_of(plain)
    rows, columns = whole.shape
    if columns > _COLUMNS:
        raise error("BCQ-E553", tensor=weight.name, found=f"{columns} columns", expected=f"at most {_COLUMNS}")
    units = pack_units(two, four)
    if units.size > LIMIT:
        raise error("BCQ-E554", tensor=weight.name, found=f"{units.size} words", expected=f"at most {LIMIT}")
    widths = [0 if part is None else part.codes.shape[1] for part in (two, four)]
    twos, fours = -(-widths[0] // TWO_COLUMNS), -(-widths[1] // FOUR_COLUMNS)
    order = np.arange(columns) if whole.perm is None else whole.perm
    places = np.full(twos * TWO_COLUMNS + fours * FOUR_COLUMNS, columns, np.uint16)  # beyond the last: zeros
    places[: widths[0]] = order[: widths[0]]
    places[twos * TWO_COLUMNS :][: widths[1]] = order[widths[0] :]
    outliers = entries_of(whole.outliers, rows, columns, target)
    words, columns_of = device.upload(units, target), device.upload(places.view(np.uint32), target)
    device.settle(words)
    return MixedOperand(
        shape=whole.shape, twos=twos, fours=fours, units=words, perm=columns_of, outliers=outliers, settled=True
    )


def mixed_gemv(operand: MixedOperand, x: Any, out: Any = None, *, shape: MixedShape | None = None) -> Any:
    """``x W^T`` for x (batch, in) with batch 1 or 2, float16, bfloat16 or float32, on a GPU of capability 9.0.

    ``out``: (batch, out) in any of these types, by default new and of x's. ``shape``: by default what
    :func:`shape_for` says. Same bits at every call.
    """
    device.require_capability(9, 0, operand.gpu)
    batch, dtype, y, result = check_product(operand.shape, x, out, BATCH)
    check_same_device(x=x, out=y, weight=operand.units)
    step = plan_of(operand, batch, dtype, result) if shape is None else _step(operand, batch, shape)
    launch(operand, step, x, y)
    return y


def plan_of(operand: MixedOperand, batch: int, dtype: str, result: str) -> Step:
    """The launch for ``batch`` vectors of type ``dtype`` with a result of type ``result``, computed once.

    BCQ-E553 where x does not fit, BCQ-E551 where the weight's GPU is not of capability 9.0.
    """
    key = (batch, dtype, result)
    if key not in operand.plans:
        device.require_capability(9, 0, operand.gpu)
        found = shape_for(operand, batch, KINDS[dtype], KINDS[result])
        operand.plans[key] = _step(operand, batch, found)
    step: Step = operand.plans[key]
    return step


def launch(operand: MixedOperand, step: Step, x: Any, y: Any, addend: None = None) -> None:
    """Start the kernel, for arrays that were checked: x and y may have any dimensions of that many elements.

    No addend: the argument is there for callers that do not know which product they start.
    """
    rows, columns = operand.shape
    indptr, entries, count = arguments(operand.outliers, operand.perm)
    step.kernel.launch(
        step.grid, step.threads,
        operand.units, operand.perm, x, indptr, entries, y, rows, -(-rows // ROWS), columns, operand.twos,
        operand.fours, count, step.room, shared=step.shared, early=operand.settled,
    )  # fmt: skip


def multiply(operand: MixedOperand, dtype: str, x: Any, y: Any, addend: None = None) -> None:
    """:func:`mixed_gemv` for arrays of ``dtype`` that were checked, x (batch, in) at any address; no addend."""
    launch(operand, plan_of(operand, len(x), dtype, dtype), device.aligned(x), y)


def _step(operand: MixedOperand, batch: int, shape: MixedShape | None) -> Step:
    from .kernel import mixed_gemv_kernel

    rows, columns = operand.shape
    space = None if shape is None else _space(operand, shape)
    if shape is None or space is None:
        found = f"{columns} columns, {batch} vectors"
        raise error("BCQ-E553", found=found, expected="vectors that fit into shared memory")
    grid = (min(device.processors(operand.gpu), -(-rows // ROWS)),)
    return Step(mixed_gemv_kernel(shape), grid, shape.threads, space.shared_bytes, space.room)


def batch_limit(operand: MixedOperand, dtype: str) -> int:
    """How many vectors of this type a launch takes; 0 where not one fits into shared memory, or for another type."""
    kind = KINDS.get(dtype)
    if kind is None:
        return 0
    return next((batch for batch in range(BATCH, 0, -1) if shape_for(operand, batch, kind, kind) is not None), 0)


def shape_for(operand: MixedOperand, batch: int, kind: int, out: int) -> MixedShape | None:
    """The shape of a product, the first of those that were measured to be best and fit; None where none does."""
    vectors = batch * MixedShape(batch, kind, out, 0).parts
    extra = operand.outliers
    size, share = (0, 0.0) if extra is None else (extra.size, extra.count / (operand.shape[0] * operand.shape[1]))
    for slices, sides, stages in preferred(vectors, share):
        most = min(slices, operand.twos + operand.fours)
        shape = MixedShape(batch, kind, out, size, most, sides, stages)
        if _space(operand, shape) is not None:
            return shape
    return None


def _space(operand: MixedOperand, shape: MixedShape) -> MixedSpace | None:
    columns = operand.shape[1]
    return space_for(shape, operand.twos, operand.fours, columns, OutlierNeeds.of(operand.outliers, columns))
