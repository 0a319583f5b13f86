"""Squared errors of a weight by a table of levels, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled


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
