"""The model files of a source during a job: their digests, and whether they are still the same files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bcqfmt.container.files import SourceFile, file_state
from bcqfmt.container.hashing import hash_file
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error

from .plan import Plan
from .workspace import Workspace

__all__ = ["check_unchanged", "digest_step", "hash_source", "source_state"]


def source_state(source: SourceCheckpoint) -> dict[str, Any]:
    """Inodes, sizes and times of the model files."""
    found = {}
    for path, model in source.models.items():
        try:
            status = model.source.path.stat()
        except OSError as fault:
            raise error("BCQ-E103", path, found=fault.strerror or str(fault)) from fault
        found[path] = file_state(status)
    return found


def check_unchanged(source: SourceCheckpoint) -> None:
    """BCQ-E103 when the path of a model file leads to another file by now."""
    for model in source.models.values():
        if isinstance(model.source, SourceFile):
            model.source.check_unchanged()


def digest_step(index: int) -> str:
    """The name of the step that hashes model file number ``index``."""
    return f"source-{index:05d}"


def hash_source(
    source: SourceCheckpoint, plan: Plan, space: Workspace, index: int, path: str, progress: Callable[[int], object]
) -> None:
    """Hash a model file and record its digest, unless an earlier run did; ``progress`` may raise to stop."""
    if space.done(digest_step(index), plan) is None:
        file = source.models[path].source
        record = {"path": path, "source_size": file.size, "source_sha256": hash_file(file, progress)}
        space.finish(digest_step(index), plan, record)
