"""The shards of a conversion as tasks for an engine, on machines that share a file system.

Nothing depends on the engine being right. A task is one part of as many parts as there are shards (`convert --part
i/N`), run in a process elsewhere: it opens the source, makes the plan, finds the same digest, takes the part's lock,
writes its shard under a temporary name and leaves a ``done`` record. So a task may be lost, repeated, or run twice at
once; what counts is what the plan and the records on disk say.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcqfmt.errors import BcqError, error
from bcqfmt.system import absolute_path, peak_memory
from bcqfmt.version import __version__

if TYPE_CHECKING:
    from .conversion import Conversion


_BASE = 300_000_000  # the interpreter, numpy and the compiled word packers, rounded up
_PER_HEADER_BYTE = 16  # of memory, for what is kept of the source's headers
_PATIENCE = 150.0  # seconds; a lock of a machine that is gone lives on for up to 90 on NFS


@dataclass(frozen=True, slots=True)
class Task:
    """One shard as a message: plain data, the same for every engine."""

    source: str
    target: str
    options: dict[str, Any]  # of the conversion
    index: int  # of the shard, from 0
    count: int
    file: str
    nbytes: int
    memory: int  # bytes that the process will need
    digest: str  # of the plan
    umask: int  # of the driver: modes follow it, wherever the file is written
    version: str = __version__


def memory_of(headers: int, largest: int, workers: int = 1) -> int:
    """Bytes that a process needs: ``headers`` of the source, and the ``largest`` weight twice for every worker."""
    return _BASE + _PER_HEADER_BYTE * headers + 2 * largest * workers


def tasks_of(conversion: Conversion, target: Path) -> list[Task]:
    """A task for every shard of the plan."""
    plan, source = conversion.plan, conversion.source
    headers = sum(model.header.data_start for model in source.models.values())
    options = {**asdict(conversion.options), "workers": 1, "memory_limit": None, "resume": True, "part": None}
    options |= plan.options  # the name included, which may come from a folder that is called otherwise elsewhere
    digest, umask = plan.digest, _umask()
    found = []
    for index, shard in enumerate(plan.shards):
        largest = max((conversion.modules[name].nbytes for name in shard.weights), default=0)
        memory = memory_of(headers, largest)
        folder = str(absolute_path(source.place))  # resolve() would follow a link
        task = Task(
            folder, str(target), options, index, len(plan.shards), shard.file, shard.nbytes, memory, digest, umask
        )
        found.append(task)
    return found


def run_task(task: Task) -> dict[str, Any]:
    """Carry out a task in this process; the report for the driver: where, how much memory, and the error if any.

    An error travels as data: an engine would wrap it, and add the traceback of another machine.
    """
    before = os.umask(task.umask)
    try:
        conversion = _planned(task).for_part((task.index + 1, task.count))
        _run_when_unlocked(lambda: conversion.run(Path(task.target)))
    except BcqError as fault:
        return {**_where(), "fault": {"finding": tuple(fault.finding), "hint": fault.hint}}
    finally:
        os.umask(before)
    return _where()


def fault_of(report: dict[str, Any]) -> BcqError | None:
    """The error that a task reported, if any."""
    if "fault" not in report:
        return None
    code, file, tensor, found, expected = report["fault"]["finding"]
    return error(code, file, tensor, found, expected, hint=report["fault"]["hint"])


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _where() -> dict[str, Any]:
    return {"node": socket.gethostname(), "process": os.getpid(), "peak_rss_bytes": peak_memory()}


def _planned(task: Task) -> Conversion:
    """The plan as made on this machine; BCQ-E711 unless it is the driver's."""
    if task.version != __version__:
        raise _elsewhere(f"bcqfmt {__version__}", f"bcqfmt {task.version}")
    try:
        conversion = _planned_once(task.source, task.digest, tuple(sorted(task.options.items())))
    except BcqError as fault:
        raise _elsewhere(str(fault), f"the source at {task.source}") from fault
    if conversion.plan.digest != task.digest:
        _planned_once.cache_clear()
        raise _elsewhere(f"another content of {task.source}", "the same model files and the same side files")
    return conversion


@functools.lru_cache(maxsize=1)
def _planned_once(source: str, digest: str, options: tuple[tuple[str, Any], ...]) -> Conversion:
    """Engines run one task after the other in a process: the headers are read for the first one."""
    from bcqfmt.converters.source.checkpoint import open_source

    from .conversion import Conversion, ConvertOptions

    return Conversion(open_source(Path(source)), ConvertOptions(**dict(options)))


atexit.register(_planned_once.cache_clear)  # closes files before the interpreter ends


def _elsewhere(found: str, expected: str) -> BcqError:
    return error("BCQ-E711", socket.gethostname(), found=found, expected=expected)


def _run_when_unlocked(run: Callable[[], object]) -> None:
    """Run; wait for a lock that a lost task left behind."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            run()
            return
        except BcqError as fault:
            if fault.code != "BCQ-E403" or time.monotonic() > end:
                raise
        time.sleep(1.0)
