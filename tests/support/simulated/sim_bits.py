"""What the tests ask of the simulator about the product on binary tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.kernels.bits import bit_gemv, bit_operand
from bcqfmt.kernels.bits.shape import BitShape, ByteShape, ShortShape
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime.limits import KINDS
from simulated.sim_kernels import Guarded, guarded


def bits(
    weight: BcqWeight, x: Any, kind: str, *, result: str = "F32", parts: int = 2, slices: int = 2, tiles: int = 1,
    stages: int = 2, planes: int | None = None, addend: Any = None, bulk: bool = True,
) -> Guarded:  # fmt: skip
    """``x W^T`` with small blocks: ``slices`` x ``tiles`` warps."""
    placed = bit_operand(operand(weight, planes=planes))
    last, entry = len(placed.segments) - 1, 0 if placed.outliers is None else placed.outliers.size
    shapes = [
        BitShape(
            s.layout, x.shape[0], KINDS[kind], KINDS[result] if k == last else 0, parts, placed.perm is not None,
            k > 0 or addend is not None, min(slices, s.layout.chunks), tiles, stages,
            entry if k == last else 0, bulk,
        )
        for k, s in enumerate(placed.segments)
    ]  # fmt: skip
    return _guarded(placed, weight, x, result, addend, shapes)


def whole_bytes(
    weight: BcqWeight, x: Any, kind: str, *, result: str = "F32", slices: int = 2, tiles: int = 1, stages: int = 2,
    addend: Any = None, bulk: bool = True,
) -> Guarded:  # fmt: skip
    """The same with bytes of x, in groups of 8 and 16 columns as well."""
    placed = bit_operand(operand(weight))
    last, entry = len(placed.segments) - 1, 0 if placed.outliers is None else placed.outliers.size
    shapes = [
        (ByteShape if s.layout.passes == 1 else ShortShape)(
            s.layout, x.shape[0], KINDS[kind], KINDS[result] if k == last else 0, placed.perm is not None,
            k > 0 or addend is not None, min(slices, s.layout.chunks), tiles, stages,
            entry if k == last else 0, bulk,
        )
        for k, s in enumerate(placed.segments)
    ]  # fmt: skip
    return _guarded(placed, weight, x, result, addend, shapes)


def by_itself(weight: BcqWeight, x: Any, *, addend: Any) -> Guarded:
    """As many launches as it takes, in the shapes that are chosen."""
    return _guarded(bit_operand(operand(weight)), weight, x, "F32", addend, None)


def _guarded(placed: Any, weight: BcqWeight, x: Any, result: str, addend: Any, shapes: Any) -> Guarded:
    held = np.ascontiguousarray(x)

    def run(out: Any) -> None:
        bit_gemv(placed, held, out=out, addend=addend, shapes=shapes)

    return guarded((x.shape[0], weight.spec.out), result, run)
