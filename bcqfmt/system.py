"""What operating systems do differently: reading by position, syncing, locks, cores, memory, forks.

Linux has all of it. macOS lacks fdatasync, posix_fallocate and sched_getaffinity, and its fsync leaves data in the
drive's cache. Windows has neither positioned reads nor the file locks of resumable jobs: those jobs are refused there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import error

BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends
_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _resource = _optional("fcntl"), _optional("resource")


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into ``view`` from ``offset``; the number of bytes read, 0 at the end of the file.

    Without positioned reads the file position moves: one thread at a time.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if hasattr(os, "pread"):
        data = os.pread(descriptor, len(view), offset)
    else:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def sync_data(descriptor: int) -> None:
    """Send what was written to the disk, without metadata such as times."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_file(descriptor: int) -> None:
    """Return when the file is on the disk; on macOS that takes F_FULLFSYNC, which some file systems do not know."""
    full = getattr(_fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            _fcntl.fcntl(descriptor, full)
        except OSError:
            pass
        else:
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """A rename lasts only once its folder is on disk. Windows cannot open folders; its file system logs renames."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Allocate the disk space now, where that is possible: a full disk shows before the work, not after hours."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def require_locks() -> None:
    """BCQ-E307 on a system without file locks; jobs call it before they create anything."""
    if _fcntl is None:
        expected = "Linux or macOS for jobs that can be resumed: convert, quantize, calibrate"
        raise error("BCQ-E307", found=f"no file locks on {sys.platform}", expected=expected)


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """The path made absolute, links as they are named. ``..`` leads where the file system says, behind a link too."""
    if os.pardir not in Path(path).parts:
        return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    parent, name = os.path.split(os.fspath(path).rstrip(os.sep))
    return real_path(path) if name in (os.pardir, os.curdir) else real_path(parent) / name


def real_path(path: str | os.PathLike[str]) -> Path:
    """The path without links; unlike ``Path.resolve`` it takes links that run in a circle."""
    return Path(os.path.realpath(path))


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file against other processes, until it is closed or the process ends.

    BlockingIOError when another one holds it and ``wait`` is not set. A lock that is held already changes its kind.
    """
    require_locks()
    _fcntl.flock(descriptor, (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | (0 if wait else _fcntl.LOCK_NB))


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int | None:
    """Most bytes of memory that this process has held so far; None where the system does not tell."""
    with contextlib.suppress(OSError):  # of this process alone: on Linux a child begins with its parent's ru_maxrss
        found = re.search(rb"VmHWM:\s*(\d+) kB", _STATUS.read_bytes())
        if found is not None:
            return int(found[1]) * 1024
    if _resource is None:
        return None
    peak: int = _resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def return_large_blocks(size: int = 1 << 20) -> None:
    """From now on give blocks of ``size`` bytes and more back to the system when they are freed.

    glibc would keep blocks of whole weights, per thread.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # ms: torch's on ARM gives all back between two uses
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to set
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, size)
        library.mallopt(_M_TRIM_THRESHOLD, 8 * size)  # of smaller ones


def return_freed_memory() -> None:
    """Give freed blocks of any size back to the system now: glibc keeps those below the size set above."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def after_fork(function: Callable[[], None]) -> None:
    """Call ``function`` in every child that is forked from now on; nothing to do where there is no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


class ForkLock:
    """A reentrant lock that is free in a forked child, where no thread is left that would release it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _fork_locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_fork_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _free_locks() -> None:
    for lock in _fork_locks:
        lock._lock = threading.RLock()


after_fork(_free_locks)
