"""How layers of vLLM hold BCQ weights and compute with them. Importing this module needs vLLM.

vLLM loads the tensors of a checkpoint one by one into the parameters of the same names. A layer therefore has an empty
parameter for every part, an inlet, whose loader keeps the tensor. Once all parts of a weight are loaded, this rank's
rows and columns are cut out of it (`BcqWeight.rows`, `columns`: exact or refused) and become a `BcqLinear` on the
device that the layer was made on. After loading the inlets are gone and the layer has its pieces in the child ``bcq``,
those that are alike above each other in one, ready to multiply (`warm_up`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearMethodBase

from bcqfmt.errors import error
from bcqfmt.integrations.torch.embedding import BcqEmbedding
from bcqfmt.integrations.torch.layers import BcqLinear, BcqModule
from bcqfmt.integrations.torch.parts import TORCH_DTYPES, weight_of
from bcqfmt.weight.scheme import SecondOrder, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .slices import pieces_of, slices_of, weights_of_pieces
from .warm_up import warm_up, warm_up_rows

_PREFIX = "bcq_"
_DENSE = "weight"


class _Loading:
    """The parts of a layer's weights that are loaded so far, and the pieces that were made of complete ones."""

    def __init__(self, columns: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.columns, self.sizes, self.dtype = columns, list(sizes), dtype
        self.device = torch.empty(0).device  # where vLLM makes the model, whatever it offloads later
        self.weights: list[int] = []  # of every piece, the number of its weight
        self.parts: dict[int, dict[str, Tensor]] = {}
        self.pieces: dict[int, nn.Module] = {}
        self.inlets: list[str] = []
        self.rows = 0  # of all pieces on this rank, without padding


class _DensePiece(nn.Module):
    """A piece that is not quantized, beside others that are."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows, requires_grad=False)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, self.weight, bias)

    def values(self) -> Tensor:
        return self.weight


class BcqLinearMethod(LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """The weights of one layer: one, or those that vLLM puts above each other (``qkv_proj``, ``gate_up_proj``)."""

    def __init__(self, weights: tuple[tuple[str, WeightSpec | None], ...]) -> None:
        """``weights``: (path, spec, None if dense) in the order of the pieces; one may hold several pieces."""
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
            if spec is not None and (len(spec.shape) != 2 or spec.columns != input_size):
                found = f"a weight of shape {list(spec.shape)}"
                raise error("BCQ-E305", tensor=name, found=found, expected=f"a matrix of {input_size} columns")
        loading = _Loading(input_size_per_partition, output_partition_sizes, params_dtype)
        rows = [None if spec is None else spec.out for _, spec in self.weights]
        loading.weights = weights_of_pieces(layer, rows, loading.sizes, shared=_shared(layer))
        layer.__dict__["_bcq_loading"] = loading
        wanted = {_PREFIX + suffix: kind for _, spec in self.weights if spec for suffix, kind in _dtypes(spec).items()}
        if None in rows:
            wanted[_DENSE] = params_dtype
        for inlet_name, kind in sorted(wanted.items()):
            inlet = nn.Parameter(torch.empty(0, dtype=kind), requires_grad=False)
            inlet.weight_loader = self._loader(layer, loading, inlet_name)  # type: ignore[attr-defined]
            layer.register_parameter(inlet_name, inlet)
            loading.inlets.append(inlet_name)

    def _loader(self, layer: nn.Module, loading: _Loading, inlet: str) -> Callable[..., None]:
        suffix = inlet.removeprefix(_PREFIX)

        def load(param: Tensor, loaded_weight: Tensor, shard_id: Any = None) -> None:
            """Called by vLLM with the tensor as it is in the file; ``shard_id``: the piece that it belongs to."""
            number = self._number(loading, shard_id)
            name, spec = self.weights[number]
            parts, wanted = loading.parts.setdefault(number, {}), _suffixes(spec)
            if suffix not in wanted or suffix in parts:
                found = "for the second time" if suffix in parts else "a part that the manifest does not name"
                raise error("BCQ-E305", tensor=name, found=f"{suffix}: {found}", expected=", ".join(wanted))
            parts[suffix] = loaded_weight
            if len(parts) == len(wanted):
                self._cut(layer, loading, number, shard_id)

        return load

    def _number(self, loading: _Loading, shard: Any) -> int:
        """Which of the weights a tensor belongs to."""
        found = {loading.weights[piece] for piece in pieces_of(shard, len(loading.sizes))}
        if len(found) != 1:
            names = ", ".join(name for name, _ in self.weights)
            raise error("BCQ-E305", tensor=names, found=f"piece {shard!r}", expected=f"one of {len(self.weights)}")
        return found.pop()

    def _cut(self, layer: nn.Module, loading: _Loading, number: int, shard: Any) -> None:
        """This rank's part of a weight that is complete."""
        name, spec = self.weights[number]
        held = {suffix: part.cpu().contiguous() for suffix, part in loading.parts[number].items()}
        loading.parts[number] = dict.fromkeys(held, torch.empty(0, device="cpu"))  # complete; tensors can be freed
        weight = None if spec is None else weight_of(spec, held, name)
        shape = tuple(held[_DENSE].shape) if spec is None else spec.shape
        for piece, rows, columns in slices_of(
            layer, shape, loading.columns, loading.sizes, shared=_shared(layer), shard=shard
        ):
            if rows[0] == rows[1]:  # a rank with nothing but padding
                continue
            loading.rows += rows[1] - rows[0]
            if weight is None:
                dense = held[_DENSE][rows[0] : rows[1], columns[0] : columns[1]]
                loading.pieces[piece] = _DensePiece(dense.to(loading.device, loading.dtype, copy=True))
                continue
            part = weight if rows == (0, shape[0]) else weight.rows(*rows)
            part = part if columns == (0, shape[1]) else part.columns(*columns)
            loading.pieces[piece] = self._piece(part, loading.dtype).to(loading.device)

    def _piece(self, weight: BcqWeight, dtype: torch.dtype) -> nn.Module:
        return BcqLinear.from_weight(weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the inlets out, put the pieces in, and prepare everything that products need.

        BCQ-E301 if a part was not loaded.
        """
        loading: _Loading | None = layer.__dict__.pop("_bcq_loading", None)
        if loading is None:
            return
        for number, (name, spec) in enumerate(self.weights):
            missing = sorted(set(_suffixes(spec)) - set(loading.parts.get(number, ())))
            if missing:
                raise error("BCQ-E301", tensor=name, found=f"no {', '.join(missing)}", expected="all parts of it")
        for inlet in loading.inlets:
            delattr(layer, inlet)
        held: Any = layer
        held.bcq = nn.ModuleList(_stacked([loading.pieces[piece] for piece in sorted(loading.pieces)]))
        loading.pieces.clear()  # vLLM keeps the inlets, whose loaders lead here
        held.bcq_padding = sum(loading.sizes) - loading.rows
        # others look here for the device (MLA, LoRA) and the width (EAGLE) of a layer
        empty = torch.empty(0, loading.columns, dtype=loading.dtype, device=loading.device)
        layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))
        bias = getattr(layer, "bias", None) if len(held.bcq) == 1 and not held.bcq_padding else None
        for piece in held.bcq:
            self._prepare(piece, loading, bias)

    def _prepare(self, piece: nn.Module, loading: _Loading, bias: Tensor | None) -> None:
        if isinstance(piece, BcqModule):
            warm_up(piece, loading.dtype, loading.device, bias)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` for x (..., in of this rank); rows that are only padding give zeros."""
        held: Any = layer
        pieces, padding = held.bcq, held.bcq_padding
        if len(pieces) == 1 and not padding:
            y: Tensor = pieces[0].product(x, bias)
            return y
        found = [piece.product(x) for piece in pieces]
        if padding:
            found.append(x.new_zeros(*x.shape[:-1], padding))
        y = torch.cat(found, -1)
        return y if bias is None else y + bias.to(y.dtype)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """A quantized head has a weight of its own in the file, even where config.json ties it to the embedding."""
        return layer

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        """The dense matrix (rows and columns of this rank), in the logical dtype."""
        pieces: Any = layer.bcq
        return torch.cat([piece.values() for piece in pieces])


class BcqEmbeddingMethod(BcqLinearMethod):
    """The table of an embedding: the rows that are asked for are decoded. A head that is tied to it multiplies."""

    def __init__(self, weights: tuple[tuple[str, WeightSpec | None], ...], *, tied: bool = False) -> None:
        """``tied``: the head multiplies with the same table."""
        super().__init__(weights)
        self.tied = tied

    def _piece(self, weight: BcqWeight, dtype: torch.dtype) -> nn.Module:
        return BcqEmbedding.from_weight(weight, dtype=dtype)

    def _prepare(self, piece: nn.Module, loading: _Loading, bias: Tensor | None) -> None:
        assert isinstance(piece, BcqEmbedding)
        warm_up_rows(piece, loading.device)
        if self.tied:
            super()._prepare(piece, loading, bias)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Integers (...) -> (..., features); any rows for a rank that holds none: vLLM sets them to zero."""
        held: Any = layer
        found: Tensor
        if len(held.bcq):
            found = held.bcq[0](input_)
        else:
            found = held.weight.new_zeros(*input_.shape, held.embedding_dim)
        return found


class TiedHeadMethod(LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A head without a weight of its own, whose embedding is quantized."""

    def create_weights(
        self, layer: nn.Module, columns: int, *sizes: Any, params_dtype: torch.dtype, **others: Any
    ) -> None:
        """Nothing but the empty ``weight`` that others look for."""
        empty = torch.empty(0, columns, dtype=params_dtype)
        layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The embedding takes the place of the head, as it does in vLLM's own models that tie them."""
        layer.__dict__["_bcq_embedding"] = embed_tokens  # no submodule: its weights are in the model once
        return layer

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` with the table of the embedding."""
        embedding: Any = layer.__dict__["_bcq_embedding"]
        found: Tensor = embedding.quant_method.apply(embedding, x, bias)
        return found


def _stacked(pieces: Sequence[nn.Module]) -> list[nn.Module]:
    """Neighbouring pieces that differ in their rows only as one: a product of all rows takes less time than several."""
    found: list[nn.Module] = []
    for spec, alike in itertools.groupby(pieces, _all_but_rows):
        several: list[Any] = list(alike)
        if isinstance(spec, WeightSpec) and len(several) > 1:
            parts: list[dict[str, Tensor]] = [dict(piece.named_buffers()) for piece in several]
            joined = {name: torch.cat([part[name] for part in parts], -2) for name in parts[0]}
            made = BcqLinear(
                replace(spec, shape=(sum(piece.spec.out for piece in several), spec.columns)), device="meta"
            )
            made.fill({name.removeprefix(_PREFIX): part for name, part in joined.items()})
            several = [made]
        found += several
    return found


def _all_but_rows(piece: nn.Module) -> WeightSpec | int:
    """What pieces that can be above each other have in common; its own number where it can be above none."""
    if not isinstance(piece, BcqLinear):
        return id(piece)
    spec = piece.spec
    scheme = spec.scheme
    second = any(isinstance(kind, SecondOrder) for segment in scheme.segments for kind in segment.numbers().values())
    if scheme.perm or scheme.outliers is not None or scheme.aligned64 or second:
        return id(piece)
    return replace(spec, shape=(1, spec.columns))


def _shared(layer: nn.Module) -> bool:
    """Whether the rows of a layer are split among the ranks."""
    return isinstance(layer, ColumnParallelLinear)


def _suffixes(spec: WeightSpec | None) -> Sequence[str]:
    return (_DENSE,) if spec is None else tuple(spec.parts())


def _dtypes(spec: WeightSpec) -> dict[str, torch.dtype]:
    return {suffix: TORCH_DTYPES[part.dtype] for suffix, part in spec.parts().items()}
