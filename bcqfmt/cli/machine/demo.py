"""``bcqfmt demo``: a tour with real numbers, offline, in a few seconds."""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import bcqfmt
from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, verb
from bcqfmt.codes import CODES
from bcqfmt.container.durable import folder_in_progress, make_folders, write_file
from bcqfmt.errors import OutputError, error, escape
from bcqfmt.inspect.summary import summarize

Array = npt.NDArray[Any]
_SAMPLE = importlib.resources.files("bcqfmt") / "data" / "demo"  # a tiny Llama, as GPTQModel wrote it
_ROWS, _COLUMNS, _GROUP = 256, 1024, 128
_AFFINE = "layers.0.up_proj.weight"
_MULTI = "layers.0.down_proj.weight"


@verb("demo")
@click.option("--keep", metavar="DIR", type=FilePath(), help="Keep in DIR what is used: gptq/ (sample) and bcq/.")
def command(keep: Path | None) -> None:
    """Take a short tour: convert, prove, write, read, break.

    Converts a small GPTQ checkpoint that comes with the package, restores its source byte for byte and multiplies with
    it. Then makes two small weights, saves them as a BCQ folder, reads them back, proves every value, reads half of the
    planes, multiplies, flips one bit and lets the validator find it. Needs no network and no GPU.

    \b
    Example:
      bcqfmt demo
      bcqfmt demo --keep /tmp/bcq-demo
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bcqfmt-demo-")))
        folder = scratch
        if keep is not None:
            try:
                folder = stack.enter_context(folder_in_progress(keep, overwrite=False, like="bcq"))
            except OutputError as fault:
                fault.hint = "choose another folder"
                raise
            make_folders(folder / "gptq")
            for file in _SAMPLE.iterdir():
                write_file(folder / "gptq" / file.name, file.read_bytes())
        for line in itertools.chain(_convert(scratch), _tour(folder / "bcq", scratch)):
            render.echo(line)
    kept = "nothing is left behind"
    if keep is not None:
        where = escape(str(keep))
        kept = f"kept: {where}/gptq, the sample of step 1, and {where}/bcq of step 2"
    render.echo(f"done in {time.perf_counter() - start:.1f} s; {kept}")


def _convert(scratch: Path) -> Iterator[str]:
    """The main job, with a checkpoint that GPTQModel wrote."""
    from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
    from bcqfmt.converters.convert.restore import restore
    from bcqfmt.converters.convert.verify import verify
    from bcqfmt.converters.source.checkpoint import open_source

    with importlib.resources.as_file(_SAMPLE) as folder:
        source = open_source(folder)
        yield "1. Convert. A small Llama, 4 bit, as GPTQModel 7.6.0 wrote it, becomes a BCQ folder:"
        conversion = Conversion(source, ConvertOptions(name="demo"))
        conversion.run(scratch / "converted")
        report = bcqfmt.validate(scratch / "converted", deep=True)
        yield (
            f"     {len(conversion.modules)} weights, {100 * conversion.plan.coverage:.1f} % of the parameters;"
            f" {render.count(len(report.errors), 'error')} in {report.nbytes:,} bytes, validated deeply"
        )
        with bcqfmt.open(scratch / "converted") as checkpoint:
            found = verify(source, checkpoint, rows=None)
            yield f"   Verify: {found.codes:,} codes, {found.scales:,} scales, {found.zeros:,} zero points compared,"
            yield f"     and {found.values:,} values with GPTQ's own arithmetic: all equal, bit for bit."
            digests = restore(checkpoint, scratch / "restored")
            yield f"   Restore: {len(digests)} files of the source again, with the same SHA-256:"
            sums = {path: hashlib.sha256((folder / path).read_bytes()).hexdigest() for path in digests}
            yield f"     {digests['model.safetensors']}  model.safetensors"
            if sums != digests or not report.valid:
                raise error("BCQ-E999", found="the restored files are not those of the source")
            name, weight = next(iter(checkpoint.weights()))
            y = weight.dequantize("float64") @ np.ones(weight.shape[1])
            yield f"   Multiply: |W x| = {np.linalg.norm(y):.6f} for {name} and a vector of ones"


def _tour(folder: Path, scratch: Path) -> Iterator[str]:
    rng = np.random.default_rng(0)
    codes, scale, zero = _affine_numbers(rng)
    target = rng.standard_normal((_ROWS, _COLUMNS))
    affine = bcqfmt.BcqWeight.from_affine(codes, scale, zero, group_size=_GROUP)
    yield from _write(folder, affine, _multi_precision(target))
    yield from _look(folder)
    with bcqfmt.open(folder) as checkpoint:
        weight, multi = checkpoint.weight(_AFFINE), checkpoint.weight(_MULTI)
        yield from _prove(weight, codes, scale, zero)
        yield from _truncate(checkpoint, multi, target)
        yield from _multiply(weight, rng)
    yield from _break(folder, scratch / "broken")


def _affine_numbers(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    groups = (_ROWS, _COLUMNS // _GROUP)
    codes = rng.integers(0, 16, (_ROWS, _COLUMNS), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.01, groups).astype(np.float16)
    return codes, scale, rng.integers(0, 16, groups, dtype=np.uint8)


def _multi_precision(target: Array) -> bcqfmt.BcqWeight:
    """Greedy binary coding: each plane takes the sign of what the planes before it left over.

    For reading two planes alone their scales are fitted once more, by least squares.
    """
    grouped = target.reshape(_ROWS, -1, _GROUP)
    rest, signs, alphas = grouped.copy(), [], []
    for _ in range(4):
        sign = np.where(rest > 0, 1.0, -1.0)
        alpha = np.abs(rest).mean(axis=2)
        rest -= sign * alpha[:, :, None]
        signs.append(sign)
        alphas.append(alpha)
    first, second = ((sign * grouped).mean(axis=2) for sign in signs[:2])
    overlap = (signs[0] * signs[1]).mean(axis=2)
    pair = np.stack([first - overlap * second, second - overlap * first]) / (1 - overlap**2)
    bits = np.stack([sign.reshape(target.shape) > 0 for sign in signs]).astype(np.uint8)
    scale_sets: dict[int, tuple[Array, Array | None]] = {2: (pair.astype(np.float16), None)}
    return bcqfmt.BcqWeight.from_bcq(
        bits, np.stack(alphas).astype(np.float16), group_size=_GROUP, scale_sets=scale_sets
    )


def _write(folder: Path, affine: bcqfmt.BcqWeight, multi: bcqfmt.BcqWeight) -> Iterator[str]:
    yield f"2. Write. Two weights of {_ROWS} x {_COLUMNS} and a dense vector, as a BCQ folder:"
    tensors: dict[str, bcqfmt.BcqWeight | Array] = {
        _AFFINE: affine,
        _MULTI: multi,
        "norm.weight": np.ones(_COLUMNS, np.float32),
    }
    bcqfmt.save(folder, tensors, config={"model_type": "demo"})
    names = sorted(path.name for path in folder.iterdir())
    yield f"     {_AFFINE}    4-bit codes with scale and zero point per {_GROUP} columns"
    yield f"     {_MULTI}  4 binary planes, and scales of their own for reading 2 of them"
    yield f"     files: {', '.join(names)}"


def _look(folder: Path) -> Iterator[str]:
    report = bcqfmt.validate(folder, deep=True)
    summary = summarize(folder)
    if not report.valid:  # cannot happen; if it does, say so instead of going on
        raise error("BCQ-E999", found=report.errors[0].text())
    verdict = f"{render.count(len(report.errors), 'error')} in {report.nbytes:,} bytes, all digests right"
    yield f"3. Validate, deeply: {verdict}."
    yield (
        f"4. Inspect: {summary.weights} weights and {summary.dense_tensors} dense tensor, {summary.coverage:.2f} % of"
        f" {summary.parameters:,} parameters quantized,"
    )
    sizes = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in summary.parts.items())
    yield f"     {summary.bits_per_weight:.3f} bits per weight; bytes: {sizes}, dense {summary.dense_bytes:,}."


def _prove(weight: bcqfmt.BcqWeight, codes: Array, scale: Array, zero: Array) -> Iterator[str]:
    values = weight.dequantize("float16")
    wide = [np.repeat(numbers.astype(np.float64), _GROUP, axis=1) for numbers in (scale, zero)]
    formula = (wide[0] * (codes.astype(np.float64) - wide[1])).astype(np.float16)
    different = int(np.count_nonzero(values.view(np.uint16) != formula.view(np.uint16)))
    yield "5. Decode, and compare with scale * (code - zero point) in plain numpy, bit for bit:"
    first = "  ".join(f"{value:.5f}" for value in values[0, :5])
    yield f"     {values.size:,} values, {different} different; the first: {first}"
    if different:
        raise error("BCQ-E999", found=f"{different} values differ")


def _truncate(checkpoint: bcqfmt.Checkpoint, multi: bcqfmt.BcqWeight, target: Array) -> Iterator[str]:
    yield "6. Read fewer planes, and only their bytes:"
    for planes in (4, 2, 1):
        before = checkpoint.bytes_read
        multi.planes(first=planes)
        read = checkpoint.bytes_read - before
        gap = np.linalg.norm(multi.dequantize("float64", planes=planes) - target) / np.linalg.norm(target)
        yield f"     {planes} of 4 planes: {read:>7,} bytes read, values off the original matrix by {100 * gap:.1f} %"


def _multiply(weight: bcqfmt.BcqWeight, rng: np.random.Generator) -> Iterator[str]:
    x = rng.standard_normal(_COLUMNS)
    whole = weight.dequantize("float64") @ x
    halves = [weight.rows(0, _ROWS // 2), weight.rows(_ROWS // 2, _ROWS)]
    joined = np.concatenate([half.dequantize("float64") @ x for half in halves])
    yield "7. Multiply W x, whole and as two row slices (as two GPUs would):"
    yield f"     |y| = {np.linalg.norm(whole):.6f}; slices differ by at most {np.abs(whole - joined).max():.1g}"


def _break(folder: Path, broken: Path) -> Iterator[str]:
    shutil.copytree(folder, broken)
    path = broken / "model.safetensors"
    data = bytearray(path.read_bytes())
    at = len(data) * 2 // 3
    data[at] ^= 1 << 5
    path.write_bytes(data)
    report = bcqfmt.validate(broken, deep=True)
    yield f"8. Break a copy: bit 5 of byte {at:,} of {len(data):,} is flipped. The validator says:"
    for finding in report.errors:
        yield f"     {finding.code} {finding.place}: {CODES[finding.code].title}"
    if report.valid:
        raise error("BCQ-E999", found="the flipped bit was not found")
