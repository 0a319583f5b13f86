"""What every export looks at before it writes: its folder, its target, and whether the weights are undamaged."""

from __future__ import annotations

from pathlib import Path

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.durable import refuse_overlap
from bcqfmt.container.files import hash_file
from bcqfmt.converters.jobs.pool import WORKERS, Stop, run_each
from bcqfmt.errors import error


def check_folder(checkpoint: Checkpoint) -> None:
    """BCQ-E302 for a single file: configuration and tokenizer are needed too."""
    if not checkpoint.path.is_dir():
        expected, hint = "a BCQ folder", "name the folder that it is in"
        raise error("BCQ-E302", str(checkpoint.path), found="a single file", expected=expected, hint=hint)


def check_target(checkpoint: Checkpoint, target: Path) -> None:
    """BCQ-E402 for a target that would touch the BCQ folder."""
    refuse_overlap(target, checkpoint.path, "the BCQ folder")


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

    run_each(check, [name for name in files if name in stated], WORKERS, stop)
