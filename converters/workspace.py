"""The folder in which a conversion grows: ``DST.partial``, locked, resumable, renamed when it is complete.

DST.partial/model-....safetensors        shards under their final names, each complete
DST.partial/.bcq_work/lock               held while a process works here; the kernel drops it when the process dies
DST.partial/.bcq_work/plan.json          the plan
DST.partial/.bcq_work/<name>.done.json   written after the thing it speaks of is safely on disk
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from bcqfmt.converters.plan import Plan
from bcqfmt.durable import sync_folder, write_file
from bcqfmt.errors import error
from bcqfmt.files import SourceFile
from bcqfmt.folder import MANIFEST
from bcqfmt.hashing import hash_file
from bcqfmt.strict_json import canonical

__all__ = ["Workspace"]

WORK = ".bcq_work"


class Workspace:
    """One conversion's place on disk."""

    def __init__(self, target: Path, *, resume: bool, overwrite: bool) -> None:
        self.target = target
        self.folder = target.with_name(target.name + ".partial")
        self.work = self.folder / WORK
        self._overwrite = overwrite
        self._lock = -1
        if os.path.lexists(target) and not overwrite and (not target.is_dir() or any(target.iterdir())):
            raise error("BCQ-E401", str(target), found="it is there already", expected="a new folder, or --overwrite")
        if self.folder.exists() and not resume and not overwrite:
            raise error(
                "BCQ-E401",
                str(self.folder),
                found="an unfinished conversion",
                expected="--resume to go on with it, or --overwrite to start anew",
                hint=f"bcqfmt convert ... {target.name} --resume",
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise error("BCQ-E402", str(self.folder), found=fault.strerror or str(fault)) from fault
        self._take_lock()
        if overwrite and not resume:
            self._clear()

    def begin(self, plan: Plan) -> None:
        """Write the plan, or check that the unfinished conversion has the very same one."""
        text = canonical({**plan.as_json(), "digest": plan.digest}).encode("ascii") + b"\n"
        path = self.work / "plan.json"
        if path.exists():
            if path.read_bytes() != text:
                raise error(
                    "BCQ-E401",
                    str(self.folder),
                    found="an unfinished conversion of another source, or with other options",
                    expected="the same plan",
                    hint="start anew with --overwrite",
                )
        else:
            write_file(path, text)
        for stray in self.folder.glob(".*.tmp"):
            stray.unlink()

    @property
    def finished(self) -> bool:
        """Whether only the last rename is missing."""
        return (self.folder / MANIFEST).exists()

    def done(self, name: str, plan: Plan) -> dict[str, Any] | None:
        """The record of a step that is complete, None when it has to be done (again)."""
        path = self.work / f"{name}.done.json"
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        if record.get("plan") != plan.digest:
            return None
        if "file" in record and not self._intact(record):
            return None
        found: dict[str, Any] = record
        return found

    def finish(self, name: str, plan: Plan, record: dict[str, Any]) -> dict[str, Any]:
        """Remember that a step is complete."""
        full = {**record, "plan": plan.digest}
        write_file(self.work / f"{name}.done.json", canonical(full).encode("ascii") + b"\n")
        return full

    def publish(self) -> None:
        """Give the complete folder its name."""
        try:
            shutil.rmtree(self.work)
            sync_folder(self.folder)
            old: Path | None = None
            if os.path.lexists(self.target):
                if not self._overwrite and any(self.target.iterdir()):
                    raise error("BCQ-E401", str(self.target), found="it appeared meanwhile")
                old = self.target.with_name(f".{self.target.name}.old")
                self.target.rename(old)
            self.folder.rename(self.target)
            sync_folder(self.target.parent)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as fault:
            raise error("BCQ-E402", str(self.target), found=fault.strerror or str(fault)) from fault
        finally:
            self.release()

    def release(self) -> None:
        """Let another process work here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard_if_empty(self) -> None:
        """After a refusal before any work: leave nothing behind."""
        self.release()
        if self.folder.exists() and {path.name for path in self.folder.iterdir()} <= {WORK}:
            kept = {path.name for path in self.work.iterdir()} if self.work.exists() else set()
            if kept <= {"lock", "plan.json"}:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _take_lock(self) -> None:
        self._lock = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            self.release()
            raise error("BCQ-E403", str(self.folder), found="another process is working on it") from fault

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path != self.work:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in self.work.iterdir():
            if path.name != "lock":
                path.unlink()

    def _intact(self, record: dict[str, Any]) -> bool:
        path = self.folder / record["file"]
        if not path.exists() or path.stat().st_size != record["size"]:
            return False
        source = SourceFile(path)
        try:
            return hash_file(source) == str(record["sha256"])
        finally:
            source.close()
