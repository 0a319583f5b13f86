"""The folder in which a conversion grows: ``DST.partial``, locked, resumable, renamed when it is complete.

DST.partial/model-....safetensors        shards under their final names, each complete
DST.partial/.bcq_work/lock               held while a process works here; the kernel drops it when the process dies
DST.partial/.bcq_work/part-1-of-2.lock   the same for one part of several; then `lock` is shared
DST.partial/.bcq_work/plan.json          the plan
DST.partial/.bcq_work/source.json        sizes and times of the source files, so that a resumed run sees the same ones
DST.partial/.bcq_work/<name>.done.json   written after the thing it speaks of is safely on disk

The folder that DST lies in is locked as well, for the moments in which a run begins or DST gets its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import MANIFEST, WORK
from bcqfmt.container.durable import TEMPORARY, output_path, refuse_existing, reported, take_name, write_file
from bcqfmt.container.files import SourceFile, hash_file
from bcqfmt.container.strict_json import canonical
from bcqfmt.errors import BcqError, error
from bcqfmt.system import lock_file, require_locks

from .plan import Plan

_PATIENCE = 10.0  # seconds in which others that begin or end a run are done with that
_VISIBLE_AFTER = 10.0  # seconds after which a file that another machine has written is visible here


class Workspace:
    """The work folder of one conversion."""

    def __init__(self, target: Path, *, resume: bool, overwrite: bool, part: tuple[int, int] | None = None) -> None:
        require_locks()
        self.target = output_path(target)
        self.folder = partial_folder(target)
        self.work = self.folder / WORK
        self._part = part
        self._overwrite = overwrite
        self._resumed = False
        self._locks: list[int] = []
        self._known: dict[str, dict[str, Any]] = {}
        try:
            with reported(self.folder):
                self._enter(resume)
        except BcqError:
            self.release()
            raise

    def _enter(self, resume: bool) -> None:
        """Look at what is there, and lock the folder."""
        target, part, overwrite = self.target, self._part, self._overwrite
        target.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(target):
            refuse_existing(target, overwrite=overwrite, like=MANIFEST)
            self._look(resume or overwrite)
            self._resumed = resume and self.folder.exists()
            self.work.mkdir(parents=True, exist_ok=True)
            self._take_lock("lock", shared=part is not None)
        if part is not None:
            self._take_lock(f"part-{part[0]}-of-{part[1]}.lock")
        if overwrite and not resume:
            self._clear()

    def begin(self, plan: Plan, source: dict[str, Any]) -> bool:
        """Write the plan, or check that the unfinished conversion has the same one.

        ``source``: sizes and times of the source files. True when everything is done but the last rename.
        """
        with reported(self.folder):
            return self._begin(plan, source)

    def _begin(self, plan: Plan, source: dict[str, Any]) -> bool:
        text = canonical({**plan.as_json(), "digest": plan.digest}).encode("ascii") + b"\n"
        path, state = self.work / "plan.json", self.work / "source.json"
        if not path.exists():
            if self._part is None:  # left over from a run that was removing it
                self._clear()
            write_file(path, text)
        elif path.read_bytes() != text:
            raise error(
                "BCQ-E401",
                str(self.folder),
                found="an unfinished conversion of another source, or with other options",
                expected="the same plan",
                hint=self._start_anew,
            )
        if self._part is not None:  # parts may run at the same time, on machines with copies of the source
            return self.finished
        stated = canonical(source).encode("ascii") + b"\n"
        if state.exists() and state.read_bytes() != stated:
            found = "the source files were written to since this conversion began"
            raise error("BCQ-E103", str(self.folder), found=found, expected="the same files", hint=self._start_anew)
        write_file(state, stated)
        if self.finished:
            return True
        self._sweep()
        return False

    @property
    def _start_anew(self) -> str:
        if self._part is not None:
            return f"give every part the same options, or remove {self.folder.name} and start anew"
        return "start anew: --overwrite without --resume"

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock with processes that lock a part each; exclusive at the end, their temporary files removed."""
        lock_file(self._locks[0], shared=True, wait=True)
        yield
        try:
            lock_file(self._locks[0])
        except OSError as fault:
            raise error("BCQ-E403", str(self.folder), found="a task taken for lost is still at work") from fault
        self._sweep()

    def adopt(self, name: str, plan: Plan) -> dict[str, Any]:
        """The record of a shard that a task of this run has done; its digest was taken while it was written."""
        end = time.monotonic() + _VISIBLE_AFTER
        while True:
            record = self._record(name, plan)
            path = self.folder / name
            if record is not None and path.exists() and path.stat().st_size == record["size"]:
                self._known[name] = record
                return record
            if time.monotonic() > end:
                raise error("BCQ-E404", str(path), found="a task says it is done; there is no record of it here")
            time.sleep(0.1)

    @property
    def finished(self) -> bool:
        """Whether only the last rename is missing."""
        return (self.folder / MANIFEST).exists()

    def done(self, name: str, plan: Plan) -> dict[str, Any] | None:
        """The record of a step that is complete, None when it has to be done (again)."""
        if name in self._known:  # done or verified by this process
            return self._known[name]
        record = self._record(name, plan)
        if record is None:
            return None
        with reported(self.folder):
            if "file" in record and not self._intact(record):
                return None
        self._known[name] = record
        return record

    def finish(self, name: str, plan: Plan, record: dict[str, Any]) -> dict[str, Any]:
        """Remember that a step is complete."""
        full = {**record, "plan": plan.digest}
        write_file(self.work / f"{name}.done.json", canonical(full).encode("ascii") + b"\n")
        self._known[name] = full
        return full

    def publish(self) -> None:
        """Give the complete folder its name."""
        try:
            with reported(self.target), one_at_a_time(self.target):
                shutil.rmtree(self.work)  # and with it the lock
                take_name(self.folder, self.target, overwrite=self._overwrite, like=MANIFEST)
        finally:
            self.release()

    def release(self) -> None:
        """Let another process work here."""
        while self._locks:
            os.close(self._locks.pop())

    def discard_if_empty(self) -> None:
        """After a refusal before any shard was done: leave nothing behind, or the unfinished run as it was."""
        if self._locks and self._part is None and not self._resumed:
            with contextlib.suppress(OSError), one_at_a_time(self.target):  # what cannot be looked at is left there
                if {path.name for path in self.folder.iterdir()} <= {WORK}:
                    kept = {path.name for path in self.work.iterdir()}
                    if all(name == "plan.json" or name.startswith("source") or name.endswith("lock") for name in kept):
                        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def _look(self, allowed: bool) -> None:
        """Refuse a folder under the temporary name that is not an unfinished conversion, or must not be changed."""
        if not os.path.lexists(self.folder):
            return
        folder = self.folder.is_dir() and not self.folder.is_symlink()
        names = {path.name for path in self.folder.iterdir()} if folder else set()
        if not folder or (names and not names & {WORK, MANIFEST}):
            hint = "move it away, or choose another name for the output"  # which --overwrite would not replace
            raise error("BCQ-E401", str(self.folder), found="something that is no unfinished conversion", hint=hint)
        if not allowed:
            with contextlib.suppress(FileNotFoundError):  # BCQ-E403 when it is being worked on right now
                self._take_lock("lock", create=False)
                self.release()
            expected = "--resume to go on with it, if source and options are the same, or --overwrite to start anew"
            hint = "repeat the command with one of them"
            raise error("BCQ-E401", str(self.folder), found="an unfinished conversion", expected=expected, hint=hint)

    def _take_lock(self, name: str, *, shared: bool = False, create: bool = True) -> None:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            self._locks.append(os.open(self.work / name, flags, 0o666))
            lock_file(self._locks[-1], shared=shared)
            # the process that held it may have finished and removed the folder: then this lock protects nothing
            held = os.path.samestat(os.fstat(self._locks[-1]), (self.work / name).stat())
        except FileNotFoundError:
            if not create:
                raise
            held = False
        except BlockingIOError:
            held = False
        if not held:
            self.release()
            raise error("BCQ-E403", str(self.folder), found="another process is working on it")

    def _record(self, name: str, plan: Plan) -> dict[str, Any] | None:
        """What is written down about a step of this plan."""
        try:
            record = json.loads((self.work / f"{name}.done.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and record.get("plan") == plan.digest else None

    def _sweep(self) -> None:
        """Remove the temporary files of processes that were killed; sources have files and folders named likewise."""
        for stray in self.folder.rglob(".*.tmp"):
            if TEMPORARY.fullmatch(stray.name) and stray.is_file():
                stray.unlink()

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path != self.work:
                _remove(path)
        for path in self.work.iterdir():
            if not path.name.endswith("lock"):
                _remove(path)

    def _intact(self, record: dict[str, Any]) -> bool:
        path = self.folder / record["file"]
        if not path.exists() or path.stat().st_size != record["size"]:
            return False
        with contextlib.closing(SourceFile(path)) as source:
            return hash_file(source) == str(record["sha256"])


@contextlib.contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """No other process of this machine begins or ends a run whose output lies in the same folder as ``target``.

    Who locks that folder for longer is another program (``flock FOLDER bcqfmt ...``): after ``_PATIENCE`` we go on.
    """
    descriptor = os.open(target.parent, os.O_RDONLY)
    end = time.monotonic() + _PATIENCE
    try:
        while True:
            try:
                lock_file(descriptor)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
            except OSError:  # a file system that locks no folders
                break
        yield
    finally:
        os.close(descriptor)


def partial_folder(target: Path) -> Path:
    """Where the conversion into ``target`` grows."""
    place = output_path(target)
    return place.with_name(place.name + ".partial")


def read_plan(target: Path) -> dict[str, Any]:
    """The plan of the unfinished conversion into ``target``, as data."""
    path = partial_folder(target) / WORK / "plan.json"
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        closed = (target / MANIFEST).exists()
        found = f"no unfinished conversion{': it is closed already' if closed else f' ({path} is not there)'}"
        hint = "prove it: bcqfmt verify SRC DST" if closed else None
        raise error("BCQ-E404", str(target), found=found, hint=hint) from None
    except (OSError, ValueError) as fault:
        raise error("BCQ-E404", str(target), found=f"{path} cannot be read: {fault}") from fault
    return plan


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
