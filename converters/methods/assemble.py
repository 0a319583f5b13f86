"""Codes and numbers that a method computed, as a BCQ weight: ``BcqWeight.from_*`` with compiled packing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import name_of, numpy_dtype
from bcqfmt.converters.words import codes_to_planes
from bcqfmt.weight.build import declared_zero, wrap
from bcqfmt.weight.packing import pack
from bcqfmt.weight.scheme import PackedZero, Scheme, Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

__all__ = ["ScaleSet", "affine_weight", "bcq_weight"]

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
ScaleSet = tuple[Array, Array | None]  # alpha [p, out, G] and bias [out, G], as stored


def affine_weight(
    codes: Codes, scale: Array, zero: Array, *, bits: int, group_size: int, stored: str, dtype: str, threads: int = 1
) -> BcqWeight:
    """``s * (code - zp)``: codes ``[out, in]``, scale ``[out, G]`` exact in type ``stored``, zero ``[out, G]``."""
    declared, fields = declared_zero(zero.astype(np.uint16), bits)
    arrays: dict[str, Array] = {
        "s0_planes": codes_to_planes(codes, bits, threads=threads),
        "s0_scale": scale.astype(numpy_dtype(stored)),
    }
    if isinstance(declared, PackedZero):
        arrays["s0_zero"] = pack(fields, declared.bits)
    segment = Segment(encoding="affine", bits=bits, group_size=group_size, scale=stored, zero=declared)
    return _weight(segment, codes.shape, dtype, arrays)


def bcq_weight(
    codes: Codes, alpha: Array, bias: Array | None, *, group_size: int, dtype: str,
    scale_sets: Mapping[int, ScaleSet] | None = None, threads: int = 1,
) -> BcqWeight:  # fmt: skip
    """Sum of +-alpha plus bias: codes ``[out, in]`` whose highest bit is plane 0.

    alpha ``[q, out, G]`` and bias ``[out, G]`` are stored as they are. ``scale_sets``: see ``BcqWeight.from_bcq``.
    """
    sets = scale_sets or {}
    bits = alpha.shape[0]
    arrays: dict[str, Array] = {"s0_planes": codes_to_planes(codes, bits, threads=threads)}
    for suffix, (one, offset) in {"": (alpha, bias), **{f"_p{p}": pair for p, pair in sets.items()}}.items():
        arrays[f"s0_alpha{suffix}"] = one
        if offset is not None:
            arrays[f"s0_bias{suffix}"] = offset
    segment = Segment(
        encoding="bcq",
        bits=bits,
        group_size=group_size,
        alpha=name_of(alpha),
        bias=None if bias is None else name_of(bias),
        precisions=tuple(sorted(sets)),
    )
    return _weight(segment, codes.shape, dtype, arrays)


def _weight(segment: Segment, shape: tuple[int, ...], dtype: str, arrays: Mapping[str, Array]) -> BcqWeight:
    spec = WeightSpec(scheme=Scheme(segments=(segment,)), shape=tuple(shape), dtype=dtype, widths=(int(shape[-1]),))
    return BcqWeight("", spec, wrap(spec, arrays))
