"""The operators of BcqLinear as they run on a GPU, in the simulator, where host tensors stand for device tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import kernel_samples as ks
from bcqfmt import BcqWeight
from bcqfmt.integrations.torch import BcqLinear
from bcqfmt.integrations.torch import linear_op as torch_cpu_ops
from bcqfmt.kernels.runtime import device


def products(weight: BcqWeight, batch: int) -> tuple[Any, Any, Any]:
    """x (batch, 1, in), its product, and the dense matrix as float32."""
    layer = BcqLinear.from_weight(weight)
    x = torch.from_numpy(ks.vectors(batch, weight.spec.columns)).reshape(batch, 1, -1)
    y = torch_cpu_ops._linear_cuda(x, layer.parts(), layer.text, 0, 0)
    again = torch_cpu_ops._linear_cuda(x, layer.parts(), layer.text, 0, 0)
    assert torch.equal(y, again)
    assert torch_cpu_ops.prepared_count() == 1
    dense = torch_cpu_ops._values_cuda(layer.parts(), layer.text, 0, 0, layer.logical)
    return x.numpy(), y.numpy(), dense.float().numpy()


def with_bias(weight: BcqWeight, batch: int, capability: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """x (batch, in) and a bias (out) as float16, ``x W^T + bias``, and the dense matrix as float32."""
    bias = torch.from_numpy(ks.vectors(1, weight.spec.out)[0]).half()
    layer = BcqLinear.from_weight(weight, bias)
    x = torch.from_numpy(ks.vectors(batch, weight.spec.columns)).mul(32).round().div(32).half()  # held by all kernels
    with mock.patch.object(device, "capability", return_value=capability):
        y = torch_cpu_ops._linear_cuda(x, layer.parts(), layer.text, 0, 0, layer.bias)
        assert torch.equal(y, torch_cpu_ops._linear_cuda(x, layer.parts(), layer.text, 0, 0, layer.bias))
    dense = torch_cpu_ops._values_cuda(layer.parts(), layer.text, 0, 0, layer.logical)
    return x.numpy(), bias.numpy(), y.numpy(), dense.float().numpy()
