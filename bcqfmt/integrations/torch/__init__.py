"""BCQ weights in torch models: layers, loading them from a checkpoint and collecting them for saving.

    >>> from bcqfmt.integrations.torch import load_linears, tensors_of
    >>> load_linears(model, bcqfmt.open("model-bcq/"))          # every nn.Linear whose weight is quantized there
    >>> bcqfmt.save("tuned/", tensors_of(model), config=config)  # and back

`BcqLinear` replaces one nn.Linear, `BcqEmbedding` an nn.Embedding, `BcqStack` a stack of experts. Importing this module
imports torch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error
from bcqfmt.weight.scheme import part_prefix
from bcqfmt.weight.weight import BcqWeight

from .embedding import BcqEmbedding
from .layers import BcqLinear, BcqModule, BcqStack
from .parts import stored_of

__all__ = ["BcqEmbedding", "BcqLinear", "BcqModule", "BcqStack", "load_linears", "tensors_of"]


def load_linears(model: nn.Module, checkpoint: Checkpoint, *, dense: bool = False, **options: Any) -> list[str]:
    """Put a :class:`BcqLinear` in the place of every nn.Linear whose weight is quantized in the checkpoint.

    Biases stay those of the model. ``dense``: copy the tensors that are not quantized into the model as well, each into
    the parameter or buffer of its name. ``options``: ``exact``, ``planes``, ``trainable_scales``. Returns the names of
    the weights. BCQ-E552 if a weight has no nn.Linear of its name and shape; the model is then unchanged.
    """
    replaced: dict[str, nn.Linear] = {}
    for name, weight in checkpoint.weights():
        replaced[name] = _linear_of(model, name, weight)
    targets = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    found = {name: tensor for name, tensor in checkpoint.dense() if dense}
    for name, tensor in found.items():
        if name not in targets or tuple(targets[name].shape) != tensor.shape:
            expected = f"one of shape {tensor.shape}"
            raise error("BCQ-E552", tensor=name, found="no such tensor in the model", expected=expected)
    for name, tensor in found.items():
        targets[name].data.copy_(tensor.to_torch())
    for name, old in replaced.items():
        layer = BcqLinear.from_weight(checkpoint.weight(name), old.bias, **options)
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(parent), own, layer.to(old.weight.device).train(old.training))
    return list(replaced)


def tensors_of(model: nn.Module) -> dict[str, BcqWeight | StoredTensor]:
    """Everything a model holds, by the names of its state dict, for :func:`bcqfmt.save`; parts as weights again."""
    weights: dict[str, BcqWeight | StoredTensor] = {}
    parts: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, BcqModule):
            name = f"{path}.weight"
            weights[name] = module.to_weight(name)
            parts.update(part_prefix(name) + suffix for suffix in module.spec.parts())
    dense = {name: tensor for name, tensor in model.state_dict().items() if name not in parts}
    return weights | {name: stored_of(name, tensor) for name, tensor in dense.items()}


def _linear_of(model: nn.Module, name: str, weight: BcqWeight) -> nn.Linear:
    try:
        module = model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != weight.shape:
        found = "no such module" if module is None else type(module).__name__
        expected = f"an nn.Linear with a weight of shape {list(weight.shape)}"
        raise error("BCQ-E552", tensor=name, found=found, expected=expected)
    return module
