"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bcqfmt.errors import BcqError, error, escape
from bcqfmt.system import BINARY, absolute_path, real_path, reserve, sync_data, sync_file, sync_folder

if TYPE_CHECKING:
    import hashlib


TEMPORARY: Final = re.compile(r"\.[0-9a-f]{16}\.tmp")  # names of files that are being written
_SYNC_EVERY = 1 << 24  # bytes
_PIECE = 1 << 19  # bytes hashed, then written while they are in the cache
_WRITE = 1 << 17  # bytes of a call: for more, Linux allocates large pages that are in no cache, at twice the cost


class OutputFile:
    """A file that is written to the path ``temporary``, created with the mode that the umask allows.

    In a ``with`` block it gets its name at the end, or is removed when something was raised.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        self.temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # no longer than any name may be
        self._descriptor = -1
        self._unsynced = 0
        self._syncer: ThreadPoolExecutor | None = None
        self._syncs: list[Future[None]] = []
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY
            self._descriptor = os.open(self.temporary, flags, 0o666)
            if size:
                reserve(self._descriptor, size)
        except OSError as fault:
            self.discard()
            raise _failed(path, fault, size or 0) from fault

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | memoryview, digest: hashlib._Hash | None = None) -> None:
        """All of ``data``, however many calls it takes; ``digest`` is updated with it, a piece at a time."""
        view = memoryview(data)
        with reported(self.path):
            while view:
                piece, view = view[:_PIECE], view[_PIECE:]
                if digest is not None:
                    digest.update(piece)
                while piece:
                    done = os.write(self._descriptor, piece[:_WRITE])
                    piece = piece[done:]
                    self._unsynced += done
            self._sync_behind()

    def _sync_behind(self) -> None:
        """Sync a large file while it grows, in a thread: otherwise the last fsync writes all of it."""
        if self._unsynced < _SYNC_EVERY:
            return
        self._unsynced = 0
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1)
        for job in [job for job in self._syncs if job.done()]:
            self._syncs.remove(job)
            job.result()
        if not self._syncs:
            self._syncs.append(self._syncer.submit(sync_data, self._descriptor))

    def _stop_syncing(self) -> None:
        """No thread uses the descriptor after this."""
        if self._syncer is not None:
            self._syncer.shutdown()
            self._syncer = None

    def commit(self) -> None:
        """Make it durable and give it its name."""
        self._stop_syncing()
        with reported(self.path):
            for job in self._syncs:
                job.result()
            sync_file(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            os.replace(self.temporary, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        self._stop_syncing()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


def write_file(path: Path, data: bytes) -> None:
    """A small file, whole or not at all."""
    with OutputFile(path) as output:
        output.write(data)


def make_folders(folder: Path) -> None:
    """Create a folder and its parents; each one is on disk before anything is put into it."""
    missing = []
    try:
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another thread was first
                os.mkdir(place)
            sync_folder(place.parent)
    except OSError as fault:
        raise _failed(missing[0] if missing else folder, fault) from fault


@contextlib.contextmanager
def folder_in_progress(target: Path, *, overwrite: bool, like: str) -> Iterator[Path]:
    """A new folder next to ``target``: renamed to it when the block ends, removed when the block raises.

    ``like``: what a folder must hold to be replaced, see :func:`refuse_other_things`.
    """
    target = output_path(target)
    refuse_file_above(target)
    refuse_existing(target, overwrite=overwrite, like=like)
    work = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    try:
        with reported(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.mkdir(work)
        yield work
        take_name(work, target, overwrite=overwrite, like=like)
    except BaseException:
        _remove(work)
        raise


def _remove(folder: Path) -> None:
    """A folder with all that it holds; again while a thread that has not seen the interrupt yet puts a file into it."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            break
        time.sleep(0.05)


def output_path(path: str | Path) -> Path:
    """An output path made absolute; the root and the working folder are refused, as they cannot be replaced."""
    place = absolute_path(path)
    if os.pardir in Path(path).parts and not Path(path).parent.is_dir():
        hint = "name the new folder without '..', or make the folders before it"
        found, expected = "no such folder before '..'", "folders that are there"
        raise error("BCQ-E402", str(path), found=found, expected=expected, hint=hint)
    if not str(path) or not place.name or place == Path.cwd():
        found, hint = "a folder that cannot be replaced", "choose the name of a new folder"
        raise error("BCQ-E402", str(path), found=found, expected="the path of a new one", hint=hint)
    return place


def refuse_overlap(target: Path, folder: Path, what: str, hint: str = "choose another place") -> None:
    """BCQ-E402 when writing ``target`` would touch ``folder``: the same one, or one inside the other.

    ``folder`` may be a file; ``what``: it in words.
    """
    there, here = real_path(target), real_path(folder)
    if _same(there, here):
        where = "is"
    elif any(_same(parent, here) for parent in there.parents):
        where = "lies inside"
    elif any(_same(parent, there) for parent in here.parents):
        where = "holds"
    else:
        return
    raise error("BCQ-E402", str(target), found=f"it {where} {what}", expected="a place elsewhere", hint=hint)


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file or folder, also where a file system takes two spellings for one name."""
    with contextlib.suppress(OSError):
        return one == other or one.samefile(other)
    return False


def refuse_file_above(target: Path) -> None:
    """BCQ-E402 for an output of which a folder on the way is a file."""
    above = next((parent for parent in target.parents if os.path.lexists(parent)), None)
    if above is not None and not above.is_dir():
        raise error("BCQ-E402", str(target), found=f"{escape(str(above))} is no folder", hint="choose another place")


def check_name(path: Path) -> None:
    """BCQ-E402 for a name that the file system cannot hold, before anything is made under it."""
    with reported(path), contextlib.suppress(FileNotFoundError):
        path.lstat()


def refuse_existing(target: Path, *, overwrite: bool, like: str, hint: str | None = None) -> None:
    """BCQ-E401 for an output that is there already, unless it is an empty folder or may be replaced.

    With ``overwrite`` a folder may that has a file which matches ``like``, see :func:`refuse_other_things`.
    """
    refuse_other_things(target, like)
    if os.path.lexists(target) and not overwrite and not _empty_folder(target):
        found, expected = "it is there already", "a new or an empty folder"
        raise error("BCQ-E401", str(target), found=found, expected=expected, hint=hint)


def refuse_existing_file(target: Path, *, overwrite: bool) -> None:
    """BCQ-E401 for an output file that is there already, unless it may be replaced; a folder never may."""
    if os.path.lexists(target) and not target.is_file():
        found = "it is a folder" if target.is_dir() else "it is there already and no file"
        raise error("BCQ-E401", str(target), found=found, expected="a new file", hint="choose another name")
    if os.path.lexists(target) and not overwrite:
        raise error("BCQ-E401", str(target), found="it is there already", expected="a new file")


def refuse_other_things(target: Path, like: str) -> None:
    """BCQ-E401 unless ``target`` is free, or a folder with a file that matches ``like``, which may be replaced.

    A configuration alone tells nothing, and a working copy under version control is more than a checkpoint.
    """
    if not os.path.lexists(target) or _empty_folder(target):
        return
    names = {path.name for path in target.iterdir()} if target.is_dir() and not target.is_symlink() else set()
    if fnmatch.filter(names, like) and ".git" not in names:
        if not os.access(target, os.W_OK | os.X_OK):  # it could get another name, but not be removed
            hint = f"choose another name, or: chmod u+w {shlex.quote(str(target))}"
            raise error("BCQ-E401", str(target), found="it is read-only", expected="a folder to replace", hint=hint)
        return
    if target.is_symlink() or not target.is_dir():
        found = f"no checkpoint: it is a {'symbolic link' if target.is_symlink() else 'file'}"
    else:
        found = f"no checkpoint: it has {'a .git' if '.git' in names else f'no {like}'}"
    hint = "choose another name, or remove it yourself if it is not needed"
    raise error("BCQ-E401", str(target), found=found, expected="a checkpoint to replace, or nothing", hint=hint)


def take_name(work: Path, target: Path, *, overwrite: bool, like: str) -> None:
    """Give the complete folder ``work`` its name, and the mode of the folder that it replaces, which is removed then.

    BCQ-E401 if the name was taken since :func:`refuse_existing`.
    """
    with reported(target):
        sync_folder(work)
        refuse_other_things(target, like)
        if target.is_dir():  # an empty one too: who made it private keeps it so
            os.chmod(work, stat.S_IMODE(target.stat().st_mode))
        old: Path | None = None
        if overwrite and os.path.lexists(target) and not _empty_folder(target):
            old = _free_name(target, like)
            os.rename(target, old)
        try:
            _rename_folder(work, target)
        except BaseException:
            if old is not None and not os.path.lexists(target):
                os.rename(old, target)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _rename_folder(work: Path, target: Path) -> None:
    """A name that another process has taken is left to it, whatever was checked before."""
    try:
        os.rename(work, target)
    except OSError as fault:
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(target):
            raise error("BCQ-E401", str(target), found="it appeared meanwhile", expected="a free name") from fault
        raise
    try:
        sync_folder(target.parent)
    except OSError:
        os.rename(target, work)
        raise


def _free_name(target: Path, like: str) -> Path:
    """Where the folder that is replaced goes. What an interrupted run left there is removed, nothing else."""
    old = target.with_name(f".{target.name}.old")
    with contextlib.suppress(BcqError):
        refuse_other_things(old, like)
        shutil.rmtree(old, ignore_errors=True)
    return old.with_name(f".{target.name}.{secrets.token_hex(6)}.old") if os.path.lexists(old) else old


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """BCQ-E402 for what the operating system refuses while ``path`` is written."""
    try:
        yield
    except OSError as fault:
        raise _failed(path, fault) from fault


def _empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _failed(path: Path, fault: OSError, needed: int = 0) -> BcqError:
    found, hint = fault.strerror or str(fault), None
    if fault.errno == errno.ENAMETOOLONG:
        found, hint = "the name is too long", "choose a shorter one"
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            found += f"; {shutil.disk_usage(path.parent).free} bytes are free"
        found += f", {needed} are needed" if needed else ""
    return error("BCQ-E402", str(path), found=found, hint=hint)
