"""Products of 1 to 4096 vectors with a 4-bit weight, as `matmul` chooses the kernel, compared with cuBLAS and others.

    python tests/benchmarks/gpu/many_vectors.py --out docs/benchmarks/gemm.json [--marlin libmarlin.so]
        [--lut-gemm liblutgemm.so]

Needs a GPU. Weights are rotated past the cache, products replayed from a CUDA graph; medians in microseconds, of one
run. docs/benchmarks/gemm.md tells how the libraries are built.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.bench import bandwidth, relative_error, replayed
from bcqfmt.kernels.gemm import parts_of
from bcqfmt.kernels.gemm.layout import GemmLayout
from bcqfmt.kernels.gemm.shape import gemm_shape
from bcqfmt.kernels.matmul import matmul, path_of
from kernel_bench.chosen import SHAPES, TABLES, rotated
from kernel_bench.compiling import Jobs, compile_all
from kernel_bench.peer_times import of_row, peer_times
from kernel_bench.timing import steadily
from kernel_bench.weights import random_vectors

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
MANY = (256, 512, 1024, 2048, 4096)  # timed last: what follows them is slower while the GPU is hot
BETWEEN = (80, 96, 112, 144, 160, 192, 224, 288, 320, 384, 448, 576, 640, 768, 896, 1100, 1200, 1400, 1600, 1800)
LEAST = 3  # vectors from which on `gemm` is compiled for every weight; it takes fewer of some
# formula or table, bits, group size
OTHERS = (
    ("affine", 3, 128), ("affine", 2, 128), ("bcq", 4, 128), ("bcq", 3, 128), ("bcq", 2, 128), ("IQ4_NL", 4, 32),
    ("MXFP4", 4, 32), ("NVFP4", 4, 16),
)  # fmt: skip
FEW, SMALL_FEW = (1, 16, 64), (8, 16)  # vectors with these, by the largest and the smallest matrix
TURNS = 3  # of both products, one after the other
STEADY = 0.4, 0.15  # seconds of a turn with MANY and BETWEEN: power limits the clock, and the first rounds are faster
# planes and vectors of bcq weights that are multiplied by look-up too, as float32 and short groups are
LOOKED_UP = ((4, 1), (3, 1), (2, 1), (4, 3))


Figures = dict[str, float | int | str]


def measured(
    formula: str, q: int, rows: int, columns: int, g: int, counts: tuple[int, ...], *, peers: dict[str, float],
    steady: float = 0.0,
) -> Iterator[Figures]:  # fmt: skip
    """A row for every number of vectors; ``peers``: what `peer_times` found."""
    weights = rotated(formula, q, rows, columns, g)
    first, ready = weights[0][0], [placed for _, placed in weights]
    several, plain = len(weights), (formula, q) == ("affine", 4)
    dense = [weight.dense(random_vectors(1, columns))[0] for weight, _ in weights[:3] if plain]
    for count in counts:
        x = random_vectors(count, columns)
        for weight in ready:
            matmul(weight, x)  # prepares it
        exact = x.double() @ first.values(0, 256).T
        row: Figures = {
            "formula": formula, "bits": q, "rows": rows, "columns": columns, "vectors": count,
            "path": path_of(ready[0], count).kernel,
            "error": relative_error(matmul(ready[0], x)[:, :256].double(), exact),
        }  # fmt: skip
        calls: dict[str, tuple[Callable[[int], object], int]] = {
            "microseconds": (lambda i, x=x: matmul(ready[i % several], x), several)
        }
        if plain:
            calls["cublas"] = (lambda i, x=x: x @ dense[i % len(dense)].T, len(dense))
        if plain and count in MANY:  # what `matmul` does where the GPU is not sm_90
            calls["dequantize"] = (lambda i, x=x: matmul(ready[i % several], x, path="dequantize"), several)
        times = [{name: steadily(call, 2 * of, steady) for name, (call, of) in calls.items()} for _ in range(TURNS)]
        row |= {name: statistics.median(turn[name] for turn in times) for name in calls}
        row |= of_row(peers, row)
        print({k: round(v, 2) if isinstance(v, float) and k != "error" else v for k, v in row.items()}, flush=True)
        yield row


def looked_up(rows: int, columns: int) -> list[Figures]:
    """Products with bcq weights of one shape by look-up, and with a decoded matrix."""
    found = list[Figures]()
    for q, count in LOOKED_UP:
        weights, x = rotated("bcq", q, rows, columns, 128), random_vectors(count, columns)
        row: Figures = {"bits": q, "rows": rows, "columns": columns, "vectors": count}
        for path in ("look-up", "dequantize"):
            calls = [partial(matmul, weight, x, path=path) for _, weight in weights]
            for call in calls:
                call()  # prepares the weight
            row[path] = replayed(lambda i, calls=calls: calls[i % len(calls)](), 2 * len(calls))
        found.append(row)
        print(row, flush=True)
    return found


def shapes_of(formula: str, q: int, rows: int, columns: int, g: int, counts: Iterable[int]) -> Jobs:
    """What `gemm` is compiled for."""
    table = tuple(map(float, TABLES.get(formula, ())))
    layout = GemmLayout(q, columns, g, "table" if table else formula, "F16", table=table)
    return {gemm_shape(layout, count, rows, 1, 1, "wgmma"): None for count in counts if count >= LEAST or table}


def all_kernels() -> Jobs:
    """What all rows are compiled for."""
    jobs: Jobs = {}
    for shape in SHAPES:
        counts = {end - begin for count in (*MANY, *BETWEEN) for begin, end in parts_of(count, shape)}
        jobs |= shapes_of("affine", 4, *shape, 128, counts)
    for formula, q, g in OTHERS:
        jobs |= shapes_of(formula, q, *SHAPES[-1], g, FEW)
        jobs |= shapes_of(formula, q, *SHAPES[0], g, SMALL_FEW)
    for shape in SHAPES[::-1]:
        jobs |= shapes_of("affine", 4, *shape, 128, COUNTS)
        jobs |= {("affine", 4, *shape, 128, count): None for count in COUNTS if count < LEAST}
    return jobs | {(formula, q, *SHAPES[-1], g, FEW[0]): None for formula, q, g in OTHERS if formula not in TABLES}


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--marlin", help="library with the function marlin")
    parser.add_argument("--lut-gemm", help="library with the function lutgemm_bias")
    options, begin = parser.parse_args(), time.perf_counter()
    compile_all(all_kernels())
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    peers = peer_times(options.marlin, options.lut_gemm, COUNTS, options.out.with_suffix(".peers"))
    print(f"peers: {time.perf_counter() - begin:.0f} s", flush=True)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "bandwidth": bandwidth(), "group_size": 128, "rows": [],
        "look_ups": [row for shape in SHAPES for row in looked_up(*shape)],
    }  # fmt: skip
    parts = [partial(measured, "affine", 4, *shape, 128, COUNTS) for shape in SHAPES]
    parts += [partial(measured, formula, q, *SHAPES[-1], g, FEW) for formula, q, g in OTHERS]
    parts += [partial(measured, formula, q, *SHAPES[0], g, SMALL_FEW) for formula, q, g in OTHERS]
    parts += [partial(measured, "affine", 4, *shape, 128, BETWEEN, steady=STEADY[1]) for shape in SHAPES]
    parts += [partial(measured, "affine", 4, *shape, 128, MANY, steady=STEADY[0]) for shape in SHAPES]
    for part in parts:
        for row in part(peers=peers):
            figures["rows"].append(row)
            options.out.write_text(json.dumps(figures, indent=1) + "\n")  # what is timed is kept if the run is cut
        print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
