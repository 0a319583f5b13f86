"""The operators of BcqLinear as they run on a GPU, in the simulator, where host tensors stand for device tensors."""

from __future__ import annotations

from typing import Any

import torch

import kernel_samples as ks
from bcqfmt import BcqWeight
from bcqfmt.integrations import torch_cpu_ops
from bcqfmt.integrations.torch import BcqLinear


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
