"""Products of 80 to 1800 vectors with a 4-bit weight by every tile that `gemm` has for them, and by cuBLAS.

    python tests/benchmarks/gpu/tiles.py --out docs/benchmarks/gemm_tiles.json

Needs a GPU of capability 9.0. Weights are rotated past the cache, products replayed from a CUDA graph, in turns of
random order; a tile far slower than the fastest of the first turn has no other. Medians in microseconds. The rule that
chooses a tile (`kernels.gemm.shape`) is tested against what is written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.kernels.gemm import GemmOperand, gemm
from bcqfmt.kernels.gemm.layout import GemmLayout
from bcqfmt.kernels.gemm.shape import MANY_TILES, GemmShape, gemm_shape
from kernel_bench.chosen import SHAPES, rotated
from kernel_bench.compiling import compile_all
from kernel_bench.timing import steadily
from kernel_bench.weights import random_vectors

COUNTS = (80, 96, 112, 128, 144, 160, 192, 224, 288, 320, 384, 448, 576, 640, 768, 896, 1100, 1200, 1400, 1600, 1800)
GROUP, BITS = 128, 4
TURNS, SECONDS = 4, 0.03  # of a turn
FAR = 1.12  # times the fastest of the first turn


def shapes_of(rows: int, columns: int, count: int) -> dict[str, GemmShape]:
    """Every tile by its rows and vectors, but those with places for twice as many vectors as there are."""
    layout = GemmLayout(BITS, columns, GROUP, "affine", "F16")
    tiles = [tile for tile in MANY_TILES if tile[1] < 2 * count]
    made = [gemm_shape(layout, count, rows, 1, 1, "wgmma", tile=tile) for tile in tiles]
    return {f"{shape.rows} x {shape.vectors}": shape for shape in made}


def measured(rows: int, columns: int) -> Iterator[dict[str, Any]]:
    """A row for every number of vectors."""
    weights = rotated("affine", BITS, rows, columns, GROUP)
    dense = [weight.dense(random_vectors(1, columns))[0] for weight, _ in weights[:3]]
    operands = [placed.gemm("F16") for _, placed in weights]
    for count in COUNTS:
        x = random_vectors(count, columns)
        ways = {name: _way(operands, x, shape) for name, shape in shapes_of(rows, columns, count).items()}
        ways["cublas"] = lambda i, x=x: x @ dense[i % len(dense)].T
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            nearest = FAR * min((found[0] for found in times.values() if found), default=float("inf"))
            left = [name for name, found in times.items() if not found or found[0] < nearest or name == "cublas"]
            for name in random.sample(left, len(left)):
                times[name].append(steadily(ways[name], 2 * len(operands), SECONDS))
        found = {name: round(statistics.median(taken), 2) for name, taken in times.items()}
        row = {"rows": rows, "columns": columns, "vectors": count, "cublas": found.pop("cublas"), "tiles": found}
        print(row, flush=True)
        yield row


def _way(operands: list[GemmOperand | None], x: torch.Tensor, shape: GemmShape) -> Callable[[int], object]:
    return lambda i: gemm(operands[i % len(operands)], x, shapes=[shape])


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    options, begin = parser.parse_args(), time.perf_counter()
    compile_all({made: None for shape in SHAPES for count in COUNTS for made in shapes_of(*shape, count).values()})
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    rows = [row for shape in SHAPES for row in measured(*shape)]
    weight = f"affine, {BITS} bits, groups of {GROUP}"
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps({"gpu": torch.cuda.get_device_name(), "weight": weight}, indent=1).removesuffix("\n}")
    options.out.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
