"""The files of a source during a job: their digests, whether they are still the same files, and their copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.manifest import FileRecord
from bcqfmt.container.durable import OutputFile, make_folders
from bcqfmt.container.files import SourceFile, file_state, hash_file
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error

from .plan import Plan
from .workspace import Workspace


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
        # a descriptor of its own: reads through one take turns
        with closing(copy.copy(source.models[path].source)) as file:
            record = {"path": path, "source_size": file.size, "source_sha256": hash_file(file, progress)}
        space.finish(digest_step(index), plan, record)


class SideFile:
    """A file of the source that is not a model file; it may be large and is never in memory as a whole.

    Its digest is the plan's; BCQ-E103 when it has another content by now.
    """

    def __init__(self, source: SourceCheckpoint, plan: Plan, path: str) -> None:
        self._place, self._path = source.path_of(path), path
        with closing(self._opened()) as opened:
            self.record = FileRecord(opened.size, plan.source["sides"][path])

    def start(self, size: int) -> bytes:
        """The first ``size`` bytes, or all of them."""
        with closing(self._opened()) as opened:
            return opened.read(0, min(size, opened.size)).tobytes()

    def check(self) -> None:
        """Read it once more."""
        with closing(self._opened()) as opened:
            self._same(hash_file(opened))

    def copy_to(self, target: Path) -> None:
        """Write it to ``target``, hashed while it is copied."""
        make_folders(target.parent)
        with closing(self._opened()) as opened, OutputFile(target, opened.size) as output:
            self._same(hash_file(opened, each=output.write))

    def _opened(self) -> SourceFile:
        return SourceFile(self._place, self._path)

    def _same(self, digest: str) -> None:
        if digest != self.record.sha256:
            raise error("BCQ-E103", self._path, found="another content than when the conversion began")
