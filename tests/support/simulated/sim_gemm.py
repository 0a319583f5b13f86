"""What the tests ask of the simulator about the product of many vectors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels import ptx
from bcqfmt.kernels.gemm import gemm, gemm_operand
from bcqfmt.kernels.gemm.shape import FewShape, GemmShape
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime.limits import KINDS
from simulated.sim_kernels import Guarded, guarded


def product(
    weight: BcqWeight, x: Any, kind: str, *, result: str = "F32", engine: str = "few", vectors: int = 8,
    groups: int = 1, depth: int = 1, stages: int = 3, height: int = 1, producers: int = 1, early: bool = False,
    addend: Any = None,
) -> Guarded:  # fmt: skip
    """``x W^T`` with small blocks of threads."""
    placed = gemm_operand(operand(weight), kind)
    last = len(placed.segments) - 1
    shapes = [
        (FewShape if engine == "few" else GemmShape)(
            segment.layout, vectors, KINDS[kind], KINDS[result] if k == last else 0, engine, groups, depth, stages,
            added=k > 0 or addend is not None, paired=weight.spec.out % 2 == 0, height=height, producers=producers,
            early=early,
        )
        for k, segment in enumerate(placed.segments)
    ]  # fmt: skip
    held = np.ascontiguousarray(x)

    def run(out: Any) -> None:
        gemm(placed, held, out=out, addend=addend, shapes=shapes)

    return guarded((x.shape[0], weight.spec.out), result, run, small=64)


def in_parts(weight: BcqWeight, x: Any, kind: str, part: int, *, addend: Any = None) -> Guarded:
    """The same with the shapes that `gemm` chooses, in launches of at least ``part`` vectors."""
    placed, held = gemm_operand(operand(weight), kind), np.ascontiguousarray(x)

    def run(out: Any) -> None:
        with mock.patch.multiple("bcqfmt.kernels.gemm", NARROW_PART=part, ROUNDED=8):
            gemm(placed, held, out=out, addend=addend)

    return guarded((x.shape[0], weight.spec.out), "F32", run, small=64)


def without(forgotten: str, weight: BcqWeight, x: Any, kind: str, **options: Any) -> Guarded:
    """The same by a kernel that has forgotten an instruction."""
    with mock.patch.object(ptx, forgotten, return_value=None):
        return product(weight, x, kind, **options)


def dense(weight: BcqWeight, kind: str) -> list[Any]:
    """The matrix that is decoded from the codes, rounded once, and to the logical dtype first; as bits."""
    made, _parts = gpu_weight(weight.spec, parts := weight.to_torch()), parts
    assert made is not None
    found = [made.decoder(kind, twice=twice)[1]() for twice in (False, True)]
    return [matrix.view(torch.int16).numpy() for matrix in found]
