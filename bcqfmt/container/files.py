"""Input files: opened safely, read by position, checked for changes.

No memory map: a mapped file that shrinks kills the process. Positioned reads return short instead, and the
file's identity (device, inode, size, times of its content and of its inode) is compared after every read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import unicodedata
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.system import BINARY, ForkLock, read_at, real_path

Bytes = npt.NDArray[np.uint8]

_FLAGS = os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_MAX_OPEN = 64
_LONGEST_NAME = 255  # bytes
_LONGEST_PATH = 900  # bytes; macOS has 1,024 for the whole, with the folder that it is in
_MOST_FOLDERS = 64
_PIECE = 1 << 21  # bytes read and hashed while they are in the cache
_open_files: OrderedDict[int, weakref.ref[SourceFile]] = OrderedDict()
_pool_lock = ForkLock()


def file_state(status: os.stat_result) -> list[int]:
    """What tells one content of a file from another: a modification time can be set back, that of the inode cannot."""
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class ByteSource(Protocol):
    """What a reader needs of a file: a local one, or one on the hub that is read by range requests."""

    path: Path
    shown: str
    size: int
    bytes_read: int

    def read(self, offset: int, size: int) -> Bytes:
        """``size`` bytes from ``offset`` as a fresh uint8 array; an error when the file is shorter or has changed."""
        buffer = np.empty(size, np.uint8)
        self.read_into(offset, buffer)
        return buffer

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` (uint8, contiguous) with the bytes from ``offset``."""
        ...

    def close(self) -> None:
        """Release what is held; a later read opens the file again."""
        ...


class SourceFile(ByteSource):
    """A regular file, read by position; the descriptor is closed when many others are open and reopened on need."""

    def __init__(self, path: str | Path, shown: str | None = None) -> None:
        self.path = Path(path)
        self.shown = shown if shown is not None else self.path.name
        self.size = 0
        self.bytes_read = 0
        self._descriptor = -1
        self._lock = ForkLock()
        self._identity: tuple[int, ...] | None = None
        with self._lock:
            self.size = self._open()

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` (uint8, contiguous) with the bytes from ``offset``."""
        size = buffer.size
        if offset < 0 or offset + size > self.size:
            raise error("BCQ-E103", self.shown, found=f"bytes {offset}..{offset + size} wanted of {self.size}")
        view = buffer.data.cast("B") if size else memoryview(b"")
        with self._lock:
            self._open()
            try:
                done = 0
                while done < size:
                    got = read_at(self._descriptor, view[done : done + (1 << 30)], offset + done)
                    if got == 0:
                        raise self._changed(f"ends at byte {offset + done}, was {self.size} bytes long")
                    done += got
                self._check(os.fstat(self._descriptor))
            except OSError as fault:
                raise error("BCQ-E102", self.shown, found=fault.strerror or str(fault)) from fault
            self.bytes_read += size

    def check_unchanged(self) -> None:
        """Raise BCQ-E103 when the path no longer leads to the very file that was opened."""
        try:
            self._check(self.path.stat())
        except FileNotFoundError:
            raise self._changed("it is gone") from None
        except OSError as fault:
            raise error("BCQ-E102", self.shown, found=fault.strerror or str(fault)) from fault

    def close(self) -> None:
        """Close the descriptor; a later read opens the file again and checks that it is still the same."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        with _pool_lock:
            _open_files.pop(id(self), None)

    def __del__(self, close: Any = os.close, pool: Any = _open_files) -> None:
        """``close``, ``pool``: bound here, because the names of a module are gone when Python exits."""
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            close(descriptor)
            self._descriptor = -1
            pool.pop(id(self), None)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "shown": self.shown, "size": self.size, "_identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, bytes_read=0, _descriptor=-1, _lock=ForkLock())

    def _open(self) -> int:
        """Open if need be, check that it is the file it was; its size."""
        if self._descriptor >= 0:
            return self.size
        try:
            descriptor = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            if self.path.is_symlink():
                found, hint = f"a link to {escape(str(self.path.readlink()))}, which is not there", "put the file there"
                raise error("BCQ-E101", self.shown, found=found, hint=hint) from None
            raise error("BCQ-E101", self.shown, found="the file does not exist") from None
        except OSError as fault:
            if fault.errno == errno.ENXIO:  # a socket, or a pipe without a reader
                raise error("BCQ-V508", self.shown, found=_kind(self.path.stat().st_mode)) from None
            raise error("BCQ-E102", self.shown, found=fault.strerror or str(fault)) from fault
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise error("BCQ-V508", self.shown, found=_kind(status.st_mode), expected="a regular file")
            self._check(status)
        except BcqError:
            os.close(descriptor)
            raise
        except OSError as fault:
            os.close(descriptor)
            raise error("BCQ-E102", self.shown, found=fault.strerror or str(fault)) from fault
        self._descriptor = descriptor
        _remember(self)
        return status.st_size

    def _check(self, status: os.stat_result) -> None:
        identity = (status.st_dev, *file_state(status))
        if self._identity is None:
            self._identity = identity
        elif status.st_nlink == 0 and identity[:-1] == self._identity[:-1]:
            return  # removed or replaced, which changes the time of its inode: what is open stays as it was
        elif identity != self._identity:
            before, now = self._identity[2], identity[2]
            sizes = f"{before} bytes before, {now} now" if before != now else "written to, or replaced, meanwhile"
            raise self._changed(sizes)

    def _changed(self, found: str) -> BcqError:
        return error("BCQ-E103", self.shown, found=found)


def _remember(opened: SourceFile) -> None:
    """Keep at most ``_MAX_OPEN`` descriptors: close the one used longest ago that is not being read."""
    with _pool_lock:
        _open_files[id(opened)] = weakref.ref(opened)
        if len(_open_files) <= _MAX_OPEN:
            return
        for key, reference in list(_open_files.items()):
            other = reference()
            if other is None:
                del _open_files[key]
            elif other is not opened and other._lock.acquire(blocking=False):
                try:
                    if other._descriptor >= 0:
                        os.close(other._descriptor)
                        other._descriptor = -1
                    del _open_files[key]
                    return
                finally:
                    other._lock.release()


def named(path: str | os.PathLike[str]) -> Path:
    """The path, made absolute where it has no name to show in messages (``.``, ``..``)."""
    place = Path(path)
    return place if place.name not in ("", "..") else real_path(place)


def read_small(path: Path, limit: int, shown: str, too_long: str) -> bytes:
    """A whole file of at most ``limit`` bytes; ``too_long`` is the code reported for a longer one."""
    with closing(SourceFile(path, shown)) as opened:
        if opened.size > limit:
            raise error(too_long, shown, found=f"{opened.size} bytes", expected=f"at most {limit}")
        return opened.read(0, opened.size).tobytes()


def read_json(path: Path, limit: int, shown: str, code: str) -> bytes:
    """The text of a JSON file of at most ``limit`` bytes that has not too many values; ``code`` for another one."""
    raw = read_small(path, limit, shown, code)
    items = sum(map(raw.count, b",[{"))
    if items > limits.MAX_JSON_FILE_ITEMS:
        found, expected = f"{items} of the characters , [ {{", f"at most {limits.MAX_JSON_FILE_ITEMS}"
        raise error(code, shown, found=found, expected=expected)
    return raw


def hash_file(
    source: ByteSource,
    progress: Callable[[int], object] | None = None,
    each: Callable[[memoryview], object] | None = None,
) -> str:
    """SHA-256 of a whole file; ``progress`` gets the bytes done since the last call and may raise to stop.

    ``each`` gets the content, a piece at a time, to copy it.
    """
    state = hashlib.sha256()
    buffer = np.empty(min(_PIECE, source.size), np.uint8)
    for start in range(0, source.size, _PIECE):
        piece = buffer[: source.size - start]
        source.read_into(start, piece)
        state.update(piece.data)
        if each is not None:
            each(piece.data)
        if progress is not None:
            progress(piece.size)
    return state.hexdigest()


def cannot_list(fault: OSError) -> NoReturn:
    """``onerror`` of ``os.walk``, which would skip a folder that cannot be read."""
    raise error("BCQ-E102", str(fault.filename or ""), found=fault.strerror or str(fault)) from fault


def refuse_pipes(folder: Path) -> None:
    """BCQ-V508 for what is neither file nor folder, before another library opens it and waits for ever."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as fault:
        cannot_list(fault)
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error("BCQ-V508", path.name, found=_kind(path.stat().st_mode), expected="a regular file")


def inside(folder: Path, name: str) -> Path:
    """``folder/name``, refused when it is a link that leaves the folder (or, in a hub cache, the cache's blobs)."""
    path = folder / name
    root = os.path.realpath(folder)
    real = os.path.realpath(path)
    if Path(real).is_symlink():
        raise error("BCQ-V507", name, found="links that run in a circle")
    if real == root or real.startswith(root.rstrip(os.sep) + os.sep):
        return path
    parent = Path(root).parent
    if parent.name == "snapshots":
        entry = parent.parent  # huggingface_hub 2 shares blobs between repositories: entry/blobs/x -> cache/blobs/ab/x
        if real.startswith((str(entry / "blobs") + os.sep, str(entry.parent / "blobs") + os.sep)):
            return path
    raise error("BCQ-V507", name, found=f"resolves to a file outside {folder.name or folder}")


def unwritable(path: str) -> str:
    """Why a relative path is none that every file system can hold, empty if it is one."""
    parts = path.encode("utf-8", "surrogateescape").split(b"/")
    if len(parts) > _MOST_FOLDERS:
        return f"{len(parts)} folders deep"
    if max(map(len, parts)) > _LONGEST_NAME:
        return f"a name of {max(map(len, parts))} bytes"
    whole = sum(map(len, parts)) + len(parts) - 1
    return f"a path of {whole} bytes" if whole > _LONGEST_PATH else ""


def folded(path: str) -> str:
    """The same for paths that are one file on some file system: case and composition do not count."""
    return unicodedata.normalize("NFC", path).casefold()


def unfit(paths: Collection[str]) -> tuple[str, str, str, str] | None:
    """The first path that cannot be written, or not next to the others: it, '', what was found, what is expected."""
    spelled: dict[str, str] = {}
    for path in sorted(paths):
        if reason := unwritable(path):
            return path, "", reason, "a path that every file system can hold"
        for end in [at for at, character in enumerate(path) if character == "/"] + [len(path)]:
            part = path[:end]
            other = spelled.setdefault(folded(part), part)
            if other != part:
                return path, "", f"equal to '{escape(other)}' but for case or composition", "one of them"
            if end < len(path) and part in paths:
                return path, "", f"'{escape(part)}' is a file", "a folder"
    return None


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return name
    return "something else"
