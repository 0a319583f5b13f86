"""Times of the product with 2/4-bit weights: with and without outliers, in one launch and in two.

Shapes are those of `mixed24`: three quarters of the columns at 2 bits with second-order scales, one at 4 bits, channels
reordered. The floor counts every byte that moves: units, perm, outliers, x and y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bcqfmt.bench import CYCLED, replayed
from bcqfmt.kernels import mixed
from bcqfmt.kernels.mixed.layout import FOUR_BYTES, FOUR_COLUMNS, TWO_BYTES, TWO_COLUMNS
from bcqfmt.kernels.outliers import csr_outliers
from bcqfmt.kernels.runtime.limits import ROWS

from .outliers import for_all_shares, random_outliers
from .timing import Row, early_and_alone

__all__ = ["mixed_products", "random_weight"]


def mixed_products(speed: float) -> Iterator[Row]:
    """One vector; outliers of 0, 0.2, 0.5 and 1.5 %, in the same launch and in one of their own."""
    return for_all_shares(partial(_with_outliers, speed))


def _with_outliers(speed: float, rows: int, columns: int, share: float, peers: dict[str, float]) -> Iterator[Row]:
    count = max(2, int(CYCLED / (rows * columns * 0.36)) + 1)
    made = [random_weight(rows, columns, share) for _ in range(count)]
    weights, apart = [weight for weight, _ in made], [csr for _, csr in made]
    x = torch.randn(1, columns, device="cuda", dtype=torch.float16)
    y = torch.empty(1, rows, device="cuda", dtype=torch.float16)
    one = weights[0]
    nbytes = one.units.nbytes + one.perm.nbytes + (0 if one.outliers is None else one.outliers.nbytes)
    nbytes += 2 * (rows + columns)
    name = f"mixed, {100 * share:g} % outliers" if share else "mixed"

    def row(kernel: str, taken: float, alone: float | None = None) -> Row:
        bits = round(8 * nbytes / (rows * columns), 2)
        return Row(kernel, rows, columns, bits, 16, 1, taken, nbytes / speed * 1e6, peers, nbytes, alone=alone)

    yield row(name, *early_and_alone(lambda weight: mixed.mixed_gemv(weight, x, y), weights))
    if share:
        bare = [replace(weight, outliers=None) for weight in weights]

        def both(i: int) -> None:
            mixed.mixed_gemv(bare[i % count], x, y)
            indptr, indices, values = apart[i % count]
            csr_outliers(y, indptr, indices, values, x)

        yield row(f"{name}, two launches", replayed(both, 2 * count))


def random_weight(rows: int, columns: int, share: float) -> tuple[mixed.MixedOperand, Any]:
    """Random codes with small finite scales on the GPU, and the outliers as (indptr, indices, values), or None."""
    tiles, twos, fours = -(-rows // ROWS), columns * 3 // 4 // TWO_COLUMNS, columns // 4 // FOUR_COLUMNS
    gpu: Any = {"device": "cuda"}
    units = torch.randint(0, 256, (tiles, twos * TWO_BYTES + fours * FOUR_BYTES), dtype=torch.uint8, **gpu)
    two = units[:, : twos * TWO_BYTES].view(tiles, twos, TWO_BYTES)
    two[:, :, 1216:1248] = (torch.rand(tiles, twos, 16, **gpu) * 0.01).half().view(torch.uint8)
    two[:, :, 1248:] &= 15
    four = units[:, twos * TWO_BYTES :].view(tiles, fours, FOUR_BYTES)
    four[:, :, 1024:1056] = (torch.rand(tiles, fours, 16, **gpu) * 0.01).half().view(torch.uint8)
    outliers, apart = random_outliers(rows, columns, share)
    made = mixed.MixedOperand(
        shape=(rows, columns),
        twos=twos,
        fours=fours,
        units=units.view(-1).view(torch.int32),
        perm=torch.randperm(columns, **gpu).to(torch.int16).view(torch.int32),
        outliers=outliers,
        settled=True,
    )
    torch.cuda.synchronize()
    return made, apart
