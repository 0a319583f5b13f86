"""Times of `dequantize`, and of products of several vectors by every way that `matmul` has: which wins from where."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.bench_kernels import Row, cublas, replayed
from bcqfmt.kernels import matmul
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands_device import to_device

__all__ = ["crossover", "dequantized"]

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)


def _weight(q: int, rows: int, columns: int, g: int = 128) -> BcqWeight:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**q, (rows, columns), np.uint8)
    scale = rng.uniform(0.001, 0.01, (rows, columns // g)).astype(np.float16)
    return BcqWeight.from_affine(codes, scale, 2 ** (q - 1), group_size=g, bits=q)


def dequantized(speed: float) -> Iterator[Row]:
    """8192 x 8192, 4 bits, groups of 128, to float16."""
    rows, columns = 8192, 8192
    weights = [to_device(operand(_weight(4, rows, columns)), "canonical") for _ in range(2)]
    outs = [torch.empty(rows, columns, device="cuda", dtype=torch.float16) for _ in range(3)]
    nbytes = rows * columns // 2 + sum(4 * s.first.numel() + 4 * s.second.numel() for s in weights[0].segments)
    nbytes += 2 * rows * columns
    taken = replayed(lambda i: matmul.dequantize(weights[i % 2], "float16", out=outs[i % 3]), 12)
    halves = [torch.empty(nbytes // 4, device="cuda", dtype=torch.float16) for _ in range(4)]
    copied = replayed(lambda i: halves[i % 2].copy_(halves[2 + i % 2]), 12)
    peers = {"torch copy of as many bytes": copied}
    yield Row("dequantize", rows, columns, 4, 128, 1, taken, nbytes / speed * 1e6, peers, nbytes)


def crossover(speed: float) -> Iterator[Row]:
    """2, 4 and 8 bits, one to 32 vectors: the fast product, look-ups, and dequantize with torch's product."""
    for rows, columns in ((4096, 4096), (11008, 4096)):
        dense = {batch: {"cuBLAS fp16": cublas(rows, columns, batch)} for batch in BATCHES}
        for q in (2, 4, 8):
            placed = matmul.MatmulWeight(operand(_weight(q, rows, columns)))
            for batch in BATCHES:
                for path in ("bits", "dequantize", *(["look-up"] if batch in (1, 8) else [])):
                    x = torch.randn(batch, columns, device="cuda", dtype=torch.float16)
                    nbytes = rows * columns * q // 8 + rows * columns // 128 * 4 + 2 * batch * (rows + columns)
                    taken = _timed(placed, x, path)
                    floor, name = nbytes / speed * 1e6, f"matmul, {path}"
                    yield Row(name, rows, columns, q, 128, batch, taken, floor, dense[batch], nbytes)


def _timed(weight: matmul.MatmulWeight, x: torch.Tensor, path: str) -> float:
    return replayed(lambda _: matmul.matmul(weight, x, path=path), 8)
