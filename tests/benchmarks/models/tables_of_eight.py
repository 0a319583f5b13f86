"""Tables of four columns or of eight on the CPU: the product as it is, and the best found with 256 sums.

    python tests/benchmarks/models/tables_of_eight.py [--threads 2]

With four columns a table of 16 sums fits into a register, and one instruction looks up 16 rows. With eight it has 256
sums in memory, half as many look-ups, each a load; the bytes of neighbouring rows are stored together, so that they
can be gathered. Both multiply the same weights, take turns, and are compared with float64.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import numba
import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.kernels import cpu
from bcqfmt.kernels.operands import operand
from products import product_reference as reference

TILE = 512  # rows that share the look-ups of a table
GROUP = 128


def _by_eight(codes: Any, alpha: Any, z: Any, x: Any, y: Any) -> None:
    """codes (G, 16, q, rows) bytes of eight columns; alpha (G, q, rows), z (G, rows), x (in), y (rows) float32."""
    groups, chunks, planes, rows = codes.shape
    tables = np.empty((groups * chunks, 256), np.float32)
    sums = np.empty(groups, np.float32)
    for g in numba.prange(groups):
        total = np.float32(0)
        for c in range(chunks):
            at = g * chunks + c
            table, first = tables[at], np.float32(0)
            for k in range(8):
                first -= x[at * 8 + k]
            table[0] = first
            for k in range(8):
                twice = 2 * x[at * 8 + k]
                for v in range(1 << k):
                    table[v + (1 << k)] = table[v] + twice
            total -= first
        sums[g] = total
    for tile in numba.prange((rows + TILE - 1) // TILE):
        low = tile * TILE
        high = min(rows, low + TILE)
        found, part = np.zeros(TILE, np.float32), np.empty(TILE, np.float32)
        for g in range(groups):
            for r in range(high - low):
                found[r] += z[g, low + r] * sums[g]
            for p in range(planes):
                part[:] = 0
                for c in range(chunks):
                    table, row = tables[g * chunks + c], codes[g, c, p]
                    for r in range(high - low):
                        part[r] += table[row[low + r]]
                for r in range(high - low):
                    found[r] += alpha[g, p, low + r] * part[r]
        y[low:high] = found[: high - low]


by_eight: Any = numba.njit(parallel=True, fastmath=True, nogil=True)(_by_eight)


def laid_out(weight: BcqWeight) -> tuple[Any, ...]:
    """codes, alpha and z of an affine weight of one segment, as :func:`_by_eight` takes them."""
    segment = operand(weight).segments[0]
    q, rows, words = segment.planes.shape
    columns = np.ascontiguousarray(segment.planes).view(np.uint8).reshape(q, rows, words * 4)
    codes = columns.transpose(2, 0, 1).reshape(words * 32 // GROUP, GROUP // 8, q, rows)
    alpha, z = segment.alpha.astype(np.float32), segment.z.astype(np.float32)
    return np.ascontiguousarray(codes), np.ascontiguousarray(alpha.transpose(2, 0, 1)), np.ascontiguousarray(z.T)


def fastest(call: Callable[[], object], calls: int = 8) -> float:
    """Milliseconds of the fastest of some calls."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def main() -> None:
    """Print a line for each shape and number of planes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    threads = parser.parse_args().threads
    numba.set_num_threads(threads)
    rng = np.random.default_rng(0)
    for rows, columns in ((4096, 4096), (11008, 4096)):
        for q in (2, 4):
            scale = rng.uniform(0.001, 0.01, (rows, columns // GROUP)).astype(np.float16)
            codes = rng.integers(0, 2**q, (rows, columns))
            weight = BcqWeight.from_affine(codes, scale, 2 ** (q - 1), group_size=GROUP, bits=q)
            x, y = rng.normal(size=columns).astype(np.float32), np.empty(rows, np.float32)
            matrix, prepared = cpu.prepare(weight), laid_out(weight)

            def four(matrix: cpu.CpuMatrix = matrix, x: Any = x) -> Any:
                return matrix.matmul(x[None], threads=threads)

            def eight(prepared: tuple[Any, ...] = prepared, x: Any = x, y: Any = y) -> None:
                by_eight(*prepared, x, y)

            eight()
            exact = reference.product(weight, x[None])[0]
            errors = [reference.relative_error(found, exact) for found in (four()[0], y)]
            assert max(errors) < 1e-5, errors
            turns = [(fastest(four), fastest(eight)) for _ in range(15)]
            ours, other = (statistics.median(turn[k] for turn in turns) for k in (0, 1))
            ratio = statistics.median(b / a for a, b in turns)
            print(f"{rows} x {columns}, {q} bit: {ours:.3f} ms by four, {other:.3f} ms by eight, {ratio:.2f}x")


if __name__ == "__main__":
    main()
