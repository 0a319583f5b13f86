"""Compiled loops over whole weights: half precision to single, and squared errors by a table of levels."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled

__all__ = ["group_errors", "widen"]

_SCALE = np.float32(2.0**112)  # what the bias of binary16's exponent lacks to that of binary32


@compiled
def widen(halves: Any, out: Any) -> None:
    """binary16 bits (uint16) to binary32; exact, infinities and NaNs stay what they are."""
    for i in range(halves.size):
        size = np.uint32(halves[i] & np.uint16(0x7FFF))
        sign = np.uint32(halves[i] & np.uint16(0x8000)) << np.uint32(16)
        scaled = np.float32(np.uint32(size << np.uint32(13)).view(np.float32) * _SCALE)
        bits = np.float32(scaled).view(np.uint32)
        if size >= np.uint32(0x7C00):
            bits = np.uint32(0x7F800000) | np.uint32(size << np.uint32(13))
        out[i] = np.uint32(bits | sign).view(np.float32)


@compiled
def group_errors(
    weight: Any, columns: Any, codes: Any, levels: Any, group_size: Any, power: Any, noise: Any, first: Any, stop: Any
) -> None:
    """Add to ``power`` and ``noise`` of rows ``first..stop`` the sums of w^2 and (w - level)^2.

    weight float32 [out, in]; columns: the column that each of the codes [out, width] belongs to; levels float32
    [out, G, L], the value of every code.
    """
    width = codes.shape[1]
    for row in range(first, stop):
        all_power, all_noise = 0.0, 0.0
        for group in range(levels.shape[1]):
            table = levels[row, group]
            for j in range(group * group_size, min((group + 1) * group_size, width)):
                w = np.float64(weight[row, columns[j]])
                off = w - np.float64(table[codes[row, j]])
                all_power += w * w
                all_noise += off * off
        power[row] += all_power
        noise[row] += all_noise
