"""The two packings of compressed-tensors: which one a file has, and the words of weights and zero points in it.

| packing | words of n codes of b bits | written by |
|---|---|---|
| dense | ceil(n*b/32), a bit stream | compressed-tensors from 0.18 on |
| slots | ceil(n / floor(32/b)), whole codes only, the top bits of a word unused | earlier ones |

They are the same for 1, 2, 4 and 8 bits. For 3, 5, 6 and 7 the number of words tells them apart, except where there are
few codes; then the library's version does, or the bits that one of the two leaves zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters import words
from bcqfmt.weight.packing import padding_is_zero, words_for

__all__ = ["pack_planes", "pack_zeros", "packings", "per_matrix", "planes_of", "telling_bits", "unpack_zeros"]

Array = npt.NDArray[Any]


def packings(fields: int, bits: int) -> dict[str, int]:
    """Packing -> number of words of ``fields`` codes; one entry where both are the same."""
    dense = {"dense": words_for(fields, bits)}
    return dense if 32 % bits == 0 else {**dense, "slots": -(-fields // (32 // bits))}


def telling_bits(packed: Array, bits: int, k: int) -> str | None:
    """The packing of words that could be either: by the bits that the other one would have left zero."""
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
    """Words (N, W) of a weight to planes (bits, N, ceil(k/32))."""
    stored = np.ascontiguousarray(packed).view(np.uint32)
    if packing == "dense":
        return words.columns_to_planes(stored, bits, threads=threads, k=k, perm=perm)
    return words.codes_to_planes(words.slots_to_codes(stored, bits, k, threads), bits, perm, threads)


def pack_planes(planes: Array, k: int, packing: str, perm: Array | None) -> Array:
    """The way back of :func:`planes_of`."""
    if packing == "dense":
        return words.planes_to_columns(planes, k=k, perm=perm)
    return words.codes_to_slots(words.planes_to_codes(planes, k, perm), len(planes))


def unpack_zeros(packed: Array, bits: int, n: int, packing: str) -> Array:
    """Words (W, G), packed along the rows of the weight, to fields (n, G)."""
    stored = np.ascontiguousarray(packed).view(np.uint32)
    if packing == "dense":
        return words.stream_rows_to_codes(stored, bits, n).T
    return words.slots_to_codes(np.ascontiguousarray(stored.T), bits, n).T


def pack_zeros(zeros: Array, bits: int, packing: str) -> Array:
    """The way back of :func:`unpack_zeros`."""
    fields = np.ascontiguousarray(zeros.T.astype(np.uint8))
    if packing == "dense":
        return words.codes_to_stream_rows(fields, bits)
    return words.codes_to_slots(fields, bits).T
