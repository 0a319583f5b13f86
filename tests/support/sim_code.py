"""Plain 4-bit weights, and their products with several vectors in the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

import sim_kernels
from bcqfmt import BcqWeight
from bcqfmt.kernels import code_gemv
from sim_kernels import Guarded


def weight(rows: int, columns: int, group_size: int = 128, *, seed: int = 0, zeros: bool = True) -> BcqWeight:
    """4-bit codes with scales of both signs, zero points of 0..15 or 8."""
    rng = np.random.default_rng((seed, rows, columns))
    groups = -(-columns // group_size)
    scale = rng.normal(0, 0.02, (rows, groups)).astype(np.float16)
    zero = rng.integers(0, 16, (rows, groups)) if zeros else 8
    return BcqWeight.from_affine(rng.integers(0, 16, (rows, columns)), scale, zero, group_size=group_size, bits=4)


def product(weight: BcqWeight, x: Any, *, result: str = "F32", **shape: Any) -> Guarded:
    """``x W^T``; ``shape``: fields of CodeShape that differ."""
    placed = code_gemv.code_operand(weight)
    names = {"float16": "F16", "bfloat16": "BF16"}
    chosen = code_gemv.shape_for(placed, x.shape[0], names[x.dtype.name], result)
    assert chosen is not None

    def run(out: Any) -> None:
        code_gemv.code_gemv(placed, x, out, shape=chosen._replace(**shape))

    return sim_kernels.twice((x.shape[0], weight.spec.out), result, run)


def checked(weight: BcqWeight, x: Any) -> Any:
    """The product as a program asks for it."""
    return code_gemv.code_gemv(code_gemv.code_operand(weight), x)
