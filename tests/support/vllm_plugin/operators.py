"""The compiled operators of vLLM's CPU engine in plain torch, as many as a small model needs: slow, and right.

`vllm_environment` puts this file in their place, as ``vllm/_C.py``. It imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("_C", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any]) -> None:
    _library.define(schema)
    _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _slots(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, size: int) -> None:
    """Where in the cache every token goes."""
    counts = starts.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = positions[: len(rows)]
    slots[: len(rows)] = table[rows, at // size].long() * size + at % size
    slots[len(rows) :] = -1


def _store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *_: Any) -> None:
    """``keys``, ``values`` (blocks, heads, tokens of a block, columns)."""
    size = keys.shape[2]
    kept = slots >= 0
    at = slots[kept]
    keys[at // size, :, at % size] = key[: len(kept)][kept]
    values[at // size, :, at % size] = value[: len(kept)][kept]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, starts: Tensor, lengths: Tensor, scale: float,
    causal: bool, alibi: Any, window: int, table: Tensor, *_: Any,
) -> None:  # fmt: skip
    bounds, size = starts.tolist(), keys.shape[2]
    group = query.shape[1] // keys.shape[1]
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        length, count = int(lengths[i]), last - first
        if not count:
            continue
        at = torch.arange(length)
        blocks = table[i, at // size].long()
        own_keys, own_values = (
            cache[blocks, :, at % size].float().repeat_interleave(group, 1).transpose(0, 1) for cache in (keys, values)
        )
        scores = query[first:last].float().transpose(0, 1) @ own_keys.transpose(1, 2) * scale
        if causal:
            scores = scores.masked_fill(at[None] > torch.arange(length - count, length)[:, None], float("-inf"))
        output[first:last] = (scores.softmax(-1) @ own_values).transpose(0, 1).to(output.dtype)


def _silu(result: Tensor, pair: Tensor) -> None:
    gate, up = pair.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


_define("silu_and_mul(Tensor(a!) result, Tensor pair) -> ()", _silu)
_define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
_define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1))
_define(
    "compute_slot_mapping_kernel_impl(Tensor start, Tensor positions, Tensor table, Tensor(a!) slots, int size) -> ()",
    _slots,
)
_define(
    "get_scheduler_metadata(int requests, int heads, int few, int head, Tensor lengths, ScalarType dtype, Tensor start,"
    " bool causal, int window, str isa, bool split, Tensor? dynamic=None, str kind='auto') -> Tensor",
    lambda *_: torch.zeros(1),
)
_define(
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, str isa,"
    " float k_scale=1.0, float v_scale=1.0, str kind='auto') -> ()",
    _store,
)
_define(
    "cpu_attention_with_kv_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) output, Tensor start,"
    " Tensor lengths, float scale, bool causal, Tensor? alibi, int window, Tensor table, float softcap,"
    " Tensor metadata, Tensor? sinks, Tensor? dynamic=None, float k_scale=1.0, float v_scale=1.0, str kind='auto')"
    " -> ()",
    _attend,
)


def _by_name(
    num_tokens: int, max_num_tokens: int, query_start_loc_ptr: Tensor, positions_ptr: Tensor, block_table_ptr: Tensor,
    block_table_stride: int, slot_mapping_ptr: Tensor, KV_CACHE_BLOCK_SIZE: int, TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int, CP_KV_CACHE_INTERLEAVE_SIZE: int, PAD_ID: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _slots(query_start_loc_ptr, positions_ptr, block_table_ptr, slot_mapping_ptr, KV_CACHE_BLOCK_SIZE)


with contextlib.suppress(ImportError):  # vLLM 0.32 without Triton passes these arguments in another order
    import vllm.triton_utils.dispatcher  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    import vllm.utils.cpu_triton_utils as _own  # type: ignore[import-not-found, unused-ignore]

    _own._compute_slot_mapping_kernel_impl = _by_name
