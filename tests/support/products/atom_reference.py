"""What the kernels of Atom compute, in numpy (arXiv 2310.19102): W4A4 to the bit (sections 4.1 to 4.3), then the INT4
key-value cache, its content to the bit and attention over it in float64.

A token is a row of x. Its channels are gathered by ``perm`` and cut into groups of 128; the last group holds the
outlier channels and is quantized to int8, the others to int4::

    scale = trunc22(absmax * factor)          factor: float32, see `operands.step_factor`
    code  = clamp(rint(x * (1 / scale)))

Everything is binary32, each operation rounded once. ``trunc22`` clears the two last bits of the significand: an
integer below 2^22 times such a scale can be had exactly from one fused multiply-add, which is how the GEMM turns its
int32 sums into numbers. A scale below 2^-126 is 0, one from 2^100 on is infinite; the codes are 0 then. A NaN or an
infinity makes its group's scale NaN or infinite, and with it the token's outputs NaN: nothing bad passes in silence.

The product of a group is an exact integer ``d``; with v = 16 for int4 groups (their weight codes stand in the upper
half of a byte) and 1 for the int8 group::

    acc = fma(RN(v * d * scale), weight_scale / v, acc)

over the groups of a slice in order, then slice after slice, ``((slice 0 + slice 1) + slice 2) + ...``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.kernels.atom.operands import GROUP, NORM_THREADS, TOKENS, UNIT, AtomWeight, padded, step_factor

_SMALLEST, _LARGEST = np.float32(2.0**-126), np.float32(2.0**100)

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
I8 = npt.NDArray[np.int8]
U32 = npt.NDArray[np.uint32]


def quantize_activations(
    x: Array, perm: Array | None = None, *, factor: float | None = None, outlier_factor: float | None = None
) -> tuple[npt.NDArray[np.int8], F32]:
    """x ``[M, in]`` -> codes ``[M, in]`` in stored order and scale ``[M, in / 128]``."""
    moved = np.asarray(x, np.float32)
    moved = moved if perm is None else moved[:, perm]
    grouped = moved.reshape(moved.shape[0], -1, GROUP)
    factors = np.full(grouped.shape[1], step_factor(4) if factor is None else factor, np.float32)
    factors[-1] = step_factor(8) if outlier_factor is None else outlier_factor
    top = np.full(grouped.shape[1], 7, np.float32)
    top[-1] = 127
    with np.errstate(all="ignore"):
        # as patterns, because a NaN has to win
        absmax = (grouped.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=2).view(np.float32)
        scale = ((absmax * factors).view(np.uint32) & np.uint32(0xFFFFFFFC)).view(np.float32)
        usable = (scale >= _SMALLEST) & (scale < _LARGEST)
        inverse = np.where(usable, np.float32(1) / scale, np.float32(0)).astype(np.float32)
        scale = np.where(scale < _SMALLEST, np.float32(0), np.where(scale >= _LARGEST, np.float32(np.inf), scale))
        steps = np.nan_to_num(np.rint(grouped * inverse[:, :, None]), nan=0.0, posinf=200, neginf=-200)
    codes = np.clip(steps, -top[:, None] - 1, top[:, None]).astype(np.int8)
    return codes.reshape(moved.shape), scale


def rmsnorm(x: Array, gamma: Array, eps: float) -> Array:
    """x ``[M, n]`` -> x / sqrt(mean(x^2) + eps) * gamma in the dtype of x, rounded to it after each factor.

    Column ``8 (256 i + t) + j`` belongs to thread t, which adds its squares in order; 32 threads then add crosswise
    (distances 16, 8, 4, 2, 1), and their sums are added one after another.
    """
    wide = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        mean = _square_sum(wide) / np.float32(wide.shape[1]) + np.float32(eps)
        inverse = np.float32(1) / np.sqrt(mean)
        normed = (wide * inverse[:, None]).astype(x.dtype).astype(np.float32)
        result: Array = (normed * np.asarray(gamma, np.float32)).astype(x.dtype)
    return result


def _square_sum(wide: F32) -> F32:
    rows, n = wide.shape
    padded = np.zeros((rows, -(-n // (8 * NORM_THREADS)) * 8 * NORM_THREADS), np.float32)
    padded[:, :n] = wide
    own = padded.reshape(rows, -1, NORM_THREADS, 8).transpose(0, 2, 1, 3).reshape(rows, NORM_THREADS, -1)
    total = np.zeros((rows, NORM_THREADS), np.float32)
    for j in range(own.shape[2]):
        total = fma32(own[:, :, j], own[:, :, j], total)
    lanes = total.reshape(rows, -1, 32)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, :, np.arange(32) ^ distance]
    return _in_order([lanes[:, warp, 0] for warp in range(lanes.shape[1])])


def slice_bounds(groups: int, slices: int) -> list[int]:
    """Where the slices of the group sum begin and end: ``slices + 1`` group numbers."""
    return [groups * s // slices for s in range(slices + 1)]


def group_gemm(codes: Array, scale: F32, weight: Array, weight_scale: F32, slices: int = 1) -> F32:
    """codes ``[M, in]`` and weight ``[out, in]`` int8, scales ``[M, G]`` and ``[out, G]`` -> ``[M, out]``."""
    m, groups = scale.shape
    left = codes.reshape(m, groups, GROUP).astype(np.float64)
    right = weight.reshape(weight.shape[0], groups, GROUP).astype(np.float64)
    bounds = slice_bounds(groups, slices)
    partials = []
    for first, last in itertools.pairwise(bounds):
        acc = np.zeros((m, weight.shape[0]), np.float32)
        for g in range(first, last):
            factor = np.float32(1 if g == groups - 1 else 16)
            dots = (left[:, g] @ right[:, g].T).astype(np.float32) * factor  # integers below 2^22: exact
            with np.errstate(all="ignore"):
                acc = fma32(dots * scale[:, g, None], (weight_scale[:, g] / factor)[None, :], acc)
        partials.append(acc)
    return _in_order(partials)


def _in_order(parts: Sequence[F32]) -> F32:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fma32(a: Array, b: Array, c: Array) -> F32:
    """a * b + c of float32 arrays with one rounding.

    The product is exact in binary64; the sum is rounded there to odd, so that rounding to binary32 is the only one
    that counts.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float64), np.broadcast_shapes(product.shape, np.shape(c)))
        total = np.ascontiguousarray(product + addend)
        shadow = total - product
        lost = (product - (total - shadow)) + (addend - shadow)
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        nudge = np.isfinite(total) & (lost != 0) & even
        total = np.where(nudge, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
        return total.astype(np.float32)


def activation_words(codes: I8, scale: F32) -> tuple[U32, F32]:
    """Codes ``[M, in]`` and scales ``[M, G]`` as the kernels keep them.

    words ``[tiles of 8 tokens, G, 256]`` uint32: bytes ``[h][token][64 columns]``; scales ``[G, 8 * tiles]``; absent
    tokens are zeros.
    """
    m, columns = codes.shape
    full = np.zeros((padded(m, TOKENS), columns), np.int8)
    full[:m] = codes
    placed = full.reshape(-1, TOKENS, columns // GROUP, 2, 64).transpose(0, 2, 3, 1, 4)
    scales = np.zeros((columns // GROUP, full.shape[0]), np.float32)
    scales[:, :m] = scale.T
    return np.ascontiguousarray(placed).reshape(-1, columns // GROUP, 1024).view(np.uint32), scales


def unpack_activations(words: U32, scales: F32, tokens: int) -> tuple[I8, F32]:
    """The inverse of :func:`activation_words`."""
    tiles, groups = words.shape[0], scales.shape[0]
    placed = words.reshape(tiles, groups, 256).view(np.int8).reshape(tiles, groups, 2, TOKENS, 64)
    codes = placed.transpose(0, 3, 1, 2, 4).reshape(tiles * TOKENS, groups * GROUP)
    return codes[:tokens], scales[:, :tokens].T


def unpack_w4(packed: AtomWeight) -> tuple[I8, F32]:
    """Codes ``[out, in]`` and scales ``[out, G]`` back."""
    units, groups = packed.words.shape[0] // 2, packed.columns // GROUP
    words = packed.words.reshape(units, 2, groups + 1, 256)
    nibbles = words[:, :, :-2].reshape(units, 2, groups - 1, 2, 8, 4, 2, 2)
    shifts = (np.arange(4)[None, :] * 8 + np.arange(2)[:, None] * 4).astype(np.uint32)  # [s][b]
    low = ((nibbles[..., None, None] >> shifts) & np.uint32(15)).astype(np.int8)
    low = ((low ^ 8) - 8).transpose(0, 4, 1, 7, 2, 3, 5, 6, 8, 9)  # u r t p g h q j s b
    bytes_ = words[:, :, -2:].reshape(units, 2, 2, 2, 8, 4, 2, 2).view(np.int8).reshape(units, 2, 2, 2, 8, 4, 2, 2, 4)
    high = bytes_.transpose(0, 4, 1, 7, 2, 5, 3, 6, 8)  # u r t p h q j s b
    rows = units * UNIT
    codes = np.concatenate([low.reshape(rows, -1), high.reshape(rows, -1)], axis=1)[: packed.out]
    factors = np.full(groups, 16, np.float32)
    factors[-1] = 1
    return codes, packed.scale[:, : packed.out].T * factors


def quantize_kv(x: Array) -> tuple[npt.NDArray[np.uint8], F16, F16]:
    """x ``[..., D]`` -> codes ``[..., D]`` 0..15, scale, offset ``[...]``; `cache_kernel` has the rule."""
    wide = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        bad = ~(np.abs(wide) <= 65504).all(axis=-1)
        offset = np.fmin.reduce(wide, axis=-1).astype(np.float16)
        span = np.fmax.reduce(wide, axis=-1) - offset.astype(np.float32)
        scale = np.fmax((span / np.float32(15)).astype(np.float16), np.float16(2.0**-14))
        steps = np.rint((wide - offset.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None])
    codes = np.clip(np.nan_to_num(steps, nan=0.0, posinf=99.0, neginf=-99.0), 0, 15).astype(np.uint8)
    scale, offset = np.where(bad, np.float16(np.nan), scale), np.where(bad, np.float16(np.nan), offset)
    return codes, scale, offset


def cache_words(codes: Array, scale: F16, offset: F16) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Codes ``[..., D]`` as words ``[..., D / 8]``, scale and offset as words ``[...]``."""
    fields = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    low, high = scale.view(np.uint16).astype(np.uint32), offset.view(np.uint16).astype(np.uint32)
    return np.bitwise_or.reduce(fields, axis=-1), high << np.uint32(16) | low


def decode_attention(
    q: Array, keys: tuple[Array, F16, F16], values: tuple[Array, F16, F16], lengths: Array, scale: float
) -> npt.NDArray[np.float64]:
    """q ``[B, H, D]``; keys, values: codes ``[B, H_kv, T, D]``, scale, offset -> ``[B, H, D]``; no tokens: zeros."""
    query = np.asarray(q, np.float64)
    batch, heads, _ = query.shape
    k, v = (
        c.astype(np.float64) * s.astype(np.float64)[..., None] + o.astype(np.float64)[..., None]
        for c, s, o in (keys, values)
    )
    ratio = heads // k.shape[1]
    result = np.zeros(query.shape)
    for b in range(batch):
        n = int(lengths[b])
        for h in range(heads if n else 0):
            score = k[b, h // ratio, :n] @ query[b, h] * scale
            share = np.exp(score - score.max())
            result[b, h] = share @ v[b, h // ratio, :n] / share.sum()
    return result
