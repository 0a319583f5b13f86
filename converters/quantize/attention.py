"""Causal attention on a CPU in blocks of queries, so that little is computed of what the mask hides.

torch's own kernel computes the products with all of up to 512 keys. Imported on demand only: torch and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["use_blocks"]

Tensor = torch.Tensor

_NAME = "bcqfmt_blocks"
_QUERIES = 32


def use_blocks(model: Any) -> None:
    """Let a transformers model that uses torch's attention use this one."""
    if model.config._attn_implementation == "sdpa":
        transformers.AttentionInterface.register(_NAME, _attention)
        transformers.AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls it: ``[rows, heads, tokens, width]``, the result ``[rows, tokens, heads, width]``."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    special = [attention_mask, *(more.get(name) for name in ("position_bias", "cache", "softcap"))]
    count = query.shape[2]
    if any(one is not None for one in special) or not causal or count != key.shape[2] or query.device.type != "cpu":
        whole: Any = sdpa_attention_forward
        made: tuple[Tensor, None]
        made = whole(module, query, key, value, attention_mask, dropout, scaling, is_causal, **more)
        return made
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    result = query.new_empty(query.shape[0], count, query.shape[1], value.shape[3])
    causal_mask = torch.ones(_QUERIES, 2 * count, dtype=torch.bool).tril(count)  # a block takes its columns of it
    for start in range(0, count, _QUERIES):
        stop = min(start + _QUERIES, count)
        mask = causal_mask[: stop - start, count - start : count - start + stop]
        block = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        found = torch.nn.functional.scaled_dot_product_attention(*block, mask, dropout, scale=scaling)
        result[:, start:stop] = found.transpose(1, 2)
    return result, None
