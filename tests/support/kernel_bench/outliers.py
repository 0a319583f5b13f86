"""Times of the fast product with outliers: added up in the same launch, and by a launch of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bcqfmt.bench import CYCLED, relative_error, replayed
from bcqfmt.kernels import bits as bit_gemv
from bcqfmt.kernels.bits.layout import BitLayout
from bcqfmt.kernels.bits.shape import AnyShape, BitShape, Wanted, product_shape
from bcqfmt.kernels.operands.outliers import NO_OUTLIERS, Entries, OutlierNeeds
from bcqfmt.kernels.outliers import csr_outliers
from bcqfmt.kernels.runtime.limits import ROWS

from .peers import cublas
from .timing import Row, early_and_alone
from .weights import copies, random_vectors, random_weight

__all__ = ["for_all_shares", "random_outliers", "with_outliers"]

SHAPES = ((28672, 8192), (11008, 4096), (4096, 4096))
SHARES = (0.0, 0.002, 0.005, 0.015)
SEVERAL = (2, 4, 8)  # vectors, with the largest shape only
_BITS, _GROUP = 4, 128
_FEW, _HALF = 0.01, 0.5  # skewed: this share of the rows has this share of the outliers
Measure = Callable[[int, int, float, dict[str, float]], Iterator[Row]]


def with_outliers(speed: float) -> Iterator[Row]:
    """Affine weights of 4 bits in groups of 128 with outliers of 0, 0.2, 0.5 and 1.5 %, and one vector.

    Then 0.5 % of which half are in one row of a hundred; then two, four and eight vectors. "Two launches" is what
    `bit_gemv` does by itself with eight, which do not fit together with outliers; with fewer, outliers as plain CSR.
    """
    yield from for_all_shares(partial(_product, speed))
    for rows, columns in SHAPES:
        dense = {"cuBLAS fp16": cublas(rows, columns, 1)}
        yield from _product(speed, rows, columns, 0.005, dense, skewed=True)
    rows, columns = SHAPES[0]
    for batch in SEVERAL:
        dense = {"cuBLAS fp16": cublas(rows, columns, batch)}
        for share in (0.0, 0.005, 0.015):
            yield from _product(speed, rows, columns, share, dense, batch=batch)


def for_all_shares(measure: Measure) -> Iterator[Row]:
    """``measure(rows, columns, share, {"cuBLAS fp16": microseconds})`` for every shape and share of outliers."""
    for rows, columns in SHAPES:
        dense = {"cuBLAS fp16": cublas(rows, columns, 1)}
        for share in SHARES:
            yield from measure(rows, columns, share, dense)


def _layout(columns: int) -> BitLayout:
    return BitLayout(_BITS, columns, _GROUP, "affine", "F16")


def _shape(columns: int, batch: int, needs: OutlierNeeds) -> AnyShape | None:
    """How that many vectors are multiplied by one launch; None where they do not fit."""
    return product_shape(Wanted(_layout(columns), batch, 1, 1, needs=needs))


def _product(
    speed: float, rows: int, columns: int, share: float, peers: dict[str, float], *, batch: int = 1,
    skewed: bool = False,
) -> Iterator[Row]:  # fmt: skip
    weight, x = random_weight("affine", _BITS, rows, columns, _GROUP), random_vectors(batch, columns)
    y = torch.empty(batch, rows, device="cuda", dtype=torch.float16)
    count = max(2, min(60, CYCLED * 8 // (rows * columns * _BITS) + 1))
    outliers = [random_outliers(rows, columns, share, skewed=skewed) for _ in range(count)]
    bare, apart = copies(weight.operand(_layout(columns)), count), [csr for _, csr in outliers]
    weights = [replace(one, outliers=entries) for one, (entries, _) in zip(bare, outliers, strict=True)]
    torch.cuda.synchronize()
    segment, extra = weights[0].segments[0], weights[0].outliers
    nbytes = 4 * (segment.planes.numel() + segment.numbers.numel()) + 2 * batch * (rows + columns)
    nbytes += 0 if extra is None else extra.nbytes
    exact = weight.dense(x)[1] + (product_of(apart[0], x) if share else 0)
    shape, alike = _shape(columns, batch, OutlierNeeds.of(extra, columns)), _shape(columns, batch, NO_OUTLIERS)
    way = "bits" if isinstance(shape or alike, BitShape) else "bytes"
    name = f"{way}, affine, {100 * share:g} % outliers" if share else f"{way}, affine"
    name += " in few rows" if skewed else ""

    def product(operand: bit_gemv.BitOperand) -> None:
        bit_gemv.bit_gemv(operand, x, out=y, shapes=(shape,))

    def both(i: int) -> None:
        if batch > bit_gemv.FUSED:
            bit_gemv.bit_gemv(weights[i % count], x, out=y)
            return
        bit_gemv.bit_gemv(bare[i % count], x, out=y)
        indptr, indices, values = apart[i % count]
        csr_outliers(y, indptr, indices, values, x)

    def row(kernel: str, taken: float, alone: float | None = None) -> Row:
        floor, error = nbytes / speed * 1e6, relative_error(y, exact)
        return Row(kernel, rows, columns, _BITS, _GROUP, batch, taken, floor, peers, nbytes, error, alone=alone)

    if shape is not None:
        taken, alone = early_and_alone(product, weights)
        product(weights[0])
        yield row(name, taken, alone)
    if share:
        taken = replayed(both, 2 * count)
        both(0)
        yield row(f"{name}, two launches", taken)


def product_of(csr: Any, x: torch.Tensor) -> torch.Tensor:
    """``x S^T`` (batch, rows) in float64 for S as (indptr, indices, values)."""
    indptr, indices, values = csr
    row = torch.repeat_interleave(torch.arange(len(indptr) - 1, device=x.device), indptr.diff())
    terms = x.double()[:, indices.long()] * values.double()
    return torch.zeros(len(x), len(indptr) - 1, dtype=torch.float64, device=x.device).index_add_(1, row, terms)


def random_outliers(rows: int, columns: int, share: float, *, skewed: bool = False) -> tuple[Entries | None, Any]:
    """That share of a matrix as a fused product takes it, and as (indptr, indices, values) on the GPU; None for 0.

    ``skewed``: half of them are in one row of a hundred.
    """
    if not share:
        return None, None
    gpu: Any = {"device": "cuda"}
    tiles = -(-rows // ROWS)
    shares = torch.full((rows,), share, **gpu)
    if skewed:
        few = max(1, round(_FEW * rows))
        shares[:] = share * _HALF * rows / (rows - few)
        shares[torch.randperm(rows, **gpu)[:few]] = share * _HALF * rows / few
    counts = torch.binomial(torch.full((rows,), float(columns), **gpu), shares)
    indptr = torch.zeros(tiles * ROWS + 1, dtype=torch.int32, **gpu)
    indptr[1 : rows + 1] = counts.int().cumsum(0)
    indptr[rows + 1 :] = indptr[rows]
    total = int(indptr[rows])
    indices = torch.randint(0, columns, (total,), dtype=torch.int32, **gpu)
    values = torch.randn(total, **gpu).half()
    entries = torch.zeros(-(-total // 4) * 4, dtype=torch.int32, **gpu)
    entries[:total] = indices | values.view(torch.int16).int() << 16
    bounds = indptr.cpu().numpy().astype(np.int64)
    most = int(np.diff(bounds[::ROWS]).max()) * 4 + 16
    made = Entries(indptr=indptr, entries=entries, count=total, size=4, most=most)
    return made, (indptr[: rows + 1].contiguous(), indices, values)
