"""Headers of a model on the hub by HTTP range reads: what it is, without downloading it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, SHARD_NAME
from bcqfmt.container.header import Header, read_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, check_limits, parse
from bcqfmt.converters.source.checkpoint import FOREIGN, QUANT_FILES, SourceCheckpoint, SourceModel
from bcqfmt.errors import BcqError, error, escape, refuse
from bcqfmt.version import __version__

from .errors import attempt, library
from .repo import HubRepo

__all__ = ["RemoteFile", "RemoteHeaders", "remote_headers"]

FIRST_READ = 1 << 18  # bytes; nearly every header fits
_WORKERS = 8
_SLOWEST = 10_000  # bytes per second, below which a transfer is given up
_INDEX = ".safetensors.index.json"
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
Bytes = npt.NDArray[np.uint8]


class RemoteFile:
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

    def read(self, offset: int, size: int) -> Bytes:
        """``size`` bytes from ``offset`` as a fresh uint8 array."""
        buffer = np.empty(size, np.uint8)
        self.read_into(offset, buffer)
        return buffer

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
        """Let go of what is kept; a later read asks the hub again."""
        self._start = b""

    def _fetch(self, start: int, size: int) -> bytes:
        if self.repo.offline:
            raise error("BCQ-E705", self.repo.repo_id, found="headers of a model on the hub are asked for")
        return attempt(lambda: self._request(start, size), self.repo.repo_id, self.shown)

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
    """What range reads tell of a model: configurations, index, headers by shard, and what they cost."""

    repo: HubRepo
    config: dict[str, Any]
    quant: dict[str, dict[str, Any]]
    weight_map: dict[str, str] | None
    headers: dict[str, Header]
    files: dict[str, RemoteFile]

    @property
    def bytes_read(self) -> int:
        """Bytes of file content that came over the network."""
        return sum(file.bytes_read for file in self.files.values())

    @property
    def requests(self) -> int:
        """Requests for file content, repeated ones included."""
        return sum(file.requests for file in self.files.values())

    def checkpoint(self) -> SourceCheckpoint:
        """The same as :func:`open_source` gives for a folder; reading a tensor is a range request."""
        models, tensors, home = {}, {}, {}
        for path, header in self.headers.items():
            source = self.files[path]
            models[path] = SourceModel(path, source, header)
            for name, entry in header.tensors.items():
                home[name] = path
                offset = header.data_start + entry.begin
                tensors[name] = StoredTensor(name, entry.dtype, entry.shape, source=source, offset=offset)
        foreign = sorted(name for name in self.repo.files if name.endswith(FOREIGN))
        side = sorted(name for name in self.repo.needed() if name not in models and name not in foreign)
        folder = Path(self.repo.repo_id)
        return SourceCheckpoint(folder, models, tensors, home, self.config, self.quant, side, foreign)


def remote_headers(repo: HubRepo) -> RemoteHeaders:
    """Configurations, index and headers of a pinned model. No name is asked for before it has been checked."""
    files: dict[str, RemoteFile] = {}
    names, weight_map = _shards(repo, files)
    if CONFIG not in repo.files:
        raise error("BCQ-V510", CONFIG, found="the file does not exist", expected="the model's configuration")
    config = _json(repo, files, CONFIG)
    quant = {name: _json(repo, files, name) for name in QUANT_FILES if name in repo.files}
    for key in ("compression_config", "quantization_config"):
        if isinstance(config.get(key), dict):
            quant[CONFIG] = config[key]
    files.update({name: RemoteFile(repo, name) for name in names})
    pool = ThreadPoolExecutor(_WORKERS)
    try:
        headers = dict(zip(names, pool.map(lambda name: _header(files[name]), names), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    _check_tensors(headers, weight_map)
    return RemoteHeaders(repo, config, quant, weight_map, headers, files)


def _header(file: RemoteFile) -> Header:
    header = read_header(file, refuse)
    assert header is not None  # refuse has raised otherwise
    file.close()
    return header


def _shards(repo: HubRepo, files: dict[str, RemoteFile]) -> tuple[list[str], dict[str, str] | None]:
    """The model's files by the listing and the index; BCQ-V501, V502, V503, V506 before any of them is asked for."""
    top = sorted(name for name in repo.files if name.endswith(".safetensors") and "/" not in name)
    indexes = [name for name in repo.files if name.endswith(_INDEX) and "/" not in name]
    if len(indexes) > 1 or (not indexes and len(top) > 1):
        found = f"{len(indexes)} index files" if indexes else f"{len(top)} model files and no index"
        raise error("BCQ-V506", repo.repo_id, found=found, expected="one, or an index")
    if not indexes:
        if not top:
            raise _nothing(repo)
        return _plain(top, repo.repo_id), None
    index = indexes[0]
    weight_map = _json(repo, files, index, limits.MAX_JSON_FILE_BYTES, "BCQ-V501").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise error("BCQ-V501", index, found="no object weight_map of names")
    names = _plain(sorted(set(weight_map.values())), index)
    missing = [name for name in names if name not in repo.files]
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise error("BCQ-V503", index, found=f"{len(missing)} of {len(names)} shards missing: {shown}")
    extra = sorted(set(top) - set(names))
    if extra:
        found = f"an index and, beside its shards, {escape(', '.join(extra[:3]))}"
        raise error("BCQ-V506", repo.repo_id, found=found)
    return names, weight_map


def _plain(names: list[str], place: str) -> list[str]:
    for name in names:
        if not SHARD_NAME.fullmatch(name):
            raise error("BCQ-V502", place, found=f"'{escape(name)}'", expected="a plain name of a .safetensors file")
    return names


def _check_tensors(headers: Mapping[str, Header], weight_map: Mapping[str, str] | None) -> None:
    """BCQ-V505, V504: every tensor once, and where the index says."""
    home: dict[str, str] = {}
    for path, header in headers.items():
        for name in header.tensors:
            if name in home:
                raise error("BCQ-V505", path, name, f"also in {home[name]}", "one file")
            home[name] = path
    stated = home if weight_map is None else weight_map
    wrong = sorted(name for name in stated.keys() | home.keys() if stated.get(name) != home.get(name))
    if wrong:
        shown = ", ".join(f"'{escape(name, 60)}'" for name in wrong[:3])
        raise error("BCQ-V504", "index", found=f"{len(wrong)} tensors are not where it says: {shown}")


def _json(
    repo: HubRepo, files: dict[str, RemoteFile], name: str, limit: int = limits.MAX_CONFIG_BYTES, code: str = "BCQ-V511"
) -> dict[str, Any]:
    files[name] = file = RemoteFile(repo, name)
    if file.size > limit:
        raise error(code, name, found=f"{file.size} bytes", expected=f"at most {limit}")
    try:
        value = parse(file.read(0, file.size).tobytes(), integers_only=False)
        check_limits(value, limits.MAX_CONFIG_DEPTH, integers=False)
    except JsonFault as fault:
        raise error(code, name, found=escape(fault.detail), expected="a JSON object") from None
    file.close()
    if not isinstance(value, dict):
        raise error(code, name, found=f"a JSON {type(value).__name__}", expected="a JSON object")
    return value


def _nothing(repo: HubRepo) -> BcqError:
    found = sorted(name for name in repo.files if PurePosixPath(name).suffix in FOREIGN)
    shown = escape(", ".join(found)[:80])
    if any(name.endswith((".gguf", ".ggml")) for name in found):
        return error("BCQ-E601", repo.repo_id, found=f"a GGUF model ({shown})", expected="a safetensors checkpoint")
    if found:
        return error("BCQ-E105", repo.repo_id, found=f"only {shown}", expected="safetensors files")
    return error("BCQ-E104", repo.repo_id, found="no .safetensors file")
