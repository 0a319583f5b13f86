"""W4A4 and the INT4 cache on the device at full size: bit by bit where the oracle says every bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels.atom import attention as kv
from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.atom.shape import LARGE
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime import tickets as ticket_counts
from products import atom_reference
from products.gpu_arrays import to_gpu, twice
from simulated import sim_atom

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def back(tensor: Any) -> Any:
    """A tensor as numpy, words as such."""
    host = tensor.cpu()
    return host.view(torch.int16).numpy().view(numpy_dtype("BF16")) if host.dtype == torch.bfloat16 else host.numpy()


def quantized(x: Any, perm: Any) -> tuple[Any, Any]:
    return atom_reference.quantize_activations(x.astype(np.float32), perm)


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize(("tokens", "groups"), [(1, 32), (67, 32), (16, 86), (3, 224)])
def test_activations(kind: str, tokens: int, groups: int) -> None:
    rng = np.random.default_rng(tokens)
    x = sim_atom.activations(tokens, groups, kind)
    gamma = rng.standard_normal(128 * groups).astype(numpy_dtype(kind))
    perm = rng.permutation(128 * groups).astype(np.int32)
    on_gpu = [to_gpu(a) for a in (x, gamma, perm)]
    for normed in (False, True):
        if normed:
            found = w4.rmsnorm_reorder_quant(*on_gpu, eps=1e-5)
            x = atom_reference.rmsnorm(x, gamma, 1e-5)
        else:
            found = w4.quantize_reorder(on_gpu[0], on_gpu[2])
        words, scale = atom_reference.activation_words(*quantized(x, perm))
        assert (back(found.codes).view(np.uint32) == words).all()
        assert (back(found.scale) == scale).all()
    alone = twice(x.shape, DTYPES[kind], lambda out: w4.rmsnorm(on_gpu[0], on_gpu[1], eps=1e-5, out=out))
    assert back(alone).tobytes() == x.tobytes()


@pytest.mark.parametrize(("tokens", "out", "groups", "kind"), [
    (1, 4096, 32, "F16"), (16, 4096, 32, "F16"), (30, 4096, 32, "BF16"), (64, 4096, 32, "F16"),
    (17, 1001, 9, "F32"), (64, 1024, 86, "BF16"), (100, 515, 5, "F16"), (512, 1024, 32, "F16"), (333, 2050, 12, "F32"),
])  # fmt: skip
def test_products(tokens: int, out: int, groups: int, kind: str) -> None:
    weight = sim_atom.atom_weight(out, groups, bits=3 if out % 2 else 4)
    placed = w4.atom_to_device(ao.pack_w4(weight))
    x = sim_atom.activations(tokens, groups, "F16")
    ready = w4.quantize_reorder(to_gpu(x), placed.perm)
    codes, scale, perm = ao.atom_codes(weight)
    plan = w4.plan_for(tokens, out, groups)
    plans = {w4.Plan(plan.tile, slices) for slices in (1, plan.slices, min(3, groups))}
    plans |= {w4.Plan(LARGE, 1), w4.plan_for(tokens, out, groups, held=device.like_sm_90())}
    for chosen in plans:
        wanted = atom_reference.group_gemm(*quantized(x, perm), codes, scale, chosen.slices).astype(numpy_dtype(kind))

        def run(y: Any, plan: Any = chosen) -> None:
            w4.w4a4(ready, placed, dtype=kind, out=y, plan=plan)

        assert back(twice((tokens, out), DTYPES[kind], run)).tobytes() == wanted.tobytes(), chosen
        assert not placed.tickets.any()


def test_products_in_a_graph() -> None:
    placed = w4.atom_to_device(ao.pack_w4(sim_atom.atom_weight(1024, 16)))
    x = to_gpu(sim_atom.activations(16, 16, "F16"))
    direct = w4.w4a4(w4.quantize_reorder(x, placed.perm), placed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caught = w4.w4a4(w4.quantize_reorder(x, placed.perm), placed)
    caught.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(caught, direct)


TOGETHER = 40  # products on each of two streams


def split() -> tuple[w4.AtomDevice, list[w4.Activations], list[torch.Tensor]]:
    """A weight, activations for two streams, and what they give; every sum is split into four."""
    placed = w4.atom_to_device(ao.pack_w4(sim_atom.atom_weight(512, 32)))
    ready = [w4.quantize_reorder(to_gpu(sim_atom.activations(16, 32, "F16", seed)), placed.perm) for seed in (1, 2)]
    expected = [w4.w4a4(x, placed, plan=FOUR) for x in ready]
    torch.cuda.synchronize()
    return placed, ready, expected


FOUR = w4.Plan(w4.plan_for(16, 512, 32).tile, 4)


def test_one_weight_on_two_streams() -> None:
    """Both wait until all has been asked for, so that their products run side by side."""
    placed, ready, expected = split()
    streams = [torch.cuda.Stream() for _ in ready]
    found: list[list[torch.Tensor]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
    for _ in range(TOGETHER):
        for stream, x, results in zip(streams, ready, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(w4.w4a4(x, placed, plan=FOUR))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(y, wanted) for y in results)
    assert not any(tickets.any() for tickets in ticket_counts._of_stream.values())


def test_one_weight_in_two_graphs_and_beside_them(
    without_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    """More products than the weight has tickets for: the last ones of the second graph bring their own."""
    placed, ready, expected = split()
    graphs, found = [torch.cuda.CUDAGraph() for _ in ready], []
    for graph, x in zip(graphs, ready, strict=True):
        with torch.cuda.graph(graph), without_waiting():
            found.append([w4.w4a4(x, placed, plan=FOUR) for _ in range(ticket_counts.TICKETS // (2 * 8) + 8)])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        for results in found:
            for y in results:
                y.zero_()
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            beside = [w4.w4a4(ready[0], placed, plan=FOUR) for _ in range(TOGETHER)]
        torch.cuda.synchronize()
        for results, wanted in zip((*found, beside), (*expected, expected[0]), strict=True):
            assert all(torch.equal(y, wanted) for y in results)
        assert not placed.tickets.any()


@pytest.mark.parametrize(("kind", "batch", "heads", "kv_heads", "tokens", "head_dim"), [
    ("F16", 1, 32, 32, 1024, 128), ("F16", 3, 32, 8, 1000, 128), ("BF16", 2, 12, 1, 300, 64), ("F32", 2, 2, 2, 70, 256),
    ("F16", 5, 8, 8, 33, 64),
])  # fmt: skip
def test_attention(kind: str, batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int) -> None:
    rng = np.random.default_rng(batch)
    k, v = (
        (rng.standard_normal((batch, kv_heads, tokens, head_dim)) + 0.5).astype(numpy_dtype(kind)) for _ in range(2)
    )
    q = rng.standard_normal((batch, heads, head_dim)).astype(numpy_dtype(kind))
    lengths = np.maximum(1, tokens - 37 * np.arange(batch)).astype(np.int32)
    cache = kv.KvCache.empty(batch, kv_heads, tokens, head_dim, like=to_gpu(q))
    for part in (cache.keys, cache.values, cache.key_parameters, cache.value_parameters):
        part.fill_(-1)
    kv.quantize_kv(cache, to_gpu(k), to_gpu(v), torch.zeros(batch, dtype=torch.int32, device="cuda"))
    keys, values = atom_reference.quantize_kv(k), atom_reference.quantize_kv(v)
    for part, wanted in zip(
        (cache.keys, cache.key_parameters, cache.values, cache.value_parameters),
        (*atom_reference.cache_words(*keys), *atom_reference.cache_words(*values)),
        strict=True,
    ):
        assert (back(part).view(np.uint32)[:, :, :tokens] == wanted).all()
    wanted = atom_reference.decode_attention(q, keys, values, lengths, head_dim**-0.5)
    for splits in (None, 1, 3):
        found = twice(
            q.shape,
            DTYPES[kind],
            lambda out, n=splits: kv.decode_attention(to_gpu(q), cache, to_gpu(lengths), splits=n, out=out),
        )
        error = np.linalg.norm(back(found).astype(np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < (4e-3 if kind == "BF16" else 1e-3), splits


def test_subnormal_halves_reach_the_tensor_cores() -> None:
    """The cache's codes are multiplied as subnormal F16: 15 * 2^-24 must not be taken for zero."""
    q, lengths = torch.zeros(1, 1, 64, device="cuda"), torch.full((1,), 32, dtype=torch.int32, device="cuda")
    cache = kv.KvCache.empty(1, 1, 32, 64, like=q)
    cache.keys.zero_()
    cache.values.fill_(-1)
    for part in (cache.key_parameters, cache.value_parameters):
        part.fill_(0x3C00)
    assert (kv.decode_attention(q, cache, lengths) == 15).all()
