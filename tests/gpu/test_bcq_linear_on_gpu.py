"""BcqLinear on a GPU: the same values as on the CPU, moves there and back, one graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch import BcqLinear
from products import kernel_samples as ks
from products import product_reference as reference

WEIGHTS = {"plain": ks.weight("affine", 4, 96, 512, 128), "mixed": ks.mixed(40, 192, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 8, 40])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_products_on_a_gpu(weight: BcqWeight, batch: int, dtype: torch.dtype) -> None:
    bias = torch.randn(weight.spec.out)
    layer = BcqLinear.from_weight(weight, bias).cuda()
    x = torch.randn(batch, 1, weight.spec.columns, device="cuda", dtype=dtype)
    y = layer(x)
    assert (y.dtype, y.device.type, y.shape) == (dtype, "cuda", (batch, 1, weight.spec.out))
    expected = reference.product(weight, x[:, 0].float().cpu().numpy()) + bias.numpy()
    bound = {torch.float32: 2e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[
        dtype
    ]  # dense float32 products may use TF32
    assert reference.relative_error(y[:, 0].float().cpu().numpy(), expected) < bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2, 4, 40, 5000])
def test_a_bias_is_added_before_the_sum_is_rounded(batch: int, dtype: torch.dtype) -> None:
    weight = ks.weight("affine", 3, 512, 512, 128)
    bias, x = torch.randn(512).to(dtype), torch.randn(batch, 512).mul(32).round().div(32).to(dtype)
    y = BcqLinear.from_weight(weight, bias).cuda()(x.cuda()).cpu()
    exact = torch.from_numpy(reference.product(weight, x.float().numpy())) + bias
    if batch > 1:  # `gemm`, whose values are rounded
        bound = 7e-4 if dtype == torch.float16 else 4e-3
        assert reference.relative_error(y.double().numpy(), exact.double().numpy()) < bound
        return
    assert (y != exact.to(dtype)).float().mean() < 0.05  # rounded twice, one in six


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_values_and_moves(weight: BcqWeight) -> None:
    layer = BcqLinear.from_weight(weight)
    for place in ("cuda", "cpu", "cuda"):
        layer.to(place)
        assert np.array_equal(layer.values().cpu().numpy(), weight.dequantize())
        assert layer.to_weight().digest() == weight.digest()


def test_one_graph_and_a_gradient() -> None:
    weight = WEIGHTS["plain"]
    layer = BcqLinear.from_weight(weight).cuda()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 512, device="cuda", requires_grad=True)
    y = compiled(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert x.grad is not None
    expected = torch.ones(4, 96).double() @ torch.from_numpy(weight.dequantize("float64"))
    assert reference.relative_error(x.grad.cpu().numpy(), expected.numpy()) < 2e-3


def test_a_layer_says_its_kernel_and_why(gpu: tuple[int, int]) -> None:
    layer = BcqLinear.from_weight(ks.weight("affine", 4, 96, 512, 8)).cuda()
    kernel, why = layer.path(9, torch.float16)
    assert (kernel, why) == (
        "dequantize",
        "segment 0 has groups of 8 columns: not 16, 32, a multiple of 64 or whole rows",
    )
    many = ("gemm", "") if gpu == (9, 0) else ("dequantize", "more than 256 vectors on a GPU that is not sm_90")
    assert BcqLinear.from_weight(WEIGHTS["plain"]).cuda().path(5000, torch.bfloat16) == many
