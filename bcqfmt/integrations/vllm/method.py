"""How a linear layer of vLLM holds BCQ weights and multiplies with them. Importing this module needs vLLM.

vLLM loads the tensors of a checkpoint one by one into the parameters of the same names. A layer therefore has an empty
parameter for every part, an inlet, whose loader keeps the tensor. Once all parts of a weight are loaded, this rank's
rows and columns are cut out of it (`BcqWeight.rows`, `columns`: exact or refused) and become a `BcqLinear` on the
device of the inlets. After loading the inlets are gone and the layer has its pieces in the child ``bcq``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (  # type: ignore[import-not-found, unused-ignore]
    ColumnParallelLinear,
    LinearMethodBase,
)

from bcqfmt.errors import error
from bcqfmt.integrations.torch.layers import BcqLinear
from bcqfmt.integrations.torch.parts import TORCH_DTYPES, weight_of
from bcqfmt.weight.scheme import WeightSpec

from .slices import QKV, slices_of

__all__ = ["BcqLinearMethod"]

_PREFIX = "bcq_"


class _Loading:
    """The parts of a layer's weights that are loaded so far, and the pieces that were made of complete ones."""

    def __init__(self, columns: int, sizes: Sequence[int]) -> None:
        self.columns, self.sizes = columns, list(sizes)
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.pieces: dict[int, BcqLinear] = {}


class BcqLinearMethod(LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """The weights of one layer: one, or those that vLLM puts above each other (``qkv_proj``, ``gate_up_proj``)."""

    def __init__(self, weights: tuple[tuple[str, WeightSpec], ...]) -> None:
        """``weights``: (path, spec) in the order of the pieces; a single one may hold all pieces of the layer."""
        self.weights = weights

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Put the inlets into the layer. Sizes in elements; the other attributes are for dense weights."""
        for name, spec in self.weights:
            if len(spec.shape) != 2 or spec.columns != input_size:
                found = f"a weight of shape {list(spec.shape)}"
                raise error("BCQ-E305", tensor=name, found=found, expected=f"a matrix of {input_size} columns")
        loading = _Loading(input_size_per_partition, output_partition_sizes)
        layer.__dict__["_bcq_loading"] = loading
        wanted = {suffix: part.dtype for _, spec in self.weights for suffix, part in spec.parts().items()}
        for suffix, kind in sorted(wanted.items()):
            inlet = nn.Parameter(torch.empty(0, dtype=TORCH_DTYPES[kind]), requires_grad=False)
            inlet.weight_loader = self._loader(layer, loading, suffix)  # type: ignore[attr-defined]
            layer.register_parameter(_PREFIX + suffix, inlet)

    def _loader(self, layer: nn.Module, loading: _Loading, suffix: str) -> Callable[..., None]:
        def load(param: Tensor, loaded_weight: Tensor, shard_id: Any = None) -> None:
            """Called by vLLM with the tensor as it is in the file; ``shard_id``: the piece that it belongs to."""
            name, spec = self._weight_for(shard_id)
            parts = loading.parts.setdefault(name, {})
            if suffix not in spec.parts() or suffix in parts:
                found = "for the second time" if suffix in parts else "a part that the manifest does not name"
                raise error("BCQ-E305", tensor=name, found=f"{suffix}: {found}", expected=", ".join(spec.parts()))
            parts[suffix] = loaded_weight
            if len(parts) == len(spec.parts()):
                self._cut(layer, loading, name, spec, shard_id, param.device)

        return load

    def _weight_for(self, shard: Any) -> tuple[str, WeightSpec]:
        if len(self.weights) == 1:
            return self.weights[0]
        number = QKV.get(shard, shard)
        if not isinstance(number, int) or not 0 <= number < len(self.weights):
            names = ", ".join(name for name, _ in self.weights)
            raise error("BCQ-E305", tensor=names, found=f"piece {shard!r}", expected=f"one of {len(self.weights)}")
        return self.weights[number]

    def _cut(self, layer: nn.Module, loading: _Loading, name: str, spec: WeightSpec, shard: Any, device: Any) -> None:
        """This rank's part of a weight that is complete."""
        held = {suffix: part.cpu().contiguous() for suffix, part in loading.parts[name].items()}
        loading.parts[name] = dict.fromkeys(held, torch.empty(0))  # complete; the tensors can be freed
        weight = weight_of(spec, held, name)
        shared = isinstance(layer, ColumnParallelLinear)
        for piece, rows, columns in slices_of(
            layer, spec.shape, loading.columns, loading.sizes, shared=shared, shard=shard
        ):
            if rows[0] == rows[1]:  # a rank with nothing but padding
                continue
            part = weight if rows == (0, spec.out) else weight.rows(*rows)
            part = part if columns == (0, spec.columns) else part.columns(*columns)
            loading.pieces[piece] = BcqLinear.from_weight(part).to(device)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the inlets out and put the pieces in; BCQ-E301 if a part was not loaded."""
        loading: _Loading | None = layer.__dict__.pop("_bcq_loading", None)
        if loading is None:
            return
        for name, spec in self.weights:
            missing = sorted(set(spec.parts()) - set(loading.parts.get(name, ())))
            if missing:
                raise error("BCQ-E301", tensor=name, found=f"no {', '.join(missing)}", expected="all parts of it")
        for suffix in {suffix for _, spec in self.weights for suffix in spec.parts()}:
            delattr(layer, _PREFIX + suffix)
        held: Any = layer
        held.bcq = nn.ModuleList([loading.pieces[piece] for piece in sorted(loading.pieces)])
        held.bcq_rows = sum(loading.sizes)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` for x (..., in of this rank); rows that are only padding give zeros."""
        held: Any = layer
        pieces, rows = held.bcq, held.bcq_rows
        if len(pieces) == 1 and pieces[0].out_features == rows:
            y: Tensor = pieces[0].product(x, bias)
            return y
        found = [piece(x) for piece in pieces]
        rest = rows - sum(piece.out_features for piece in pieces)
        if rest:
            found.append(x.new_zeros(*x.shape[:-1], rest))
        y = torch.cat(found, -1)
        return y if bias is None else y + bias.to(y.dtype)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """A quantized head has a weight of its own in the file, even where config.json ties it to the embedding."""
        return layer

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        """The dense matrix (rows and columns of this rank), in the logical dtype."""
        pieces: Any = layer.bcq
        return torch.cat([piece.values() for piece in pieces])
