"""The layout aligned64 and its bijection with the canonical parts (spec annex A).

Tiles of 64 columns: three groups of 16 two-bit codes, sixteen four-bit codes, three zeros and three scale codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error

from .packing import Words, pack, pack_planes, unpack, unpack_codes
from .scheme import PackedZero, SecondOrder, WeightSpec

Array = npt.NDArray[Any]
Parts = Mapping[str, StoredTensor]
Built = tuple[WeightSpec, dict[str, Array]]
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
    order = low.scale
    if not isinstance(order, SecondOrder) or (order.bits, order.zero, order.groups) != (4, "packed", 1):
        return "the scales of segment 0 are not second-order with 4 bits and packed zeros, without groups"
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


def canonical_form(spec: WeightSpec, parts: Parts) -> Built:
    """Tiles to planes, zeros and scale codes."""
    arrays = {s: p.array() for s, p in parts.items() if not s.startswith("tile")}
    lead = spec.shape[:-1]
    tile, extra, meta = (parts[s].array() for s in ("tile", "tile_extra", "tile_meta"))
    low, high = tile_codes(tile.reshape(-1, *tile.shape[-2:]), extra.reshape(-1, extra.shape[-1]))
    zeros, codes = tile_meta_fields(meta.reshape(-1, meta.shape[-1]))
    arrays["s0_planes"] = pack_planes(low.reshape(*lead, -1), 2)
    arrays["s1_planes"] = pack_planes(high.reshape(*lead, -1), 4)
    arrays["s0_zero"] = pack(zeros.reshape(*lead, -1), 2)
    arrays["s0_scale_codes"] = pack(codes.reshape(*lead, -1), 4)
    arrays["s0_scale_zero"] = pack(arrays["s0_scale_zero"], 4)
    return replace(spec, scheme=replace(spec.scheme, aligned64=False)), arrays


def aligned_form(spec: WeightSpec, parts: Parts) -> Built:
    """Planes, zeros and scale codes to tiles; refused when a number does not fit."""
    if reason := misfit(spec, as_declared=False):
        raise error("BCQ-E305", found=reason, expected="a weight that fits aligned64")
    groups = spec.groups(0)
    codes = unpack(parts["s0_scale_codes"].array(), 4, groups).reshape(-1, groups)
    zeros = _zero_points(spec, parts, codes)
    if zeros.max() > 3 or codes.reshape(-1, 3)[:, 1:].max() > 7:
        found = "a zero above 3, or a scale code above 7 in the second or third group of a tile"
        raise error("BCQ-E305", found=found, expected="numbers that fit aligned64")
    low, high = (
        unpack_codes(parts[f"s{k}_planes"].array(), spec.widths[k]).reshape(-1, spec.widths[k]) for k in (0, 1)
    )
    tile, extra = to_tiles(low, high)
    lead, tiles = spec.shape[:-1], spec.columns // 64
    replaced = ("s0_planes", "s1_planes", "s0_zero", "s0_scale_codes")
    arrays = {s: p.array() for s, p in parts.items() if s not in replaced}
    arrays["tile"] = tile.reshape(*lead, tiles, 4)
    arrays["tile_extra"] = extra.reshape(*lead, tiles)
    arrays["tile_meta"] = to_meta(zeros, codes).reshape(*lead, tiles)
    arrays["s0_scale_zero"] = unpack(arrays["s0_scale_zero"], 4, groups).astype(np.uint8)
    segments = (replace(spec.scheme.segments[0], zero=PackedZero(2)), spec.scheme.segments[1])
    return replace(spec, scheme=replace(spec.scheme, segments=segments, aligned64=True)), arrays


def _zero_points(spec: WeightSpec, parts: Parts, like: Array) -> Array:
    zero = spec.scheme.segments[0].zero
    if isinstance(zero, PackedZero):
        return unpack(parts["s0_zero"].array(), zero.bits, spec.groups(0)).reshape(like.shape)
    assert isinstance(zero, int)
    return np.full_like(like, zero)
