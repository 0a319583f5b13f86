"""``verify``: the proof that a source can be restored and that its values are kept, without writing anything."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import SourceFile, hash_file
from bcqfmt.container.read_ahead import read_ahead
from bcqfmt.converters.jobs.plan import asked_in
from bcqfmt.converters.jobs.pool import WORKERS, Stop, Tick, run_each
from bcqfmt.converters.layouts.protocol import Module, Options
from bcqfmt.converters.layouts.rebuild import same_bytes
from bcqfmt.converters.layouts.reference import reference_rows
from bcqfmt.converters.layouts.registry import find_modules
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.words.buffers import reused
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.weight.weight import BcqWeight

from .shard import ReadOnce
from .source_rebuilder import SourceRebuilder

_OTHER = "this is another source, or it was changed since: `bcqfmt restore BCQ OUT` gives the one that was converted"

_ZEROS = {"qzeros", "scaled_zeros", "weight_zero_point", "zero"}
_CHUNK = 1 << 20  # bytes read, compared and hashed while they are in the cache
SAMPLE_ROWS = 64  # of every weight, whose values are computed a second time unless all are asked for


@dataclass(slots=True)
class Certificate:
    """What was compared, and that all of it was equal.

    ``values``: compared with the tools' own arithmetic; ``by_specification``: weights whose values the format defines,
    because the tool has no single rounding (AnyBCQ). ``archived``: bytes that no rule rebuilds. ``left_out``: what the
    source has besides, path -> why it is not carried.
    """

    files: int = 0
    nbytes: int = 0
    weights: int = 0
    codes: int = 0
    scales: int = 0
    zeros: int = 0
    values: int = 0
    by_specification: int = 0
    archived: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


def verify(
    source: SourceCheckpoint, checkpoint: Checkpoint, tick: Tick | None = None, rows: int | None = SAMPLE_ROWS
) -> Certificate:
    """Rebuild every source file in memory, piece by piece, and compare it with the real one. Nothing is written.

    Then the values of the first ``rows`` rows of every weight (None: all of them), bit for bit, with the arithmetic of
    the tool that wrote the source.
    """
    rebuilder = SourceRebuilder(checkpoint)
    files = rebuilder.files()
    here = {*source.models, *source.side_files}
    if here != files.keys():
        raise _other_files(source, files)
    stop = Stop()
    progress = stop.progress(tick)
    with reused():
        digests = run_each(lambda path: _compare_file(source, rebuilder, path, progress), files, WORKERS, stop)
        modules, weights = _modules(source, rebuilder), dict(checkpoint.weights())
        values = run_each(lambda name: _compare_values(modules[name], weights[name], rows), weights, WORKERS, stop)
    found = Certificate(len(files), sum(record["size"] for record in files.values()), digests=digests)
    found.left_out = source.left_out
    for name, weight in weights.items():
        found.weights += 1
        found.values += values[name]
        found.by_specification += not values[name]
        found.codes += weight.size
        for k, segment in enumerate(weight.scheme.segments):
            groups = weight.spec.stack * weight.spec.out * weight.spec.groups(k)
            found.scales += groups * (segment.bits if segment.encoding == "bcq" else 1)
            found.zeros += groups if _ZEROS & modules[name].tensors.keys() else 0
    for path, entries in rebuilder.record["tensors"].items():
        for name, entry in entries.items():
            if rebuilder.record["rules"][entry[0]] == {"rule": "raw"}:
                found.archived += source.stored(name).nbytes if source.home.get(name) == path else 0
    return found


def _other_files(source: SourceCheckpoint, files: dict[str, Any]) -> BcqError:
    """BCQ-E613 for a source with other files; a lone file of the right size may only have been renamed."""
    here = {*source.models, *source.side_files}
    if source.lone and len(here) == len(files) == 1:
        ((name, record),) = files.items()
        right = source.folder / name
        hint = f"a file of that name lies beside it: verify {right}"
        if not os.path.lexists(right):
            hint = f"if it is the same file, give it that name: {shlex.join(['mv', str(source.place), str(right)])}"
        if source.models[source.lone].source.size != record["size"]:
            hint = _OTHER
        found = "a file of another name"
        return error("BCQ-E613", source.lone, found=found, expected=escape(name), hint=escape(hint, 4096))
    odd = sorted(here ^ files.keys())
    found = f"{len(odd)} files on one side only: {escape(', '.join(odd[:3]))}"
    return error("BCQ-E613", source.place.name, found=found, expected="the same files", hint=_OTHER)


def _compare_file(source: SourceCheckpoint, rebuilder: SourceRebuilder, path: str, progress: Tick) -> str:
    """The SHA-256 of a source file whose bytes are the rebuilt ones; BCQ-E613 where they are not."""
    record = rebuilder.files()[path]
    with closing(SourceFile(source.path_of(path), path)) as real:
        if real.size != record["size"]:
            raise error(
                "BCQ-E613", path, found=f"{real.size} bytes in the source", expected=f"{record['size']}", hint=_OTHER
            )
        state = hashlib.sha256()
        try:
            with closing(read_ahead(_compared(rebuilder, path, real))) as chunks:
                for chunk in chunks:
                    state.update(chunk.data)
                    progress(chunk.size)
        except BcqError as fault:
            if fault.code == "BCQ-E613" and hash_file(real) != record["sha256"]:
                fault.hint = _OTHER
            raise
    if state.hexdigest() != record["sha256"]:
        raise error("BCQ-E613", path, found=f"sha256 {state.hexdigest()}", expected=record["sha256"])
    return state.hexdigest()


def _small_chunks(rebuilder: SourceRebuilder, path: str) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a source file, at most ``_CHUNK`` at a time."""
    for chunk in rebuilder.chunks(path):
        for start in range(0, chunk.size, _CHUNK):
            yield chunk[start : start + _CHUNK]
        del chunk  # the next one may need the memory


def _compared(rebuilder: SourceRebuilder, path: str, real: SourceFile) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of the real file, all of them, each chunk found equal to what is rebuilt."""
    at = 0
    for chunk in _small_chunks(rebuilder, path):
        end = at + chunk.size
        found = real.read(at, min(end, real.size) - at)
        if not same_bytes(found, chunk):
            raise error("BCQ-E613", path, found=f"different bytes between {at} and {end}", expected="the source's")
        yield found
        at = end
    if at != real.size:
        raise error("BCQ-E613", path, found=f"{at} bytes rebuilt", expected=f"{real.size}")


def _modules(source: SourceCheckpoint, rebuilder: SourceRebuilder) -> dict[str, Module]:
    """The modules of the source by weight, read as the conversion was asked to, or as its rules say."""
    recorded: dict[str, str] = {}
    for entries in rebuilder.record["tensors"].values():
        for name, (number, *_) in entries.items():
            rule = rebuilder.record["rules"][number].get("zero_point")
            if rule is not None:
                recorded[name.removesuffix(".qzeros")] = rule
    asked = asked_in(rebuilder.checkpoint.manifest)
    zero_point = asked.get("zero_point") or next(iter(recorded.values()), "auto")
    options = Options(zero_point, allow_nonfinite=True)
    _, modules = find_modules(source, options, asked.get("layout", "auto"))
    for module in modules:
        if "zero_point" in module.settings and module.name in recorded:
            module.settings["zero_point"] = recorded[module.name]
    found = {module.weight_name: module for module in modules}
    if found.keys() != {name for name, _ in rebuilder.checkpoint.weights()}:
        raise error("BCQ-E613", source.folder.name, found="other weights than the source has", expected="the same")
    return found


def _compare_values(module: Module, weight: BcqWeight, rows: int | None) -> int:
    """How many values of a weight were found equal; 0 where the tool's arithmetic does not define them."""
    count = weight.spec.out if rows is None else min(rows, weight.spec.out)
    read_once = ReadOnce(module)
    expected = reference_rows(read_once.module, count)
    read_once.forget()
    if expected is None:
        return 0
    values = weight.dequantize(rows=(0, count))
    kind = f"u{values.dtype.itemsize}"
    wrong = np.ascontiguousarray(expected).view(kind) != np.ascontiguousarray(values).view(kind)
    if expected.dtype != values.dtype or (wrong & ~(np.isnan(expected) & np.isnan(values))).any():
        different = int(np.count_nonzero(wrong))
        raise error("BCQ-E613", tensor=weight.name, found=f"{different} values differ", expected="the source's values")
    return int(values.size)
