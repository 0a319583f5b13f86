"""The layout aligned64 and its bijection with the canonical parts (spec section 7).

Tiles of 64 columns: three groups of 16 two-bit codes, sixteen four-bit codes, three zeros and three scale codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .packing import Words
from .scheme import PackedZero, SecondOrder, WeightSpec

__all__ = ["misfit", "tile_codes", "tile_meta_fields", "to_meta", "to_tiles"]

Array = npt.NDArray[Any]
_TWO = np.arange(16, dtype=np.uint32) * 2
_FOUR = np.arange(8, dtype=np.uint32) * 4
_META_SHIFT = np.array([0, 2, 4, 6, 10, 13], np.uint16)
_META_MASK = np.array([3, 3, 3, 15, 7, 7], np.uint16)


def misfit(spec: WeightSpec, *, as_declared: bool = True) -> str:
    """Why a weight cannot have this layout; empty when it can.

    ``as_declared`` asks for the zero of segment 0 in the form that aligned64 files declare, ``{"bits": 2}``.
    """
    segments = spec.scheme.segments
    if len(segments) != 2:
        return f"{len(segments)} segment(s) instead of two"
    low, high = segments
    if spec.columns % 64 or spec.widths != (spec.columns // 4 * 3, spec.columns // 4):
        return f"widths {list(spec.widths)} instead of three quarters and one quarter of a multiple of 64"
    if low.encoding != "affine" or low.bits != 2 or low.group_size != 16:
        return "segment 0 is not affine with 2 bits and groups of 16"
    if not isinstance(low.scale, SecondOrder) or low.scale.bits != 4 or low.scale.zero != "packed":
        return "the scales of segment 0 are not second-order with 4 bits and packed zeros"
    if as_declared and low.zero != PackedZero(2):
        return "the zero of segment 0 is not declared as {bits: 2}"
    if high.encoding != "affine" or high.bits != 4:
        return "segment 1 is not affine with 4 bits"
    return ""


def tile_codes(tile: Array, extra: Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Tiles (rows, T, 4) and extras (rows, T) to codes of segment 0 (rows, 48T) and segment 1 (rows, 16T), uint8."""
    words = tile.view(np.uint32)
    rows, tiles = words.shape[:2]
    low = (words[:, :, :3, None] >> _TWO) & np.uint32(3)
    high = np.stack([words[:, :, 3], extra.view(np.uint32)], axis=2)
    high = (high[..., None] >> _FOUR) & np.uint32(15)
    return low.reshape(rows, tiles * 48).astype(np.uint8), high.reshape(rows, tiles * 16).astype(np.uint8)


def to_tiles(low: Array, high: Array) -> tuple[Words, Words]:
    """The inverse of :func:`tile_codes`: tiles (rows, T, 4) and extras (rows, T), uint32."""
    rows, tiles = low.shape[0], low.shape[1] // 48
    two = np.bitwise_or.reduce(low.reshape(rows, tiles, 3, 16).astype(np.uint32) << _TWO, axis=-1)
    four = np.bitwise_or.reduce(high.reshape(rows, tiles, 2, 8).astype(np.uint32) << _FOUR, axis=-1)
    return np.concatenate([two, four[:, :, :1]], axis=2), np.ascontiguousarray(four[:, :, 1])


def tile_meta_fields(meta: Array) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Meta words (rows, T) uint16 to zeros (rows, 3T) and scale codes (rows, 3T) of segment 0."""
    rows, tiles = meta.shape
    fields = (meta[:, :, None] >> _META_SHIFT) & _META_MASK
    return fields[:, :, :3].reshape(rows, tiles * 3), fields[:, :, 3:].reshape(rows, tiles * 3)


def to_meta(zeros: Array, codes: Array) -> npt.NDArray[np.uint16]:
    """The inverse of :func:`tile_meta_fields`; zeros at most 3, scale codes at most 15, 7, 7 within a tile."""
    rows, tiles = zeros.shape[0], zeros.shape[1] // 3
    fields = np.concatenate([zeros.reshape(rows, tiles, 3), codes.reshape(rows, tiles, 3)], axis=2)
    meta: npt.NDArray[np.uint16] = np.bitwise_or.reduce(fields.astype(np.uint16) << _META_SHIFT, axis=-1)
    return meta
