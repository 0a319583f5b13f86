"""Faults of the operating system, injected where Python calls it: at the n-th call that touches given folders.

Calls elsewhere (compiled caches, temporary files of libraries) are neither counted nor disturbed.
"""

# ruff: noqa: PTH100, PTH115, PTH118 - the os layer itself
from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

READS = ("open_read", "read", "fstat", "list")
WRITES = ("create", "write", "fallocate", "fsync", "fdatasync", "rename", "mkdir", "unlink", "rmdir")

# os function -> what it is called here; `open` and `io.open` are told apart by their flags
_BY_DESCRIPTOR = {
    "write": "write",
    "preadv": "read",
    "fsync": "fsync",
    "fdatasync": "fdatasync",
    "posix_fallocate": "fallocate",
    "fstat": "fstat",
}
_BY_PATH = {
    "replace": "rename",
    "rename": "rename",
    "mkdir": "mkdir",
    "unlink": "unlink",
    "rmdir": "rmdir",
    "scandir": "list",
    "listdir": "list",
}

Action = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def raises(number: int) -> Action:
    """The call fails with this errno."""

    def act(kind: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        raise OSError(number, os.strerror(number))

    return act


def short(kind: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A read or a write does one byte less than asked for, or a third; other calls are as always."""
    if kind == "write":
        data = memoryview(args[1])
        return real(args[0], data[: max(1, len(data) // 3)])
    if kind == "read":
        (buffer,) = args[1]
        view = memoryview(buffer)
        return real(args[0], [view[: max(1, len(view) // 3)]], *args[2:])
    return real(*args, **options)


class OsFaults:
    """Counts calls of some kinds below ``roots``; ``action`` takes the place of the ``at``-th, or of all (``at=0``)."""

    def __init__(
        self, roots: tuple[Path, ...], kinds: tuple[str, ...], at: int = -1, action: Action | None = None
    ) -> None:
        self.roots = tuple(os.path.realpath(root) for root in roots)
        self.kinds, self.at, self.action = kinds, at, action
        self.calls = 0
        self.hit = ""
        self._lock = threading.Lock()
        self._acting = threading.local()  # what an action does itself is not watched

    def call(self, kind: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One call of the kind: counted, and disturbed when it is its turn."""
        if kind not in self.kinds:
            return real(*args, **options)
        with self._lock:
            self.calls += 1
            turn = self.action is not None and self.at in (0, self.calls)
        if not turn:
            return real(*args, **options)
        self.hit = kind
        assert self.action is not None
        self._acting.now = True
        try:
            return self.action(kind, real, args, options)
        finally:
            self._acting.now = False

    def below(self, path: Any, dir_fd: int | None = None) -> bool:
        """Whether a path, or an open descriptor, lies in a watched folder."""
        if getattr(self._acting, "now", False):
            return False
        if isinstance(path, int):
            try:
                place = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        else:
            place = os.path.abspath(os.fsdecode(os.fspath(path))) if dir_fd is None else os.fsdecode(os.fspath(path))
            if dir_fd is not None:
                place = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), place)
        return any(place == root or place.startswith(root + os.sep) for root in self.roots)

    @contextlib.contextmanager
    def installed(self) -> Iterator[OsFaults]:
        """In force inside the block."""
        saved: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, made: Any) -> None:
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, made)

        for name, kind in _BY_DESCRIPTOR.items():
            patch(os, name, self._wrapped(getattr(os, name), kind))
        for name, kind in _BY_PATH.items():
            patch(os, name, self._wrapped(getattr(os, name), kind))
        patch(os, "open", self._opening(os.open))
        patch(io, "open", self._reading(io.open))
        patch(builtins, "open", self._reading(builtins.open))
        try:
            yield self
        finally:
            for owner, name, real in reversed(saved):
                setattr(owner, name, real)

    def _wrapped(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            target = args[0] if args else "."
            dir_fd = options.get("dir_fd", options.get("src_dir_fd"))
            if not self.below(target, dir_fd):
                return real(*args, **options)
            return self.call(kind, real, args, options)

        return call

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *args: Any, **options: Any) -> Any:
            if not self.below(path, options.get("dir_fd")):
                return real(path, flags, *args, **options)
            return self.call("create" if flags & os.O_CREAT else "open_read", real, (path, flags, *args), options)

        return call

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not self.below(file):
                return real(file, mode, *args, **options)
            assert not set(mode) & set("wax+"), f"{file} is written to without the layer that makes files durable"
            return self.call("open_read", real, (file, mode, *args), options)

        return call


def count(roots: tuple[Path, ...], kinds: tuple[str, ...], action: Callable[[], object]) -> int:
    """How many calls of these kinds ``action`` makes below ``roots``."""
    faults = OsFaults(roots, kinds)
    with faults.installed():
        action()
    return faults.calls


# name -> (kinds of calls it can befall, what happens)
FAULTS: dict[str, tuple[tuple[str, ...], Action]] = {
    "EIO while reading": (READS, raises(errno.EIO)),
    "EIO while writing": (WRITES, raises(errno.EIO)),
    "ENOSPC": (("create", "write", "fallocate", "fsync", "fdatasync", "rename", "mkdir"), raises(errno.ENOSPC)),
    "EDQUOT": (("create", "write", "fallocate", "fsync", "mkdir"), raises(errno.EDQUOT)),
    "EROFS": (("create", "rename", "mkdir", "unlink", "rmdir"), raises(errno.EROFS)),
    "EINTR": (("open_read", "read", "create", "write", "fsync", "fdatasync", "fallocate"), raises(errno.EINTR)),
    "EMFILE": (("open_read", "create"), raises(errno.EMFILE)),
    "failing fsync": (("fsync", "fdatasync"), raises(errno.EIO)),
    "short read": (("read",), short),
    "short write": (("write",), short),
}
