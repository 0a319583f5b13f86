"""The interface of the INT4 key-value cache: make it, write tokens into it, attend over it::

cache = KvCache.empty(batch, kv_heads, 4096, 128, like=q)
quantize_kv(cache, k, v, starts)             # k, v [B, H_kv, new, D], starts [B] int32: where they go
y = decode_attention(q, cache, lengths)      # q [B, H, D], lengths [B] int32, including this step's token
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device, on_host
from bcqfmt.kernels.runtime.limits import LIMIT, PROCESSORS

from .attention_kernel import ATTENTION_WARPS, HEADS, TILE, attention_kernel, join_kernel, shared_bytes
from .cache_kernel import CACHE_WARPS, quantize_kv_kernel

HEAD_DIMS = (64, 128, 256)
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class KvCache:
    """``keys`` and ``values [B, H_kv, capacity, D / 8]`` words of eight codes, parameters ``[B, H_kv, capacity]``.

    A parameter word holds scale (low half) and offset (high half) in F16. ``capacity`` is a multiple of 32.
    """

    keys: Any
    key_parameters: Any
    values: Any
    value_parameters: Any

    @classmethod
    def empty(cls, batch: int, kv_heads: int, capacity: int, head_dim: int, *, like: Any) -> KvCache:
        """Room for ``capacity`` tokens (rounded up to 32) of ``batch`` sequences, where ``like`` lives."""
        device.require_cuda()
        if device.describe(like).device < 0 and not device.simulated():
            raise on_host("like")
        rounded = -(-capacity // TILE) * TILE
        _check_size(batch, kv_heads, rounded, head_dim)
        if batch * kv_heads * rounded * head_dim // 8 > LIMIT:
            found = f"a cache of {batch} x {kv_heads} x {rounded} x {head_dim}"
            expected = f"at most {LIMIT} words"
            raise error("BCQ-E554", found=found, expected=expected, hint="make several caches of fewer sequences")
        words = [device.empty_like(like, (batch, kv_heads, rounded, head_dim // 8), "I32") for _ in range(2)]
        parameters = [device.empty_like(like, (batch, kv_heads, rounded), "I32") for _ in range(2)]
        return cls(keys=words[0], key_parameters=parameters[0], values=words[1], value_parameters=parameters[1])


def quantize_kv(cache: KvCache, k: Any, v: Any, starts: Any) -> None:
    """Write k and v ``[B, H_kv, new, D]`` to tokens ``starts[b] ...`` of the cache; what falls outside is dropped."""
    device.require_cuda()
    batch, heads, capacity, head_dim = _check_cache(cache)
    found = check_array("k", k, _FLOATS, (batch, heads, None, head_dim), 16)
    check_array("v", v, (found.dtype,), found.shape, 16)
    check_array("starts", starts, ("I32",), (batch,), 4)
    check_same_device(k=k, v=v, starts=starts, keys=cache.keys)
    new = found.shape[2]
    vectors = batch * heads * new
    quantize_kv_kernel(head_dim, found.dtype).launch(
        (-(-vectors // CACHE_WARPS), 2), 32 * CACHE_WARPS, k, v, cache.keys, cache.key_parameters, cache.values,
        cache.value_parameters, starts, heads, new, capacity, vectors,
    )  # fmt: skip


def splits_for(blocks: int, capacity: int) -> int:
    """Into how many blocks a context is split: two for a processor (more are slower), at least 128 tokens to each."""
    return max(1, min(2 * PROCESSORS // blocks, capacity // (ATTENTION_WARPS * TILE), 64))


def decode_attention(
    q: Any, cache: KvCache, lengths: Any, *, scale: float | None = None, out: Any = None, splits: int | None = None
) -> Any:
    """softmax(scale * q K^T) V for one query per sequence: q ``[B, H, D]`` -> ``[B, H, D]``, in the dtype of q.

    H is a multiple of the cache's heads; query heads h share key-value head ``h // (H / H_kv)``. ``lengths[b]`` tokens
    count (none: zeros). ``scale``: by default 1 / sqrt(D). The queries are rounded to F16, what is larger than 16,376
    is infinite. The same ``splits`` give the same bits.
    """
    device.require_cuda()
    batch, kv_heads, capacity, head_dim = _check_cache(cache)
    found = check_array("q", q, _FLOATS, (batch, None, head_dim), 16)
    heads = found.shape[1]
    if heads < 1 or heads % kv_heads:
        raise error("BCQ-E552", found=f"{heads} query heads", expected=f"a multiple of {kv_heads}")
    check_array("lengths", lengths, ("I32",), (batch,), 4)
    y = device.empty_like(q, found.shape, found.dtype) if out is None else out
    check_array("out", y, (found.dtype,), found.shape, 16)
    check_same_device(q=q, lengths=lengths, keys=cache.keys, out=y)
    factor = (head_dim**-0.5 if scale is None else float(scale)) / math.log(2)
    if not math.isfinite(factor):
        raise error("BCQ-E552", found=f"scale = {scale}", expected="a finite number")
    rows = kv_heads * -(-heads // kv_heads // HEADS)
    count = splits_for(rows * batch, capacity) if splits is None else splits
    if not 1 <= count <= 65535 or batch * heads * count * head_dim > LIMIT:
        raise error("BCQ-E552", found=f"{count} splits", expected="1..65535, with at most 2^31 - 1 partial sums")
    span = -(-capacity // (count * TILE)) * TILE
    partials = statistics = cache.keys
    if count > 1:
        partials = device.empty_like(q, (batch, heads, count, head_dim), "F32")
        statistics = device.empty_like(q, (batch, heads, count, 2), "F32")
    attention_kernel(head_dim, found.dtype).launch(
        (count, rows, batch), 32 * ATTENTION_WARPS, q, cache.keys, cache.key_parameters, cache.values,
        cache.value_parameters, lengths, y, partials, statistics, heads, kv_heads, capacity, span, factor,
        shared=shared_bytes(head_dim),
    )  # fmt: skip
    if count > 1:
        join_kernel(found.dtype).launch((batch * heads,), head_dim, y, partials, statistics, count)
    return y


def _check_size(batch: int, heads: int, capacity: int, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS or capacity % TILE or min(batch, heads, capacity) < 1:
        found = f"a cache of {batch} x {heads} heads x {capacity} tokens x {head_dim}"
        expected = f"heads of {', '.join(map(str, HEAD_DIMS))}; tokens in multiples of {TILE}; at least one of each"
        raise error("BCQ-E552", found=found, expected=expected)


def _check_cache(cache: KvCache) -> tuple[int, int, int, int]:
    found = check_array("keys", cache.keys, ("I32", "U32"), (None, None, None, None), 16)
    batch, heads, capacity, words = found.shape
    _check_size(batch, heads, capacity, words * 8)
    check_array("values", cache.values, ("I32", "U32"), found.shape, 16)
    check_array("key parameters", cache.key_parameters, ("I32", "U32"), found.shape[:3], 4)
    check_array("value parameters", cache.value_parameters, ("I32", "U32"), found.shape[:3], 4)
    check_same_device(
        keys=cache.keys, values=cache.values, key_parameters=cache.key_parameters,
        value_parameters=cache.value_parameters,
    )  # fmt: skip
    return batch, heads, capacity, words * 8
