"""Conversion: plan, one task per output shard, finalize.

A task turns the modules of its shard into weights, applies every rule of the way back once and compares with the
source, writes the shard, and leaves a ``done`` record. Truth is in these files: a task can be repeated, killed, or
run by another process without harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.checkpoint import SourceCheckpoint
from bcqfmt.converters.finalize import finalize
from bcqfmt.converters.plan import Plan, Shard, make_plan
from bcqfmt.converters.protocol import Converted, Layout, Module, Options, Rebuild, Rule
from bcqfmt.converters.rebuild import apply_rule
from bcqfmt.converters.registry import find_modules, layouts
from bcqfmt.converters.settings import Settings
from bcqfmt.converters.workspace import Workspace
from bcqfmt.descriptor import digest_of
from bcqfmt.errors import BcqError, Finding, error
from bcqfmt.hashing import hash_file
from bcqfmt.scheme import part_prefix
from bcqfmt.shards import Unit
from bcqfmt.stored import StoredTensor
from bcqfmt.weight import BcqWeight
from bcqfmt.writer import DEFAULT_SHARD_BYTES, Written, write_shard

__all__ = ["Conversion", "ConvertOptions"]

Array = npt.NDArray[Any]


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
        self.plan = make_plan(self.source, modules, self.options.meaning(), self.options.max_shard_size)
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
    ) -> bool:
        """Convert into ``target``; True when the folder is complete, False after one part of several."""
        workers = self.workers
        space = Workspace(
            target, resume=self.options.resume or self.options.part is not None, overwrite=self.options.overwrite
        )
        try:
            if not space.finished:
                space.begin(self.plan)
                self._work(space, workers, tick, shard_done)
                if self.options.part is not None:
                    return False
                finalize(self.source, self.plan, space, self.settings, self.options.provenance)
            space.publish()
        except BcqError:
            space.discard_if_empty()
            raise
        finally:
            space.release()
        return True

    def _work(
        self,
        space: Workspace,
        workers: int,
        tick: Callable[[int], None] | None,
        shard_done: Callable[[str, int], None] | None,
    ) -> None:
        """All shards (of this part) and the digests of the source files, in threads: the heavy work releases the lock."""
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

        jobs: list[Callable[[], None]] = [partial(self._shard, space, shard, beat, shard_done) for shard in shards]
        jobs += [partial(self._source_digest, space, path) for path in paths]
        pool = ThreadPoolExecutor(workers)
        try:
            futures = [pool.submit(job) for job in jobs]
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

    def _source_digest(self, space: Workspace, path: str) -> None:
        name = f"source-{list(self.source.models).index(path):05d}"
        if space.done(name, self.plan) is None:
            source = self.source.models[path].source
            space.finish(
                name,
                self.plan,
                {"path": path, "source_size": source.size, "source_sha256": hash_file(source, lambda _: self._heed())},
            )

    def _heed(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _shard(
        self, space: Workspace, shard: Shard, beat: Callable[[int], None], shard_done: Callable[[str, int], None] | None
    ) -> None:
        record = space.done(shard.file, self.plan)
        if record is None:
            job = _ShardJob(self, shard)
            written = write_shard(space.folder / shard.file, job.units, job.weights, tick=beat)
            record = space.finish(shard.file, self.plan, job.record(written))
        else:
            beat(record["size"])
        if shard_done is not None:
            shard_done(shard.file, record["size"])


class _ShardJob:
    """The weights of one shard, each with its rules proved."""

    def __init__(self, conversion: Conversion, shard: Shard) -> None:
        self.shard = shard
        self.source = conversion.source
        self.weights: dict[str, BcqWeight] = {}
        self.rules: dict[str, tuple[Rule, str | None]] = {}
        self.units: list[Unit] = []
        options = Options(conversion.options.zero_point, conversion.options.allow_nonfinite)
        for name in shard.weights:
            conversion._heed()
            module = conversion.modules[name]
            layout = conversion.layouts[module.layout]
            converted = layout.convert(module, options)
            weight = self._prove(module, converted, layout.rebuilders())
            self.weights[name] = weight
            self.units.append(Unit(name, {part.name: part for part in weight.parts().values()}, True))
        for name in shard.dense:
            self.rules[name] = ({"rule": "copy"}, None)
            self.units.append(Unit(name, {name: self.source.tensors[name]}, False))

    def record(self, written: Written) -> dict[str, Any]:
        """What the finalizer needs to know of this shard."""
        digests = {}
        for name, weight in self.weights.items():
            prefix = part_prefix(name)
            parts = {s: (p.dtype, p.shape, written.tensors[prefix + s]) for s, p in weight.parts().items()}
            digests[name] = digest_of(weight.spec, parts)
        rules = {name: [rule, weight] if weight else [rule] for name, (rule, weight) in self.rules.items()}
        return {
            "file": self.shard.file,
            "size": written.record.size,
            "sha256": written.record.sha256,
            "weights": digests,
            "rules": rules,
        }

    def _prove(self, module: Module, converted: Converted, known: Any) -> BcqWeight:
        """Apply each rule and compare; tensors that do not come out right are archived raw."""
        weight = converted.weight
        for suffix, rule in converted.rules.items():
            tensor = module.tensors[suffix]
            self.rules[tensor.name] = (rule, module.weight_name)
            if suffix not in converted.heavy:
                self._compare(weight, rule, tensor, known)
        parts = weight.parts()
        for suffix, part in converted.heavy.items():
            parts[part] = self._watched(weight, part, converted.rules[suffix], module.tensors[suffix], known)
        return BcqWeight(weight.name, weight.spec, parts)

    def _watched(self, weight: BcqWeight, part: str, rule: Rule, tensor: StoredTensor, known: Any) -> StoredTensor:
        """The part, computed on demand; the first computation also proves the rule that goes back from it."""
        original = weight.parts()[part]

        def make() -> Array:
            array = original.array()
            computed = {**weight.parts(), part: StoredTensor.from_array(part, array, original.dtype)}
            self._compare(BcqWeight(weight.name, weight.spec, computed), rule, tensor, known)
            return array

        return StoredTensor(part, original.dtype, original.shape, make=make)

    def _compare(self, weight: BcqWeight, rule: Rule, tensor: StoredTensor, known: dict[str, Rebuild]) -> None:
        rebuilt = np.ascontiguousarray(apply_rule(weight, rule, known)).reshape(-1).view(np.uint8)
        source = tensor.array().reshape(-1).view(np.uint8)
        if rebuilt.size != source.size or not np.array_equal(rebuilt, source):
            self.rules[tensor.name] = ({"rule": "raw"}, None)
