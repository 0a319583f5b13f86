"""Times of `dequantize`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bcqfmt import BcqWeight
from bcqfmt.bench import replayed
from bcqfmt.kernels import dequant
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device

from .timing import Row

__all__ = ["dequantized"]

SQUARE, LONG = (8192, 8192), (4096, 11008)  # of weights that are only decoded
DECODED = ((4, 128), (8, 128), (4, 16), (4, 8), (2, 16))  # planes, group size
REORDERED = ((4, 128), (8, 128), (4, 32))  # the same, with a perm
TWO_AND_FOUR = (3072, 1024)  # columns of 2 bits, of 4 bits


def _weight(q: int, rows: int, columns: int, g: int = 128) -> BcqWeight:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**q, (rows, columns), np.uint8)
    scale = rng.uniform(0.001, 0.01, (rows, columns // g)).astype(np.float16)
    return BcqWeight.from_affine(codes, scale, 2 ** (q - 1), group_size=g, bits=q)


def _reordered(weight: BcqWeight) -> BcqWeight:
    return weight.with_perm(np.random.default_rng(1).permutation(weight.shape[1]))


def _two_and_four(rows: int, low: int, high: int) -> BcqWeight:
    """``low`` columns of 2 bits in groups of 16 with second-order scales, ``high`` of 4 bits, reordered."""
    rng = np.random.default_rng(0)
    groups, tiles = low // 16, -(-rows // 16)
    two = BcqWeight.from_affine(
        rng.integers(0, 4, (rows, low), np.uint8), np.ones((rows, groups), np.float16), 2, group_size=16, bits=2
    ).with_second_order(
        rng.integers(0, 16, (rows, groups), np.uint8),
        rng.uniform(0.001, 0.01, (tiles, groups)).astype(np.float16),
        rng.integers(0, 16, (tiles, groups), np.uint8),
        bits=4,
        rows=16,
    )
    return BcqWeight.from_segments([two, _weight(4, rows, high)], perm=rng.permutation(low + high))


def dequantized(speed: float) -> Iterator[Row]:
    """To float16: 8192 x 8192 at 4 bits in groups of 128; 4096 x 11008 by every way to decode but element by element;
    two segments, reordered, with 4096 columns.
    """
    yield _decoded("dequantize", _weight(4, *SQUARE), 4, 128, speed)
    for q, g in DECODED:
        yield _decoded("dequantize", _weight(q, *LONG, g), q, g, speed)
    for q, g in REORDERED:
        yield _decoded("dequantize perm", _reordered(_weight(q, *LONG, g)), q, g, speed)
    yield _decoded("dequantize 2/4-bit", _two_and_four(LONG[0], *TWO_AND_FOUR), 2.9, 16, speed)


def _decoded(name: str, weight: BcqWeight, bits: float, g: int, speed: float) -> Row:
    rows, columns = weight.shape
    placed = [to_device(operand(weight), "canonical") for _ in range(2)]
    outs = [torch.empty(rows, columns, device="cuda", dtype=torch.float16) for _ in range(3)]
    nbytes = sum(4 * a.numel() for s in placed[0].segments for a in (s.planes, s.first, s.second))
    nbytes += 2 * rows * columns + (4 * columns if placed[0].perm is not None else 0)
    taken = replayed(lambda i: dequant.dequantize(placed[i % 2], "float16", out=outs[i % 3]), 12)
    halves = [torch.empty(nbytes // 4, device="cuda", dtype=torch.float16) for _ in range(4)]
    copied = replayed(lambda i: halves[i % 2].copy_(halves[2 + i % 2]), 12)
    peers = {"torch copy of as many bytes": copied}
    return Row(name, rows, columns, bits, g, 1, taken, nbytes / speed * 1e6, peers, nbytes)
