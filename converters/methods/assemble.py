"""Codes and numbers that a method computed, as a BCQ weight: ``BcqWeight.from_*`` with compiled packing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.converters.words import codes_to_planes
from bcqfmt.weight.build import declared_zero, one_segment, plane_numbers, wrap
from bcqfmt.weight.scheme import Segment, sized
from bcqfmt.weight.weight import BcqWeight

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
ScaleSet = tuple[Array, Array | None]  # alpha [p, out, G] and bias [out, G], as stored


def affine_weight(
    codes: Codes,
    scale: Array,
    zero: Array,
    *,
    bits: int,
    group_size: int | str,
    stored: str,
    dtype: str,
    threads: int = 1,
) -> BcqWeight:
    """``s * (code - zp)``: codes ``[out, in]``, scale ``[out, G]`` exact in type ``stored``, zero ``[out, G]``."""
    declared, part = declared_zero(zero.astype(np.uint16), bits)
    planes = codes_to_planes(codes, bits, threads=threads)
    arrays: dict[str, Array] = {"s0_planes": planes, "s0_scale": scale.astype(numpy_dtype(stored)), **part}
    segment = Segment(encoding="affine", bits=bits, **sized(group_size), scale=stored, zero=declared)
    return _weight(segment, codes.shape, dtype, arrays)


def bcq_weight(
    codes: Codes, alpha: Array, bias: Array | None, *, group_size: int | str, dtype: str,
    scale_sets: Mapping[int, ScaleSet] | None = None, threads: int = 1,
) -> BcqWeight:  # fmt: skip
    """Sum of +-alpha plus bias: codes ``[out, in]`` whose highest bit is plane 0.

    alpha ``[q, out, G]`` and bias ``[out, G]`` are stored as they are. ``scale_sets``: see ``BcqWeight.from_bcq``.
    """
    segment, arrays = plane_numbers(alpha.shape[0], group_size, alpha, bias, scale_sets or {})
    arrays["s0_planes"] = codes_to_planes(codes, segment.bits, threads=threads)
    return _weight(segment, codes.shape, dtype, arrays)


def _weight(segment: Segment, shape: tuple[int, ...], dtype: str, arrays: Mapping[str, Array]) -> BcqWeight:
    spec = one_segment(segment, shape, dtype)
    return BcqWeight("", spec, wrap(spec, arrays))
