"""From a model with BCQ layers to the dense model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bcqfmt.integrations.torch_module import BcqLinear
from bcqfmt.integrations.transformers_experts import ExpertList, ExpertStack

__all__ = ["make_dense"]


def make_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace every BCQ layer by an nn.Linear or parameter with its values, rounded to ``dtype`` if one is given."""
    for module in list(model.modules()):
        for leaf, held in list(module.__dict__.items()):
            if isinstance(held, ExpertList):
                _experts(module, leaf, held.dense(), dtype)
                for row in range(len(held.rows)):
                    module._modules.pop(str(row), None)
        for leaf, child in list(module._modules.items()):
            if isinstance(child, ExpertStack):
                _experts(module, leaf, child.dense(), dtype)
            elif isinstance(child, BcqLinear):
                setattr(module, leaf, _linear(child, dtype))


def _experts(owner: nn.Module, leaf: str, values: Tensor, dtype: torch.dtype | None) -> None:
    delattr(owner, leaf)
    owner.register_parameter(leaf, nn.Parameter(values if dtype is None else values.to(dtype), requires_grad=False))


def _linear(layer: BcqLinear, dtype: Any) -> nn.Linear:
    values = layer.values()
    dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(values if dtype is None else values.to(dtype))
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias if dtype is None else layer.bias.to(dtype))
    return dense.train(layer.training)
