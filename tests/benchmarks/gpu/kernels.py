"""Times of the CUDA kernels for docs/benchmarks/kernels*.md, of one kernel after the other.

    python tests/benchmarks/gpu/kernels.py --only atom --out docs/benchmarks/kernels_atom.json

Needs a GPU of capability 9.0. Products with random weights, captured in a CUDA graph, weights rotated past the cache,
medians; with each the time that its bytes take at the bandwidth measured in the same run, and torch's float16 product.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.bench import bandwidth, figures
from kernel_bench import atom, matmul, mixed, outliers, products
from kernel_bench.plot import plot
from kernel_bench.timing import Row

KINDS = ("products", "outliers", "mixed", "dequantize", "atom")


def measured(only: list[str], speed: float, lut_gemm: str | None) -> Iterator[Row]:
    """The rows of these kinds."""
    if "products" in only:
        yield from products.products(speed, lut_gemm)
    if "outliers" in only:
        yield from outliers.with_outliers(speed)
    if "mixed" in only:
        yield from mixed.mixed_products(speed)
    if "dequantize" in only:
        yield from matmul.dequantized(speed)
    if "atom" in only:
        yield from atom.w4a4_products(speed)
        yield from atom.norms(speed)
        yield from atom.attention(speed)


def main() -> None:
    """Measure, print a line for every row, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated; by default all")
    parser.add_argument("--sweep", action="store_true", help="planes times group sizes: time and energy against bytes")
    parser.add_argument("--lut-gemm", help="a library with the published kernel, to be timed too")
    parser.add_argument("--out", type=Path, required=True, help="the figures; a plot is written beside them (.svg)")
    asked = parser.parse_args()
    speed = bandwidth()
    found = products.sweep(speed) if asked.sweep else measured(asked.only or [*KINDS], speed, asked.lut_gemm)
    rows = []
    for row in found:
        rows.append(row)
        what = f"{row.kernel} {row.rows} x {row.columns} q={row.bits:g} g={row.group_size} batch {row.batch}"
        print(f"{what}: {row.microseconds:.2f} us, {100 * row.floor / row.microseconds:.0f} %", flush=True)
    asked.out.write_text(json.dumps(figures(speed, rows), indent=1) + "\n", encoding="utf-8")
    asked.out.with_suffix(".svg").write_text(plot(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
