"""What the W4A4 kernels compute, in numpy, to the bit (Atom, arXiv 2310.19102, sections 4.1 to 4.3).

A token is a row of x. Its channels are gathered by ``perm`` and cut into groups of 128; the last group holds the
outlier channels and is quantized to int8, the others to int4::

    scale = trunc22(absmax * factor)          factor: float32, see :func:`step_factor`
    code  = clamp(rint(x * (1 / scale)))

Everything is binary32, each operation rounded once. ``trunc22`` clears the two last bits of the significand: an
integer below 2^22 times such a scale can be had exactly from one fused multiply-add, which is how the GEMM turns its
int32 sums into numbers. A scale below 2^-126 is 0, one from 2^100 on is infinite; the codes are 0 then. A NaN or an
infinity makes its group's scale NaN or infinite, and with it the token's outputs NaN: nothing bad passes in silence.

The product of a group is an exact integer ``d``; with v = 16 for int4 groups (their weight codes stand in the upper
half of a byte) and 1 for the int8 group::

    acc = fma(RN(v * d * scale), weight_scale / v, acc)

over the groups of a slice in order, then slice after slice, ``((slice 0 + slice 1) + slice 2) + ...``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error

__all__ = [
    "GROUP", "OUTLIERS", "RULES", "fma32", "group_gemm", "quantize_activations", "rmsnorm", "slice_bounds",
    "step_factor",
]  # fmt: skip

GROUP = 128  # columns that share a scale
OUTLIERS = 128  # channels in int8: the last group
RULES = ("absmax", "paper")
NORM_THREADS = 256  # the order of the sum of squares depends on it
_SMALLEST, _LARGEST = np.float32(2.0**-126), np.float32(2.0**100)

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]


def step_factor(bits: int, clip: float = 1.0, rule: str = "absmax") -> np.float32:
    """What the absolute maximum of a group is multiplied with: float32, rounded once.

    ``absmax``: clip / (2^(bits-1) - 1), what Atom's code does; ``paper``: 2 clip / (2^bits - 1), its section 2.
    """
    if rule not in RULES or not 0.0 < clip <= 1.0:
        raise error("BCQ-E552", found=f"rule {rule!r}, clip {clip}", expected=f"one of {RULES}; 0 < clip <= 1")
    return np.float32(clip / (2 ** (bits - 1) - 1) if rule == "absmax" else 2 * clip / (2**bits - 1))


def quantize_activations(
    x: Array, perm: Array | None = None, *, factor: float | None = None, outlier_factor: float | None = None
) -> tuple[npt.NDArray[np.int8], F32]:
    """x ``[M, in]`` -> codes ``[M, in]`` in stored order and scale ``[M, in / 128]``."""
    moved = np.asarray(x, np.float32)
    moved = moved if perm is None else moved[:, perm]
    grouped = moved.reshape(moved.shape[0], -1, GROUP)
    factors = np.full(grouped.shape[1], step_factor(4) if factor is None else factor, np.float32)
    factors[-1] = step_factor(8) if outlier_factor is None else outlier_factor
    top = np.full(grouped.shape[1], 7, np.float32)
    top[-1] = 127
    with np.errstate(all="ignore"):
        # as patterns, because a NaN has to win
        absmax = (grouped.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=2).view(np.float32)
        scale = ((absmax * factors).view(np.uint32) & np.uint32(0xFFFFFFFC)).view(np.float32)
        usable = (scale >= _SMALLEST) & (scale < _LARGEST)
        inverse = np.where(usable, np.float32(1) / scale, np.float32(0)).astype(np.float32)
        scale = np.where(scale < _SMALLEST, np.float32(0), np.where(scale >= _LARGEST, np.float32(np.inf), scale))
        steps = np.nan_to_num(np.rint(grouped * inverse[:, :, None]), nan=0.0, posinf=200, neginf=-200)
    codes = np.clip(steps, -top[:, None] - 1, top[:, None]).astype(np.int8)
    return codes.reshape(moved.shape), scale


def rmsnorm(x: Array, gamma: Array, eps: float) -> Array:
    """x ``[M, n]`` -> x / sqrt(mean(x^2) + eps) * gamma in the dtype of x, rounded to it after each factor.

    Column ``8 (256 i + t) + j`` belongs to thread t, which adds its squares in order; 32 threads then add crosswise
    (distances 16, 8, 4, 2, 1), and their sums are added one after another.
    """
    wide = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        mean = _square_sum(wide) / np.float32(wide.shape[1]) + np.float32(eps)
        inverse = np.float32(1) / np.sqrt(mean)
        normed = (wide * inverse[:, None]).astype(x.dtype).astype(np.float32)
        result: Array = (normed * np.asarray(gamma, np.float32)).astype(x.dtype)
    return result


def _square_sum(wide: F32) -> F32:
    rows, n = wide.shape
    padded = np.zeros((rows, -(-n // (8 * NORM_THREADS)) * 8 * NORM_THREADS), np.float32)
    padded[:, :n] = wide
    own = padded.reshape(rows, -1, NORM_THREADS, 8).transpose(0, 2, 1, 3).reshape(rows, NORM_THREADS, -1)
    total = np.zeros((rows, NORM_THREADS), np.float32)
    for j in range(own.shape[2]):
        total = fma32(own[:, :, j], own[:, :, j], total)
    lanes = total.reshape(rows, -1, 32)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, :, np.arange(32) ^ distance]
    return _in_order([lanes[:, warp, 0] for warp in range(lanes.shape[1])])


def slice_bounds(groups: int, slices: int) -> list[int]:
    """Where the slices of the group sum begin and end: ``slices + 1`` group numbers."""
    return [groups * s // slices for s in range(slices + 1)]


def group_gemm(codes: Array, scale: F32, weight: Array, weight_scale: F32, slices: int = 1) -> F32:
    """codes ``[M, in]`` and weight ``[out, in]`` int8, scales ``[M, G]`` and ``[out, G]`` -> ``[M, out]``."""
    m, groups = scale.shape
    left = codes.reshape(m, groups, GROUP).astype(np.float64)
    right = weight.reshape(weight.shape[0], groups, GROUP).astype(np.float64)
    bounds = slice_bounds(groups, slices)
    partials = []
    for first, last in itertools.pairwise(bounds):
        acc = np.zeros((m, weight.shape[0]), np.float32)
        for g in range(first, last):
            factor = np.float32(1 if g == groups - 1 else 16)
            dots = (left[:, g] @ right[:, g].T).astype(np.float32) * factor  # integers below 2^22: exact
            with np.errstate(all="ignore"):
                acc = fma32(dots * scale[:, g, None], (weight_scale[:, g] / factor)[None, :], acc)
        partials.append(acc)
    return _in_order(partials)


def _in_order(parts: Sequence[F32]) -> F32:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fma32(a: Array, b: Array, c: Array) -> F32:
    """a * b + c of float32 arrays with one rounding.

    The product is exact in binary64; the sum is rounded there to odd, so that rounding to binary32 is the only one
    that counts.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float64), np.broadcast_shapes(product.shape, np.shape(c)))
        total = np.ascontiguousarray(product + addend)
        shadow = total - product
        lost = (product - (total - shadow)) + (addend - shadow)
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        nudge = np.isfinite(total) & (lost != 0) & even
        total = np.where(nudge, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
        return total.astype(np.float32)
