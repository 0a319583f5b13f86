"""Conversion: plan, one task per output shard, finalize.

A task turns the modules of its shard into weights, applies every rule of the way back once and compares with the
source, writes the shard, and leaves a ``done`` record. Truth is in these files: a task can be repeated, killed, or
run by another process without harm.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.writer import DEFAULT_SHARD_BYTES, write_shard
from bcqfmt.container.files import SourceFile
from bcqfmt.container.hashing import hash_file
from bcqfmt.converters.jobs.complete import carried_out
from bcqfmt.converters.jobs.finalize import finalize
from bcqfmt.converters.jobs.plan import Plan, Shard, make_plan
from bcqfmt.converters.jobs.warnings import remark
from bcqfmt.converters.jobs.workspace import Workspace, partial_folder
from bcqfmt.converters.layouts.protocol import Layout, Module, Options
from bcqfmt.converters.layouts.registry import find_modules, layouts
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.converters.words.buffers import reused
from bcqfmt.errors import BcqError, Finding, error

from .shard import ShardJob
from .tasks import Executor

__all__ = ["Conversion", "ConvertOptions"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Everything a user can ask of a conversion."""

    layout: str = "auto"
    zero_point: str = "auto"
    allow_nonfinite: bool = False
    max_shard_size: int = DEFAULT_SHARD_BYTES
    min_coverage: float = 0.0
    provenance: bool = True
    workers: int = 1
    memory_limit: int | None = None
    resume: bool = False
    overwrite: bool = False
    part: tuple[int, int] | None = None
    name: str = ""  # of the model, for its card; the folder's by default
    dry_run: bool = False  # plan only; the source may be one whose data is far away

    def meaning(self) -> dict[str, Any]:
        """The options that change the output; they are part of the plan."""
        return {
            "layout": self.layout,
            "zero_point": self.zero_point,
            "allow_nonfinite": self.allow_nonfinite,
            "provenance": self.provenance,
        }


class Stopped(Exception):
    """Another task failed, or the user interrupted."""


@dataclass(slots=True)
class Conversion:
    """A source, what was found in it, and the plan; :meth:`run` carries it out."""

    source: SourceCheckpoint
    options: ConvertOptions
    settings: Settings = field(init=False)
    modules: dict[str, Module] = field(init=False)
    plan: Plan = field(init=False)
    layouts: dict[str, Layout] = field(init=False)
    warnings: list[Finding] = field(init=False)
    _stop: threading.Event = field(init=False)

    def __post_init__(self) -> None:
        asked = Options(self.options.zero_point, self.options.allow_nonfinite)
        self.layouts = layouts()
        self.settings, modules = find_modules(self.source, asked, self.options.layout)
        self.modules = {module.weight_name: module for module in modules}
        meaning = {**self.options.meaning(), "name": self.options.name or self.source.folder.name}
        carried_out = not self.options.dry_run
        self.plan = make_plan(self.source, modules, meaning, self.options.max_shard_size, carried_out=carried_out)
        remark(self.source, modules, data=carried_out)
        self.warnings = self.source.warnings
        self._stop = threading.Event()
        if self.plan.coverage * 100 < self.options.min_coverage:
            raise error(
                "BCQ-E611",
                self.source.folder.name,
                found=f"{self.plan.coverage * 100:.2f} % of the parameters are quantized",
                expected=f"at least {self.options.min_coverage:g} %",
            )

    @property
    def named(self) -> Settings:
        """The settings; where the configuration names no method, its place is taken by the tensors' layout."""
        found = " and ".join(sorted({module.layout for module in self.modules.values()}))
        return self.settings if self.settings.method else replace(self.settings, method=found)

    @property
    def workers(self) -> int:
        """As many as asked for, fewer where memory is limited; refused when not even one fits."""
        limit = self.options.memory_limit
        if limit is None:
            return max(1, self.options.workers)
        largest = max((module.nbytes for module in self.modules.values()), default=0)
        need = 2 * largest + 300_000_000
        if limit < need:
            raise error(
                "BCQ-E801",
                self.source.folder.name,
                found=f"a memory limit of {limit} bytes",
                expected=f"at least {need}, for the largest weight",
            )
        return max(1, min(self.options.workers, (limit - 300_000_000) // max(1, 2 * largest)))

    def run(
        self,
        target: Path,
        tick: Callable[[int], None] | None = None,
        shard_done: Callable[[str, int], None] | None = None,
        executor: Executor | None = None,
    ) -> bool:
        """Convert into ``target``; True when the folder is complete, False after one part of several.

        ``executor``: an engine that runs the shards elsewhere; threads of this process do without one.
        """
        workers, part = self.workers, self.options.part
        if self.is_complete(target):
            return True
        space = Workspace(
            target, resume=self.options.resume or part is not None, overwrite=self.options.overwrite, part=part
        )
        try:
            if not space.begin(self.plan, self._state()):
                if executor is None:
                    self._work(space, workers, tick, shard_done)
                else:
                    with space.shared():
                        executor.work(self, space, tick or (lambda _: None), shard_done or (lambda *_: None))
                self._unchanged()
                if part is None:
                    finalize(self.source, self.plan, space, self.named, self.options.provenance)
            if part is None:
                space.publish()
        except BcqError:
            space.discard_if_empty()
            raise
        finally:
            space.release()
        return part is None

    def for_part(self, part: tuple[int, int]) -> Conversion:
        """The same conversion, of which :meth:`run` does one part only; headers are not read again."""
        found = copy.copy(self)
        found.options = replace(self.options, part=part, resume=True)
        found._stop = threading.Event()
        return found

    def is_complete(self, target: Path) -> bool:
        """Whether there is nothing to resume: ``target`` is what this plan makes."""
        asked = self.options.resume and self.options.part is None
        return asked and not partial_folder(target).exists() and carried_out(target, self.plan, self.modules.values())

    def close(self, target: Path) -> None:
        """Close a conversion whose parts are all done."""
        space = Workspace(target, resume=True, overwrite=self.options.overwrite)
        try:
            if not space.begin(self.plan, self._state()):
                finalize(self.source, self.plan, space, self.named, self.options.provenance)
            space.publish()
        finally:
            space.release()

    def _unchanged(self) -> None:
        """BCQ-E103 when a model file was replaced behind the back of its open descriptor."""
        for model in self.source.models.values():
            if isinstance(model.source, SourceFile):
                model.source.check_unchanged()

    def _state(self) -> dict[str, Any]:
        """Sizes and times of the model files."""
        found = {}
        for path, model in self.source.models.items():
            try:
                status = model.source.path.stat()
            except OSError as fault:
                raise error("BCQ-E103", path, found=fault.strerror or str(fault)) from fault
            found[path] = [status.st_size, status.st_mtime_ns]
        return found

    def _work(
        self,
        space: Workspace,
        workers: int,
        tick: Callable[[int], None] | None,
        shard_done: Callable[[str, int], None] | None,
    ) -> None:
        """All shards (of this part) and the source's digests, in threads: the heavy work releases the lock."""
        shards = list(self.plan.shards)
        paths = list(self.source.models)
        if self.options.part is not None:
            index, count = self.options.part
            shards, paths = shards[index - 1 :: count], paths[index - 1 :: count]

        def beat(done: int) -> None:
            if self._stop.is_set():
                raise Stopped
            if tick is not None:
                tick(done)

        threads = max(1, workers // max(1, len(shards)))
        with reused():
            pool = ThreadPoolExecutor(workers)
            try:
                futures = [pool.submit(self._shard, space, shard, threads, beat, shard_done) for shard in shards]
                futures += [pool.submit(job) for job in self._source_digests(space, paths)]
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                self._raise_first(finished)
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                self._stop.clear()

    @staticmethod
    def _raise_first(finished: set[Any]) -> None:
        faults = [fault for future in finished if (fault := future.exception()) is not None]
        real = [fault for fault in faults if not isinstance(fault, Stopped)]
        if faults:
            raise (real or faults)[0]

    def _source_digests(self, space: Workspace, paths: list[str]) -> list[Callable[[], None]]:
        """The jobs that hash the source's files and write down what they find."""
        numbers = {path: f"source-{number:05d}" for number, path in enumerate(self.source.models)}
        models = {path: self.source.models[path].source for path in paths}
        models = {path: source for path, source in models.items() if space.done(numbers[path], self.plan) is None}

        def finish(path: str) -> None:
            digest = hash_file(models[path], lambda _: self._heed())
            record = {"path": path, "source_size": models[path].size, "source_sha256": digest}
            space.finish(numbers[path], self.plan, record)

        return [partial(finish, path) for path in models]

    def _heed(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _shard(
        self,
        space: Workspace,
        shard: Shard,
        threads: int,
        beat: Callable[[int], None],
        shard_done: Callable[[str, int], None] | None,
    ) -> None:
        """Write a shard and its record."""
        if (record := space.done(shard.file, self.plan)) is not None:
            beat(record["size"])
            if shard_done is not None:
                shard_done(shard.file, record["size"])
            return
        options = Options(self.options.zero_point, self.options.allow_nonfinite, threads)
        job = ShardJob(self.source, shard, self.modules, self.layouts, options, self._heed)
        written = write_shard(space.folder / shard.file, job.units, job.weights, tick=beat)
        job.let_go()
        record = space.finish(shard.file, self.plan, job.record(written))
        if shard_done is not None:
            shard_done(shard.file, record["size"])
