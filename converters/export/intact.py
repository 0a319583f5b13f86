"""Whether the model files of a BCQ folder are those that it was made with."""

from __future__ import annotations

import os

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import hash_file
from bcqfmt.converters.jobs.pool import Stop, run_each
from bcqfmt.errors import error

_WORKERS = min(4, os.cpu_count() or 1)  # files at a time; hashing releases the interpreter lock


def check_intact(checkpoint: Checkpoint) -> None:
    """BCQ-V605 or V606 for a model file that the manifest states otherwise.

    In another layout nothing would tell any more that a weight was damaged.
    """
    if checkpoint.manifest is None:
        return
    stated, files, stop = checkpoint.manifest.files, {file.source.shown: file for file in checkpoint.files()}, Stop()

    def check(name: str) -> None:
        source, record = files[name].source, stated[name]
        if source.size != record.size:
            raise error("BCQ-V605", name, found=f"{source.size} bytes", expected=f"{record.size}")
        digest = hash_file(source, stop.check)
        if digest != record.sha256:
            raise error("BCQ-V606", name, found=f"sha256 {digest}", expected=record.sha256)

    run_each(check, [name for name in files if name in stated], _WORKERS, stop)
