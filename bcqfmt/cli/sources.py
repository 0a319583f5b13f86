"""Sources of the converting verbs, a folder or a hub id, and targets that must not harm a source."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bcqfmt.container.durable import check_name, output_path, refuse_existing, refuse_file_above, refuse_overlap
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.system import absolute_path

from . import render
from .command import usage_error
from .expect import another_folder, expect, expected

if TYPE_CHECKING:
    from bcqfmt.converters.hub import RemoteHeaders
    from bcqfmt.converters.hub.repo import HubRepo
    from bcqfmt.converters.quantize.stats import StatsFile
    from bcqfmt.converters.source.checkpoint import SourceCheckpoint

# what a verb reads, by the option or argument that names it; a string may be a name on the hub as well
Inputs = Mapping[str, str | Path | None]


class Source(NamedTuple):
    """An opened source; ``name``: what the model is called, ``revision``: its commit, where it is from the hub.

    ``remote`` when only its headers were fetched.
    """

    checkpoint: SourceCheckpoint
    name: str
    revision: str = ""
    remote: RemoteHeaders | None = None


def find_source(
    text: str, revision: str | None, offline: bool, *, headers_only: bool = False, gguf: bool = False
) -> Source:
    """A folder, or a model on the hub: pinned to a commit, then downloaded, or looked at by range reads.

    ``gguf``: whether the caller takes GGUF files and quantized models, else dense ones.
    """
    from bcqfmt.converters.source.checkpoint import open_source
    from bcqfmt.inspect.kinds import look

    folder = absolute_path(text)  # resolve() would follow a link and lose the model's name
    if is_here(text):
        if revision is not None:
            raise usage_error("--revision is for models on the hub; SRC is a folder.")
        wanted = ("quantized", "gguf") if gguf else ("dense",)
        with expected(text, *wanted):
            found = open_source(folder)
            if not found.is_gguf and (there := look(folder)).kind in ("unfinished", "stopped"):
                hint = "finish or repeat the run or the download that makes it"
                raise error("BCQ-V601", text, found=there.words, hint=hint)
        if found.is_gguf and not gguf:
            expect(text, *wanted)
        return Source(found, found.name) if found.lone else Source(found, *_called(folder))
    from bcqfmt.converters import hub

    repo = ask_hub(text, revision, offline)
    if repo.file and not gguf:
        raise error("BCQ-E601", text, found="a GGUF model", expected="a safetensors checkpoint")
    render.say(f"{repo.repo_id}: revision {repo.revision} is commit {repo.commit}")
    if headers_only and not repo.offline:
        remote = hub.remote_headers(repo)
        return Source(_without_zero_points(remote.checkpoint), repo.repo_id, repo.commit, remote)
    shown = sys.stderr is not None and sys.stderr.isatty()
    place = hub.download(repo, offline=offline, progress=shown)
    downloaded = open_source(place / repo.file if repo.file else place)
    downloaded.left_out = {**repo.left_out(), **downloaded.left_out}
    return Source(downloaded, repo.repo_id, repo.commit)


def is_here(text: str) -> bool:
    """Whether a path is there; where it is not, it is the name of a model on the hub, or BCQ-E101."""
    if os.path.lexists(text):
        return True
    from bcqfmt.converters import hub

    if not hub.looks_like_hub_id(text):
        raise error("BCQ-E101", text, found="no such folder, and no name of a model on the hub")
    return False


def ask_hub(text: str, revision: str | None, offline: bool) -> HubRepo:
    """The model of this name on the hub, pinned to a commit."""
    from bcqfmt.converters import hub

    if not hub.stays_offline(offline):
        render.say(f"{escape(text)}: nothing here has this name; asking the hub")  # without a connection it takes long
    try:
        return hub.resolve(text, revision, offline)
    except BcqError as fault:
        if fault.code in ("BCQ-E704", "BCQ-E705"):
            fault.hint = f"{fault.hint}; if a folder or file was meant, there is none of this name"
        raise


def refusal(path: Path) -> BcqError | None:
    """Why the converter refuses a folder, as far as headers and configuration tell."""
    from bcqfmt.converters.layouts.protocol import Options
    from bcqfmt.converters.layouts.registry import find_modules
    from bcqfmt.converters.source.checkpoint import open_source

    try:
        find_modules(_without_zero_points(open_source(path)), Options())
    except BcqError as fault:
        return fault
    return None


def read_stats(path: Path) -> StatsFile:
    """Calibration statistics; where the file is something else, what it is."""
    from bcqfmt.converters.quantize.stats import open_stats

    with expected(path, "stats", file=True):
        return open_stats(path)


def check_target(source: str, target: Path, *, overwrite: bool, hint: str | None = None) -> None:
    """BCQ-E401 or BCQ-E402 for a folder that cannot be the output, before the source is read or downloaded."""
    from bcqfmt.checkpoint.folder import MANIFEST

    if os.path.lexists(source):
        keep_apart(target, Path(source))
    refuse_file_above(target)
    named = output_path(target)
    refuse_existing(target, overwrite=overwrite, like=MANIFEST, hint=hint)
    check_name(named.with_name(f"{named.name}.partial"))


def keep_apart(target: Path, *sources: Path) -> None:
    """BCQ-E402 when writing ``target`` would touch one of ``sources``: the same place, or one inside the other."""
    for place, source in itertools.product(_written(target), sources):
        refuse_overlap(place, source, "the source", f"choose another place, {another_folder(source)} for example")


def keep_inputs(target: Path, inputs: Inputs) -> None:
    """The same for what else a verb reads."""
    for place, (name, given) in itertools.product(_written(target), inputs.items()):
        if given is not None and os.path.lexists(given):
            refuse_overlap(place, Path(given), f"what {name} names")


def _written(target: Path) -> tuple[Path, Path]:
    """An output, and its work folder."""
    named = output_path(target)
    return target, named.with_name(f"{named.name}.partial")


def read_text(file: Path) -> str:
    """A text that the user names; BCQ-E101, E102 or E302 when it cannot be read, or is not UTF-8."""
    wanted = "a UTF-8 text"
    try:
        return file.read_bytes().decode("utf-8")
    except IsADirectoryError as fault:
        raise error("BCQ-E302", str(file), found="a folder", expected=wanted, hint="name a file in it") from fault
    except OSError as fault:
        code = "BCQ-E101" if isinstance(fault, FileNotFoundError) else "BCQ-E102"
        raise error(code, str(file), found=fault.strerror or str(fault), expected=wanted) from fault
    except UnicodeDecodeError as fault:
        hint = "write it as UTF-8: iconv -f LATIN1 -t UTF-8, if that is what it is in"
        found = f"byte {fault.start} is no UTF-8"
        raise error("BCQ-E102", str(file), found=found, expected=wanted, hint=hint) from fault


def _called(folder: Path) -> tuple[str, str]:
    """Name and commit: a folder's own name, or what a snapshot in the hub's cache is a snapshot of."""
    kind, _, owner = folder.parent.parent.name.partition("--")
    if kind == "models" and owner.count("--") == 1 and folder.parent.name == "snapshots":
        return owner.replace("--", "/"), folder.name
    return folder.name, ""


def _without_zero_points(checkpoint: SourceCheckpoint) -> SourceCheckpoint:
    """The checkpoint with zero points read as zeros: planning looks at them, and reading them is slow."""
    import numpy as np

    from bcqfmt.container.stored_tensor import StoredTensor

    for name, tensor in list(checkpoint.tensors.items()):
        if name.endswith(".qzeros") and tensor.dtype == "I32":
            blank = np.zeros(tensor.shape, np.int32)
            checkpoint.tensors[name] = StoredTensor.from_array(name, blank)
    return checkpoint
