"""From a model with BCQ layers to the dense model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from bcqfmt.integrations.torch.embedding import BcqEmbedding, TiedHead
from bcqfmt.integrations.torch.layers import BcqLinear, BcqModule

from .experts import ExpertList, ExpertsForward, ExpertStack
from .scaled import ScaledEmbedding


def convert(model: Any, dtype: torch.dtype) -> None:
    """Everything that is floating point to a type, but for what the model keeps in float32."""
    plan, before = model._get_dtype_plan(dtype), model.dtype
    kept = [re.compile(rf"(^|\.){name}(\.|$)") for name in plan]
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(pattern.search(name) for pattern in kept):
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():  # parts of weights are no buffers of this kind
        for name, held in [] if isinstance(module, BcqModule) else list(module._buffers.items()):
            persistent = name not in module._non_persistent_buffers_set
            if persistent and held is not None and held.dtype == before != torch.float32:
                module._buffers[name] = held.to(dtype)


def make_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace every BCQ layer by a dense one or a parameter with its values, rounded to ``dtype`` if one is given."""
    tables: dict[nn.Module, nn.Embedding] = {}
    for module in list(model.modules()):
        if isinstance(module.__dict__.get("forward"), ExpertsForward):
            del module.forward
        for leaf, held in list(module.__dict__.items()):
            if isinstance(held, ExpertList):
                _experts(module, leaf, held.dense(), dtype)
                for row in range(len(held.rows)):
                    module._modules.pop(str(row), None)
                for name in [name for name, child in module._modules.items() if child in held.pieces]:
                    del module._modules[name]
        for leaf, child in list(module._modules.items()):
            if isinstance(child, ExpertStack):
                _experts(module, leaf, child.dense(), dtype)
            elif isinstance(child, BcqLinear):
                setattr(module, leaf, _linear(child, dtype))
            elif isinstance(child, BcqEmbedding):
                values = child.values() if dtype is None else child.values().to(dtype)
                if isinstance(child, ScaledEmbedding):
                    tables[child] = child.dense(values)
                else:
                    tables[child] = nn.Embedding(child.num_embeddings, child.embedding_dim, device="meta")
                    tables[child].weight = nn.Parameter(values)
                setattr(module, leaf, tables[child].train(child.training))
    for module in list(model.modules()):
        for leaf, child in list(module._modules.items()):
            if isinstance(child, TiedHead):
                head = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                head.weight = tables[child.__dict__["embedding"]].weight
                setattr(module, leaf, head.train(child.training))


def _experts(owner: nn.Module, leaf: str, values: Tensor, dtype: torch.dtype | None) -> None:
    delattr(owner, leaf)
    owner.register_parameter(leaf, nn.Parameter(values if dtype is None else values.to(dtype)))


def _linear(layer: BcqLinear, dtype: Any) -> nn.Linear:
    values = layer.values()
    dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(values if dtype is None else values.to(dtype))
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias if dtype is None else layer.bias.to(dtype))
    return dense.train(layer.training)
