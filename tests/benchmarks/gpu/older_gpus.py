"""Products on this GPU by the kernels for older ones: PTX for them, compiled by the driver, beside this GPU's own.

    python tests/benchmarks/gpu/older_gpus.py --out docs/benchmarks/older_gpus.json [--marlin libmarlin.so]
        [--lut-gemm liblutgemm.so]

Needs a GPU of capability 9.0. Every build is timed in a process of its own (``BCQFMT_CAPABILITY``), one after the
other, after the peers: weights rotated past the cache, products replayed from a CUDA graph; medians in microseconds.
docs/benchmarks/gemm.md tells how the libraries are built.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.bench import bandwidth, relative_error, replayed
from bcqfmt.kernels.matmul import matmul, path_of
from kernel_bench.chosen import SHAPES, rotated
from kernel_bench.compiling import Jobs, choose, compile_all
from kernel_bench.peer_times import of_row, peer_times
from kernel_bench.weights import random_vectors

BUILDS = {"compute_80": "8.0", "sm_90": "9.0", "compute_89": "8.9"}  # names of columns, capabilities
COUNTS, FEW = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 16)  # vectors of affine weights, of bcq
WEIGHTS = (("affine", 4, COUNTS), ("affine", 3, FEW), ("bcq", 4, FEW), ("bcq", 3, FEW), ("bcq", 2, FEW))
GROUP, TURNS = 128, 3
KEY = ("formula", "bits", "rows", "columns", "vectors")
Row = dict[str, Any]


def measured(speed: float) -> Iterator[Row]:
    """A row for every weight, shape and number of vectors; ``speed``: bytes per second."""
    for rows, columns in SHAPES:
        for formula, q, counts in WEIGHTS:
            weights = rotated(formula, q, rows, columns, GROUP)
            several, (first, placed) = len(weights), weights[0]
            numbers = first.first.nbytes + (first.second.nbytes if formula == "bcq" else 0)
            for count in counts:
                x = random_vectors(count, columns)
                for _, weight in weights:
                    matmul(weight, x)  # prepares it
                moved = first.planes.nbytes + numbers + 2 * count * (rows + columns)
                exact = x.double() @ first.values(0, 256).T
                call = partial(_product, weights, x)
                yield {
                    "formula": formula, "bits": q, "rows": rows, "columns": columns, "vectors": count,
                    "floor": moved / speed * 1e6, "path": path_of(placed, count).kernel,
                    "error": relative_error(matmul(placed, x)[:, :256].double(), exact),
                    "microseconds": statistics.median(replayed(call, 2 * several) for _ in range(TURNS)),
                }  # fmt: skip


def _product(weights: list[Any], x: torch.Tensor, i: int) -> object:
    return matmul(weights[i % len(weights)][1], x)


def cublas() -> dict[tuple[int, int], float]:
    """By rows and vectors: torch's product with the matrix in float16."""
    found = {}
    for rows, columns in SHAPES:
        dense = [torch.randn(rows, columns, device="cuda", dtype=torch.float16) for _ in range(3)]
        for count in COUNTS:
            x = random_vectors(count, columns)
            call = partial(_dense, dense, x)
            found[rows, count] = statistics.median(replayed(call, 2 * len(dense)) for _ in range(TURNS))
    return found


def _dense(matrices: list[torch.Tensor], x: torch.Tensor, i: int) -> object:
    return x @ matrices[i % len(matrices)].T


def jobs_of(capability: str) -> Jobs:
    """What a build is compiled for."""
    return {
        (formula, q, *shape, GROUP, count): None
        for shape in SHAPES[::-1]
        for formula, q, counts in WEIGHTS[::-1]
        for count in counts
        if capability == "9.0" or count not in (2, 8, 128, 256)  # elsewhere the kernel of 4 or of 64
    }


def timed(capability: str, speed: float, place: Path) -> None:
    """A build's rows, written to a file."""
    choose(capability)
    rows = []
    for row in measured(speed):
        print(capability, {k: round(v, 2) if isinstance(v, float) and k != "error" else v for k, v in row.items()})
        rows.append(row)
    place.write_text(json.dumps(rows))


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--marlin", help="library with the function marlin")
    parser.add_argument("--lut-gemm", help="library with the function lutgemm_bias")
    options, begin = parser.parse_args(), time.perf_counter()
    place, rows = options.out.with_suffix(".part"), dict[tuple[Any, ...], Row]()
    peers = peer_times(options.marlin, options.lut_gemm, COUNTS, options.out.with_suffix(".peers"))
    speed, dense = bandwidth(), cublas()
    print(f"peers: {time.perf_counter() - begin:.0f} s", flush=True)
    for name, capability in BUILDS.items():
        compile_all(jobs_of(capability), capability)
        print(f"compiled for {capability}: {time.perf_counter() - begin:.0f} s", flush=True)
        process = multiprocessing.get_context("spawn").Process(target=timed, args=(capability, speed, place))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name} was not timed")
        for found in json.loads(place.read_text()):
            row = rows.setdefault(tuple(found[part] for part in KEY), {part: found[part] for part in (*KEY, "floor")})
            row[name] = {part: found[part] for part in ("microseconds", "path", "error")}
            row |= of_row(peers, row)
            if (row["formula"], row["bits"]) == ("affine", 4):
                row["cublas"] = dense[row["rows"], row["vectors"]]
        made = {"gpu": torch.cuda.get_device_name(), "bandwidth": speed, "group_size": GROUP, "rows": [*rows.values()]}
        options.out.write_text(json.dumps(made, indent=1) + "\n")  # what is timed is kept if the run is cut
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    place.unlink()


if __name__ == "__main__":
    main()
