"""2/4-bit products and outliers on the device at full size, against the float64 product of the normative decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels import mixed
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.outliers import csr_outliers
from products import product_reference as reference
from products.gpu_arrays import to_gpu, twice
from simulated import sim_mixed


def vectors(batch: int, columns: int, dtype: str) -> Any:
    return np.random.default_rng(columns).normal(size=(batch, columns)).astype(numpy_dtype(dtype))


@pytest.mark.sm_90
@pytest.mark.parametrize(
    ("rows", "low", "high", "batch", "dtype", "outliers", "share"),
    [
        (4096, 3072, 1024, 1, "F16", "add", 0.002),
        (4096, 3072, 1024, 2, "BF16", "replace", 0.015),
        (1001, 3008, 1080, 1, "F16", "add", 0.005),
        (2048, 6144, 2048, 1, "F32", "add", 0.002),
        (515, 8256, 2752, 1, "F16", "", 0.0),
        (17, 16, 0, 1, "F16", "", 0.0),
        (300, 0, 1000, 2, "F32", "add", 0.1),
        (128, 21504, 7168, 1, "F16", "add", 0.05),
    ],
)
def test_products(rows: int, low: int, high: int, batch: int, dtype: str, outliers: str, share: float) -> None:
    weight = sim_mixed.weight(rows, low, high, outliers=outliers, share=share)
    x = vectors(batch, low + high, dtype)
    placed, on_gpu = mixed.mixed_operand(weight), to_gpu(x)
    expected = reference.product(weight, x)
    found = twice((batch, rows), torch.float32, lambda out: mixed.mixed_gemv(placed, on_gpu, out))
    assert reference.relative_error(found.cpu().numpy(), expected) < 2e-5
    found = twice((batch, rows), torch.float16, lambda out: mixed.mixed_gemv(placed, on_gpu, out))
    assert reference.relative_error(found.cpu().numpy(), expected) < 1e-3


@pytest.mark.sm_90
def test_shares_of_the_work() -> None:
    weight = sim_mixed.weight(999, 3072, 1024, outliers="add", share=0.002)
    x = vectors(1, 4096, "F16")
    placed, on_gpu, expected = mixed.mixed_operand(weight), to_gpu(x), reference.product(weight, x)
    plain = mixed.shape_for(placed, 1, 1, 0)
    assert plain is not None
    for slices, sides, stages in ((1, 4, 2), (4, 4, 2), (8, 1, 5), (12, 1, 1), (5, 3, 4)):
        shape = plain._replace(slices=slices, sides=sides, stages=stages)
        found = twice((1, 999), torch.float32, lambda out: mixed.mixed_gemv(placed, on_gpu, out, shape=shape))  # noqa: B023
        assert reference.relative_error(found.cpu().numpy(), expected) < 2e-5


@pytest.mark.sm_90
def test_in_a_graph() -> None:
    weight: BcqWeight = sim_mixed.weight(256, 3072, 1024, outliers="add", share=0.002)
    placed, x = mixed.mixed_operand(weight), to_gpu(vectors(1, 4096, "F16"))
    y, z = (torch.empty(1, 256, device="cuda", dtype=torch.float16) for _ in range(2))
    mixed.mixed_gemv(placed, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed.mixed_gemv(placed, x, z)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, z)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_outliers_alone(dtype: str) -> None:
    weight = sim_mixed.weight(2000, 3072, 1024, outliers="add", share=0.015)
    found = operand(weight).outliers
    assert found is not None
    x = vectors(2, 4096, dtype)
    dense = np.zeros(weight.shape)
    dense[np.repeat(np.arange(2000), np.diff(found.indptr)), found.indices] = found.values
    arrays = [to_gpu(a) for a in (found.indptr, found.indices, found.values, x)]

    def run(out: torch.Tensor) -> None:
        csr_outliers(out.zero_(), *arrays)

    sums = twice((2, 2000), torch.float32, run)
    assert reference.relative_error(sums.cpu().numpy(), x.astype(float) @ dense.T) < 1e-6
