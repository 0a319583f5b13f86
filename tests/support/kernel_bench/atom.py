"""Times of Atom's kernels and torch's: the W4A4 product, norm with reordering and quantization, INT4 attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bcqfmt.bench import CYCLED, replayed
from bcqfmt.kernels.atom import attention as kv
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.runtime.tickets import new_tickets

from .timing import Row, early_and_alone

__all__ = ["attention", "norms", "w4a4_products"]

SHAPES = ((4096, 4096), (11008, 4096))
TOKENS = (1, 16, 32, 64, 128, 256, 512)
CONTEXT, HEAD = 1024, 128
_HIDDEN = 4096


def w4a4_products(speed: float) -> Iterator[Row]:
    """One to 512 tokens, float16 results, activations quantized beforehand, as `w4a4` shares them out by itself."""
    for rows, columns in SHAPES:
        weights = [_weight(rows, columns) for _ in range(CYCLED * 2 // (rows * columns) + 1)]
        dense = [torch.randn(rows, columns, device="cuda", dtype=torch.float16) for _ in range(8)]
        for tokens in TOKENS:
            yield _product(weights, dense, tokens, speed)


def _product(weights: list[w4.AtomDevice], dense: list[torch.Tensor], tokens: int, speed: float) -> Row:
    rows, columns, groups = weights[0].out, weights[0].columns, weights[0].groups
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.float16)
    ready = w4.quantize_reorder(x, weights[0].perm)
    y = torch.empty(tokens, rows, device="cuda", dtype=torch.float16)
    taken, alone = early_and_alone(lambda weight: w4.w4a4(ready, weight, out=y), weights)
    nbytes = rows * (groups + 1) * 64 + rows * groups * 4 + tokens * (columns + groups * 4 + 2 * rows)
    peers = {"cuBLAS fp16": replayed(lambda i: torch.mm(x, dense[i % len(dense)].T), 2 * len(dense))}
    return Row("W4A4", rows, columns, 4, 128, tokens, taken, nbytes / speed * 1e6, peers, nbytes, alone=alone)


def norms(speed: float) -> Iterator[Row]:
    """RMSNorm, reordering and quantization of 4096 channels: fused, and in steps.

    Two launches: our norm, then reordering and quantization. Three: torch's norm, torch's gather, then quantization in
    the order in which channels come. The fused kernel in that order shows what reordering costs.
    """
    for tokens in (1, 16, 64, 512):
        yield _norm(tokens, speed)


def _norm(tokens: int, speed: float) -> Row:
    x = torch.randn(tokens, _HIDDEN, device="cuda", dtype=torch.float16)
    gamma = torch.randn(_HIDDEN, device="cuda", dtype=torch.float16)
    perm = torch.randperm(_HIDDEN, device="cuda")
    order, plain = perm.int(), torch.arange(_HIDDEN, device="cuda", dtype=torch.int32)
    norm = torch.nn.functional.rms_norm

    def gathered() -> torch.Tensor:
        return norm(x, (_HIDDEN,), gamma, 1e-5).index_select(1, perm)

    fused = replayed(lambda _: w4.rmsnorm_reorder_quant(x, gamma, order, eps=1e-5), 40)
    peers = {
        "two launches": replayed(lambda _: w4.quantize_reorder(w4.rmsnorm(x, gamma, eps=1e-5), order), 40),
        "three launches": replayed(lambda _: w4.quantize_reorder(gathered(), plain), 40),
        "torch, norm and gather alone": replayed(lambda _: gathered(), 40),
        "fused, not reordered": replayed(lambda _: w4.rmsnorm_reorder_quant(x, gamma, plain, eps=1e-5), 40),
    }
    nbytes = tokens * _HIDDEN * 3 + _HIDDEN * 6
    return Row("norm, reorder, quantize", 1, _HIDDEN, 4, 128, tokens, fused, nbytes / speed * 1e6, peers, nbytes)


def attention(speed: float) -> Iterator[Row]:
    """One query a sequence over a full INT4 cache of 1024 tokens; torch's attention over a float16 one."""
    for heads, few in ((32, 32), (32, 8)):
        for batch in (1, 8, 32, 128):
            yield _attention(heads, few, batch, speed)


def _attention(heads: int, few: int, batch: int, speed: float) -> Row:
    q = torch.randn(batch, heads, HEAD, device="cuda", dtype=torch.float16)
    lengths = torch.full((batch,), CONTEXT, device="cuda", dtype=torch.int32)
    nbytes = 2 * batch * few * CONTEXT * (HEAD // 2 + 4)
    caches = [_cache(batch, few, q) for _ in range(max(1, min(60, CYCLED // nbytes + 1)))]
    y = torch.empty_like(q)
    taken = replayed(
        lambda i: kv.decode_attention(q, caches[i % len(caches)], lengths, out=y), max(8, len(caches))
    )  # fmt: skip
    name, peers = f"INT4 attention, {heads}/{few} heads", {"SDPA fp16": _sdpa(q, few)}
    return Row(name, CONTEXT, HEAD, 4, HEAD, batch, taken, nbytes / speed * 1e6, peers, nbytes)


def _weight(rows: int, columns: int) -> w4.AtomDevice:
    groups = columns // 128
    return w4.AtomDevice(
        out=rows,
        columns=columns,
        words=torch.randint(
            -(2**31), 2**31 - 1, (rows // 16, groups + 1, 256), device="cuda", dtype=torch.int32
        ),
        scale=torch.rand(groups, rows, device="cuda") * 0.01,
        perm=torch.randperm(columns, device="cuda").int(),
        tickets=new_tickets("cuda"),
        settled=True,
    )  # fmt: skip


def _cache(batch: int, heads: int, like: torch.Tensor) -> kv.KvCache:
    cache = kv.KvCache.empty(batch, heads, CONTEXT, HEAD, like=like)
    k, v = (torch.randn(batch, heads, CONTEXT, HEAD, device="cuda", dtype=torch.float16) for _ in range(2))
    kv.quantize_kv(cache, k, v, torch.zeros(batch, device="cuda", dtype=torch.int32))
    return cache


def _sdpa(q: torch.Tensor, few: int) -> float:
    batch, heads, _ = q.shape
    count = max(1, min(16, CYCLED // (4 * batch * few * CONTEXT * HEAD) + 1))
    pairs = [torch.randn(2, batch, few, CONTEXT, HEAD, device="cuda", dtype=torch.float16) for _ in range(count)]

    keys, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    attend, shared = torch.nn.functional.scaled_dot_product_attention, heads != few
    return replayed(
        lambda i: attend(q[:, :, None], keys[i % count], values[i % count], enable_gqa=shared), max(8, count)
    )  # fmt: skip
