"""What the tests of W4A4 and of the INT4 cache ask of the simulator; samples and bad calls of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels.atom import attention as kv
from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.atom.shape import Held, Tile

_GUARD = 64  # elements before and after a result
_PATTERN = 0xA5


class Found(NamedTuple):
    """A result; whether a second run gave the same bits and nothing around it was touched."""

    value: Any
    clean: bool


def atom_weight(out: int, groups: int, *, bits: int = 4, numbers: str = "F16", seed: int = 0) -> BcqWeight:
    """A random weight in Atom's form: ``groups - 1`` groups of ``bits`` bits, one of 8, channels reordered."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(numbers)
    low = BcqWeight.from_affine(
        rng.integers(0, 2**bits, (out, 128 * (groups - 1))), (rng.random((out, groups - 1)) * 0.1).astype(kind),
        2 ** (bits - 1), group_size=128, bits=bits, dtype="F16",
    )  # fmt: skip
    high = BcqWeight.from_affine(
        rng.integers(0, 256, (out, 128)), (rng.random((out, 1)) * 0.01).astype(kind), 128, group_size=128, bits=8,
        dtype="F16",
    )  # fmt: skip
    return BcqWeight.from_segments([low, high], perm=rng.permutation(128 * groups))


def activations(tokens: int, groups: int, kind: str, seed: int = 0) -> Any:
    """Tokens with a loud channel and a silent group."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 128 * groups)) * 2
    x[:, 5] *= 40
    x[0, 128:256] = 0
    return x.astype(numpy_dtype(kind))


def quantize(
    x: Any, perm: Any, gamma: Any = None, *, eps: float = 1e-5, clip: float = 1.0, rule: str = "absmax"
) -> Any:
    """Words and scales that the kernel writes."""
    if gamma is None:
        found = w4.quantize_reorder(x, perm, clip=clip, rule=rule)
    else:
        found = w4.rmsnorm_reorder_quant(x, gamma, perm, eps=eps, clip=clip, rule=rule)
    return found.codes.view(np.uint32), found.scale


def norm(x: Any, gamma: Any, eps: float) -> Found:
    """RMSNorm by itself."""
    return _guarded(x.shape, x.dtype, lambda out: w4.rmsnorm(x, gamma, eps=eps, out=out))


def product(weight: BcqWeight, x: Any, dtype: str, tile: tuple[int, ...], slices: int) -> Found:
    """Quantized and multiplied by one tile; the tickets have to be zeros again."""
    placed = w4.atom_to_device(ao.pack_w4(weight))
    quantized = w4.quantize_reorder(x, placed.perm)
    plan = w4.Plan((Held if len(tile) == 4 else Tile)(*tile), slices)

    def run(out: Any) -> None:
        w4.w4a4(quantized, placed, dtype=dtype, out=out, plan=plan)

    found = _guarded((x.shape[0], weight.spec.out), numpy_dtype(dtype), run)
    return found._replace(clean=found.clean and not placed.tickets.any())


def chosen(weight: BcqWeight, x: Any) -> Any:
    """The product as `w4a4` shares it out by itself, and its plan's slices."""
    placed = w4.atom_to_device(ao.pack_w4(weight))
    quantized = w4.quantize_reorder(x, placed.perm)
    plan = w4.plan_for(x.shape[0], placed.out, placed.groups)
    return w4.w4a4(quantized, placed, dtype="F32"), plan.slices


def write_cache(k: Any, v: Any, capacity: int, starts: Any) -> Any:
    """A cache full of ones with k and v written into it: keys, their parameters, values, their parameters."""
    cache = _cache(k, capacity)
    kv.quantize_kv(cache, k, v, starts)
    return tuple(part.view(np.uint32) for part in (*_parts(cache),))


def attend(q: Any, parts: Any, lengths: Any, splits: int | None, scale: float | None = None) -> Found:
    """Attention over a cache given by its four arrays."""
    keys, key_parameters, values, value_parameters = (np.ascontiguousarray(part.view(np.int32)) for part in parts)
    cache = kv.KvCache(
        keys=keys, key_parameters=key_parameters, values=values, value_parameters=value_parameters
    )  # fmt: skip
    return _guarded(
        q.shape, q.dtype, lambda out: kv.decode_attention(q, cache, lengths, splits=splits, scale=scale, out=out)
    )


def _cache(like: Any, capacity: int) -> kv.KvCache:
    batch, heads, _, head_dim = like.shape
    cache = kv.KvCache.empty(batch, heads, capacity, head_dim, like=like)
    for part in _parts(cache):
        part.view(np.uint32)[...] = 0xFFFFFFFF
    return cache


def _parts(cache: kv.KvCache) -> tuple[Any, ...]:
    return cache.keys, cache.key_parameters, cache.values, cache.value_parameters


def _guarded(shape: tuple[int, ...], kind: Any, run: Any) -> Found:
    """As :func:`sim_kernels.guarded`."""
    found, intact = [], True
    size, margin = int(np.prod(shape)), _GUARD * np.dtype(kind).itemsize
    for fill in (0xFF, 0x00) if size <= 256 else (0xFF,):
        room = np.full(size * np.dtype(kind).itemsize + 2 * margin, _PATTERN, np.uint8)
        inside = room[margin : room.size - margin]
        inside[:] = fill
        run(inside.view(kind).reshape(shape))
        found.append(inside.copy())
        intact &= bool((room[:margin] == _PATTERN).all() and (room[room.size - margin :] == _PATTERN).all())
    return Found(found[0].view(kind).reshape(shape), intact and found[0].tobytes() == found[-1].tobytes())


# -- calls that must be refused: name -> (code, words of the message) ------------------------------------------------

BAD = {
    "x of 200 channels": ("BCQ-E552", "multiple of 128"),
    "x of one group": ("BCQ-E552", "at least 256"),
    "x of integers": ("BCQ-E552", "dtype I32"),
    "x of three dimensions": ("BCQ-E552", "shape"),
    "x with strides": ("BCQ-E552", "contiguous"),
    "perm of another length": ("BCQ-E552", "perm has shape"),
    "perm of 64 bits": ("BCQ-E552", "perm has dtype I64"),
    "gamma of another type": ("BCQ-E552", "gamma has dtype F32"),
    "eps of 2": ("BCQ-E552", "eps = 2"),
    "clip of 0": ("BCQ-E552", "clip 0"),
    "an unknown rule": ("BCQ-E552", "rule 'nearest'"),
    "activations of another width": ("BCQ-E552", "384 channels"),
    "a result of another shape": ("BCQ-E552", "out has shape"),
    "a result of another type": ("BCQ-E552", "out has dtype F32"),
    "a result in float64": ("BCQ-E552", "dtype float64"),
    "more slices than groups": ("BCQ-E552", "3 slices"),
    "more results than indices": ("BCQ-E554", "results"),
    "a cache of 100 columns": ("BCQ-E552", "heads of 64, 128, 256"),
    "a cache of 40 tokens": ("BCQ-E552", "multiples of 32"),
    "a cache too large": ("BCQ-E554", "a cache of"),
    "values of another shape": ("BCQ-E552", "values has shape"),
    "three query heads for two": ("BCQ-E552", "3 query heads"),
    "lengths of 64 bits": ("BCQ-E552", "lengths has dtype I64"),
    "an infinite scale": ("BCQ-E552", "scale = inf"),
    "no splits": ("BCQ-E552", "0 splits"),
    "k and v of different types": ("BCQ-E552", "v has dtype F32"),
}


def refused(case: str) -> Any:
    """Run a case of `BAD`; everything but the argument in question is in order."""
    x, perm = np.ones((2, 256), np.float16), np.arange(256, dtype=np.int32)
    weight = w4.atom_to_device(ao.pack_w4(atom_weight(40, 2)))
    ready = w4.Activations(
        codes=np.zeros((1, 2, 256), np.int32), scale=np.zeros((2, 8), np.float32), tokens=2, columns=256
    )
    other = w4.Activations(codes=ready.codes, scale=ready.scale, tokens=2, columns=384)
    many = w4.Activations(codes=ready.codes, scale=ready.scale, tokens=2**30, columns=256)
    q, k = np.ones((1, 2, 64), np.float16), np.ones((1, 2, 3, 64), np.float16)
    cache = _cache(k, 32)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    half, single = np.float16, np.float32
    calls: dict[str, Any] = {
        "x of 200 channels": lambda: w4.quantize_reorder(np.ones((2, 200), half), perm),
        "x of one group": lambda: w4.quantize_reorder(np.ones((2, 128), half), perm),
        "x of integers": lambda: w4.quantize_reorder(np.ones((2, 256), np.int32), perm),
        "x of three dimensions": lambda: w4.quantize_reorder(np.ones((1, 2, 256), half), perm),
        "x with strides": lambda: w4.quantize_reorder(np.ones((2, 512), half)[:, ::2], perm),
        "perm of another length": lambda: w4.quantize_reorder(x, perm[:128]),
        "perm of 64 bits": lambda: w4.quantize_reorder(x, perm.astype(np.int64)),
        "gamma of another type": lambda: w4.rmsnorm_reorder_quant(x, np.ones(256, single), perm, eps=0.0),
        "eps of 2": lambda: w4.rmsnorm(x, x[0], eps=2.0),
        "clip of 0": lambda: w4.quantize_reorder(x, perm, clip=0.0),
        "an unknown rule": lambda: w4.quantize_reorder(x, perm, rule="nearest"),
        "activations of another width": lambda: w4.w4a4(other, weight),
        "a result of another shape": lambda: w4.w4a4(ready, weight, out=np.ones((3, 40), half)),
        "a result of another type": lambda: w4.w4a4(ready, weight, out=np.ones((2, 40), single)),
        "a result in float64": lambda: w4.w4a4(ready, weight, dtype="float64"),
        "more slices than groups": lambda: w4.w4a4(ready, weight, plan=w4.Plan(Tile(32, 8, 1, 1, 2), 3)),
        "more results than indices": lambda: w4.w4a4(many, weight),
        "a cache of 100 columns": lambda: kv.KvCache.empty(1, 1, 32, 100, like=q),
        "a cache of 40 tokens": lambda: kv.decode_attention(q, _short(cache), one),
        "a cache too large": lambda: kv.KvCache.empty(2**12, 2**10, 2**12, 128, like=q),
        "values of another shape": lambda: kv.decode_attention(q, _lopsided(cache), one),
        "three query heads for two": lambda: kv.decode_attention(np.ones((1, 3, 64), half), cache, one),
        "lengths of 64 bits": lambda: kv.decode_attention(q, cache, one.astype(np.int64)),
        "an infinite scale": lambda: kv.decode_attention(q, cache, one, scale=float("inf")),
        "no splits": lambda: kv.decode_attention(q, cache, one, splits=0),
        "k and v of different types": lambda: kv.quantize_kv(cache, k, k.astype(single), zero),
    }
    return calls[case]()


def _short(cache: kv.KvCache) -> kv.KvCache:
    return kv.KvCache(
        keys=np.zeros((1, 2, 40, 8), np.int32), key_parameters=cache.key_parameters, values=cache.values,
        value_parameters=cache.value_parameters,
    )  # fmt: skip


def _lopsided(cache: kv.KvCache) -> kv.KvCache:
    return kv.KvCache(
        keys=cache.keys, key_parameters=cache.key_parameters, values=np.zeros((1, 2, 64, 8), np.int32),
        value_parameters=cache.value_parameters,
    )  # fmt: skip


def hostile_perm(x: Any) -> Any:
    """Channels far outside of x: read as some channel, never followed."""
    perm = np.arange(x.shape[1], dtype=np.int32)
    perm[::7] = -5
    perm[3::7] = 2**31 - 1
    return quantize(x, perm)
