"""Products of 1 to 4096 vectors with a 4-bit weight, as `matmul` chooses the kernel, beside cuBLAS in float16.

    python tests/benchmarks/gpu/many_vectors.py --out docs/benchmarks/gemm.json

Needs a GPU. Weights are rotated past the cache, products replayed from a CUDA graph; medians in microseconds, of one
run. "sm_80" is the engine that every GPU since Ampere has, timed on this GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.bench import bandwidth, relative_error, replayed
from bcqfmt.integrations.torch.gpu_weight import GpuWeight, gpu_weight
from bcqfmt.kernels.gemm import gemm
from bcqfmt.kernels.gemm.shape import gemm_shape
from bcqfmt.kernels.matmul import matmul, path_of
from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec
from kernel_bench.weights import Weight, random_vectors, random_weight

SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096)
DISTINCT = (512, 128, 64, 32, 16, 8, 2, 1)  # of these every number has a kernel of its own
OTHERS = (("affine", 3), ("affine", 2), ("bcq", 4), ("bcq", 3))
ROTATED = 300e6  # bytes of weights that are used in turn
ZERO = 8


def placed(weight: Weight) -> GpuWeight:
    """The weight for `matmul`; an affine one has the zero point 8 everywhere."""
    if weight.formula == "bcq":
        return weight.placed()
    segment = Segment(encoding="affine", bits=weight.bits, group_size=weight.group_size, scale="F16", zero=ZERO)
    spec = WeightSpec(scheme=Scheme(segments=(segment,)), shape=weight.shape, dtype="F16", widths=weight.shape[1:])
    made = gpu_weight(spec, {"s0_planes": weight.planes, "s0_scale": weight.first})
    assert made is not None
    return made


Figures = dict[str, float | int | str]


def measured(
    formula: str, q: int, rows: int, columns: int, counts: tuple[int, ...], *, old: bool = False
) -> list[Figures]:
    """A row for every number of vectors."""
    size = rows * columns * q // 8
    weights = [random_weight(formula, q, rows, columns, 128) for _ in range(max(2, min(8, int(ROTATED / size) + 1)))]
    for weight in weights:
        if formula == "affine":
            weight.second.fill_(ZERO)
    ready = [placed(weight) for weight in weights]
    several, found = len(weights), list[Figures]()
    dense = [weight.dense(random_vectors(1, columns))[0] for weight in weights[:3]]
    for count in counts:
        x = random_vectors(count, columns)
        for weight in ready:
            matmul(weight, x)  # prepares it
        exact = x.double() @ weights[0].values(0, 256).T
        row: Figures = {
            "formula": formula, "bits": q, "rows": rows, "columns": columns, "vectors": count,
            "path": path_of(ready[0], count),
            "error": relative_error(matmul(ready[0], x)[:, :256].double(), exact),
            "microseconds": replayed(lambda i, x=x: matmul(ready[i % several], x), 2 * several),
            "cublas": replayed(lambda i, x=x: x @ dense[i % len(dense)].T, 2 * len(dense)),
        }  # fmt: skip
        if old and count <= 64:
            row["sm_80"] = replayed(_older(ready, x), 2 * several)
        found.append(row)
        print({k: round(v, 2) if isinstance(v, float) and k != "error" else v for k, v in row.items()}, flush=True)
    return found


def _older(ready: list[GpuWeight], x: torch.Tensor) -> Callable[[int], object]:
    """The product with the instructions of sm_80."""
    ours = [weight.gemm("F16") for weight in ready]
    assert ours[0] is not None
    shapes = [gemm_shape(ours[0].segments[0].layout, len(x), ours[0].shape[0], 1, 1, "mma")]

    def product(i: int) -> object:
        operand = ours[i % len(ours)]
        assert operand is not None
        return gemm(operand, x, shapes=shapes)

    return product


def compiled(formula: str, q: int, rows: int, columns: int, count: int, older: bool) -> None:
    """The kernel of a row, or that of sm_80, is in the cache of compiled kernels."""
    weight = random_weight(formula, q, rows, columns, 128)
    if formula == "affine":
        weight.second.fill_(ZERO)
    ready, x = placed(weight), random_vectors(count, columns)
    if older:
        _older([ready], x)(0)
    else:
        matmul(ready, x)


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = [("affine", 4, *shape, count, False) for count in DISTINCT for shape in SHAPES]
    wanted += [(*other, *SHAPES[-1], count, False) for count in (64, 16, 1) for other in OTHERS]
    wanted += [("affine", 4, *shape, count, True) for count in (64, 32, 16, 8) for shape in SHAPES[::2]]
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        pool.starmap(compiled, wanted, chunksize=1)
    rows = []
    for shape in SHAPES:
        rows += measured("affine", 4, *shape, COUNTS, old=True)
    for formula, q in OTHERS:
        rows += measured(formula, q, *SHAPES[-1], (1, 16, 64))
    made = {"gpu": torch.cuda.get_device_name(), "bandwidth": bandwidth(), "group_size": 128, "rows": rows}
    options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
