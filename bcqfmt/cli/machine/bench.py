"""``bcqfmt bench``: how fast the kernels are on this machine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, json_option, verb
from bcqfmt.cli.progress import announce_kernels
from bcqfmt.cli.reports import check_output
from bcqfmt.container.durable import write_file
from bcqfmt.errors import error
from bcqfmt.version import pip_install

if TYPE_CHECKING:
    from bcqfmt.bench import Row


@verb("bench")
@click.argument("what", type=click.Choice(["kernels"]))
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", show_default=True, help="Where to measure.")
@click.option("--out", type=FilePath(), metavar="FILE.json", help="Write the figures to this file.")
@click.option("--overwrite", is_flag=True, help="Replace this file.")
@json_option
def command(what: str, device: str, out: Path | None, overwrite: bool, as_json: bool) -> None:
    """Measure the kernels on this machine's GPU.

    Products of 1 to 64 vectors with random weights, by the kernel that BcqLinear takes, captured in a CUDA graph,
    weights rotated past the cache, medians; with each the time that its bytes take at the bandwidth measured in the
    same run, and torch's float16 product.

    \b
    Example:
      bcqfmt bench kernels
      bcqfmt bench kernels --out kernels.json
    """
    from bcqfmt.kernels.runtime.device import require_cuda

    if out is not None:
        check_output(out, overwrite, {})
    require_cuda("run it on a machine that has one; `bcqfmt doctor` shows what is missing here")
    try:
        from bcqfmt import bench
    except ImportError:
        hint = f"{pip_install('torch')}; {pip_install('cuda')}"
        raise error("BCQ-E306", found="torch is not installed", hint=hint) from None
    speed = bench.bandwidth()
    rows: list[Row] = []
    with ExitStack() as stack:
        announce_kernels(stack)
        for row in bench.measured(speed):
            rows.append(row)
            what = f"{row.kernel} {row.bits} bits, {row.rows} x {row.columns}, {render.count(row.vectors, 'vector')}"
            render.say(f"{what}: {row.microseconds:.2f} us")
    figures = bench.figures(speed, rows)
    if out is not None:
        write_file(out, (json.dumps(figures, indent=1) + "\n").encode())
    render.show(as_json, figures, table(rows))


def table(rows: list[Row]) -> list[str]:
    """The rows as a table in Markdown."""
    head = "| kernel | bits | rows x columns | vectors | us | of the floor | times as fast as float16 | error |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        floor, faster = row.floor / row.microseconds, row.float16 / row.microseconds
        lines.append(
            f"| {row.kernel} | {row.bits} | {row.rows} x {row.columns} | {row.vectors} | {row.microseconds:.2f} "
            f"| {100 * floor:.0f} % | {faster:.2f} | {row.error:.1e} |"
        )
    return lines
