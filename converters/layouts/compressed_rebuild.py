"""The way back to the tensors of compressed-tensors, and the numbers that are written out on the way there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.weight.weight import BcqWeight

from . import compressed_words as packed_words
from .g_idx import group_index
from .protocol import Rebuild, Rule
from .uniform import zero_points_of

__all__ = ["REBUILDERS", "widened"]

Array = npt.NDArray[Any]


def widened(tensor: StoredTensor, wide: tuple[int, ...]) -> StoredTensor:
    """Numbers that rows or experts share, written out to ``([E,] N, G)``; one-dimensional ones are those of rows."""
    if tensor.shape == wide:
        return tensor
    return StoredTensor(
        tensor.name,
        tensor.dtype,
        wide,
        make=lambda: np.broadcast_to(tensor.array().reshape(_aligned(tensor.shape)), wide),
    )


def _narrowed(array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of :func:`widened`."""
    aligned = _aligned(shape)
    lead = (1,) * (array.ndim - len(aligned))
    return array[tuple(slice(0, dim) for dim in (*lead, *aligned))].reshape(shape)


def _aligned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 1) if len(shape) == 1 else shape


def _scale(weight: BcqWeight, rule: Rule) -> Array:
    return _narrowed(weight.parts()["s0_scale"].array(), tuple(rule["shape"]))


def _zero_plain(weight: BcqWeight, rule: Rule) -> Array:
    zeros = zero_points_of(weight).astype(np.int16) - np.int16(2 ** (weight.scheme.segments[0].bits - 1))
    return _narrowed(zeros.astype(np.int8), tuple(rule["shape"]))


def _zero_packed(weight: BcqWeight, rule: Rule) -> Array:
    def one(zeros: Array) -> Array:
        return packed_words.pack_zeros(zeros, weight.scheme.segments[0].bits, rule["packing"])

    return packed_words.per_matrix(one, zero_points_of(weight), stacked=len(weight.shape) == 3)


def _weight_packed(weight: BcqWeight, rule: Rule) -> Array:
    def one(planes: Array, perm: Array | None) -> Array:
        return packed_words.pack_planes(planes, weight.shape[-1], rule["packing"], perm)

    return packed_words.per_matrix(one, weight.planes()[0], _perm(weight), stacked=len(weight.shape) == 3)


def _weight(weight: BcqWeight, rule: Rule) -> Array:
    def one(planes: Array, perm: Array | None) -> Array:
        return words.planes_to_codes(planes, weight.shape[-1], perm) ^ np.uint8(128)

    return packed_words.per_matrix(one, weight.planes()[0], _perm(weight), stacked=len(weight.shape) == 3)


def _weight_shape(weight: BcqWeight, rule: Rule) -> Array:
    return np.array(weight.shape, numpy_dtype(rule["dtype"]))


def _g_idx(weight: BcqWeight, rule: Rule) -> Array:
    shape, kind = tuple(rule["shape"]), numpy_dtype(rule["dtype"])
    if "fill" in rule:
        return np.full(shape, rule["fill"], kind)
    perm, k, size = _perm(weight), weight.shape[-1], weight.scheme.segments[0].group_size
    rows = [None] if perm is None else list(perm.reshape(-1, k))
    index = np.stack([group_index(row, k, size) for row in rows]).astype(kind)
    return np.broadcast_to(index, shape) if len(shape) == 2 else index[0]


def _perm(weight: BcqWeight) -> Array | None:
    return weight.parts()["perm"].array() if weight.scheme.perm else None


REBUILDERS: dict[str, Rebuild] = {
    "compressed.weight_packed": _weight_packed,
    "compressed.weight": _weight,
    "compressed.scale": _scale,
    "compressed.zero_packed": _zero_packed,
    "compressed.zero_plain": _zero_plain,
    "compressed.weight_shape": _weight_shape,
    "compressed.g_idx": _g_idx,
}
