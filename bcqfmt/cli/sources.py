"""What the converting verbs are given: a source folder or hub id, sizes, and targets that must not harm a source."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from bcqfmt.container.durable import output_path
from bcqfmt.errors import error

from .params import ParamType

if TYPE_CHECKING:
    from bcqfmt.converters.hub import RemoteHeaders
    from bcqfmt.converters.source.checkpoint import SourceCheckpoint

__all__ = ["PART", "SIZE", "Source", "command_line", "find_source", "keep_apart"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


class Source(NamedTuple):
    """An opened source; ``name`` is what the model is called; ``remote`` when only its headers were fetched."""

    checkpoint: SourceCheckpoint
    name: str
    remote: RemoteHeaders | None = None


def find_source(text: str, revision: str | None, offline: bool, *, headers_only: bool = False) -> Source:
    """A folder, or a model on the hub: pinned to a commit, then downloaded, or looked at by range reads."""
    from bcqfmt.converters.source.checkpoint import open_source

    from . import render

    folder = Path(os.path.abspath(text))  # noqa: PTH100 - resolve() would follow a link and lose the model's name
    if os.path.lexists(text):
        if revision is not None:
            raise click.UsageError("--revision is for models on the hub; SRC is a folder.", _context())
        return Source(open_source(folder), folder.name)
    from bcqfmt.converters import hub

    if not hub.looks_like_hub_id(text):
        raise error("BCQ-E101", text, found="no such folder, and no name of a model on the hub")
    repo = hub.resolve(text, revision, offline)
    render.say(f"{repo.repo_id}: revision {repo.revision} is commit {repo.commit}")
    if headers_only and not repo.offline:
        remote = hub.remote_headers(repo)
        return Source(_without_data(remote), repo.repo_id, remote)
    return Source(open_source(hub.download(repo, offline=offline, progress=_terminal())), repo.repo_id)


def keep_apart(source: Path, target: Path, what: str = "the source") -> None:
    """BCQ-E402 when writing ``target`` would touch ``source``: the same folder, or one inside the other."""
    origin = source.resolve()
    named = output_path(target)
    for place in (named, named.with_name(f"{named.name}.partial")):
        real = place.resolve()
        if real == origin or origin in real.parents or real in origin.parents:
            where = "is" if real == origin else "lies inside" if origin in real.parents else "holds"
            raise error("BCQ-E402", str(target), found=f"it {where} {what}", expected="a folder elsewhere")


def command_line(*words: str | Path) -> str:
    """A command to type, quoted for a shell."""
    return shlex.join(str(word) for word in words)


class _Size(ParamType[int]):
    """Bytes: ``5GB`` is decimal, ``5GiB`` binary."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", value.strip().lower())
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
        if size < 1:
            self.fail(f"'{value}' is no size; write 5GB, 512MiB or a number of bytes.", param, ctx)
        return size


class _Part(ParamType[tuple[int, int]]):
    """``2/8``: the second of eight parts."""

    name = "i/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Which part, of how many."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"'{value}' is no part; write 2/8 for the second of eight.", param, ctx)
        return int(match[1]), int(match[2])


SIZE, PART = _Size(), _Part()


def _without_data(remote: RemoteHeaders) -> SourceCheckpoint:
    """The remote checkpoint with zero points read as zeros: planning looks at them, and they are far too many."""
    import numpy as np

    from bcqfmt.container.stored_tensor import StoredTensor

    checkpoint = remote.checkpoint
    for name, tensor in list(checkpoint.tensors.items()):
        if name.endswith(".qzeros") and tensor.dtype == "I32":
            blank = np.zeros(tensor.shape, np.int32)
            checkpoint.tensors[name] = StoredTensor.from_array(name, blank)
    return checkpoint


def _terminal() -> bool:
    import sys

    return sys.stderr is not None and sys.stderr.isatty()


def _context() -> click.Context:
    return click.get_current_context()
