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


def _latent(result: Tensor, query: Tensor, cache: Tensor, scale: float, table: Tensor, lengths: Tensor) -> None:
    """Multi-head latent attention of one token a request; ``cache`` (blocks, tokens of a block, columns)."""
    size, columns = cache.shape[1], result.shape[-1]
    for i, length in enumerate(lengths.tolist()):
        at = torch.arange(length)
        own = cache[table[i, at // size].long(), at % size].float()
        scores = query[i].float() @ own.T * scale
        result[i] = (scores.softmax(-1) @ own[:, :columns]).to(result.dtype)


def _accept(
    output: Tensor, ends: Tensor, drafted: Tensor, chosen: Tensor, bonus: Tensor, greedy: Any, most: int
) -> None:
    """Of the drafted tokens those that the model chooses too, then one of its own."""
    for i, (first, last) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        wrong = (drafted[first:last] != chosen[first:last]).nonzero().flatten().tolist()
        kept = wrong[0] + 1 if wrong else last - first
        output[i, :kept] = chosen[first : first + kept]
        if not wrong:
            output[i, kept] = bonus.flatten()[i]


def _last_kept(ends: Tensor, kept: Tensor, starts: Tensor, at: Tensor, rejected: Tensor, requests: int) -> None:
    """Where the last token that was kept is, and how many after it were rejected."""
    drafted = ends[:requests].diff(prepend=ends.new_zeros(1))
    rejected[:requests] = torch.where(drafted > 0, drafted + 1 - kept[:requests], 0)
    at[:requests] = starts[1 : requests + 1] - 1 - rejected[:requests]


def _next_tokens(
    sampled: Tensor, discarded: Tensor, backup: Tensor, tokens: Tensor, kept: Tensor, vocabulary: int, *_: Any
) -> None:
    """The last valid token of every request, and the number of valid ones."""
    for i, row in enumerate(sampled.tolist()):
        valid = [] if bool(discarded[i]) else [token for token in row if 0 <= token < vocabulary]
        kept[i] = len(valid)
        tokens[i] = valid[-1] if valid else backup[i]


def _with_next(
    tokens: Tensor, positions: Tensor, following: Tensor, out: Tensor, out_positions: Tensor, rejected: Tensor,
    masked: Tensor, fresh: Tensor, mapping: Tensor, starts: Tensor, ends: Tensor, padding: int, *_: Any,
) -> None:  # fmt: skip
    """What a draft model reads: the tokens of every request that were kept, and the one that follows them."""
    masked.zero_()
    for i, (first, stop) in enumerate(itertools.pairwise(starts.tolist())):
        count = int(ends[i]) - first + 1
        own = slice(first + i, stop + i + 1)
        out[own] = padding
        out[own][: count + 1] = torch.cat((tokens[first : first + count], following[i : i + 1]))
        out_positions[own] = 0
        out_positions[own][: count + 1] = positions[first] + torch.arange(count + 1)
        rejected[own] = torch.arange(stop - first + 1) > count
        fresh[i] = first + i + count


def _one_on(
    positions: Tensor, table: Tensor, lengths: Tensor, moved: Tensor, slots: Tensor, size: int, most: int, unused: int
) -> None:
    """Positions, lengths and places in the cache of the next token."""
    count = len(positions)
    after = positions + 1
    full = after >= most
    at = torch.where(full, 0, after)
    moved[:count] = at
    slots[count:] = unused
    slots[:count] = torch.where(full, unused, table[torch.arange(count), at // size].long() * size + at % size)
    lengths[:count] = torch.where(full, 1, lengths[:count] + 1).clamp(max=most)


def _silu(result: Tensor, pair: Tensor) -> None:
    gate, up = pair.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


_define("silu_and_mul(Tensor(a!) result, Tensor pair) -> ()", _silu)
_define(
    "mla_decode_kvcache(Tensor(a!) result, Tensor query, Tensor cache, float scale, Tensor table, Tensor lengths)"
    " -> ()",
    _latent,
)
_define(
    "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafted, Tensor chosen, Tensor bonus,"
    " Tensor? greedy, int most) -> ()",
    _accept,
)
_define(
    "eagle_prepare_inputs_padded_kernel_impl(Tensor ends, Tensor kept, Tensor starts, Tensor(a!) at,"
    " Tensor(b!) rejected, int requests) -> ()",
    _last_kept,
)
_define(
    "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled, Tensor discarded, Tensor backup, Tensor(a!) tokens,"
    " Tensor(b!) kept, int vocabulary, int sampled_each, int requests) -> ()",
    _next_tokens,
)
_define(
    "copy_and_expand_eagle_inputs_kernel_impl(Tensor tokens, Tensor positions, Tensor following, Tensor(a!) out,"
    " Tensor(b!) out_positions, Tensor(c!) rejected, Tensor(d!) masked, Tensor(e!) fresh, Tensor(f!) mapping,"
    " Tensor starts, Tensor ends, int padding, int parallel, int total, int added, bool shift) -> ()",
    _with_next,
)
_define(
    "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor table, Tensor(a!) lengths,"
    " Tensor(b!) moved, Tensor(c!) slots, int size, int most, int unused) -> ()",
    _one_on,
)
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
