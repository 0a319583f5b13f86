"""Oracles of the INT4 key-value cache: its content to the bit, attention over it in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["cache_words", "decode_attention", "quantize_kv"]

Array = npt.NDArray[Any]
F16 = npt.NDArray[np.float16]


def quantize_kv(x: Array) -> tuple[npt.NDArray[np.uint8], F16, F16]:
    """x ``[..., D]`` -> codes ``[..., D]`` 0..15, scale, offset ``[...]``; `cuda_kv_attention_cache` has the rule."""
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
