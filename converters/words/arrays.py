"""The arrays that the functions of `words` take and return: checked, aligned, padded to whole words, cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from .buffers import new_array

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.uint32]


def blocks_of(k: int) -> int:
    """Blocks of 32 codes, the last maybe not full."""
    return -(-k // 32)


def length(k: int, bits: int) -> int:
    """Words of a stream of k codes."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits; 1 to 8 can be packed")
    return -(-k * bits // 32)


def words_in(words: Array, *shape: int | None, itemsize: int = 4) -> Array:
    """Words as unsigned integers, C order, aligned; ValueError if they have another shape (None: any)."""
    if words.dtype.kind not in "iu" or words.dtype.itemsize != itemsize or not words.dtype.isnative:
        raise ValueError(f"words of type {words.dtype}; expected {8 * itemsize}-bit integers")
    if words.ndim != len(shape) or any(b is not None and a != b for a, b in zip(words.shape, shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"words of shape {list(words.shape)}; expected [{expected}]")
    return np.require(words, requirements=["C", "A"]).view(f"u{itemsize}")


def whole_blocks(words: Array, bits: int, axis: int, k: int | None) -> int:
    """K, which is ``k`` if that is given, of a layout that knows only blocks of 32 codes along ``axis``."""
    length(0, bits)
    if words.ndim != 2 or words.shape[axis] % bits or (k is not None and 32 * words.shape[axis] != k * bits):
        wanted = f"a multiple of {bits}" if k is None else f"{k} * {bits} / 32"
        raise ValueError(f"words of shape {list(words.shape)}; dimension {axis} must be {wanted}")
    return int(words.shape[axis]) // bits * 32


def gemv_fast_in(words: Array) -> Words:
    """int16 [N/4, K], four rows interleaved, as words [N, K/8], row after row."""
    words = words_in(words, None, None, itemsize=2)
    quarter, k = words.shape
    if k % 64:
        raise ValueError(f"GEMV-fast words of shape {list(words.shape)}; K must be a multiple of 64")
    turns = words.reshape(quarter, k // 64, 4, 16).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(turns).view(np.uint32).reshape(4 * quarter, k // 8)


def gemv_fast_out(words: Words) -> npt.NDArray[np.int16]:
    """The inverse of `gemv_fast_in`."""
    n, width = words.shape
    turns = words.view(np.int16).reshape(n // 4, 4, width // 8, 16).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(turns).reshape(n // 4, 8 * width)


def codes_in(codes: Array, rows: int = 1, columns: int = 1) -> Codes:
    """Codes [N, K] as bytes; N and K multiples of ``rows`` and ``columns``."""
    if codes.dtype != np.uint8 or codes.ndim != 2:
        raise ValueError(f"codes of type {codes.dtype} and {codes.ndim} dimensions; expected uint8 [N, K]")
    if codes.shape[0] % rows or codes.shape[1] % columns:
        raise ValueError(f"codes of shape {list(codes.shape)}; N must be a multiple of {rows}, K of {columns}")
    return np.ascontiguousarray(codes)


def planes_in(planes: Array, k: int | None, bits: int | None = None, multiple: int = 1) -> tuple[Words, int]:
    """Planes and K, a ``multiple``; without K every bit of every word is a column."""
    planes = words_in(planes, bits, None, None if k is None else blocks_of(k))
    k = 32 * planes.shape[2] if k is None else k
    if k % multiple:
        raise ValueError(f"{k} columns; this layout needs a multiple of {multiple}")
    return planes, k


def flat(words: Words) -> tuple[Words, int]:
    """The memory of words [R, lanes] as one axis, and the words from one row to the next; some columns are enough."""
    row = words.strides[0] // 4
    return as_strided(words, ((words.shape[0] - 1) * row + words.shape[1] if words.size else 0,), (4,)), row


def new_planes(bits: int, n: int, k: int) -> Words:
    """Planes uint32 [bits, N, ceil(K/32)] to be filled."""
    length(k, bits)
    return new_array((bits, n, blocks_of(k)), np.uint32)


def new_codes(n: int, k: int) -> Codes:
    """Codes uint8 [N, K] to be filled, K padded to whole words; see `cut`."""
    return np.empty((n, -(-k // 4) * 4), np.uint8)


def padded(codes: Codes) -> Codes:
    """The same codes, rows padded with zeros to whole words; four-byte aligned."""
    short = -codes.shape[1] % 4
    if short:
        codes = np.pad(codes, ((0, 0), (0, short)))
    return codes if codes.ctypes.data % 4 == 0 else codes.copy()


def cut(codes: Codes, k: int) -> Codes:
    """Without the padding."""
    return codes if codes.shape[1] == k else np.ascontiguousarray(codes[:, :k])


def permutation(perm: Array | None, k: int) -> Order | None:
    """A permutation of 0..k-1, checked: the loop uses it as an index."""
    back = inverse(perm, k)
    return None if perm is None or back is None else np.ascontiguousarray(perm, np.uint32)


def inverse(perm: Array | None, k: int) -> Order | None:
    """The permutation that undoes ``perm``."""
    if perm is None:
        return None
    if perm.shape != (k,) or perm.dtype.kind not in "iu" or (k and not 0 <= perm.min() <= perm.max() < k):
        raise ValueError(f"perm is no permutation of 0..{k - 1}")
    back = np.full(k, k, np.uint32)
    back[perm] = np.arange(k, dtype=np.uint32)
    if k and back.max() == k:
        raise ValueError(f"perm is no permutation of 0..{k - 1}: a column occurs twice")
    return back
