"""Times of `dequantize`, and of products on every path of `matmul`: which is fastest for how many vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bcqfmt import BcqWeight
from bcqfmt.bench import replayed
from bcqfmt.kernels import dequant, matmul
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device

from .peers import cublas
from .timing import Row

__all__ = ["crossover", "dequantized"]

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
SHAPES = ((4096, 4096), (11008, 4096))
SQUARE, LONG = (8192, 8192), (4096, 11008)  # of weights that are only decoded
DECODED = ((4, 128), (8, 128), (4, 16), (4, 8), (2, 16))  # planes, group size
REORDERED = ((4, 128), (8, 128), (4, 32))  # the same, with a perm
SHORT = (8, 16)  # group sizes with a fast product for fewer vectors at once
UNUSUAL = ((96, 4032), (40, 4000))  # group sizes without a fast product, columns
TWO_AND_FOUR = (3072, 1024)  # columns of 2 bits, of 4 bits
ROWS = 4096  # of all but SHAPES
_NAMES = {torch.float16: "fp16", torch.float32: "fp32"}


class _Placed(NamedTuple):
    """A weight on the GPU, its numbers for a row, and the bytes of it that a product reads."""

    weight: matmul.MatmulWeight
    bits: float
    group_size: int
    nbytes: int
    note: str = ""


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


def crossover(speed: float) -> Iterator[Row]:
    """The fast products, look-ups, and dequantize with torch's product, one to 32 vectors.

    2, 4 and 8 bits; groups of 8 and 16 columns; reordered columns; groups of 96 and 40, which have no fast product;
    float32; 2/4-bit weights.
    """
    for rows, columns in SHAPES:
        for q in (2, 4, 8):
            yield from _paths(_placed(q, rows, columns, 128), ("bits", "dequantize", "look-up"), BATCHES, speed)
    for g in SHORT:
        yield from _paths(_placed(4, ROWS, SHAPES[0][1], g), ("bits", "dequantize", "look-up"), BATCHES, speed)
    for q in (2, 4):
        permuted = _placed(q, ROWS, SHAPES[0][1], 128, reordered=True)
        yield from _paths(permuted, ("bits", "dequantize", "look-up"), BATCHES, speed)
    for g, columns in UNUSUAL:
        yield from _paths(_placed(4, ROWS, columns, g), ("look-up", "dequantize"), (1, 2, 4, 8), speed)
    usual = _placed(4, ROWS, SHAPES[0][1], 128)
    yield from _paths(usual, ("bits", "dequantize", "look-up"), BATCHES, speed, torch.float32)
    yield from _paths(_mixed(), ("mixed", "dequantize", "look-up"), (1, 2, 4, 8, 12, 16, 24), speed)


def _placed(q: int, rows: int, columns: int, g: int, *, reordered: bool = False) -> _Placed:
    weight, nbytes = _weight(q, rows, columns, g), rows * columns * q // 8 + rows * columns // g * 4
    if reordered:
        weight, nbytes = _reordered(weight), nbytes + 4 * columns
    return _Placed(matmul.MatmulWeight(operand(weight)), q, g, nbytes, ", perm" if reordered else "")


def _mixed() -> _Placed:
    weight = _two_and_four(ROWS, *TWO_AND_FOUR)
    made = matmul.MatmulWeight(operand(weight), weight=weight)
    assert made.mixed is not None  # where capability is 9.0
    return _Placed(made, round(8 * made.mixed.nbytes / weight.size, 2), 16, made.mixed.nbytes)


def _paths(
    placed: _Placed, paths: Sequence[str], batches: Sequence[int], speed: float, dtype: torch.dtype = torch.float16
) -> Iterator[Row]:
    """Look-ups, which take eight vectors at a time, are left out between and beyond where there is a fast product."""
    rows, columns = placed.weight.operand.shape
    few = tuple(batches) if paths[0] == "look-up" else (1, 2, 8)
    suffix = placed.note + ("" if dtype == torch.float16 else ", float32")
    for batch in batches:
        x = torch.randn(batch, columns, device="cuda", dtype=dtype)
        peers = {f"cuBLAS {_NAMES[dtype]}": cublas(rows, columns, batch, dtype)}
        nbytes = placed.nbytes + x.element_size() * batch * (rows + columns)
        for path in paths:
            if path == "look-up" and batch not in few:
                continue
            taken, floor = _timed(placed.weight, x, path), nbytes / speed * 1e6
            name = f"matmul, {path}{suffix}"
            yield Row(name, rows, columns, placed.bits, placed.group_size, batch, taken, floor, peers, nbytes)


def _timed(weight: matmul.MatmulWeight, x: torch.Tensor, path: str) -> float:
    return replayed(lambda _: matmul.matmul(weight, x, path=path), 8)
