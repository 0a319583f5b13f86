"""W4A4 and the INT4 key-value cache as torch operators in ``torch.ops.bcqfmt``.

``quantize_reorder``, ``rmsnorm_reorder_quant`` and ``w4a4`` are the product of Atom, ``quantize_kv`` and
``decode_attention`` its cache. They are operators like those of `ops.lut`: tensors and numbers only, the shape of the
result known without running, launched on the current stream, no wait for the device, no gradient; once each has run it
can be captured in a CUDA graph. The functions here take and return the dataclasses of `kernels.atom`::

    x_q = rmsnorm_reorder_quant(x, gamma, weight.perm, eps=1e-5)
    y = w4a4(x_q, weight)

The tickets of a weight are zeros before and after a product, so they do not count as changed; what `kernels.atom.w4a4`
says of two streams holds here too. Importing this module registers the operators and needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bcqfmt.errors import error
from bcqfmt.kernels.atom.operands import GROUP, TOKENS
from bcqfmt.kernels.runtime import device

if TYPE_CHECKING:  # these need Numba, which the first call asks for with a better message
    from bcqfmt.kernels.atom.attention import KvCache
    from bcqfmt.kernels.atom.w4a4 import Activations, AtomDevice


def quantize_reorder(x: Tensor, perm: Tensor, *, clip: float = 1.0, rule: str = "absmax") -> Activations:
    """x (tokens, in) float16, bfloat16 or float32, gathered by perm (in) int32 and quantized token by token.

    ``in`` is a multiple of 128, at least 256; ``clip`` and ``rule`` as in `kernels.atom.w4a4.quantize_reorder`.
    """
    codes, scale = torch.ops.bcqfmt.quantize_reorder(x, perm, clip, rule)
    return _named(x, codes, scale)


def rmsnorm_reorder_quant(
    x: Tensor, gamma: Tensor, perm: Tensor, *, eps: float, clip: float = 1.0, rule: str = "absmax"
) -> Activations:
    """RMSNorm with gamma (in) in the dtype of x, then :func:`quantize_reorder`, in one launch."""
    codes, scale = torch.ops.bcqfmt.rmsnorm_reorder_quant(x, gamma, perm, eps, clip, rule)
    return _named(x, codes, scale)


def _named(x: Tensor, codes: Tensor, scale: Tensor) -> Activations:
    from bcqfmt.kernels.atom.w4a4 import Activations

    return Activations(codes=codes, scale=scale, tokens=x.shape[0], columns=x.shape[1])


def w4a4(x: Activations, weight: AtomDevice, *, dtype: torch.dtype = torch.float16) -> Tensor:
    """``x W^T`` (tokens, out) in ``dtype``: float16, bfloat16 or float32."""
    result: Tensor = torch.ops.bcqfmt.w4a4(
        x.codes, x.scale, x.tokens, weight.words, weight.scale, weight.perm, weight.tickets, weight.out, dtype,
        weight.settled,
    )  # fmt: skip
    return result


def quantize_kv(cache: KvCache, k: Tensor, v: Tensor, starts: Tensor) -> None:
    """Write k and v (B, H_kv, new, D) to tokens ``starts[b] ...`` of the cache, in place; starts (B) int32.

    k and v of one type: float16, bfloat16 or float32. What falls outside of the cache is dropped.
    """
    torch.ops.bcqfmt.quantize_kv(
        cache.keys, cache.key_parameters, cache.values, cache.value_parameters, k, v, starts
    )  # fmt: skip


def decode_attention(
    q: Tensor, cache: KvCache, lengths: Tensor, *, scale: float | None = None, splits: int | None = None
) -> Tensor:
    """softmax(scale * q K^T) V over ``lengths[b]`` tokens (B) int32: q (B, H, D) -> (B, H, D) in the dtype of q.

    ``scale``: by default 1 / sqrt(D). ``splits``: blocks that share a context, by default what occupies the GPU.
    """
    result: Tensor = torch.ops.bcqfmt.decode_attention(
        q, cache.keys, cache.key_parameters, cache.values, cache.value_parameters, lengths, scale, splits
    )
    return result


@torch.library.custom_op("bcqfmt::quantize_reorder", mutates_args=())
def _quantize_reorder(x: Tensor, perm: Tensor, clip: float, rule: str) -> tuple[Tensor, Tensor]:
    device.require_cuda()
    from bcqfmt.kernels.atom import w4a4 as w4

    made = w4.quantize_reorder(x, perm, clip=clip, rule=rule)
    return made.codes, made.scale


@_quantize_reorder.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _activations(x)


@torch.library.custom_op("bcqfmt::rmsnorm_reorder_quant", mutates_args=())
def _rmsnorm_reorder_quant(
    x: Tensor, gamma: Tensor, perm: Tensor, eps: float, clip: float, rule: str
) -> tuple[Tensor, Tensor]:
    device.require_cuda()
    from bcqfmt.kernels.atom import w4a4 as w4

    made = w4.rmsnorm_reorder_quant(x, gamma, perm, eps=eps, clip=clip, rule=rule)
    return made.codes, made.scale


@_rmsnorm_reorder_quant.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _activations(x)


def _activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (tiles, G, 256) int32 and scales (G, 8 tiles) float32 for x (tokens, in), without content."""
    tokens, columns = x.shape
    tiles, groups = (tokens + TOKENS - 1) // TOKENS, columns // GROUP
    codes = x.new_empty((tiles, groups, 256), dtype=torch.int32)
    return codes, x.new_empty((groups, TOKENS * tiles), dtype=torch.float32)


@torch.library.custom_op("bcqfmt::w4a4", mutates_args=())
def _w4a4(
    codes: Tensor,
    scale: Tensor,
    tokens: int,
    words: Tensor,
    weight_scale: Tensor,
    perm: Tensor,
    tickets: Tensor,
    out: int,
    dtype: torch.dtype,
    settled: bool = False,
) -> Tensor:
    device.require_cuda()
    from bcqfmt.kernels.atom import w4a4 as w4

    if tokens < 0 or codes.dim() != 3:
        found = f"codes of shape {list(codes.shape)} for {tokens} tokens"
        raise error("BCQ-E552", found=found, expected=f"[tokens / {TOKENS}, in / {GROUP}, 256]")
    ready = w4.Activations(codes=codes, scale=scale, tokens=tokens, columns=codes.shape[1] * GROUP)
    weight = w4.AtomDevice(
        out=out, columns=perm.numel(), words=words, scale=weight_scale, perm=perm, tickets=tickets, settled=settled
    )  # fmt: skip
    result: Tensor = w4.w4a4(ready, weight, dtype=str(dtype).removeprefix("torch."))
    return result


@_w4a4.register_fake
def _(_codes: Tensor, scale: Tensor, tokens: int, *others: Any) -> Tensor:
    _words, _scale, _perm, _tickets, out, dtype = others[:6]
    return scale.new_empty((tokens, out), dtype=dtype)


@torch.library.custom_op(
    "bcqfmt::quantize_kv", mutates_args=("keys", "key_parameters", "values", "value_parameters")
)  # fmt: skip
def _quantize_kv(
    keys: Tensor, key_parameters: Tensor, values: Tensor, value_parameters: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> None:
    device.require_cuda()
    from bcqfmt.kernels.atom import attention as kv

    kv.quantize_kv(_cache(keys, key_parameters, values, value_parameters), k, v, starts)


@_quantize_kv.register_fake
def _(*_: Any) -> None:
    """No result."""


@torch.library.custom_op("bcqfmt::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    keys: Tensor,
    key_parameters: Tensor,
    values: Tensor,
    value_parameters: Tensor,
    lengths: Tensor,
    scale: float | None,
    splits: int | None,
) -> Tensor:
    device.require_cuda()
    from bcqfmt.kernels.atom import attention as kv

    cache = _cache(keys, key_parameters, values, value_parameters)
    result: Tensor = kv.decode_attention(q, cache, lengths, scale=scale, splits=splits)
    return result


@_decode_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _cache(keys: Tensor, key_parameters: Tensor, values: Tensor, value_parameters: Tensor) -> KvCache:
    from bcqfmt.kernels.atom.attention import KvCache

    return KvCache(keys=keys, key_parameters=key_parameters, values=values, value_parameters=value_parameters)
