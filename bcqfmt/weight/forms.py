"""A weight in its other layout: canonical parts to aligned64 tiles and back (spec section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error

from . import aligned64
from .packing import pack, pack_planes, unpack, unpack_codes
from .scheme import PackedZero, WeightSpec

__all__ = ["aligned_form", "canonical_form", "codes_of"]

Array = npt.NDArray[Any]
Parts = Mapping[str, StoredTensor]
Built = tuple[WeightSpec, dict[str, Array]]


def canonical_form(spec: WeightSpec, parts: Parts) -> Built:
    """Tiles to planes, zeros and scale codes."""
    arrays = {s: p.array() for s, p in parts.items() if not s.startswith("tile")}
    lead = spec.shape[:-1]
    tile, extra, meta = (parts[s].array() for s in ("tile", "tile_extra", "tile_meta"))
    low, high = aligned64.tile_codes(tile.reshape(-1, *tile.shape[-2:]), extra.reshape(-1, extra.shape[-1]))
    zeros, codes = aligned64.tile_meta_fields(meta.reshape(-1, meta.shape[-1]))
    arrays["s0_planes"] = pack_planes(low.reshape(*lead, -1), 2)
    arrays["s1_planes"] = pack_planes(high.reshape(*lead, -1), 4)
    arrays["s0_zero"] = pack(zeros.reshape(*lead, -1), 2)
    arrays["s0_scale_codes"] = pack(codes.reshape(*lead, -1), 4)
    arrays["s0_scale_zero"] = pack(arrays["s0_scale_zero"], 4)
    return replace(spec, scheme=replace(spec.scheme, aligned64=False)), arrays


def aligned_form(spec: WeightSpec, parts: Parts) -> Built:
    """Planes, zeros and scale codes to tiles; refused when a number does not fit."""
    if reason := aligned64.misfit(spec, as_declared=False):
        raise error("BCQ-E305", found=reason, expected="a weight that fits aligned64")
    groups = spec.groups(0)
    codes = unpack(parts["s0_scale_codes"].array(), 4, groups).reshape(-1, groups)
    zeros = _zeros(spec, parts, codes)
    if zeros.max() > 3 or codes.reshape(-1, 3)[:, 1:].max() > 7:
        raise error(
            "BCQ-E305",
            found="a zero above 3, or a scale code above 7 in the second or third group of a tile",
            expected="numbers that fit aligned64",
        )
    low, high = (codes_of(spec, parts, k).reshape(-1, spec.widths[k]) for k in (0, 1))
    tile, extra = aligned64.to_tiles(low, high)
    lead, tiles = spec.shape[:-1], spec.columns // 64
    replaced = ("s0_planes", "s1_planes", "s0_zero", "s0_scale_codes")
    arrays = {s: p.array() for s, p in parts.items() if s not in replaced}
    arrays["tile"] = tile.reshape(*lead, tiles, 4)
    arrays["tile_extra"] = extra.reshape(*lead, tiles)
    arrays["tile_meta"] = aligned64.to_meta(zeros, codes).reshape(*lead, tiles)
    arrays["s0_scale_zero"] = unpack(arrays["s0_scale_zero"], 4, groups).astype(np.uint8)
    segments = (replace(spec.scheme.segments[0], zero=PackedZero(2)), spec.scheme.segments[1])
    return replace(spec, scheme=replace(spec.scheme, segments=segments, aligned64=True)), arrays


def codes_of(spec: WeightSpec, parts: Parts, k: int) -> npt.NDArray[np.uint8]:
    """Codes of segment ``k`` of a canonical weight in stored column order, ``([E,] out, width)`` uint8."""
    words = parts[f"s{k}_planes"].array()
    matrices = words.reshape(-1, *words.shape[-3:])
    codes = np.stack([unpack_codes(matrix, spec.widths[k]) for matrix in matrices])
    return codes.reshape(*spec.shape[:-1], spec.widths[k])


def _zeros(spec: WeightSpec, parts: Parts, like: Array) -> Array:
    zero = spec.scheme.segments[0].zero
    if isinstance(zero, PackedZero):
        return unpack(parts["s0_zero"].array(), zero.bits, spec.groups(0)).reshape(like.shape)
    assert isinstance(zero, int)
    return np.full_like(like, zero)
