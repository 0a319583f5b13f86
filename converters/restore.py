"""``restore``: every file of the source again; ``verify``: the same proof without writing anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bcqfmt.converters.checkpoint import SourceCheckpoint
from bcqfmt.converters.rebuild import SourceRebuilder
from bcqfmt.durable import OutputFile, folder_in_progress
from bcqfmt.errors import error
from bcqfmt.files import SourceFile, inside
from bcqfmt.reader import Checkpoint
from bcqfmt.scheme import PackedZero

__all__ = ["Certificate", "restore", "verify"]


def restore(
    checkpoint: Checkpoint, target: Path, *, overwrite: bool = False, tick: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Rebuild the source folder; path -> SHA-256. A file whose digest is not the recorded one stops everything."""
    rebuilder = SourceRebuilder(checkpoint)
    digests: dict[str, str] = {}
    with folder_in_progress(target, overwrite=overwrite) as work:
        for path, record in rebuilder.files().items():
            place = work / path
            place.parent.mkdir(parents=True, exist_ok=True)
            output, state = OutputFile(place, record["size"]), hashlib.sha256()
            try:
                for chunk in rebuilder.chunks(path):
                    output.write(chunk.data)
                    state.update(chunk.data)
                    if tick is not None:
                        tick(chunk.size)
                if state.hexdigest() != record["sha256"]:
                    raise error("BCQ-E613", path, found=f"sha256 {state.hexdigest()}", expected=record["sha256"])
                output.commit()
            except BaseException:
                output.discard()
                raise
            digests[path] = state.hexdigest()
    return digests


@dataclass(slots=True)
class Certificate:
    """What was compared, and that all of it was equal."""

    files: int = 0
    nbytes: int = 0
    weights: int = 0
    codes: int = 0
    scales: int = 0
    zeros: int = 0
    values: int = 0
    archived: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


def verify(source: SourceCheckpoint, checkpoint: Checkpoint, tick: Callable[[int], None] | None = None) -> Certificate:
    """Rebuild every source file in memory, piece by piece, and compare it with the real one. Nothing is written."""
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
    for path, record in rebuilder.files().items():
        _compare_file(source, rebuilder, path, record, found, tick)
    for name, weight in checkpoint.weights():
        found.weights += 1
        found.codes += weight.size
        for k, segment in enumerate(weight.scheme.segments):
            groups = weight.spec.stack * weight.spec.out * weight.spec.groups(k)
            found.scales += groups * (segment.bits if segment.encoding == "bcq" else 1)
            found.zeros += groups if isinstance(segment.zero, PackedZero | str) or segment.offset else 0
        if name == "":
            raise error("BCQ-E613", tensor=name, found="a weight without a name")
    for path, entries in rebuilder.record["tensors"].items():
        for name, entry in entries.items():
            if rebuilder.record["rules"][entry[0]] == {"rule": "raw"}:
                found.archived += source.tensors[name].nbytes if source.home.get(name) == path else 0
    return found


def _compare_file(
    source: SourceCheckpoint,
    rebuilder: SourceRebuilder,
    path: str,
    record: dict[str, Any],
    found: Certificate,
    tick: Callable[[int], None] | None,
) -> None:
    real = SourceFile(inside(source.folder, path), path)
    if real.size != record["size"]:
        raise error("BCQ-E613", path, found=f"{real.size} bytes in the source", expected=f"{record['size']}")
    at, state = 0, hashlib.sha256()
    for chunk in rebuilder.chunks(path):
        same = real.read(at, chunk.size) if at + chunk.size <= real.size else np.empty(0, np.uint8)
        if not np.array_equal(same, chunk):
            raise error(
                "BCQ-E613", path, found=f"different bytes between {at} and {at + chunk.size}", expected="the source's"
            )
        state.update(chunk.data)
        at += chunk.size
        if tick is not None:
            tick(chunk.size)
    if at != real.size or state.hexdigest() != record["sha256"]:
        raise error("BCQ-E613", path, found=f"{at} bytes, sha256 {state.hexdigest()}", expected=record["sha256"])
    real.close()
    found.files += 1
    found.nbytes += at
    found.digests[path] = record["sha256"]
