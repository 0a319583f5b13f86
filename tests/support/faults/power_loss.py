"""Power loss: every operation on a folder is recorded, and disks are made on which only what was synced is left.

The model is the one that POSIX allows, not the kinder one of a particular file system: the content of a file is
safe once the file was synced, its name once the folder that holds it was synced, and nothing else is ever promised.
What was not synced may be lost, may be there, or may be there as a name without content.
"""

# ruff: noqa: PTH100, PTH115, PTH118 - the os layer itself
from __future__ import annotations

import builtins
import contextlib
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entries = dict[str, "Node"]
Pending = Callable[[Entries], None]


@dataclass(eq=False)
class Node:
    """A file (``content`` now, ``safe`` as last synced) or a folder (``entries``, ``safe_entries``, the way there)."""

    folder: bool
    content: bytearray = field(default_factory=bytearray)
    safe: bytes | None = None
    entries: Entries = field(default_factory=dict)
    safe_entries: Entries = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)

    def change(self, operation: Pending) -> None:
        """One change of a folder's names."""
        operation(self.entries)
        self.pending.append(operation)

    def sync(self) -> None:
        """What is here now is safe."""
        self.safe = bytes(self.content)
        self.safe_entries = dict(self.entries)
        self.pending = []


# What happened, as (name, path or descriptor's path, more); replayed onto a fresh tree of nodes.
Operation = tuple[str, str, Any]


class Recorder:
    """Records what is done below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.log: list[Operation] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """In force inside the block."""
        saved = {name: getattr(os, name) for name in _OPERATIONS}
        plain = io.open
        for name, real in saved.items():
            setattr(os, name, self._recorded(name, real))
        io.open = builtins.open = self._read_only(plain)  # type: ignore[assignment]
        try:
            yield self
        finally:
            io.open = builtins.open = plain  # type: ignore[assignment]
            for name, real in saved.items():
                setattr(os, name, real)

    def _recorded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:  # the order of the log is the order on the disk
                where = self._place(args[0], options.get("dir_fd"))
                result = real(*args, **options)
                if where is not None:
                    self._note(name, where, args, options, result)
                return result

        return call

    def _note(self, name: str, where: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        if name == "open":
            if args[1] & os.O_CREAT and not args[1] & os.O_EXCL:
                self.log.append(("touch", where, None))
            elif args[1] & os.O_CREAT:
                self.log.append(("create", where, None))
        elif name == "write":
            at = os.lseek(args[0], 0, os.SEEK_CUR) - result
            self.log.append(("write", where, (at, bytes(memoryview(args[1])[:result]))))
        elif name == "posix_fallocate":
            self.log.append(("size", where, args[1] + args[2]))
        elif name in ("fsync", "fdatasync"):
            self.log.append(("sync", where, None))
        elif name in ("rename", "replace"):
            there = self._place(args[1], options.get("dst_dir_fd"))
            assert there is not None
            self.log.append(("rename", where, there))
        else:
            self.log.append((name, where, None))

    def _place(self, path: Any, dir_fd: int | None) -> str | None:
        """The path below the root, None where it lies elsewhere."""
        if isinstance(path, int):
            place = os.readlink(f"/proc/self/fd/{path}")
        else:
            base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            place = os.path.abspath(os.path.join(base, os.fsdecode(os.fspath(path))))
        if place == self.root:
            return ""
        return place[len(self.root) + 1 :] if place.startswith(self.root + os.sep) else None

    def _read_only(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            writing = not isinstance(file, int) and set(mode) & set("wax+") and self._place(file, None) is not None
            assert not writing, f"{file} is written to without the layer that makes files durable"
            return real(file, mode, *args, **options)

        return call


_OPERATIONS = (
    "open",
    "write",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
)


class Disk:
    """The tree that a log makes, and what a power loss may leave of it."""

    def __init__(self, start: Path | None = None) -> None:
        """``start``: what lies there, safely, before the log begins."""
        self.root = Node(True)
        if start is not None:
            self._load(start, self.root)
        self.root.sync()

    def apply(self, operation: Operation) -> None:
        """One operation, as the program sees it."""
        name, path, more = operation
        if name == "sync":
            self._node(path).sync()
            return
        if name in ("write", "size"):
            self._fill(self._node(path).content, more if name == "write" else (more, b""))
            return
        folder, last = self._parent(path)
        if name == "touch" and last in folder.entries:
            return
        if name in ("create", "touch", "mkdir"):
            node = Node(name == "mkdir")
            folder.change(lambda entries: entries.__setitem__(last, node))
        elif name in ("unlink", "rmdir"):
            folder.change(lambda entries: entries.__delitem__(last))
        elif name == "rename":
            other, new = self._parent(more)
            node = folder.entries[last]
            assert other is folder, "a rename from folder to folder has no order that could be relied on"

            def move(entries: Entries) -> None:
                entries.pop(last, None)
                entries[new] = node

            folder.change(move)
        else:
            raise AssertionError(name)

    def leave(self, place: Path, how: str, rng: random.Random) -> None:
        """Write into ``place`` what is left. ``how``: see HOW."""
        self._write(self.root, place, how, rng)

    def _write(self, node: Node, place: Path, how: str, rng: random.Random) -> None:
        place.mkdir(exist_ok=True)
        for name, inner in _names(node, how, rng).items():
            if inner.folder:
                self._write(inner, place / name, how, rng)
            else:
                (place / name).write_bytes(_content(inner, how, rng))

    def _load(self, place: Path, node: Node) -> None:
        for path in place.iterdir():
            inner = Node(path.is_dir(), bytearray() if path.is_dir() else bytearray(path.read_bytes()))
            if path.is_dir():
                self._load(path, inner)
            inner.sync()
            node.entries[path.name] = inner

    def _node(self, path: str) -> Node:
        node = self.root
        for part in path.split("/") if path else ():
            node = node.entries[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        folder, _, last = path.rpartition("/")
        return self._node(folder), last

    @staticmethod
    def _fill(content: bytearray, more: tuple[int, bytes]) -> None:
        at, data = more
        content.extend(bytes(max(0, at + len(data) - len(content))))
        content[at : at + len(data)] = data


# What a power loss may leave of what was not synced.
HOW = {
    "nothing": "neither names nor contents",
    "names": "the names, without the contents: files are empty",
    "zeros": "the names and lengths, the contents all zero",
    "some": "any beginning of the changes of every folder, any of the contents",
    "all": "everything, as after a kill",
}


def _names(node: Node, how: str, rng: random.Random) -> Entries:
    if how == "nothing":
        return node.safe_entries
    if how != "some":
        return node.entries
    entries = dict(node.safe_entries)
    for operation in node.pending[: rng.randrange(len(node.pending) + 1)]:
        with contextlib.suppress(KeyError):
            operation(entries)
    return entries


def _content(node: Node, how: str, rng: random.Random) -> bytes:
    if how == "all" or (how == "some" and rng.random() < 0.5):
        return bytes(node.content)
    if how == "zeros" and node.safe is None:
        return bytes(len(node.content))
    return node.safe or b""
