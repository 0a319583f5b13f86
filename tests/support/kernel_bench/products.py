"""Times of the fast products and of torch's on this machine's GPU.

Every product is captured in a CUDA graph many times, with copies of its weight that together exceed the L2 cache; the
result is the median of several replays. It is compared with the time that its bytes take at the bandwidth measured in
the same run (the floor), and with torch's float16 product (cuBLAS). All products of a case have the same random weight
and the same x (`weights`), and every result is compared with that of float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bcqfmt.bench import CYCLED, relative_error, replayed
from bcqfmt.kernels import bits as bit_gemv
from bcqfmt.kernels import matmul
from bcqfmt.kernels.bits.layout import BitLayout
from bcqfmt.kernels.bits.shape import AnyShape, BitShape, Wanted, product_shape

from .peers import Peer, cublas_of, published, tinygemm
from .timing import Row, early_and_alone, energy
from .weights import Weight, copies, random_vectors, random_weight

__all__ = ["products", "sweep"]

LARGE, SMALL = ((28672, 8192), (49152, 12288)), ((4096, 4096), (11008, 4096))
SWEEP = [(q, g) for q in range(1, 9) for g in (8, 16, 32, 64, 128, 512, 12288)]
_SQUARE = 12288


class _Timed(NamedTuple):
    """What was timed, and what it gave."""

    kernel: str
    y: Tensor
    microseconds: float
    alone: float | None
    joules: float | None


def products(speed: float, lut_gemm: str | None = None) -> Iterator[Row]:
    """Products of one to eight vectors; ``lut_gemm``: a library with the published kernel (docs/benchmarks/kernels)."""
    for formula, q, rows, columns, g, batch in _cases():
        weight, x = random_weight(formula, q, rows, columns, g), random_vectors(batch, columns)
        dense, exact = weight.dense(x)
        peers = {"cuBLAS fp16": cublas_of(dense, x)}
        if q == 4 and g == 128 and batch == 1:
            peers["tinygemm int4"] = tinygemm(weight, x)
        if lut_gemm is not None and formula == "bcq" and g == 128 and batch == 1 and q <= 4:
            peers["LUT-GEMM"] = published(lut_gemm, weight, x)
        yield _product(weight, x, exact, speed, peers)


def sweep(speed: float) -> Iterator[Row]:
    """Planes times group sizes at 12288 x 12288: time against bytes, and the energy of a product."""
    for q, g in SWEEP:
        weight, x = random_weight("bcq", q, _SQUARE, _SQUARE, g), random_vectors(1, _SQUARE)
        yield _product(weight, x, weight.dense(x)[1], speed, {}, measure_energy=True)


def _cases() -> list[tuple[str, int, int, int, int, int]]:
    cases = [("bcq", q, *shape, 128, 1) for shape in (*LARGE, *SMALL) for q in (2, 3, 4)]
    cases += [("affine", 4, *shape, 128, 1) for shape in (*LARGE, *SMALL)]
    cases += [("bcq", 4, 28672, 8192, g, 1) for g in (32, 64, 8192)]
    cases += [("bcq", 8, 49152, 12288, 128, 1)]
    cases += [("affine", 4, 28672, 8192, 32, 1)]
    cases += [(formula, 4, 28672, 8192, 128, batch) for formula in ("bcq", "affine") for batch in (2, 4, 8)]
    return cases


def _layout(q: int, columns: int, g: int, formula: str) -> BitLayout:
    return BitLayout(q, columns, g if g < columns else -(-columns // 256) * 256, formula, "F16")


def _product(
    weight: Weight, x: Tensor, exact: Tensor, speed: float, peers: dict[str, Peer], *, measure_energy: bool = False
) -> Row:
    (rows, columns), q, g, batch = weight.shape, weight.bits, weight.group_size, len(x)
    numbers = 2 * (q + 1) if weight.formula == "bcq" else 2 + q / 8
    nbytes = int(rows * columns * q / 8 + rows * (columns // g) * numbers + 2 * batch * (rows + columns))
    count = max(2, min(60, CYCLED * 8 // (rows * columns * q) + 1))
    layout = _layout(q, columns, g, weight.formula)
    shape = product_shape(Wanted(layout, batch, 1, 1))
    if shape is None:
        found = _usual(weight, x, count, measure_energy)
    else:
        found = _fast(weight, x, count, layout, shape, measure_energy)
    return Row(
        found.kernel,
        rows,
        columns,
        q,
        g,
        batch,
        found.microseconds,
        nbytes / speed * 1e6,
        {name: peer.microseconds for name, peer in peers.items()},
        nbytes,
        relative_error(found.y, exact),
        found.joules,
        found.alone,
        {name: relative_error(peer.y, exact) for name, peer in peers.items() if peer.y is not None} or None,
    )


def _fast(weight: Weight, x: Tensor, count: int, layout: BitLayout, shape: AnyShape, measure_energy: bool) -> _Timed:
    weights = copies(weight.operand(layout), count)
    y = torch.empty(len(x), weight.shape[0], device="cuda", dtype=torch.float16)

    def product(operand: bit_gemv.BitOperand) -> None:
        bit_gemv.bit_gemv(operand, x, out=y, shapes=(shape,))

    taken, alone = early_and_alone(product, weights)
    joules = energy(lambda i: product(weights[i % count]), taken) if measure_energy else None
    way = "bits" if isinstance(shape, BitShape) else "bytes"
    return _Timed(f"{way}, {weight.formula}", y, taken, alone, joules)


def _usual(weight: Weight, x: Tensor, count: int, measure_energy: bool) -> _Timed:
    """What `matmul` does with a bcq weight that has no fast product; the kernel is named after its path."""
    kept = [weight, *(replace(weight, planes=weight.planes.clone()) for _ in range(count - 1))]
    placed = [one.placed() for one in kept]
    path = matmul.path_of(placed[0], len(x)).kernel
    results = [matmul.matmul(one, x) for one in placed]  # of all: the first product of a weight prepares it

    def product(i: int) -> None:
        matmul.matmul(placed[i % count], x)

    taken = replayed(product, 2 * count)
    joules = energy(product, taken) if measure_energy else None
    return _Timed(f"{path}, {weight.formula}", results[0], taken, None, joules)
