"""``bcqfmt bench``: how fast the kernels are on this machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.progress import announce_kernels
from bcqfmt.container.durable import write_file
from bcqfmt.errors import error
from bcqfmt.version import pip_install

if TYPE_CHECKING:
    from bcqfmt.bench.timing import Row


@verb("bench")
@click.argument("what", type=click.Choice(["kernels"]))
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", show_default=True, help="Where to measure.")
@click.option("--sweep", is_flag=True, help="Planes times group sizes instead: time and energy against bytes.")
@click.option(
    "--only",
    type=click.Choice(["products", "outliers", "mixed", "dequantize", "atom", "crossover"]),
    multiple=True,
    help="Measure only this; may be repeated. By default all but crossover.",
)
@click.option("--lut-gemm", type=click.Path(exists=True), help="A library with the published kernel, to be timed too.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures to this JSON file, and a plot (.svg).")
@json_option
def command(
    what: str, device: str, sweep: bool, only: tuple[str, ...], lut_gemm: str | None, out: Path | None, as_json: bool
) -> None:
    """Measure the kernels on this machine's GPU.

    Products with random weights, captured in a CUDA graph, weights rotated past the cache, medians; with each
    the time that its bytes take at the bandwidth measured in the same run, and torch's float16 product. Where a weight
    has no fast product, the name of the kernel says what is used instead ("look-up", "dequantize").

    \b
    Example:
      bcqfmt bench kernels --device cuda
      bcqfmt bench kernels --sweep --out sweep.json
    """
    from bcqfmt.kernels.runtime.device import require_cuda

    require_cuda()
    try:
        from bcqfmt.bench import products, timing
    except ImportError:
        hint = f"{pip_install('torch')}; {pip_install('cuda')}"
        raise error("BCQ-E306", found="torch is not installed", hint=hint) from None
    speed = timing.bandwidth()
    rows: list[Row] = []
    with ExitStack() as stack:
        announce_kernels(stack)
        for row in products.sweep(speed) if sweep else _measured(only, speed, lut_gemm):
            rows.append(row)
            render.say([_line(row)])
    figures = _figures(speed, rows)
    if out is not None:
        from bcqfmt.bench.plot import plot

        write_file(out, (json.dumps(figures, indent=1) + "\n").encode())
        write_file(out.with_suffix(".svg"), plot(rows).encode())
    render.emit_json(figures) if as_json else render.echo(table(rows))


def _measured(only: tuple[str, ...], speed: float, lut_gemm: str | None) -> Iterator[Row]:
    from bcqfmt.bench import atom, matmul, mixed, outliers, products

    chosen = only or ("products", "outliers", "mixed", "dequantize", "atom")
    if "products" in chosen:
        yield from products.products(speed, lut_gemm)
    if "outliers" in chosen:
        yield from outliers.with_outliers(speed)
    if "mixed" in chosen:
        yield from mixed.mixed_products(speed)
    if "dequantize" in chosen:
        yield from matmul.dequantized(speed)
    if "atom" in chosen:
        yield from atom.w4a4_products(speed)
        yield from atom.norms(speed)
        yield from atom.attention(speed)
    if "crossover" in chosen:
        yield from matmul.crossover(speed)


def table(rows: list[Row]) -> list[str]:
    """The rows as a table in Markdown."""
    head = "| kernel | rows x columns | q | g | batch | us | of the floor | compared with |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        notes = [f"{name} {taken:.1f} us: {taken / row.microseconds:.2f}x" for name, taken in row.peers.items()]
        if row.alone is not None:
            notes.insert(0, f"launched alone {row.alone:.2f} us")
        if row.joules is not None:
            notes = [f"{row.joules * 1e3:.1f} mJ"]
        if row.error is not None:
            notes.append(f"error {row.error:.1e}")
        lines.append(
            f"| {row.kernel} | {row.rows} x {row.columns} | {row.bits:g} | {row.group_size} | {row.batch} "
            f"| {row.microseconds:.2f} | {100 * row.floor / row.microseconds:.0f} % | {'; '.join(notes)} |"
        )
    return lines


def _line(row: Row) -> str:
    what = f"{row.kernel} {row.rows} x {row.columns} q={row.bits:g} g={row.group_size} batch {row.batch}"
    return f"{what}: {row.microseconds:.2f} us, {100 * row.floor / row.microseconds:.0f} %"


def _figures(speed: float, rows: list[Row]) -> dict[str, Any]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bandwidth": round(speed),
        "rows": [row._asdict() for row in rows],
    }
