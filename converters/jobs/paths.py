"""Names of files in a source that the output cannot have, refused in the plan, before anything is written.

A folder is copied from one file system to another: paths that differ only in case or composition are the same file on
some of them, and count as the same here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE
from bcqfmt.checkpoint.manifest import relative_path
from bcqfmt.container.files import folded, unfit
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.front_matter import CARD
from bcqfmt.errors import error

QUANTIZATION: Final = "bcq_quantization.json"
_ARCHIVED: Final = ".header"  # what the name of a model file gets in the archive
_ANEW: Final = {folded(name) for name in (CONFIG, CARD, INDEX, QUANTIZATION)}


def written_anew(path: str) -> bool:
    """Whether the output has a file of this name that takes the place of the source's; the archive keeps that one."""
    return folded(path) in _ANEW


def check_paths(source: SourceCheckpoint, shards: Iterable[str]) -> None:
    """BCQ-E617 for a file of the source with a path that the output needs itself, or that not every system can hold."""
    own = {folded(name) for name in (SOURCE, MANIFEST, *shards)}
    archived = {path + _ARCHIVED for path in source.models}
    if wrong := unfit({*source.side_files, *source.models}) or unfit(archived):
        raise error("BCQ-E617", *wrong)
    for path in source.side_files:
        first, *rest = folded(path).split("/")
        if not relative_path(path) or first in own or (first in _ANEW and rest):
            found = "a file or folder of the output has this name" if relative_path(path) else "a backslash"
            raise error("BCQ-E617", path, found=found, expected="another name")
