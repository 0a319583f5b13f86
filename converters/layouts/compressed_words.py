"""The tensors of compressed-tensors, both ways: the two packings of its words, and the rules that rebuild them.

| packing | words of n codes of b bits | written by |
|---|---|---|
| dense | ceil(n*b/32), a bit stream | compressed-tensors from 0.18 on |
| slots | ceil(n / floor(32/b)), whole codes only, the top bits of a word unused | earlier ones |

They are the same for 1, 2, 4 and 8 bits. For 3, 5, 6 and 7 the number of words tells them apart, except where there are
few codes; then the library's version does, or the bits that one of the two leaves zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.weight.packing import padding_is_zero, words_for
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .g_idx import group_index
from .protocol import Rebuilder, Rule, Values
from .uniform import plain, zero_points_of

Array = npt.NDArray[Any]


def packings(fields: int, bits: int) -> dict[str, int]:
    """Packing -> number of words of ``fields`` codes; one entry where both are the same."""
    dense = {"dense": words_for(fields, bits)}
    return dense if 32 % bits == 0 else {**dense, "slots": -(-fields // (32 // bits))}


def telling_bits(packed: Array, bits: int, k: int) -> str | None:
    """The packing of words whose number fits both: by the bits that the other packing would have left zero."""
    stored = packed.view(np.uint32)
    used = 32 // bits * bits
    not_slots = bool((stored >> np.uint32(used)).any())
    not_dense = not padding_is_zero(stored, bits, k)
    if not_slots == not_dense:
        return None
    return "dense" if not_slots else "slots"


def per_matrix(make: Callable[..., Array], *arrays: Array | None, stacked: bool) -> Array:
    """``make`` of the arrays, or of every matrix of a stack."""
    if not stacked:
        return make(*arrays)
    count = next(len(array) for array in arrays if array is not None)
    return np.stack([make(*(None if array is None else array[e] for array in arrays)) for e in range(count)])


def planes_of(packed: Array, bits: int, k: int, packing: str, perm: Array | None, threads: int) -> Array:
    """Words (N, W) of a weight, or its signed bytes (N, k), to planes (bits, N, ceil(k/32))."""
    if packing == "bytes":  # a change of sign bit adds 128
        return words.codes_to_planes(packed.view(np.uint8) ^ np.uint8(128), 8, perm, threads)
    stored = np.ascontiguousarray(packed).view(np.uint32)
    if packing == "dense":
        return words.columns_to_planes(stored, bits, threads=threads, k=k, perm=perm)
    return words.codes_to_planes(words.slots_to_codes(stored, bits, k, threads), bits, perm, threads)


def unpack_zeros(packed: Array, bits: int, n: int, packing: str) -> Array:
    """Words (W, G), packed along the rows of the weight, to fields (n, G)."""
    stored = np.ascontiguousarray(packed).view(np.uint32)
    if packing == "dense":
        return words.stream_rows_to_codes(stored, bits, n).T
    return words.slots_to_codes(np.ascontiguousarray(stored.T), bits, n).T


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


def _zero_plain(weight: BcqWeight, rule: Rule) -> Array:
    zeros = zero_points_of(weight).astype(np.int16) - np.int16(2 ** (weight.scheme.segments[0].bits - 1))
    return _narrowed(zeros.astype(np.int8), tuple(rule["shape"]))


def _zero_packed(weight: BcqWeight, rule: Rule) -> Array:
    """The inverse of :func:`unpack_zeros`."""
    bits = weight.scheme.segments[0].bits

    def one(zeros: Array) -> Array:
        fields = np.ascontiguousarray(zeros.T.astype(np.uint8))
        return (
            words.codes_to_stream_rows(fields, bits)
            if rule["packing"] == "dense"
            else words.codes_to_slots(fields, bits).T
        )

    return per_matrix(one, zero_points_of(weight), stacked=len(weight.shape) == 3)


def _weight(weight: BcqWeight, rule: Rule) -> Array:
    """The inverse of :func:`planes_of`."""

    def one(planes: Array, perm: Array | None) -> Array:
        if rule["packing"] == "dense":
            return words.planes_to_columns(planes, k=weight.shape[-1], perm=perm)
        codes = words.planes_to_codes(planes, weight.shape[-1], perm)
        return codes ^ np.uint8(128) if rule["packing"] == "bytes" else words.codes_to_slots(codes, len(planes))

    return per_matrix(one, weight.planes()[0], _perm(weight), stacked=len(weight.shape) == 3)


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


def _matrices(spec: WeightSpec) -> bool:
    return plain(spec, stack=True)


def _packings(spec: WeightSpec, rule: Rule) -> Collection[str]:
    return packings(spec.columns, spec.scheme.segments[0].bits)


def _narrow_shapes(spec: WeightSpec, rule: Rule) -> list[list[int]]:
    """Of numbers for groups, rows or the whole, which experts may share."""
    lead, n, groups = spec.shape[:-2], spec.out, spec.groups(0)
    return [[*lead, n, groups], [n, groups], [n], [1], [*lead, 1, 1], []]


_SHAPED: Final[dict[str, Values]] = {"shape": _narrow_shapes}
_INTEGERS: Final[dict[str, Values]] = {"dtype": lambda *_: ("I32", "I64")}
REBUILDERS: dict[str, Rebuilder] = {
    "compressed.weight_packed": Rebuilder(_weight, _matrices, {"packing": _packings}),
    "compressed.weight": Rebuilder(
        _weight, lambda spec: plain(spec, bits=[8], stack=True), {"packing": lambda *_: ["bytes"]}
    ),
    "compressed.scale": Rebuilder(
        lambda weight, rule: _narrowed(weight.parts()["s0_scale"].array(), tuple(rule["shape"])), _matrices, _SHAPED
    ),
    "compressed.zero_packed": Rebuilder(_zero_packed, _matrices, {"packing": _packings}),
    "compressed.zero_plain": Rebuilder(_zero_plain, _matrices, _SHAPED),
    "compressed.weight_shape": Rebuilder(
        lambda weight, rule: np.array(weight.shape, numpy_dtype(rule["dtype"])), _matrices, _INTEGERS
    ),
    "compressed.g_idx": Rebuilder(
        _g_idx,
        _matrices,
        {"shape": lambda spec, _: [[spec.columns], [*spec.shape[:-2], spec.columns]], **_INTEGERS},
        {"fill": lambda *_: [-1]},
    ),
}
