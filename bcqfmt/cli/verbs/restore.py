"""``bcqfmt restore``: the source of a converted folder again, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, command_line, json_option, stoppable, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.next_steps import run_it, step_lines
from bcqfmt.cli.progress import Progress
from bcqfmt.container.durable import refuse_overlap
from bcqfmt.errors import error, escape
from bcqfmt.system import return_large_blocks


@verb("restore")
@click.argument("bcq", type=FilePath())
@click.argument("out", type=FilePath())
@click.option("--overwrite", is_flag=True, help="Replace OUT.")
@json_option
def command(bcq: Path, out: Path, overwrite: bool, as_json: bool) -> None:
    """Rebuild the source of a converted folder, byte for byte.

    BCQ is a folder that `bcqfmt convert` wrote. OUT gets every file of its source again; each must have the SHA-256
    that was recorded when it was converted, or nothing appears under OUT.

    \b
    Example:
      bcqfmt restore model-bcq/ model-gptq/
    """
    import bcqfmt
    from bcqfmt.cli.forecast import nearest
    from bcqfmt.converters.convert.restore import restore
    from bcqfmt.converters.convert.source_rebuilder import SourceRebuilder
    from bcqfmt.converters.jobs.warnings import in_words

    refuse_overlap(out, bcq, "the BCQ folder")
    with expected_bcq(bcq), bcqfmt.open(bcq) as checkpoint:
        rebuilder = SourceRebuilder(checkpoint)
        files, left_out = rebuilder.files(), rebuilder.left_out()
        total = sum(record["size"] for record in files.values())
        free = shutil.disk_usage(nearest(out)).free
        if total > free:
            raise error("BCQ-E802", str(out), found=f"{free:,} bytes free", expected=f"{total:,} bytes")
        with stoppable(out, resumed=False), Progress("restoring", total, len(files)) as progress:
            return_large_blocks()
            digests = restore(checkpoint, out, overwrite=overwrite, tick=progress.tick)
    if as_json:
        render.emit_json(
            {"target": str(out), "bytes": total, "files": dict(sorted(digests.items())), "left_out": left_out}
        )
        return
    counted = f"{render.count(len(digests), 'file')}, {total:,} bytes, every SHA-256 as recorded"
    counted += f"; {in_words(left_out)}" if left_out else ""
    render.echo(f"{escape(str(out))}: {counted}")
    render.echo(f"  {digest}  {escape(path)}" for path, digest in sorted(digests.items()))
    render.echo(step_lines({**run_it(out), "prove it": command_line("bcqfmt", "verify", out, bcq)}))
