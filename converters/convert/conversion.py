"""Conversion: plan, one job per output shard, finalize.

A job turns the modules of its shard into weights, proves that every source tensor can be rebuilt from them, writes the
shard, and leaves a ``done`` record. Only these files count: a job can be repeated, killed, or run by another process
without harm.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bcqfmt.checkpoint.writer import DEFAULT_SHARD_BYTES, write_shard
from bcqfmt.converters.jobs.finalize import config_text, finalize
from bcqfmt.converters.jobs.plan import Plan, Shard, make_plan
from bcqfmt.converters.jobs.pool import ShardDone, Stop, Tick, run_all
from bcqfmt.converters.jobs.source_files import check_unchanged, hash_source, source_state
from bcqfmt.converters.jobs.warnings import add_warnings
from bcqfmt.converters.jobs.workspace import Workspace, partial_folder
from bcqfmt.converters.layouts.protocol import Layout, Module, NonfiniteNumbers, Options
from bcqfmt.converters.layouts.registry import find_modules, layouts
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.converters.words.buffers import reused
from bcqfmt.errors import BcqError, Finding, error

from .shard import ShardJob

_BASE_MEMORY = 300_000_000  # bytes: the interpreter, numpy and the compiled word packers, rounded up


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
    revision: str = ""  # the commit of a source from the hub, for the card
    dry_run: bool = False  # plan only; the source may be one whose data is far away

    def meaning(self) -> dict[str, Any]:
        """The options that change the output; they are part of the plan."""
        return {
            "layout": self.layout,
            "zero_point": self.zero_point,
            "allow_nonfinite": self.allow_nonfinite,
            "provenance": self.provenance,
        }


class Executor(Protocol):
    """An engine that runs the shards elsewhere: in the end every step of the plan has its record in the workspace."""

    def work(self, conversion: Conversion, space: Workspace, tick: Tick, shard_done: ShardDone) -> None:
        """Carry out all that is not done yet; raise the first failure, as a ``BcqError``."""
        ...


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

    def __post_init__(self) -> None:
        asked = Options(self.options.zero_point, self.options.allow_nonfinite)
        self.layouts = layouts()
        self.settings, modules = find_modules(self.source, asked, self.options.layout)
        self.modules = {module.weight_name: module for module in modules}
        known = {"name": self.options.name or self.source.name, "revision": self.options.revision}
        meaning = {**self.options.meaning(), **known}
        carried_out = not self.options.dry_run
        self.plan = make_plan(self.source, modules, meaning, self.options.max_shard_size, carried_out=carried_out)
        config_text(self.source, ())  # refused before the work
        add_warnings(self.source, modules, data=carried_out)
        self.warnings = self.source.warnings
        if self.plan.coverage * 100 < self.options.min_coverage:
            found = f"{self.plan.coverage * 100:.2f} % of the parameters are quantized"
            expected = f"at least {self.options.min_coverage:g} %"
            raise error("BCQ-E611", self.source.folder.name, found=found, expected=expected)

    @property
    def named(self) -> Settings:
        """The settings; a configuration that names no method gets the layout of its tensors as one."""
        found = " and ".join(sorted({module.layout for module in self.modules.values()}))
        return self.settings if self.settings.method else replace(self.settings, method=found)

    @property
    def workers(self) -> int:
        """The number asked for, fewer where memory is limited; BCQ-E801 when not even one fits."""
        limit = self.options.memory_limit
        if limit is None:
            return max(1, self.options.workers)
        each = 2 * max((module.nbytes for module in self.modules.values()), default=0)
        if limit < each + _BASE_MEMORY:
            found = f"a memory limit of {limit} bytes"
            expected = f"at least {each + _BASE_MEMORY}, for the largest weight"
            raise error("BCQ-E801", self.source.folder.name, found=found, expected=expected)
        return max(1, min(self.options.workers, (limit - _BASE_MEMORY) // max(1, each)))

    def run(
        self,
        target: Path,
        tick: Tick | None = None,
        shard_done: ShardDone | None = None,
        executor: Executor | None = None,
    ) -> bool:
        """Convert into ``target``; True when the folder is complete, False after one part of several.

        Without an ``executor`` the shards are converted in threads of this process.
        """
        workers, part = self.workers, self.options.part
        if self.is_complete(target):
            return True
        tick, shard_done = tick or (lambda _: None), shard_done or (lambda *_: None)
        space = Workspace(
            target, resume=self.options.resume or part is not None, overwrite=self.options.overwrite, part=part
        )
        try:
            if not space.begin(self.plan, source_state(self.source)):
                if executor is None:
                    self._work(space, workers, tick, shard_done)
                else:
                    with space.shared():
                        executor.work(self, space, tick, shard_done)
                check_unchanged(self.source)
                if part is None:
                    finalize(
                        self.source, self.plan, space, self.named, self.options.provenance, self.source.made_files()
                    )
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
        return found

    def is_complete(self, target: Path) -> bool:
        """Whether there is nothing to resume: ``target`` is what this plan makes."""
        asked = self.options.resume and self.options.part is None
        return (
            asked and not partial_folder(target).exists() and self.plan.is_carried_out_in(target, self.modules.values())
        )

    def close(self, target: Path) -> None:
        """Close a conversion whose parts are all done."""
        space = Workspace(target, resume=True, overwrite=self.options.overwrite)
        try:
            if not space.begin(self.plan, source_state(self.source)):
                finalize(self.source, self.plan, space, self.named, self.options.provenance, self.source.made_files())
            space.publish()
        finally:
            space.release()

    def _work(self, space: Workspace, workers: int, tick: Tick, shard_done: ShardDone) -> None:
        """Convert the shards (of this part) and hash the source files; the heavy work releases the interpreter lock."""
        shards, files = list(self.plan.shards), list(enumerate(self.source.models))
        if self.options.part is not None:
            index, count = self.options.part
            shards, files = shards[index - 1 :: count], files[index - 1 :: count]
        stop = Stop()
        threads = max(1, workers // max(1, len(shards)))
        writing = [partial(self._write_shard, space, shard, threads, stop, tick, shard_done) for shard in shards]
        hashing = [partial(hash_source, self.source, self.plan, space, i, path, stop.check) for i, path in files]
        # in turns: a source file is hashed about when its tensors are read, while it is in the page cache
        jobs = [job for pair in itertools.zip_longest(writing, hashing) for job in pair if job is not None]
        # one thread more than cores: one of them is waiting for the disk much of the time
        with reused():
            run_all(jobs, workers + 1 if workers > 1 else 1, stop, patience=None)

    def _write_shard(
        self, space: Workspace, shard: Shard, threads: int, stop: Stop, tick: Tick, shard_done: ShardDone
    ) -> None:
        """Write a shard and its record, unless an earlier run did."""
        progress = stop.progress(tick)
        record = space.done(shard.file, self.plan)
        if record is not None:
            progress(record["size"])
        else:
            options = Options(self.options.zero_point, self.options.allow_nonfinite, threads, read_late=True)
            try:
                found = self._written(space, shard, options, stop, progress)
            except NonfiniteNumbers:
                found = self._written(space, shard, replace(options, read_late=False), stop, progress)
            record = space.finish(shard.file, self.plan, found)
        shard_done(shard.file, record["size"])

    def _written(self, space: Workspace, shard: Shard, options: Options, stop: Stop, progress: Tick) -> dict[str, Any]:
        """Write a shard; its record. When that fails, ``progress`` goes back to where it was."""
        done: list[int] = []

        def tick(size: int) -> None:
            done.append(size)
            progress(size)

        job = ShardJob(self.source, shard, self.modules, self.layouts, options, stop.check)
        try:
            return job.record(write_shard(space.folder / shard.file, job.units, job.weights, tick=tick))
        except NonfiniteNumbers:
            progress(-sum(done))
            raise
        finally:
            job.forget()
