"""Names of files in a source that the output cannot have, refused in the plan, before anything is written.

A folder is copied from one file system to another: paths that differ only in case or composition are the same file on
some of them, and count as the same here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE
from bcqfmt.checkpoint.manifest import relative_path
from bcqfmt.container.files import unwritable
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape

__all__ = ["CARD", "QUANTIZATION", "check_paths", "written_anew"]

CARD: Final = "README.md"
QUANTIZATION: Final = "bcq_quantization.json"
_ARCHIVED: Final = ".header"  # what the name of a model file gets in the archive


def folded(path: str) -> str:
    """The same for paths that are one file on some file system."""
    return unicodedata.normalize("NFC", path).casefold()


_ANEW: Final = {folded(name) for name in (CONFIG, CARD, INDEX, QUANTIZATION)}


def written_anew(path: str) -> bool:
    """Whether the output has a file of this name that takes the place of the source's; the archive keeps that one."""
    return folded(path) in _ANEW


def check_paths(source: SourceCheckpoint, shards: Iterable[str]) -> None:
    """BCQ-E617 for a file of the source with a path that the output needs itself, or that not every system can hold."""
    own = {folded(name) for name in (SOURCE, MANIFEST, *shards)}
    spelled: dict[str, str] = {}
    files = {*source.models, *source.side_files}
    for path in sorted(files):
        if not relative_path(path):
            raise _refused(path, "a backslash in its name", "a name that is no path elsewhere")
        if reason := unwritable(path + _ARCHIVED if path in source.models else path):
            raise _refused(path, reason, "a path that every file system can hold")
        first, *rest = folded(path).split("/")
        if path not in source.models and (first in own or (first in _ANEW and rest)):
            raise _refused(path, "a file or folder of the output has this name", "another name")
        for end in [at for at, character in enumerate(path) if character == "/"] + [len(path)]:
            part = path[:end]
            if spelled.setdefault(folded(part), part) != part or (end < len(path) and part in files):
                found = f"equal to '{escape(spelled[folded(part)])}' but for case or composition"
                raise _refused(path, found if spelled[folded(part)] != part else "a file and a folder", "one of them")


def _refused(path: str, found: str, expected: str) -> BcqError:
    return error("BCQ-E617", path, found=found, expected=expected)
