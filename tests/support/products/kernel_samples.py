"""Weights for kernels: any encoding, number of planes, group size and shape, with or without the extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import numpy_dtype

ENCODINGS = ("affine", "bcq", "float-zero", "offset", "second-order")

TABLES = {
    "table": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "short table": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],  # a byte holds each as float16
}


def weight(
    encoding: str,
    q: int,
    rows: int,
    columns: int,
    group_size: int,
    *,
    seed: int = 0,
    dtype: str = "F16",
    numbers: str = "F16",
    perm: bool = False,
    outliers: str = "",
    share: float = 0.05,
) -> BcqWeight:
    """One segment of random codes; float-zero ones have zeros in halves, which F16 and F32 can subtract exactly."""
    rng = np.random.default_rng((seed, q, rows, columns, group_size))
    groups = -(-columns // group_size)
    kind = numpy_dtype(numbers)
    scale = rng.normal(1, 0.3, (rows, groups)).astype(kind)
    codes = rng.integers(0, 2**q, (rows, columns))
    options: dict[str, Any] = {"group_size": group_size, "dtype": numpy_dtype(dtype)}
    if encoding == "affine":
        zeros = rng.integers(0, 2**q + 1, (rows, groups))
        made = BcqWeight.from_affine(codes, scale, zeros, bits=q, **options)
    elif encoding == "bcq":
        alpha = rng.normal(1, 0.5, (q, rows, groups)).astype(kind)
        bias = rng.normal(0, 0.5, (rows, groups)).astype(kind)
        bits = rng.integers(0, 2, (q, rows, columns))
        made = BcqWeight.from_bcq(bits, alpha, bias if seed % 2 == 0 else None, **options)
    elif encoding == "float-zero":
        zeros = (rng.integers(0, 2 ** (q + 1), (rows, groups)) / 2).astype(kind)
        made = BcqWeight.from_float_zero(codes, scale, zeros, bits=q, **options)
    elif encoding in TABLES:
        made = BcqWeight.from_table(codes, scale, TABLES[encoding], **options)
    elif encoding == "offset":
        made = BcqWeight.from_offset(codes, scale, rng.normal(0, 1, (rows, groups)).astype(kind), bits=q, **options)
    else:
        height = 1 + seed % 3
        row_groups = -(-rows // height)
        made = BcqWeight.from_affine(codes, scale, 2 ** (q - 1), bits=q, **options).with_second_order(
            rng.integers(0, 16, (rows, groups)),
            rng.normal(1, 0.3, (row_groups, groups)).astype(kind),
            rng.integers(0, 16, (row_groups, groups)),
            bits=4,
            rows=height,
        )
    if perm:
        made = made.with_perm(rng.permutation(columns))
    return with_outliers(made, outliers, share, seed) if outliers else made


def with_outliers(made: BcqWeight, mode: str, share: float, seed: int = 0) -> BcqWeight:
    """That share of the elements of every segment, row by row; some rows have none."""
    rng = np.random.default_rng((seed, 7))
    chosen = rng.random((made.spec.out, made.spec.columns)) < share
    chosen[:: max(2, made.spec.out // 2)] = False
    indptr = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    values = rng.normal(0, 8, int(chosen.sum())).astype(np.float16)
    return made.with_outliers(indptr, np.nonzero(chosen)[1], values, mode=mode)


def in_few_rows(made: BcqWeight, full: Sequence[int], share: float = 0.02, values: Any = np.float16) -> BcqWeight:
    """Outliers (added) in a share of all places and in all places of the rows ``full``."""
    rng = np.random.default_rng(len(full))
    chosen = rng.random(made.shape) < share
    chosen[list(full)] = True
    indptr = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    return made.with_outliers(indptr, np.nonzero(chosen)[1], rng.normal(0, 3, int(chosen.sum())).astype(values))


def mixed(rows: int, low: int, high: int, *, seed: int = 0, outliers: str = "add", perm: bool = True) -> BcqWeight:
    """A 2-bit segment with second-order scales beside a 4-bit one, reordered, with outliers."""
    pieces = [weight("second-order", 2, rows, low, 16, seed=seed), weight("affine", 4, rows, high, 32, seed=seed)]
    order = np.random.default_rng(seed).permutation(low + high) if perm else None
    made = BcqWeight.from_segments(pieces, perm=order)
    return with_outliers(made, outliers, 0.03, seed) if outliers else made


def vectors(batch: int, columns: int, dtype: str = "F32", seed: int = 0) -> Any:
    """Activations (batch, columns), a few of them large."""
    rng = np.random.default_rng((seed, batch, columns))
    x = rng.normal(size=(batch, columns))
    x[:, :: max(1, columns // 3)] *= 20
    return x.astype(numpy_dtype(dtype))
