"""Times of the fast product with outliers: added up in the same launch, and by a launch of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bcqfmt.integrations.bench_kernels import AROUND, Row, cublas, early_and_alone, random_operand, replayed
from bcqfmt.kernels import bit_gemv
from bcqfmt.kernels.bit_layout import BitLayout
from bcqfmt.kernels.cuda_outliers import csr_outliers
from bcqfmt.kernels.limits import ROWS
from bcqfmt.kernels.outlier_entries import Entries

__all__ = ["for_all_shares", "random_outliers", "with_outliers"]

SHAPES = ((28672, 8192), (11008, 4096), (4096, 4096))
SHARES = (0.0, 0.002, 0.005, 0.015)
_BITS, _GROUP = 4, 128
Measure = Callable[[int, int, float, dict[str, float]], Iterator[Row]]


def with_outliers(speed: float) -> Iterator[Row]:
    """One vector, affine weights of 4 bits in groups of 128; outliers of 0, 0.2, 0.5 and 1.5 %."""
    return for_all_shares(partial(_product, speed))


def for_all_shares(measure: Measure) -> Iterator[Row]:
    """``measure(rows, columns, share, {"cuBLAS fp16": microseconds})`` for every shape and share of outliers."""
    for rows, columns in SHAPES:
        dense = {"cuBLAS fp16": cublas(rows, columns, 1)}
        for share in SHARES:
            yield from measure(rows, columns, share, dense)


def _product(speed: float, rows: int, columns: int, share: float, peers: dict[str, float]) -> Iterator[Row]:
    layout = BitLayout(_BITS, columns, _GROUP, "affine", "F16")
    count = max(2, min(60, AROUND * 8 // (rows * columns * _BITS) + 1))
    weights, apart = [], []
    for _ in range(count):
        entries, csr = random_outliers(rows, columns, share)
        weights.append(replace(random_operand(layout, rows, columns), outliers=entries))
        apart.append(csr)
    torch.cuda.synchronize()
    x = torch.randn(1, columns, device="cuda", dtype=torch.float16)
    y = torch.empty(1, rows, device="cuda", dtype=torch.float16)
    segment, extra = weights[0].segments[0], weights[0].outliers
    nbytes = 4 * (segment.planes.numel() + segment.numbers.numel()) + 2 * (rows + columns)
    nbytes += 0 if extra is None else extra.nbytes
    name = f"bits, affine, {100 * share:g} % outliers" if share else "bits, affine"

    def row(kernel: str, taken: float, alone: float | None = None) -> Row:
        return Row(kernel, rows, columns, _BITS, _GROUP, 1, taken, nbytes / speed * 1e6, peers, nbytes, alone=alone)

    yield row(name, *early_and_alone(lambda weight: bit_gemv.bit_gemv(weight, x, out=y), weights))
    if share:
        bare = [replace(weight, outliers=None) for weight in weights]

        def both(i: int) -> None:
            bit_gemv.bit_gemv(bare[i % count], x, out=y)
            indptr, indices, values = apart[i % count]
            csr_outliers(y, indptr, indices, values, x)

        yield row(f"{name}, two launches", replayed(both, 2 * count))


def random_outliers(rows: int, columns: int, share: float) -> tuple[Entries | None, Any]:
    """That share of a matrix as a fused product takes it, and as (indptr, indices, values) on the GPU; None for 0."""
    if not share:
        return None, None
    gpu: Any = {"device": "cuda"}
    tiles = -(-rows // ROWS)
    counts = torch.binomial(torch.full((rows,), float(columns), **gpu), torch.tensor(share, **gpu))
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
