"""``restore``: every file of the source again, byte for byte."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.durable import OutputFile, folder_in_progress, make_folders
from bcqfmt.container.read_ahead import read_ahead
from bcqfmt.converters.jobs.pool import WORKERS, Stop, Tick, run_each
from bcqfmt.converters.words.buffers import reused
from bcqfmt.errors import error

from .source_rebuilder import SourceRebuilder


def restore(
    checkpoint: Checkpoint,
    target: Path,
    *,
    overwrite: bool = False,
    tick: Tick | None = None,
) -> dict[str, str]:
    """Rebuild the source folder; path -> SHA-256. A file whose digest is not the recorded one stops everything."""
    rebuilder, stop = SourceRebuilder(checkpoint), Stop()
    progress = stop.progress(tick)
    gguf = any(record["kind"] == "gguf" for record in rebuilder.files().values())
    like = "*.gguf" if gguf else "*.safetensors"
    with folder_in_progress(target, overwrite=overwrite, like=like) as work, reused():
        return run_each(
            lambda path: _restore_file(rebuilder, path, work / path, progress), rebuilder.files(), WORKERS, stop
        )


def _restore_file(rebuilder: SourceRebuilder, path: str, place: Path, progress: Tick) -> str:
    record = rebuilder.files()[path]
    make_folders(place.parent)
    state = hashlib.sha256()
    with OutputFile(place, record["size"]) as output:
        with closing(read_ahead(rebuilder.chunks(path))) as chunks:
            for chunk in chunks:
                output.write(chunk.data, state)
                progress(chunk.size)
        if state.hexdigest() != record["sha256"]:
            raise error("BCQ-E613", path, found=f"sha256 {state.hexdigest()}", expected=record["sha256"])
    return state.hexdigest()
