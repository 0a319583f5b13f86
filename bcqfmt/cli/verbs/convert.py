"""``bcqfmt convert``: a quantized checkpoint of another format becomes a BCQ folder, without loss."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import (
    FilePath,
    Number,
    command_line,
    command_words,
    html_option,
    hub_options,
    json_option,
    push_options,
    stoppable,
    usage_error,
    verb,
)
from bcqfmt.cli.next_steps import prove_it, run_it, step_lines
from bcqfmt.cli.options import PART, SIZE, default_workers
from bcqfmt.cli.progress import Progress
from bcqfmt.cli.publish import check_push_options, publish
from bcqfmt.cli.reports import check_report_path, write_report
from bcqfmt.cli.sources import Source, check_target, find_source, is_here, keep_apart, keep_inputs
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.system import peak_memory, return_large_blocks

if TYPE_CHECKING:
    from bcqfmt.cli.forecast import Forecast
    from bcqfmt.converters.convert.conversion import Conversion
    from bcqfmt.converters.convert.ray import RayExecutor

_LAYOUTS = ("auto", "gptq", "awq", "compressed-tensors", "hqq", "anybcq", "gguf")
_EXECUTORS = ("local", "ray")
_PARTS = "choose another DST, or remove that one yourself"
_ZEROS = ("auto", "v2", "v1-nowrap", "v1-wrap", "v1-carry", "v1-gptqmodel-3bit")


@verb("convert")
@click.argument("src")
@click.argument("dst", type=FilePath())
@click.option(
    "--from", "layout", default="auto", metavar="LAYOUT", help=f"Layout of the source: {', '.join(_LAYOUTS)}."
)
@click.option("--zero-point", type=click.Choice(_ZEROS), default="auto", help="How GPTQ zero points are read.")
@click.option("--against", metavar="MODEL", help="Where zero points are unclear: try all readings on this dense model.")
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Largest output file.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads, by default one per core, up to four; or tasks.")
@click.option("--executor", type=click.Choice(_EXECUTORS), default="local", help="Where shards are done: here, on Ray.")
@click.option("--ray-address", metavar="HOST:PORT", help="The Ray cluster, unless RAY_ADDRESS says it, or it is here.")
@click.option("--memory-limit", type=SIZE, help="Use fewer workers rather than more memory than this.")
@click.option("--min-coverage", type=Number(0, 100), default=0.0, help="Refuse if less (%) is quantized.")
@click.option("--allow-nonfinite", is_flag=True, help="Keep infinities and NaNs among the scales.")
@click.option("--no-provenance", is_flag=True, help="Leave out what restores the source byte for byte.")
@click.option("--resume", is_flag=True, help="Go on with an unfinished conversion.")
@click.option("--overwrite", is_flag=True, help="Replace DST; without --resume, drop an unfinished conversion.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; of a hub id only headers are read.")
@click.option("--part", type=PART, help="Do one part of N, on any machine; `bcqfmt finalize` closes the conversion.")
@html_option
@hub_options
@push_options
@json_option
def command(
    src: str,
    dst: Path,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    part: tuple[int, int] | None,
    executor: str,
    ray_address: str | None,
    html: Path | None,
    revision: str | None,
    offline: bool,
    push: str | None,
    private: bool,
    create_pr: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Convert a quantized checkpoint (GPTQ, AWQ, GGUF, ...) to BCQ.

    SRC is a folder, a GGUF file or a model on the hub (owner/name); it is never written to. DST is the new folder.
    Layout, bits and zero points are found out; a source that can be read in two ways is refused, with the option that
    decides. Nothing appears under DST before it is complete. `bcqfmt verify` proves the result, `bcqfmt restore` gives
    the source back.

    \b
    Example:
      bcqfmt convert model-gptq/ model-bcq/
      bcqfmt convert model-Q4_K_M.gguf model-bcq/
      bcqfmt convert owner/model-awq model-bcq/ --dry-run
      bcqfmt convert owner/model-GGUF:model-Q4_K_M.gguf model-bcq/
      bcqfmt convert model-gptq/ model-bcq/ --resume
      bcqfmt convert /shared/model-gptq /shared/model-bcq --executor ray --ray-address head:6379
    """
    whole = not dry_run and part is None
    if overwrite and part is not None:
        raise usage_error(f"--part never overwrites: {_PARTS}.")
    check_push_options(push, private, create_pr, whole=whole)
    if executor == "ray" and part is not None:
        raise usage_error("--part is for machines without an engine; Ray does all parts.")
    if executor != "ray" and ray_address is not None:
        raise usage_error("--ray-address goes with --executor ray.")
    if html is not None and not whole:
        raise usage_error("--html needs a complete conversion.")
    inputs = {"--against": asked["against"]}
    if html is not None:
        check_report_path(html, dst, overwrite, {"SRC": src, **inputs})
    from bcqfmt.cli.forecast import Forecast

    keep_inputs(dst, inputs)
    check_target(src, dst, overwrite=overwrite or resume, hint=None if part is None else _PARTS)
    engine = None if executor == "local" or dry_run else _ray(ray_address, asked["workers"])
    start = time.perf_counter()
    source = find_source(src, revision, offline, headers_only=dry_run, gguf=True)
    if source.remote is None:
        keep_apart(dst, *source.checkpoint.places)
    asked["provenance"] = not asked.pop("no_provenance")
    asked["workers"] = 1 if executor == "ray" else asked["workers"] or default_workers()
    against = asked.pop("against")
    conversion = _planned(
        source, src, dst, against, asked, resume=resume, overwrite=overwrite, dry_run=dry_run, part=part
    )
    _check_zero_options(conversion, against)
    forecast = Forecast(conversion, dst, source.remote)
    if dry_run:
        render.show(as_json, forecast.as_dict(), forecast.text())
        if not as_json:
            render.say(render.findings(conversion.warnings))
        return
    render.say(forecast.text())
    already = conversion.is_complete(dst)
    if already:
        render.say("it is complete already: nothing to do")
    else:
        forecast.check_disk()
    complete = already or _carry_out(conversion, dst, engine)
    where = [] if revision is None else ["--revision", revision]
    where += ["--offline"] * offline
    summary = _summary(conversion, forecast, src, dst, where, time.perf_counter() - start, complete)
    if engine is not None:
        summary["executor"] = engine.summary()
    if html is not None:
        summary["reports"] = _write_report(dst, html)
    if not as_json:
        render.echo(_text(summary, conversion))
    if push is not None:
        summary["pushed"] = publish(dst, push, private=private, create_pr=create_pr)["url"]
    if as_json:
        render.emit_json(summary)
    elif push is not None:
        render.echo(f"pushed: {summary['pushed']}")


def _ray(address: str | None, at_once: int | None) -> RayExecutor:
    from bcqfmt.converters.convert.ray import RayExecutor

    return RayExecutor(address, at_once, say=render.say)


def _planned(source: Source, src: str, dst: Path, against: str | None, asked: dict[str, Any], **run: Any) -> Conversion:
    from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions

    try:
        return Conversion(source.checkpoint, ConvertOptions(**asked, **run, name=source.name, revision=source.revision))
    except BcqError as fault:
        if fault.code == "BCQ-E610":
            hint = f"quantize it: {command_line('bcqfmt', 'quantize', src, dst, '--method', 'rtn')}"
            found, expected = fault.finding.found, fault.finding.expected
            raise error("BCQ-E610", src, found=found, expected=expected, hint=hint) from None
        if fault.code == "BCQ-E605":
            tried = against is not None and source.remote is None
            hint = _tried(source, str(against), asked["layout"]) if tried else fault.hint
            found, expected = fault.finding.found, fault.finding.expected
            raise error("BCQ-E605", src, found=found, expected=expected, hint=hint) from None
        raise


def _check_zero_options(conversion: Conversion, against: str | None) -> None:
    """A usage error where options that are about zero points are given for a layout that has one reading of them."""
    found = conversion.modules.values()
    if any("zero_point" in module.settings for module in found):
        if against is not None:
            is_here(against)  # an error where it is neither there nor on the hub
            told = "--zero-point says" if conversion.options.zero_point != "auto" else "it is clear"
            render.say(f"--against is not needed: {told} how the zero points are read")
        return
    layouts = ", ".join(sorted({module.layout for module in found})) or "another layout"
    given = {"--zero-point": conversion.options.zero_point != "auto", "--against": against is not None}
    for option in filter(given.get, given):
        raise usage_error(f"{option} is for GPTQ, whose zero points can be read in several ways; SRC is {layouts}.")


def _tried(source: Source, against: str, layout: str) -> str:
    """The readings of the zero points with their errors against a dense model, and the command with the best."""
    from bcqfmt.converters.convert.zero_trial import try_rules

    trials = try_rules(source.checkpoint, find_source(against, None, offline=False).checkpoint, layout)
    shown = ", ".join(f"{trial.rule} {100 * trial.relative:.3g} %" for trial in trials)
    words = [word for word in command_words() if word != "--dry-run"]
    best = command_line("bcqfmt", *words, "--zero-point", trials[0].rule)
    return f"relative error against {escape(against)}: {shown}; the best: {best}"


def _carry_out(conversion: Conversion, dst: Path, engine: RayExecutor | None) -> bool:
    shards = conversion.plan.shards
    part = conversion.options.part
    mine = shards if part is None else shards[part[0] - 1 :: part[1]]
    with (
        stoppable(dst, resumed=True),
        Progress("converting", sum(shard.nbytes for shard in mine), len(mine)) as progress,
    ):
        return_large_blocks()
        return conversion.run(dst, progress.tick, progress.done, engine)


def _write_report(dst: Path, path: Path) -> list[str]:
    import bcqfmt
    from bcqfmt.converters.report import make_report

    with bcqfmt.open(dst) as checkpoint:
        return write_report(make_report(checkpoint), path, dst)


def _summary(
    conversion: Conversion, forecast: Forecast, src: str, dst: Path, where: list[str], seconds: float, complete: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source": src,
        "target": str(dst),
        "complete": complete,
        "shards": len(conversion.plan.shards),
        "weights": len(conversion.modules),
        "coverage": round(100 * conversion.plan.coverage, 4),
        "input_bytes": forecast.input,
        "seconds": round(seconds, 3),
        "bytes_per_second": round(forecast.input / seconds),
        "peak_rss_bytes": peak_memory(),
        "warnings": [finding.as_dict() for finding in conversion.warnings],
    }
    if complete:
        from bcqfmt.inspect.summary import summarize

        found["output_bytes"] = sum(path.stat().st_size for path in dst.rglob("*") if path.is_file())
        found["bits_per_weight"] = summarize(dst).bits_per_weight
        found["run"] = run_it(dst)
        found["next"] = prove_it(src, dst, *where, provenance=conversion.options.provenance)
    else:
        found["part"] = list(conversion.options.part or ())
        found["next"] = command_line("bcqfmt", "finalize", dst, src, *where)
    return found


def _text(summary: dict[str, Any], conversion: Conversion) -> list[str]:
    rate = f"{render.size(int(summary['bytes_per_second']))}/s, {summary['seconds']:.1f} s"
    used = f"peak memory {render.size(summary['peak_rss_bytes'])}"
    lines = []
    counts = Counter(finding.code for finding in conversion.warnings)
    for code, number in sorted(counts.items()):
        first = next(finding for finding in conversion.warnings if finding.code == code)
        lines.append(f"warning: {first.text()}" + (f" (and {number - 1} more)" if number > 1 else ""))
    if summary["complete"]:
        done = [
            render.count(summary["shards"], "shard"),
            render.count(summary["weights"], "weight"),
            *([f"{summary['bits_per_weight']:.3f} bits per weight"] if summary["weights"] else []),
            render.size(summary["output_bytes"]),
        ]
        lines.append(f"{summary['target']}: {', '.join(done)}")
    else:
        index, count = summary["part"]
        lines.append(f"{summary['target']}: part {index} of {count} is done")
    if "executor" in summary:
        engine = summary["executor"]
        used += f" here, {render.size(engine['peak_task_rss_bytes'])} in a task"
        lines.append(f"ray: {render.count(engine['tasks'], 'task')} on {render.count(engine['nodes'], 'node')}")
    lines += [f"report: {escape(path)}" for path in summary.get("reports", ())]
    then = "prove it" if summary["complete"] else "when all parts are done"
    steps = {**summary.get("run", {}), then: summary["next"]}
    return [*lines, f"{rate}, {used}", *step_lines(steps)]
