"""The operators of BcqLinear as they run on a GPU, in the simulator, where host tensors stand for device tensors."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch import BcqLinear, linear_op
from bcqfmt.kernels.runtime import device
from products import kernel_samples as ks


def products(weight: BcqWeight, batch: int) -> tuple[Any, Any, Any]:
    """x (batch, 1, in), its product, and the dense matrix as float32."""
    layer = BcqLinear.from_weight(weight)
    x = torch.from_numpy(ks.vectors(batch, weight.spec.columns)).reshape(batch, 1, -1)
    y = linear_op._linear_cuda(x, layer.parts(), layer.text, 0, 0)
    again = linear_op._linear_cuda(x, layer.parts(), layer.text, 0, 0)
    assert torch.equal(y, again)
    assert linear_op._drop_freed() == 1
    dense = linear_op._values_cuda(layer.parts(), layer.text, 0, 0, layer.logical)
    return x.numpy(), y.numpy(), dense.float().numpy()


def with_bias(weight: BcqWeight, batch: int, capability: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """x (batch, in) and a bias (out) as float16, ``x W^T + bias``, and torch's product with the dense matrix, here."""
    bias = torch.from_numpy(ks.vectors(1, weight.spec.out)[0]).half()
    layer = BcqLinear.from_weight(weight, bias)
    x = torch.from_numpy(ks.vectors(batch, weight.spec.columns)).mul(32).round().div(32).half()  # held by all kernels
    with mock.patch.object(device, "capability", return_value=capability):
        y = linear_op._linear_cuda(x, layer.parts(), layer.text, 0, 0, layer.bias)
        assert torch.equal(y, linear_op._linear_cuda(x, layer.parts(), layer.text, 0, 0, layer.bias))
    dense = linear_op._values_cuda(layer.parts(), layer.text, 0, 0, layer.logical).half()
    same = torch.nn.functional.linear(x, dense, bias)
    return x.numpy(), bias.numpy(), y.numpy(), same.numpy()


def released(weight: BcqWeight, capability: tuple[int, int], batches: list[int]) -> tuple[list[bool], list[Any], Any]:
    """Which parts are held after :meth:`BcqLinear.release`, products before and after it, and the dense matrix after.

    The memory that was let go is overwritten.
    """
    layer = BcqLinear.from_weight(weight)
    x = torch.from_numpy(ks.vectors(max(batches), weight.spec.columns)).half()
    with mock.patch.object(device, "capability", return_value=capability):
        before = [linear_op._linear_cuda(x[:count], layer.parts(), layer.text, 0, 0).numpy() for count in batches]
        held = layer.parts()
        layer.release(torch.float16, batches)
        freed = [part is not old for part, old in zip(layer.parts(), held, strict=True)]
        for old in [old for old, gone in zip(held, freed, strict=True) if gone]:
            old.view(torch.uint8).fill_(0xA5)
        after = [linear_op._linear_cuda(x[:count], layer.parts(), layer.text, 0, 0).numpy() for count in batches]
        dense = linear_op._values_cuda(layer.parts(), layer.text, 0, 0, layer.logical).float().numpy()
    linear_op._cache.clear()  # what is prepared on the host keeps the parts, which are on it here
    return freed, [before, after], dense


def in_one_layout(weight: BcqWeight, batches: list[int]) -> tuple[list[bool], list[str], list[Any], list[Any]]:
    """With one layout: which parts are freed, which layouts there are, products and those with the dense matrix."""
    layer = BcqLinear.from_weight(weight)
    x = torch.from_numpy(ks.vectors(max(batches), weight.spec.columns)).half()
    with (
        mock.patch.object(device, "capability", return_value=(9, 0)),
        mock.patch.dict(os.environ, BCQFMT_GPU_LAYOUTS="one"),
    ):
        held = layer.parts()
        made = linear_op.gpu_operand(held, layer.text, 0)
        for count in batches:
            linear_op._linear_cuda(x[:count], held, layer.text, 0, 0)
        layer.release(torch.float16, batches)
        freed = [part is not old for part, old in zip(layer.parts(), held, strict=True)]
        found = [linear_op._linear_cuda(x[:count], layer.parts(), layer.text, 0, 0) for count in batches]
    dense = torch.from_numpy(weight.dequantize("F32"))
    layouts = [name for name in ("bits", "mixed", "look_up", "exact") if name in made.__dict__]
    layouts += ["gemm"] * len(made._gemm)
    linear_op._cache.clear()
    return (
        freed,
        layouts,
        [y.float().numpy() for y in found],
        [(x[:count].float() @ dense.T).numpy() for count in batches],
    )
