"""Headers of a model on the hub by HTTP range reads: what it is, without downloading it."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.files import ByteSource
from bcqfmt.container.header import Header
from bcqfmt.converters.source.checkpoint import FOREIGN, SourceCheckpoint, read_gguf_source, read_source
from bcqfmt.converters.source.gguf import split_names
from bcqfmt.errors import BcqError, error
from bcqfmt.version import __version__

from .errors import attempt, library
from .repo import HubRepo

FIRST_READ = 1 << 18  # bytes; nearly every header fits
_WORKERS = 8
_SLOWEST = 10_000  # bytes per second, below which a transfer is given up
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
Bytes = npt.NDArray[np.uint8]


class RemoteFile(ByteSource):
    """A file of a pinned commit with the interface of `files.SourceFile`; every read is a range request.

    The beginning is kept until :meth:`close`, so that a header costs one request, or two when it is long.
    """

    def __init__(self, repo: HubRepo, name: str) -> None:
        self.repo = repo
        self.shown = name
        self.path = Path(name)
        self.size = repo.files[name].size
        self.bytes_read = 0
        self.requests = 0
        self._start = b""
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` (uint8, contiguous) with the bytes from ``offset``."""
        size = buffer.size
        if offset < 0 or offset + size > self.size:
            raise error("BCQ-E103", self.shown, found=f"bytes {offset}..{offset + size} wanted of {self.size}")
        with self._lock:
            if not self._start and size > 0 and offset + size <= FIRST_READ:
                self._start = self._fetch(0, min(FIRST_READ, self.size))
            held = self._start[offset : offset + size]
        rest = self._fetch(offset + len(held), size - len(held)) if len(held) < size else b""
        buffer[: len(held)] = np.frombuffer(held, np.uint8)
        buffer[len(held) :] = np.frombuffer(rest, np.uint8)

    def close(self) -> None:
        """Drop the bytes that are kept; a later read asks the hub again."""
        self._start = b""

    def _fetch(self, start: int, size: int) -> bytes:
        if self.repo.offline:
            raise error("BCQ-E705", self.repo.repo_id, found="headers of a model on the hub are asked for")
        return attempt(lambda: self._request(start, size), self.repo.repo_id, self.shown, file_bytes=self.size)

    def _request(self, start: int, size: int) -> bytes:
        """One GET of exactly these bytes; nothing is read beyond them, whatever the server sends."""
        hub = library()
        url = hub.hf_hub_url(self.repo.repo_id, self.shown, revision=self.repo.commit)
        headers = hub.utils.build_hf_headers(library_name="bcqfmt", library_version=__version__)
        headers["Accept-Encoding"] = "identity"
        whole = size == self.size
        if not whole:
            headers["Range"] = f"bytes={start}-{start + size - 1}"
        limit = float(hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
        last = time.monotonic() + limit + size / _SLOWEST
        data = bytearray()
        self.requests += 1
        ask = hub.utils.get_session().stream("GET", url, headers=headers, timeout=limit, follow_redirects=True)
        with ask as response:
            hub.utils.hf_raise_for_status(response)
            self._check(response, start, size)
            for chunk in response.iter_raw():
                data += chunk
                self.bytes_read += len(chunk)
                if len(data) > size:
                    raise self._differs("more bytes than were asked for")
                if time.monotonic() > last:
                    raise error("BCQ-E704", self._place, found=f"{len(data)} of {size} bytes in {limit:g} s and more")
        if len(data) != size:
            raise self._differs(f"{len(data)} bytes instead of {size}")
        return bytes(data)

    def _check(self, response: Any, start: int, size: int) -> None:
        """That the answer is about this commit, this file as listed, and these bytes."""
        for step in (*response.history, response):
            if step.headers.get("X-Repo-Commit", self.repo.commit) != self.repo.commit:
                raise self._differs("it comes from another commit")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise error("BCQ-E704", self._place, found="a compressed answer to a request for plain bytes")
        if response.status_code == 206:
            told = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
            if told is None or (int(told[1]), int(told[2]) + 1) != (start, start + size):
                raise error("BCQ-E704", self._place, found="an answer with other bytes than were asked for")
            if int(told[3]) != self.size:
                raise self._differs(f"{told[3]} bytes, {self.size} in the listing")
        elif size != self.size:
            found = "the server sends whole files where a part is asked for"
            raise error("BCQ-E704", self._place, found=found, hint=f"hf download {self.repo.repo_id}")

    @property
    def _place(self) -> str:
        return f"{self.repo.repo_id}/{self.shown}"

    def _differs(self, found: str) -> BcqError:
        return error("BCQ-E706", self._place, found=found)


@dataclass(slots=True)
class RemoteHeaders:
    """What range reads tell of a model: its checkpoint, whose tensors are read by further requests, and the cost."""

    repo: HubRepo
    checkpoint: SourceCheckpoint
    files: dict[str, RemoteFile]

    @property
    def headers(self) -> dict[str, Header]:
        return {name: model.header for name, model in self.checkpoint.models.items()}

    @property
    def bytes_read(self) -> int:
        """Bytes of file content that came over the network."""
        return sum(file.bytes_read for file in self.files.values())

    @property
    def requests(self) -> int:
        """Requests for file content, repeated ones included."""
        return sum(file.requests for file in self.files.values())


def remote_headers(repo: HubRepo) -> RemoteHeaders:
    """Configurations, index and headers of a pinned model. No name is asked for before it has been checked."""
    files: dict[str, RemoteFile] = {}

    def open_file(name: str) -> RemoteFile:
        return files.setdefault(name, RemoteFile(repo, name))

    foreign = () if repo.file else (name for name in repo.files if name.endswith(FOREIGN))
    names = sorted({*repo.needed(), *foreign})
    pool = ThreadPoolExecutor(_WORKERS)
    try:
        if repo.file:
            wanted = split_names(repo.file)
            checkpoint = read_gguf_source(Path(repo.repo_id), names, wanted, open_file, pool.map)
            checkpoint.lone = repo.file
        else:
            checkpoint = read_source(Path(repo.repo_id), names, open_file, pool.map, repo.left_out())
    finally:
        pool.shutdown(cancel_futures=True)
    for file in files.values():
        file.close()
    return RemoteHeaders(repo, checkpoint, files)
