"""A model on the hub: its name, the commit it is pinned to, and the files that commit has."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from bcqfmt.converters.source.checkpoint import foreign_files
from bcqfmt.converters.source.front_matter import is_repo_id
from bcqfmt.converters.source.gguf import split_names
from bcqfmt.errors import error, escape
from bcqfmt.version import __version__

from .errors import attempt, library

# What a checkpoint consists of. Weights of other kinds and code are never fetched, whatever their names match;
# nor are weights in folders below: a checkpoint's own shards lie at the top.
KEEP = (
    *("*.safetensors", "config*", "*.json", "tokenizer*", "*.txt", "*.model", "*.tiktoken", "*.jinja"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "README*"),
)
SKIP = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data"),
    *("*.msgpack", "*.h5", "*.npz", "*.ot", "*.tflite", "*.py", "*.pyc", "*.so", "*.sh", "*/*.safetensors"),
)
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/+-]*[A-Za-z0-9_])?")
_EXAMPLE = "for example Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4@main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit: large files have a ``sha256``, the others git's own digest; either may be empty."""

    name: str
    size: int
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository pinned to ``commit``; ``revision`` is what was asked for, ``offline`` that the cache told it all.

    ``file``: the GGUF file that was named, if one was; then nothing but the files of its split is needed.
    """

    repo_id: str
    revision: str
    commit: str
    files: dict[str, HubFile]
    offline: bool = False
    file: str = ""

    def needed(self) -> dict[str, HubFile]:
        """The files that belong to a checkpoint, by name."""
        names = split_names(self.file) if self.file else needed(list(self.files))
        return {name: self.files[name] for name in names if name in self.files}

    def left_out(self) -> dict[str, str]:
        """The other files of the repository, path -> why it is not carried; none where a GGUF file was named."""
        if self.file:
            return {}
        others = sorted(self.files.keys() - self.needed().keys())
        return {**dict.fromkeys(others, "not downloaded"), **foreign_files(others)}


def looks_like_hub_id(text: str) -> bool:
    """Whether ``text`` is the name of a model, or of a GGUF file of one; anything that exists here is a path instead.

    ``owner/name``, ``owner/name@revision``, ``owner/name:file.gguf``, ``owner/name@revision:file.gguf``.
    """
    return not os.path.lexists(text) and _split(text) is not None


def split_hub_id(text: str, *, file: bool = False, hint: str = _EXAMPLE) -> tuple[str, str | None]:
    """``owner/name`` and the revision, if one is named; ``file``: a GGUF file may be named too, and is left out."""
    found = _split(text)
    if found is None or (_file(text) and not file):
        raise error("BCQ-E302", found=f"'{escape(text)}'", expected="owner/name, or owner/name@revision", hint=hint)
    return found


def stays_offline(offline: bool) -> bool:
    """Whether nothing is sent to the hub: as asked, or as ``HF_HUB_OFFLINE`` says."""
    return offline or bool(library().constants.HF_HUB_OFFLINE)


def resolve(repo_id: str, revision: str | None = None, offline: bool = False) -> HubRepo:
    """Pin a revision (default: main) to its commit and list the files of that commit, in one request.

    Offline, or where ``HF_HUB_OFFLINE`` is set, the answer comes from the cache and nothing is sent.
    """
    file = _file(repo_id)
    repo_id, named = split_hub_id(repo_id, file=True)
    wanted = revision or named or "main"
    if not is_revision(wanted):
        found = f"revision '{escape(wanted)}'"
        raise error("BCQ-E302", repo_id, found=found, expected="a branch, a tag or a commit", hint=_EXAMPLE)
    if stays_offline(offline):
        return _chosen(_from_cache(repo_id, wanted), file)
    info = attempt(lambda: _listing(repo_id, wanted), repo_id)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit) or (_COMMIT.fullmatch(wanted) and commit != wanted):
        raise error("BCQ-E704", repo_id, found="an answer without the commit", hint="check HF_ENDPOINT")
    files = {}
    for entry in info.siblings:
        lfs = entry.lfs
        size = entry.size if lfs is None else lfs.size
        if type(size) is not int or size < 0:
            raise error("BCQ-E704", repo_id, found="a listing without sizes", hint="check HF_ENDPOINT")
        _check_name(repo_id, entry.rfilename)
        sha256 = lfs.sha256 if lfs is not None and _DIGEST.fullmatch(str(lfs.sha256)) else ""
        sha1 = entry.blob_id if lfs is None and _COMMIT.fullmatch(str(entry.blob_id)) else ""
        files[entry.rfilename] = HubFile(entry.rfilename, size, sha256, sha1)
    return _chosen(HubRepo(repo_id, wanted, commit, files), file)


def _chosen(repo: HubRepo, file: str) -> HubRepo:
    """The repository with the file that was named, which it must have."""
    if file and file not in repo.files:
        there = ", ".join(name for name in repo.files if name.endswith(".gguf")) or "none"
        expected = f"one of its GGUF files: {escape(there)}"
        raise error("BCQ-E101", f"{repo.repo_id}:{file}", found="no such file in the repository", expected=expected)
    return replace(repo, file=file)


def needed(names: list[str]) -> list[str]:
    """Those of ``names`` that belong to a checkpoint, by the same function that ``snapshot_download`` uses."""
    return list(library().utils.filter_repo_objects(names, allow_patterns=list(KEEP), ignore_patterns=list(SKIP)))


def _listing(repo_id: str, revision: str) -> Any:
    hub = library()
    api = hub.HfApi(library_name="bcqfmt", library_version=__version__)
    limit = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=limit)
        if not isinstance(info.siblings, list):
            raise ValueError("no files")
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not the answer of a hub") from None
    return info


def _from_cache(repo_id: str, revision: str) -> HubRepo:
    """The commit that a revision had when it was downloaded, and its files: as listed then, or as they lie there."""
    hub = library()

    def look() -> str:
        return str(
            hub.snapshot_download(
                repo_id,
                revision=revision,
                local_files_only=True,
                allow_patterns=list(KEEP),
                ignore_patterns=list(SKIP),
            )
        )

    folder = Path(attempt(look, repo_id, pauses=()))
    sizes = _sizes_listed(repo_id, folder.name)
    if sizes is None:
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
    files = {}
    for name, size in sizes.items():
        _check_name(repo_id, name)
        link = folder / name
        blob = link.readlink().name if link.is_symlink() else ""  # the hub's name for the content: its digest
        sha256 = blob if _DIGEST.fullmatch(blob) else ""
        files[name] = HubFile(name, size, sha256, blob if _COMMIT.fullmatch(blob) else "")
    return HubRepo(repo_id, revision, folder.name, files, offline=True)


def _sizes_listed(repo_id: str, commit: str) -> dict[str, int] | None:
    """Sizes from the listing that version 2 of the library keeps in the cache; None without one."""
    hub = library()
    listed = getattr(hub, "get_cached_repo_tree", None)
    if listed is None:
        return None
    try:
        return {str(file.path): int(file.size) for file in listed(repo_id, revision=commit)}
    except hub.errors.CachedRepoTreeNotFoundError:
        return None


def _split(text: str) -> tuple[str, str | None] | None:
    repo_id, at, revision = text.removesuffix(f":{_file(text)}").partition("@")
    if not is_repo_id(repo_id) or (at and not is_revision(revision)):
        return None
    return repo_id, revision if at else None


def _file(text: str) -> str:
    """The GGUF file in ``owner/name:file.gguf``; empty without one."""
    _, _, file = text.partition(":")
    return file if file.endswith(".gguf") else ""


def is_revision(text: str) -> bool:
    """Whether it can be the name of a branch, a tag, a commit or a pull request."""
    return len(text) <= 200 and _REVISION.fullmatch(text) is not None and ".." not in text and "//" not in text


def _check_name(repo_id: str, name: Any) -> None:
    """A listing is foreign input: its names become paths in the cache."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or parts[0] == "/" or "\\" in name or not name.isprintable() or len(name) > 1024:
        found = f"a file named '{escape(str(name))}'"
        raise error("BCQ-E704", repo_id, found=found, expected="a path inside the repository", hint="do not use it")
