"""Models on the hub as sources and as targets: pin, look, download, check, push.

The revision is pinned to a commit before anything else, and every later request names that commit: a branch that
moves meanwhile changes nothing. Looking (:func:`remote_headers`) needs range reads only; downloading goes through the
library's cache, fetches what belongs to a checkpoint and nothing else, and compares every file with the listing.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from bcqfmt.container.files import SourceFile, inside
from bcqfmt.errors import error
from bcqfmt.version import __version__

from .errors import attempt, library, status_of
from .publish import check_push, check_target, files_to_push, push
from .remote import RemoteHeaders, remote_headers
from .repo import KEEP, SKIP, HubFile, HubRepo, looks_like_hub_id, resolve, split_hub_id, stays_offline

__all__ = [
    "RemoteHeaders",
    "check_push",
    "check_target",
    "download",
    "files_to_push",
    "looks_like_hub_id",
    "push",
    "remote_headers",
    "resolve",
    "split_hub_id",
    "stays_offline",
]

_CHUNK = 1 << 22
_HASHERS = min(4, os.cpu_count() or 1)  # files at a time; hashlib releases the interpreter lock


def download(repo: HubRepo, offline: bool = False, progress: bool = False) -> Path:
    """The folder of a pinned model in the library's cache, complete and as the hub lists it.

    Size and digest of every file are compared with the listing. A file that differs (an interrupted copy, a bad disk)
    is fetched once more. Offline nothing is sent: the folder is there and complete, or an error says so.
    """
    local = offline or repo.offline or bool(library().constants.HF_HUB_OFFLINE)
    small = [name for name in repo.needed() if not name.endswith(".safetensors")]
    if small and not local:  # first, and on their own: none of them may be as large as a model
        _fetch(repo, progress, small)
    folder = _fetch(repo, progress, local=local)
    wrong = _wrong_files(repo, folder)
    if wrong and not local:
        _fetch(repo, progress, list(wrong), force=True)
        wrong = _wrong_files(repo, folder)
    if wrong:
        name, (found, expected) = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more files)" if len(wrong) > 1 else ""
        again = f"hf download {repo.repo_id} {name} --revision {repo.commit} --force-download"
        raise error("BCQ-E706", f"{repo.repo_id}/{name}", found=found + more, expected=expected, hint=again)
    _remember(repo, folder)
    return folder


def _fetch(
    repo: HubRepo, progress: bool, only: list[str] | None = None, *, local: bool = False, force: bool = False
) -> Path:
    """The folder, with all files of the model or with ``only`` these; none may be larger than the listing says."""
    hub = library()
    wanted = repo.needed()
    largest = max((wanted[name].size for name in (wanted if only is None else only)), default=0)
    patterns = list(KEEP)
    if only is not None or repo.file:
        patterns = [glob.escape(name) for name in (wanted if only is None else only)]

    def fetch() -> str:
        return str(
            hub.snapshot_download(
                repo.repo_id,
                revision=repo.commit,
                local_files_only=local,
                allow_patterns=patterns,
                ignore_patterns=None if repo.file else list(SKIP),
                force_download=force,
                library_name="bcqfmt",
                library_version=__version__,
                tqdm_class=None if progress else _silent(),
            )
        )

    return Path(attempt(fetch, repo.repo_id, again=_not_retried, file_bytes=largest))


def _silent() -> type[Any]:
    """The library's progress bar, switched off."""
    bar: Any = importlib.import_module("huggingface_hub.utils.tqdm").tqdm

    def begin(self: Any, *args: Any, **options: Any) -> None:
        bar.__init__(self, *args, **{**options, "disable": True})

    return type("Silent", (bar,), {"__init__": begin})


def _not_retried(fault: BaseException) -> bool:
    """What the library gives up on at once while a file comes in: an answer of 5xx, a connection that is reset."""
    return status_of(fault) >= 500 or type(fault).__name__ in ("ReadError", "WriteError")


def _wrong_files(repo: HubRepo, folder: Path) -> dict[str, tuple[str, str]]:
    """Files of the model that are not what the hub lists: name -> (found, expected)."""
    files = repo.needed()
    with ThreadPoolExecutor(_HASHERS) as pool:
        found = zip(files, pool.map(lambda file: _difference(folder, file), files.values()), strict=True)
        return {name: difference for name, difference in found if difference is not None}


def _difference(folder: Path, file: HubFile) -> tuple[str, str] | None:
    """(found, expected) of a file that differs. Large files have a SHA-256, small ones git's SHA-1 of a blob."""
    try:
        size = (folder / file.name).stat().st_size
    except OSError:
        return "missing", f"{file.size} bytes"
    if size != file.size:
        return f"{size} bytes", f"{file.size} bytes"
    expected = file.sha256 or file.git_sha1
    if not expected:
        return None
    state = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with closing(SourceFile(inside(folder, file.name), file.name)) as source:
        for start in range(0, size, _CHUNK):
            state.update(source.read(start, min(_CHUNK, size - start)).data)
    found = state.hexdigest()
    return None if found == expected else (f"digest {found}", expected)


def _remember(repo: HubRepo, folder: Path) -> None:
    """Note in the cache which commit the revision was, as the library does, so that it is found offline later."""
    refs = folder.parent.parent / "refs"
    if repo.offline or repo.revision == repo.commit or folder.parent.name != "snapshots":
        return
    note = refs / repo.revision
    with contextlib.suppress(OSError):  # a cache that cannot be written is good enough to read from
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix=".bcqfmt-", delete=False) as draft:
            draft.write(repo.commit)
        Path(draft.name).replace(note)
