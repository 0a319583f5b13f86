"""Random weights as `matmul` takes them, which chooses the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels.matmul import MatmulWeight
from bcqfmt.kernels.operands import Operand, OperandSegment
from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec

from .weights import Weight, random_weight

__all__ = ["SHAPES", "TABLES", "chosen", "rotated"]

SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLES = {
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), "MXFP4": _FP4, "NVFP4": _FP4,
}  # fmt: skip
_ROTATED = 300e6  # bytes of weights that are used in turn
_ZERO = 8


def chosen(formula: str, q: int, rows: int, columns: int, g: int) -> tuple[Weight, MatmulWeight]:
    """A random weight, which has to be kept, and the same for `matmul`; zero points are 8 everywhere.

    ``formula``: affine, bcq or a name of ``TABLES``.
    """
    weight = random_weight("bcq" if formula == "bcq" else "affine", q, rows, columns, g)
    if formula == "bcq":
        return weight, weight.placed()
    if formula in TABLES:
        weight = replace(weight, formula="table", second=torch.tensor(TABLES[formula], device="cuda"))
        part: Any = OperandSegment(
            planes=weight.planes, start=0, width=columns, group_size=g, formula="table",
            first=weight.first.cpu().numpy(), second=weight.second.cpu().numpy(),
        )  # fmt: skip
        operand = Operand(name=formula, shape=(rows, columns), dtype="F16", segments=(part,), perm=None, outliers=None)
        return weight, MatmulWeight(operand)
    weight.second.fill_(_ZERO)
    segment = Segment(encoding="affine", bits=q, group_size=g, scale="F16", zero=_ZERO)
    spec = WeightSpec(scheme=Scheme(segments=(segment,)), shape=(rows, columns), dtype="F16", widths=(columns,))
    found = gpu_weight(spec, {"s0_planes": weight.planes, "s0_scale": weight.first})
    assert found is not None
    return weight, found


def rotated(formula: str, q: int, rows: int, columns: int, g: int) -> list[tuple[Weight, MatmulWeight]]:
    """As many of them as do not stay in the cache together."""
    several = max(2, min(8, int(_ROTATED / (rows * columns * q // 8)) + 1))
    return [chosen(formula, q, rows, columns, g) for _ in range(several)]
