"""``restore``: every file of the source again; ``verify``: the same proof without writing anything."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.durable import OutputFile, folder_in_progress, make_folders
from bcqfmt.container.files import SourceFile, inside
from bcqfmt.container.read_ahead import read_ahead
from bcqfmt.converters.layouts.protocol import Module, Options
from bcqfmt.converters.layouts.rebuild import SourceRebuilder, same_bytes
from bcqfmt.converters.layouts.reference import reference_rows
from bcqfmt.converters.layouts.registry import find_modules
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.words.buffers import new_array, reused
from bcqfmt.errors import BcqError, error
from bcqfmt.weight.weight import BcqWeight

from .shard import KeptModule

__all__ = ["Certificate", "restore", "verify"]

_ZEROS = {"qzeros", "scaled_zeros", "weight_zero_point", "zero"}
_PIECE = 1 << 20
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
WORKERS = min(4, os.cpu_count() or 1)  # files at a time; the heavy work releases the interpreter lock
SAMPLE_ROWS = 64  # of every weight, whose values verify computes a second time unless it is asked for all


def restore(
    checkpoint: Checkpoint,
    target: Path,
    *,
    overwrite: bool = False,
    tick: Callable[[int], None] | None = None,
    workers: int = WORKERS,
) -> dict[str, str]:
    """Rebuild the source folder; path -> SHA-256. A file whose digest is not the recorded one stops everything."""
    rebuilder = SourceRebuilder(checkpoint)
    with folder_in_progress(target, overwrite=overwrite) as work:

        def one(path: str, beat: Callable[[int], None]) -> str:
            return _restore_file(rebuilder, path, work / path, beat)

        return _each(list(rebuilder.files()), one, tick, workers)


def _restore_file(rebuilder: SourceRebuilder, path: str, place: Path, beat: Callable[[int], None]) -> str:
    record = rebuilder.files()[path]
    make_folders(place.parent)
    state = hashlib.sha256()
    with OutputFile(place, record["size"]) as output:
        with closing(read_ahead(_cut(rebuilder.chunks(path)))) as stream:
            for chunk in stream:
                state.update(chunk.data)
                output.write(chunk.data)
                beat(chunk.size)
        if state.hexdigest() != record["sha256"]:
            raise error("BCQ-E613", path, found=f"sha256 {state.hexdigest()}", expected=record["sha256"])
    return state.hexdigest()


class _Stopped(Exception):
    """Another file failed, or the user interrupted."""


def _each(
    names: list[str],
    job: Callable[[str, Callable[[int], None]], T],
    tick: Callable[[int], None] | None,
    workers: int,
) -> dict[str, T]:
    """``job`` for every name, several at a time; the first real error stops the others."""
    stop = threading.Event()

    def beat(done: int) -> None:
        if stop.is_set():
            raise _Stopped
        if tick is not None:
            tick(done)

    with reused(), ThreadPoolExecutor(max(1, workers)) as pool:
        jobs = {name: pool.submit(job, name, beat) for name in names}
        try:
            finished, _ = wait(jobs.values(), return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            return {name: future.result() for name, future in jobs.items()}
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@dataclass(slots=True)
class Certificate:
    """What was compared, and that all of it was equal.

    ``values``: compared with the tools' own arithmetic; ``by_specification``: weights whose values the format defines,
    because the tool has no single rounding (AnyBCQ). ``archived``: bytes that no rule rebuilds.
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


def verify(
    source: SourceCheckpoint,
    checkpoint: Checkpoint,
    tick: Callable[[int], None] | None = None,
    rows: int | None = SAMPLE_ROWS,
    workers: int = WORKERS,
) -> Certificate:
    """Rebuild every source file in memory, piece by piece, and compare it with the real one. Nothing is written.

    Then the values of the first ``rows`` rows of every weight (None: all of them), bit for bit, with the arithmetic of
    the tool that wrote the source.
    """
    rebuilder = SourceRebuilder(checkpoint)
    found = Certificate()
    here = {*source.models, *source.side_files}
    if here != rebuilder.files().keys():
        odd = sorted(here ^ rebuilder.files().keys())
        raise error(
            "BCQ-E613",
            source.folder.name,
            found=f"{len(odd)} files on one side only: {', '.join(odd[:3])}",
            expected="the same files",
        )

    def bytes_of(path: str, beat: Callable[[int], None]) -> str:
        return _compare_file(source, rebuilder, path, beat)

    found.digests = _each(list(rebuilder.files()), bytes_of, tick, workers)
    found.files, found.nbytes = len(found.digests), sum(record["size"] for record in rebuilder.files().values())
    modules = _modules(source, rebuilder)
    weights = dict(checkpoint.weights())

    def values_of(name: str, beat: Callable[[int], None]) -> int:
        beat(0)
        return _compare_values(modules[name], weights[name], rows)

    for name, compared in _each(list(weights), values_of, None, workers).items():
        weight = weights[name]
        found.weights += 1
        found.values += compared
        found.by_specification += not compared
        found.codes += weight.size
        for k, segment in enumerate(weight.scheme.segments):
            groups = weight.spec.stack * weight.spec.out * weight.spec.groups(k)
            found.scales += groups * (segment.bits if segment.encoding == "bcq" else 1)
            found.zeros += groups if _ZEROS & modules[name].tensors.keys() else 0
    for path, entries in rebuilder.record["tensors"].items():
        for name, entry in entries.items():
            if rebuilder.record["rules"][entry[0]] == {"rule": "raw"}:
                found.archived += source.tensors[name].nbytes if source.home.get(name) == path else 0
    return found


def _cut(chunks: Iterator[Bytes]) -> Iterator[Bytes]:
    """The same bytes, a little at a time, to be hashed and written while they are in the cache."""
    for chunk in chunks:
        for start in range(0, chunk.size, _PIECE):
            yield chunk[start : start + _PIECE]
        del chunk  # the next one may need the memory


def _modules(source: SourceCheckpoint, rebuilder: SourceRebuilder) -> dict[str, Module]:
    """The modules of the source by weight, read with the zero-point rules that the conversion recorded."""
    recorded: dict[str, str] = {}
    for entries in rebuilder.record["tensors"].values():
        for name, (number, *_) in entries.items():
            rule = rebuilder.record["rules"][number].get("zero_point")
            if rule is not None:
                recorded[name.removesuffix(".qzeros")] = rule
    _, modules = find_modules(source, Options(next(iter(recorded.values()), "auto"), allow_nonfinite=True))
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
    kept = KeptModule(module)
    expected = reference_rows(kept.module, count)
    kept.forget()
    if expected is None:
        return 0
    values = weight.dequantize(rows=(0, count))
    kind = f"u{values.dtype.itemsize}"
    wrong = np.ascontiguousarray(expected).view(kind) != np.ascontiguousarray(values).view(kind)
    if expected.dtype != values.dtype or (wrong & ~(np.isnan(expected) & np.isnan(values))).any():
        different = int(np.count_nonzero(wrong))
        raise error("BCQ-E613", tensor=weight.name, found=f"{different} values differ", expected="the source's values")
    return int(values.size)


def _compare_file(source: SourceCheckpoint, rebuilder: SourceRebuilder, path: str, beat: Callable[[int], None]) -> str:
    """The SHA-256 of a source file whose rebuilt bytes are those of the real one."""
    record = rebuilder.files()[path]
    real = SourceFile(inside(source.folder, path), path)
    if real.size != record["size"]:
        raise error("BCQ-E613", path, found=f"{real.size} bytes in the source", expected=f"{record['size']}")
    at, state = 0, hashlib.sha256()
    with closing(read_ahead(_cut(_compared(rebuilder, path, real)))) as stream:
        for chunk in stream:
            state.update(chunk.data)
            at += chunk.size
            beat(chunk.size)
    if at != real.size or state.hexdigest() != record["sha256"]:
        raise error("BCQ-E613", path, found=f"{at} bytes, sha256 {state.hexdigest()}", expected=record["sha256"])
    real.close()
    return state.hexdigest()


def _compared(rebuilder: SourceRebuilder, path: str, real: SourceFile) -> Iterator[Bytes]:
    """The bytes of the real file, each found equal to what is rebuilt; BCQ-E613 where they are not."""
    at = 0
    for piece in rebuilder.pieces(path):
        begin = at
        if piece.equals is not None:
            at += piece.size
            expected = new_array((piece.size // 4,), np.uint32) if piece.size % 4 == 0 else np.empty(piece.size, "u1")
            content = expected.view(np.uint8)
            if at > real.size:
                raise _different(path, begin, at)
            real.read_into(begin, content)
            if not piece.equals(expected):
                raise _different(path, begin, at)
            yield content
            del expected, content
            continue
        for chunk in piece.chunks():
            if at + chunk.size > real.size or not same_bytes(real.read(at, chunk.size), chunk):
                raise _different(path, at, at + chunk.size)
            at += chunk.size
            yield chunk
        if at != begin + piece.size:
            raise error("BCQ-E613", path, piece.name, f"{at - begin} bytes rebuilt", f"{piece.size}")


def _different(path: str, begin: int, end: int) -> BcqError:
    return error("BCQ-E613", path, found=f"different bytes between {begin} and {end}", expected="the source's")
