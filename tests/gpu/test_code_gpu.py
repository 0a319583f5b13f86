"""Products of 4-bit codes with several vectors on a GPU: right, the same bits twice, within buffers, in a graph."""

from __future__ import annotations

import pytest
import torch

import kernel_samples as ks
import sim_code
from bcqfmt.kernels import reference
from bcqfmt.kernels.code_gemv import code_gemv, code_operand
from gpu_arrays import to_gpu, twice


@pytest.mark.parametrize(
    ("rows", "columns", "g", "batch", "dtype"),
    [(4096, 4096, 128, 8, "F16"), (1000, 11008, 128, 5, "BF16"), (77, 396, 396, 1, "F16"), (2000, 8192, 256, 8, "F16")],
)
def test_products(rows: int, columns: int, g: int, batch: int, dtype: str) -> None:
    weight = sim_code.weight(rows, columns, g)
    x = ks.vectors(batch, columns, dtype)
    placed, given = code_operand(weight), to_gpu(x)
    found = twice((batch, rows), torch.float32, lambda out: code_gemv(placed, given, out))
    assert reference.relative_error(found.cpu().numpy(), reference.product(weight, x)) < 2e-4


def test_in_a_graph() -> None:
    placed, x = code_operand(sim_code.weight(512, 1024)), to_gpu(ks.vectors(4, 1024, "F16"))
    expected = code_gemv(placed, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = code_gemv(placed, x)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
