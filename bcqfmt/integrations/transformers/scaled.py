"""Gemma's embedding over a BCQ weight: its rows times a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bcqfmt.integrations.torch.embedding import BcqEmbedding
from bcqfmt.weight.scheme import WeightSpec


def is_scaled(module: Any) -> bool:
    """Whether a module is an embedding of transformers that multiplies its rows with one number."""
    named = type(module).__name__.endswith("TextScaledWordEmbedding")
    return named and isinstance(module, nn.Embedding) and isinstance(getattr(module, "scalar_embed_scale", None), float)


class ScaledEmbedding(BcqEmbedding):
    """A `BcqEmbedding` in the place of such a module; a head that is tied to it multiplies with the rows alone."""

    def __init__(self, spec: WeightSpec, plain: Any, **options: Any) -> None:
        """``plain``: the module that it replaces; its weight is not used."""
        super().__init__(spec, **options)
        self._class, self._padding, self.scale = type(plain), plain.padding_idx, plain.scalar_embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Integers of any shape -> (..., features)."""
        rows = super().forward(ids)
        return rows * torch.tensor(self.scale, device=rows.device).to(rows.dtype)

    def dense(self, values: Tensor) -> nn.Embedding:
        """The module of transformers again, with these values."""
        made: nn.Embedding = self._class(self.num_embeddings, self.embedding_dim, self._padding, embed_scale=self.scale)
        made.weight = nn.Parameter(values)
        return made
