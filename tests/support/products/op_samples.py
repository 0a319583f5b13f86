"""A call of every torch operator: through the operator, and of the kernel directly; on host tensors or on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.ops import atom as torch_ops_atom
from bcqfmt.integrations.torch.ops import fast as torch_ops_fast
from bcqfmt.integrations.torch.ops import lut as torch_ops
from bcqfmt.kernels import dequant, lut
from bcqfmt.kernels.atom import attention as kv
from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.bits import bit_gemv, bit_operand
from bcqfmt.kernels.mixed import mixed_gemv, mixed_operand
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device
from bcqfmt.kernels.outliers import csr_outliers
from bcqfmt.kernels.runtime import device
from products import kernel_samples as ks
from simulated import sim_atom, sim_mixed

Results = tuple[Tensor, ...]


class Sample(NamedTuple):
    """An input, and what is made of it: by the operator and by the kernel called directly. Nothing given is changed."""

    name: str
    x: Tensor
    operator: Callable[[Tensor], Results]
    direct: Callable[[Tensor], Results]


class Recorder(TorchDispatchMode):
    """Our operators as they were called, arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bcqfmt":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


@functools.cache
def arguments_of(name: str) -> tuple[Any, dict[str, Any]]:
    """:func:`called` for a small sample on host tensors, called once: not to be changed."""
    return called(ALL[name]("cpu", False))


def called(sample: Sample) -> tuple[Any, dict[str, Any]]:
    """The operator of a sample and the arguments that it was called with."""
    with Recorder() as seen:
        sample.operator(sample.x)
    ((function, arguments),) = seen.calls
    return function, arguments


def lut_gemv(target: str, large: bool) -> Sample:
    """Two segments, reordered, with outliers."""
    weight = ks.mixed(500, 768, 256) if large else ks.mixed(9, 48, 64)
    placed = to_device(operand(weight), "lut-gemm", target)
    return Sample(
        "lut_gemv", _vectors(weight, 2, "F16", target),
        lambda x: (torch_ops.lut_gemv(x, placed),),
        lambda x: (lut.lut_gemv(placed, x),),
    )  # fmt: skip


def dequantize(target: str, large: bool) -> Sample:
    """The input is the plane words."""
    weight = ks.weight("affine", 3, 500, 1024, 128) if large else ks.weight("affine", 3, 5, 64, 32)
    placed = to_device(operand(weight), "canonical", target)
    (segment,) = placed.segments

    def with_planes(words: Tensor) -> Any:
        return replace(placed, segments=(replace(segment, planes=words),))

    return Sample(
        "dequantize", segment.planes,
        lambda words: (torch_ops.dequantize(with_planes(words), torch.float16),),
        lambda words: (dequant.dequantize(with_planes(words), "F16"),),
    )  # fmt: skip


def bit_gemv_plain(target: str, large: bool) -> Sample:
    """One segment, nothing more."""
    weight = ks.weight("bcq", 2, 515, 1024, 128) if large else ks.weight("bcq", 2, 6, 40, 8)
    placed = bit_operand(operand(weight), target)
    return Sample(
        "bit_gemv", _vectors(weight, 1, "F16", target),
        lambda x: (torch_ops_fast.bit_gemv(x, placed),),
        lambda x: (bit_gemv(placed, x),),
    )  # fmt: skip


def bit_gemv_everything(target: str, large: bool) -> Sample:
    """Two segments, reordered, with outliers and an addend."""
    weight = ks.mixed(500, 768, 256) if large else ks.mixed(9, 32, 64)
    placed = bit_operand(operand(weight), target)
    x = _vectors(weight, 2, "BF16", target)
    addend = device.upload(ks.vectors(2, weight.spec.out), target)
    return Sample(
        "bit_gemv", x,
        lambda x: (torch_ops_fast.bit_gemv(x, placed, addend),),
        lambda x: (bit_gemv(placed, x, addend=addend),),
    )  # fmt: skip


def mixed_gemv_plain(target: str, large: bool) -> Sample:
    """4 bits only, no outliers."""
    return _mixed(sim_mixed.weight(300, 0, 1000) if large else sim_mixed.weight(5, 0, 32), 1, "F16", target)


def mixed_gemv_everything(target: str, large: bool) -> Sample:
    """2 and 4 bits, reordered, with outliers."""
    rows, low, high, batch = (300, 1536, 512, 2) if large else (5, 32, 16, 1)
    return _mixed(sim_mixed.weight(rows, low, high, outliers="add", share=0.05), batch, "BF16", target)


def _mixed(weight: BcqWeight, batch: int, kind: str, target: str) -> Sample:
    placed = mixed_operand(weight, target)
    return Sample(
        "mixed_gemv", _vectors(weight, batch, kind, target),
        lambda x: (torch_ops_fast.mixed_gemv(x, placed),),
        lambda x: (mixed_gemv(placed, x),),
    )  # fmt: skip


def outliers(target: str, large: bool) -> Sample:
    """Added to results that are there already."""
    rows, columns = (2000, 4096) if large else (9, 64)
    weight = ks.weight("affine", 2, rows, columns, 32, outliers="add", share=0.02 if large else 0.1)
    found = operand(weight).outliers
    assert found is not None
    csr = [device.upload(array, target) for array in (found.indptr, found.indices, found.values)]
    before = device.upload(ks.vectors(2, rows, "F16", seed=1), target)
    return Sample(
        "csr_outliers", _vectors(weight, 2, "F16", target),
        lambda x: (torch_ops_fast.csr_outliers(before.clone(), *csr, x),),
        lambda x: (csr_outliers(before.clone(), *csr, x),),
    )  # fmt: skip


def quantize_reorder(target: str, large: bool) -> Sample:
    """Clipped; tokens that do not fill a tile."""
    x, _, perm = _tokens(target, large)

    def direct(x: Tensor) -> Results:
        made = w4.quantize_reorder(x, perm, clip=0.9)
        return made.codes, made.scale

    def operator(x: Tensor) -> Results:
        made = torch_ops_atom.quantize_reorder(x, perm, clip=0.9)
        assert (made.tokens, made.columns) == tuple(x.shape)
        return made.codes, made.scale

    return Sample("quantize_reorder", x, operator, direct)


def rmsnorm_reorder_quant(target: str, large: bool) -> Sample:
    """Normed first."""
    x, gamma, perm = _tokens(target, large)

    def direct(x: Tensor) -> Results:
        made = w4.rmsnorm_reorder_quant(x, gamma, perm, eps=1e-5)
        return made.codes, made.scale

    def operator(x: Tensor) -> Results:
        made = torch_ops_atom.rmsnorm_reorder_quant(x, gamma, perm, eps=1e-5)
        return made.codes, made.scale

    return Sample("rmsnorm_reorder_quant", x, operator, direct)


def w4a4(target: str, large: bool) -> Sample:
    """The input is the codes of activations; on a GPU the sum is split, with tickets."""
    groups, out, tokens = (16, 1024, 19) if large else (2, 5, 3)
    weight = w4.atom_to_device(ao.pack_w4(sim_atom.atom_weight(out, groups)), target)
    ready = w4.quantize_reorder(device.upload(sim_atom.activations(tokens, groups, "F16"), target), weight.perm)

    def operator(codes: Tensor) -> Results:
        return (torch_ops_atom.w4a4(replace(ready, codes=codes), weight, dtype=torch.bfloat16),)

    def direct(codes: Tensor) -> Results:
        return (w4.w4a4(replace(ready, codes=codes), weight, dtype="BF16"),)

    return Sample("w4a4", ready.codes, operator, direct)


def quantize_kv(target: str, large: bool) -> Sample:
    """Into copies of a cache: the input is k."""
    k, v, cache = _cache(target, large)
    starts = torch.full((k.shape[0],), 3, dtype=torch.int32, device=k.device)

    def through(write: Any) -> Callable[[Tensor], Results]:
        def run(k: Tensor) -> Results:
            own = kv.KvCache(**{name: part.clone() for name, part in _parts(cache).items()})
            write(own, k, v, starts)
            return tuple(_parts(own).values())

        return run

    return Sample("quantize_kv", k, through(torch_ops_atom.quantize_kv), through(kv.quantize_kv))


def decode_attention(target: str, large: bool) -> Sample:
    """Heads that share keys and values; a context in two splits."""
    k, v, cache = _cache(target, large)
    kv.quantize_kv(cache, k, v, torch.zeros(k.shape[0], dtype=torch.int32, device=k.device))
    batch, heads, tokens, head_dim = k.shape
    q = device.upload(ks.vectors(batch * heads * 2, head_dim, "F16", seed=3), target).reshape(batch, -1, head_dim)
    lengths = torch.full((batch,), tokens - 1, dtype=torch.int32, device=k.device)
    return Sample(
        "decode_attention", q,
        lambda q: (torch_ops_atom.decode_attention(q, cache, lengths, scale=0.1, splits=2),),
        lambda q: (kv.decode_attention(q, cache, lengths, scale=0.1, splits=2),),
    )  # fmt: skip


FAST = {
    "bit_gemv": bit_gemv_plain,
    "bit_gemv with everything": bit_gemv_everything,
    "mixed_gemv": mixed_gemv_plain,
    "mixed_gemv with everything": mixed_gemv_everything,
    "csr_outliers": outliers,
}
ATOM = {
    "quantize_reorder": quantize_reorder,
    "rmsnorm_reorder_quant": rmsnorm_reorder_quant,
    "w4a4": w4a4,
    "quantize_kv": quantize_kv,
    "decode_attention": decode_attention,
}
ALL = {"lut_gemv": lut_gemv, "dequantize": dequantize} | FAST | ATOM

# arguments whose content leads to places in memory: a kernel must not follow it out of bounds, whatever it is
PLACES = [
    ("lut_gemv", "perm"), ("lut_gemv", "indptr"), ("lut_gemv", "indices"),
    ("bit_gemv with everything", "perm"), ("bit_gemv with everything", "indptr"),
    ("bit_gemv with everything", "entries"),
    ("mixed_gemv with everything", "perm"), ("mixed_gemv with everything", "indptr"),
    ("mixed_gemv with everything", "entries"),
    ("csr_outliers", "indptr"), ("csr_outliers", "indices"),
    ("quantize_reorder", "perm"), ("rmsnorm_reorder_quant", "perm"),
    ("quantize_kv", "starts"), ("decode_attention", "lengths"),
]  # fmt: skip


def wrong_places(function: Any, arguments: dict[str, Any], which: str) -> Any:
    """Call an operator with random words for the content of one argument: small ones in no order, then any."""
    found, made = arguments[which], None
    for least, end in ((0, 40), (-(2**31), 2**31)):
        words = np.random.default_rng(0).integers(least, end, tuple(found.shape)).astype(np.int32)
        made = function(**{**arguments, which: device.upload(words, found.device)})
    return made


def _vectors(weight: BcqWeight, batch: int, kind: str, target: str) -> Tensor:
    x: Tensor = device.upload(ks.vectors(batch, weight.spec.columns, kind), target)
    return x


def _tokens(target: str, large: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, groups = (19, 32) if large else (3, 2)
    rng = np.random.default_rng(5)
    x = sim_atom.activations(tokens, groups, "F16")
    gamma = rng.standard_normal(x.shape[1]).astype(np.float16)
    perm = rng.permutation(x.shape[1]).astype(np.int32)
    x, gamma, perm = (device.upload(array, target) for array in (x, gamma, perm))
    return x, gamma, perm


def _cache(target: str, large: bool) -> tuple[Tensor, Tensor, kv.KvCache]:
    """k, v (B, H_kv, tokens, 64) and a cache full of ones with room for them."""
    shape = (3, 4, 300, 64) if large else (1, 1, 5, 64)
    rng = np.random.default_rng(7)
    k, v = (device.upload(rng.standard_normal(shape).astype(np.float16), target) for _ in range(2))
    cache = kv.KvCache.empty(*shape[:2], shape[2] + 20, shape[3], like=k)
    for part in _parts(cache).values():
        part.fill_(-1)
    return k, v, cache


def _parts(cache: kv.KvCache) -> dict[str, Tensor]:
    return {
        "keys": cache.keys, "key_parameters": cache.key_parameters, "values": cache.values,
        "value_parameters": cache.value_parameters,
    }  # fmt: skip
