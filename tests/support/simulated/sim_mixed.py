"""2/4-bit weights, and their products in the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.kernels import mixed
from bcqfmt.kernels.outliers import csr_outliers
from simulated import sim_kernels
from simulated.sim_kernels import Guarded


def weight(
    rows: int,
    low: int,
    high: int,
    *,
    seed: int = 0,
    perm: bool = True,
    outliers: str = "",
    share: float = 0.03,
    height: int = 16,
    values: Any = np.float16,
) -> BcqWeight:
    """2-bit groups of 16 with second-order scales (``low`` columns), 4-bit groups of 128 (``high`` columns)."""
    rng = np.random.default_rng((seed, rows, low, high))
    pieces = []
    if low:
        groups, row_groups = -(-low // 16), -(-rows // height)
        plain = BcqWeight.from_affine(
            rng.integers(0, 4, (rows, low)), np.ones((rows, groups), np.float16), rng.integers(0, 4, (rows, groups)),
            group_size=16, bits=2,
        )  # fmt: skip
        pieces.append(
            plain.with_second_order(
                rng.integers(0, 16, (rows, groups)),
                rng.normal(0.01, 0.003, (row_groups, groups)).astype(np.float16),
                rng.integers(0, 16, (row_groups, groups)),
                bits=4,
                rows=height,
            )
        )
    if high:
        g = min(128, high)
        groups = -(-high // g)
        scale = rng.normal(0.02, 0.005, (rows, groups)).astype(np.float16)
        zeros = rng.integers(0, 16, (rows, groups))
        pieces.append(BcqWeight.from_affine(rng.integers(0, 16, (rows, high)), scale, zeros, group_size=g, bits=4))
    made = BcqWeight.from_segments(pieces, perm=rng.permutation(low + high) if perm else None)
    return with_outliers(made, outliers, share, seed, values) if outliers else made


def with_outliers(made: BcqWeight, mode: str, share: float, seed: int = 0, values: Any = np.float16) -> BcqWeight:
    """That share of the elements; every third row has none."""
    rng = np.random.default_rng((seed, 11))
    chosen = rng.random((made.spec.out, made.spec.columns)) < share
    chosen[::3] = False
    indptr = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    added = rng.normal(0, 0.5, int(chosen.sum())).astype(values)
    return made.with_outliers(indptr, np.nonzero(chosen)[1], added, mode=mode)


def product(weight: BcqWeight, x: Any, *, result: str = "F32", **shape: Any) -> Guarded:
    """``x W^T`` by the kernel for 2/4-bit weights; ``shape``: fields of MixedShape that differ."""
    placed = mixed.mixed_operand(weight)
    kinds = {"float32": 0, "float16": 1, "bfloat16": 2}
    names = {"F32": 0, "F16": 1, "BF16": 2}
    usual = mixed.shape_for(placed, x.shape[0], kinds[x.dtype.name], names[result])
    assert usual is not None
    chosen = usual._replace(**shape)

    def run(out: Any) -> None:
        mixed.mixed_gemv(placed, x, out, shape=chosen)

    return sim_kernels.guarded((x.shape[0], weight.spec.out), result, run)


def bytes_per_weight(weight: BcqWeight) -> float:
    """Bytes on the device per element."""
    made = mixed.mixed_operand(weight)
    return (made.units.nbytes + made.perm.nbytes + (0 if made.outliers is None else made.outliers.nbytes)) / weight.size


def checked(weight: BcqWeight, x: Any) -> Any:
    """The product as a program asks for it."""
    return mixed.mixed_gemv(mixed.mixed_operand(weight), x)


def outliers(y: Any, indptr: Any, indices: Any, values: Any, x: Any) -> Any:
    """``y + S x`` by the launch of its own."""
    found = y.copy()
    return csr_outliers(found, indptr, indices, values, x)
