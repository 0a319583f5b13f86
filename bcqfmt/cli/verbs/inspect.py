"""``bcqfmt inspect``: what is in a checkpoint, at a glance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import command_line, hub_options, json_option, usage_error, verb
from bcqfmt.cli.expect import another_folder, expected, expected_bcq, fitting
from bcqfmt.cli.sources import ask_hub
from bcqfmt.errors import BcqError, escape
from bcqfmt.inspect.kinds import look
from bcqfmt.inspect.summary import Summary, TensorRow, summarize, summarize_gguf, summarize_sources
from bcqfmt.inspect.tensor_details import Details, tensor_details
from bcqfmt.weight.describe import PART_KINDS, scheme_text, segment_text
from bcqfmt.weight.weight import BcqWeight

_MODELS = ("bcq", "bcq file", "quantized", "dense", "gguf")


@verb("inspect")
@click.argument("path")
@click.option(
    "--modules",
    is_flag=True,
    help="Also list weights: the quantized ones, of other formats as convert sees them; of a dense model all tensors.",
)
@click.option("--tensor", metavar="NAME", help="Show one tensor: its parts, where they lie, its values.")
@hub_options
@json_option
def command(path: str, modules: bool, tensor: str | None, revision: str | None, offline: bool, as_json: bool) -> None:
    """Show what is in a checkpoint.

    PATH is a BCQ folder or file, any other folder or file of safetensors or GGUF, or the id of a model on the hub. Only
    headers are read (on the hub by range requests), unless --tensor asks for values, or --modules for a GPTQ
    checkpoint, whose zero points are looked at.

    \b
    Example:
      bcqfmt inspect model/
      bcqfmt inspect owner/model
      bcqfmt inspect owner/model --offline
      bcqfmt inspect model/ --modules
      bcqfmt inspect model/ --tensor model.layers.0.mlp.up_proj.weight
    """
    if tensor is not None and modules:
        raise usage_error("--modules and --tensor exclude each other.")
    if revision is not None and not _on_hub(path):
        raise usage_error("--revision is for models on the hub; PATH is here.")
    if tensor is not None:
        try:
            with expected_bcq(path, file=True):
                details = tensor_details(path, tensor)
        except BcqError as fault:
            if fault.code == "BCQ-E301" and look(path).kind in ("bcq", "bcq file"):
                listed = command_line("bcqfmt", "inspect", path, "--modules")
                fault.hint = f"the quantized weights: {listed}; all names in Python: list(bcqfmt.open({path!r}))"
            raise
        render.show(as_json, details.as_dict(), _tensor(details))
        return
    with expected(path, *_MODELS, file=True):
        summary = _remote(path, revision, offline, modules) if _on_hub(path) else summarize(path, modules=modules)
    found, lines = summary.as_dict(), _glance(summary, path)
    if summary.tensors is not None:
        lines += ["", *_tensors(summary.tensors)]
    elif modules and summary.foreign and (Path(path).is_dir() or summary.foreign == "gguf"):
        from bcqfmt.cli.forecast import module_rows, module_table

        found["modules"], why = module_rows(Path(path))
        if not why:
            lines += ["", *module_table(found["modules"])]
        elif f"not converted: {why}" not in lines:
            lines += ["", f"not converted: {why}"]
    render.show(as_json, found, lines)


def _on_hub(path: str) -> bool:
    if Path(path).exists() or "/" not in path:
        return False
    from bcqfmt.converters.hub.repo import looks_like_hub_id

    return looks_like_hub_id(path)


def _remote(path: str, revision: str | None, offline: bool, modules: bool) -> Summary:
    from bcqfmt.converters.hub import download, remote_headers, split_hub_id

    name, _ = split_hub_id(path, file=True)
    repo = ask_hub(path, revision, offline)
    if repo.offline:
        place = download(repo, offline=True)
        found_here = summarize(place / repo.file if repo.file else place, modules=modules)
        return replace(found_here, path=f"{name}@{repo.commit[:12]}")
    found = remote_headers(repo)
    files = {shard: found.files[shard] for shard in found.headers}
    shown = f"{name}@{found.repo.commit[:12]}"
    if found.repo.file:
        models = found.checkpoint.models.values()
        summary = summarize_gguf(shown, [(model.source.size, model.gguf) for model in models if model.gguf])
    else:
        summary = summarize_sources(shown, files, found.headers, found.checkpoint.config, modules=modules)
    render.say(f"read {found.bytes_read:,} bytes in {render.count(found.requests, 'request')}, headers only")
    return summary


def _next(summary: Summary, path: str) -> list[str]:
    """The command that makes BCQ of it; or why there is none, and what to do first."""
    if _on_hub(path):
        return [f"hint: {_next_on_hub(summary, path)}"]
    if summary.foreign == "gguf" or (summary.quantization and summary.folder):
        from bcqfmt.cli.sources import refusal

        refused = refusal(Path(path))
        if refused is not None:
            return [f"not converted: {refused}", *([f"hint: {refused.hint}"] if refused.hint else [])]
    then = fitting(path)
    return [f"hint: {then}"] if then else []


def _next_on_hub(summary: Summary, path: str) -> str:
    target = another_folder(path.rpartition("/")[2].partition(":")[0])
    if summary.quantization:
        return f"convert it, without loss: {command_line('bcqfmt', 'convert', path, target)}"
    return f"quantize it: {command_line('bcqfmt', 'quantize', path, target, '--method', 'rtn', '--bits', '4')}"


def _glance(summary: Summary, path: str) -> list[str]:
    lines = [f"{escape(summary.path)}: {_title(summary)}"]
    lines += render.fields(_facts(summary))
    if summary.foreign:
        then = _next(summary, path)
        lines += ["", *_types(summary), *(["", *then] if then else [])]
    else:
        lines += ["", *_sizes(summary)]
        if summary.schemes:
            lines += ["", *_schemes(summary)]
        if summary.dense:
            lines += ["", *_types(summary)]
        if summary.modules:
            lines += ["", *_modules(summary)]
    if summary.warnings:
        lines += ["", *render.findings(summary.warnings)]
    return lines


def _title(summary: Summary) -> str:
    kind = "folder" if summary.folder else "file"
    if not summary.foreign:
        return f"BCQ {summary.version} {kind}"
    found = summary.quantization
    if summary.foreign == "gguf":
        return f"not BCQ: GGUF version {summary.version}, architecture {found.get('architecture', 'not stated')}"
    if not found:
        return f"not BCQ: a plain safetensors {kind}, nothing says that it is quantized"
    words = [summary.foreign]
    if "bits" in found:
        words.append(f"{found['bits']} bit")
    if "group_size" in found:
        words.append(f"group size {found['group_size']}")
    evidence = found["evidence"]
    return f"not BCQ: {', '.join(words)}, {'per' if evidence == 'config.json' else 'to judge by'} {evidence}"


def _facts(summary: Summary) -> list[tuple[str, str]]:
    generator, source = summary.generator, summary.source
    files = f"{render.count(summary.files, 'model file')}, {render.size(summary.file_bytes)}"
    if summary.foreign:
        return [("files", files), ("tensors", render.count(summary.dense_tensors))]
    facts = [
        ("features", ", ".join(summary.features) or "none: plain affine"),
        ("written by", f"{escape(generator['name'])} {escape(generator['version'])}" if generator else ""),
        ("source", f"{escape(source['format'])}, {render.count(len(source['files']), 'file')}" if source else ""),
        ("files", files),
        ("tensors", f"{render.count(summary.weights, 'quantized weight')}, {summary.dense_tensors:,} dense"),
        (
            "coverage",
            f"{render.percent(summary.coverage)} of {render.count(summary.parameters, 'parameter')} quantized",
        ),
    ]
    if summary.overall_bits is not None:
        quantized = summary.bits_per_weight
        first = "" if quantized is None else f"{quantized:.3f} bits per quantized weight, "
        facts.append(("average", f"{first}{summary.overall_bits:.3f} bits overall"))
    return facts


def _sizes(summary: Summary) -> list[str]:
    sizes = {kind: summary.parts.get(kind, 0) for kind in PART_KINDS} | {"dense": summary.dense_bytes}
    total = sum(sizes.values()) or 1
    rows = [
        (kind, f"{nbytes:,}", render.size(nbytes), f"{100 * nbytes / total:.2f} %")
        for kind, nbytes in sizes.items()
        if nbytes
    ]
    return render.table(("size by part", "bytes", "", "share"), rows)


def _schemes(summary: Summary) -> list[str]:
    rows = [
        (f"[{i}] {scheme_text(row.scheme)}", f"{row.weights:,}", f"{row.parameters:,}", f"{row.bits_per_weight:.3f}")
        for i, row in enumerate(summary.schemes)
    ]
    return render.table(("scheme", "weights", "parameters", "bits/weight"), rows)


def _types(summary: Summary) -> list[str]:
    rows = [
        (name, f"{row.tensors:,}", f"{row.elements:,}", render.size(row.nbytes))
        for name, row in sorted(summary.dense.items())
    ]
    return render.table(("dtype" if summary.foreign else "dense dtype", "tensors", "elements", "size"), rows)


def _modules(summary: Summary) -> list[str]:
    rows = [
        (
            escape(row.name, 512),
            "x".join(map(str, row.shape)),
            row.dtype,
            f"[{row.scheme}]",
            f"{row.bits_per_weight:.3f}",
            render.size(row.nbytes),
            escape(row.file),
        )
        for row in summary.modules or ()
    ]
    return render.table(("weight", "shape", "dtype", "scheme", "bits/weight", "size", "file"), rows, left=(0, 6))


def _tensors(found: list[TensorRow]) -> list[str]:
    rows = [
        (
            escape(row.name, 512),
            "x".join(map(str, row.shape)) or "scalar",
            row.dtype,
            render.size(row.nbytes),
            escape(row.file),
        )
        for row in found
    ]
    return render.table(("tensor", "shape", "dtype", "size", "file"), rows, left=(0, 4))


def _tensor(details: Details) -> list[str]:
    tensor, values = details.tensor, details.values
    weight = isinstance(tensor, BcqWeight)
    lines = [f"{escape(details.name, 512)}: {'a quantized weight' if weight else 'a dense tensor'}"]
    facts = [
        ("shape", " x ".join(map(str, tensor.shape)) or "scalar"),
        ("dtype", tensor.dtype),
        ("elements", f"{math.prod(tensor.shape):,}"),
        ("size", f"{tensor.nbytes:,} bytes"),
    ]
    if isinstance(tensor, BcqWeight):
        facts[-1] = ("size", f"{tensor.nbytes:,} bytes, {tensor.bits_per_weight:.3f} bits per weight")
        facts.append(("scheme", scheme_text(tensor.scheme)))
        if len(tensor.segments) > 1:
            facts += [(f"segment {k}", f"{w:,} columns, {segment_text(s)}") for k, (s, w) in enumerate(tensor.segments)]
    facts.append(("sha256", f"{details.digest} (of the weight, computed)" if details.digest else ""))
    if values is not None and values.first:
        spread = "none is finite" if values.low is None else f"{values.low:g} .. {values.high:g}"
        facts.append(("values", spread + (f", {values.nonfinite:,} not finite" if values.nonfinite else "")))
        facts.append(("first", "  ".join(f"{value:g}" for value in values.first)))
    rows = [
        (
            escape(part.name, 512),
            part.dtype,
            "x".join(map(str, part.shape)) or "scalar",
            f"{part.offset:,}",
            f"{part.nbytes:,}",
            escape(part.file.name) if part.file is not None else "",
        )
        for part in details.parts.values()
    ]
    lines += render.fields(facts)
    return [*lines, "", *render.table(("stored as", "dtype", "shape", "offset", "bytes", "file"), rows, left=(0, 5))]
