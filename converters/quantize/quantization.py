"""Quantizing a dense checkpoint: choose, plan, quantize weight by weight, put shards together, finalize.

It works as a conversion does (`jobs`): the plan is decided first, every step leaves a record when its bytes are
safely on disk, nothing appears under the target's name before all of it is there. A run can be killed and resumed; how
many threads take part changes no byte.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcqfmt.checkpoint.folder import WORK
from bcqfmt.checkpoint.shards import Unit
from bcqfmt.checkpoint.writer import DEFAULT_SHARD_BYTES, write_shard
from bcqfmt.container.files import SourceFile, hash_file
from bcqfmt.converters.jobs.finalize import config_text, finalize
from bcqfmt.converters.jobs.plan import Plan, Shard, make_plan
from bcqfmt.converters.jobs.pool import Gate, ShardDone, Stop, Tick, run_all
from bcqfmt.converters.jobs.source_files import check_unchanged, source_state
from bcqfmt.converters.jobs.warnings import add_warnings
from bcqfmt.converters.jobs.workspace import Workspace, partial_folder
from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.methods.protocol import Reading
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import BcqError, Finding
from bcqfmt.weight.weight import BcqWeight

from .calibration_work import TextOptions
from .choice import Choice, choose
from .dense import judge, refuse_quantized
from .preflight import LazyStats, check_covered, check_shapes, check_source, check_stats, check_trained
from .record import closing_files, same_record
from .rules import RuleFile
from .stats import StatsFile
from .weight import Finished, Measured, measured_again, quantize_tensor, read_spool, write_spool

if TYPE_CHECKING:
    from .sequential import Prepared

__all__ = ["Quantization", "QuantizeOptions"]

_BATCH = 1 << 25  # bytes of source that are quantized between two records, unless one weight has more
# the same plan can only fail again: nothing of it is worth keeping
_HOPELESS = ("BCQ-E305", "BCQ-E620", "BCQ-E621", "BCQ-E622", "BCQ-E623", "BCQ-E624")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Everything a user can ask for. ``settings``: of ``method``, as texts or values."""

    method: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rules: RuleFile | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stats: StatsFile | None = None
    text: TextOptions | None = None  # quantize block by block, with inputs from the quantized part
    max_shard_size: int = DEFAULT_SHARD_BYTES
    workers: int = 1
    resume: bool = False
    overwrite: bool = False
    name: str = ""
    revision: str = ""
    dry_run: bool = False
    headers_only: bool = False  # the source's data is far away; only a dry run can do without


class DenseWeight(Module):
    """A dense weight of the source; it keeps its name, whatever that ends in."""

    __slots__ = ()

    @property
    def weight_name(self) -> str:
        """The tensor's own name."""
        return self.name


class Quantization:
    """A source, what becomes of each tensor, and the plan; :meth:`run` carries it out."""

    def __init__(self, source: SourceCheckpoint, options: QuantizeOptions) -> None:
        self.source, self.options = source, options
        refuse_quantized(source)
        config_text(source, ())  # refused before the work
        self.choice: Choice = choose(
            judge(source), options.method, options.settings, options.rules, options.include, options.exclude
        )
        check_shapes(source, self.choice)
        if options.text is None:
            check_stats(source, self.choice, options.stats, data=not options.headers_only)
        elif options.text.train:
            check_trained(source, self.choice)
        self._prepared: Prepared | None = None
        if options.text is not None and options.dry_run and not options.headers_only:
            self._prepare(options.text)
        self._ready: dict[str, Finished] = {}
        self._opened: list[SourceFile] = []
        self.modules = {name: self._module(name) for name in self.choice.weights}
        self.plan: Plan = make_plan(
            source,
            list(self.modules.values()),
            self._meaning(),
            options.max_shard_size,
            carried_out=not options.dry_run,
        )
        add_warnings(source, (), data=False)
        self.warnings: list[Finding] = source.warnings

    def run(
        self, target: Path, tick: Tick | None = None, shard_done: ShardDone | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """Quantize into ``target``; what stops half-way can be resumed, unless it can never succeed.

        ``say`` gets a line for every layer where layers come one after the other.
        """
        space = Workspace(target, resume=self.options.resume, overwrite=self.options.overwrite)
        self._stop = Stop()
        self._gate = Gate(max(_matrix(module) for module in self.modules.values()), self._stop.check)
        try:
            if not space.begin(self.plan, source_state(self.source)):
                if self.options.text is not None and space.done("blocks", self.plan) is None:
                    self._prepare(self.options.text)
                check_source(self.source, self.modules, space, self.plan, self.options.workers, self._stop)
                if self.options.text is not None:
                    self._blocks(space, self.options.text, say)
                self._work(space, tick or (lambda _: None), shard_done or (lambda *_: None))
                check_unchanged(self.source)
                extra, how = closing_files(self.plan, self.choice, self._records(space), self.options.stats)
                finalize(self.source, self.plan, space, Settings(), provenance=False, extra=extra, how=how)
            space.publish()
        except BcqError as fault:
            if fault.code in _HOPELESS:
                shutil.rmtree(space.folder, ignore_errors=True)
            space.discard_if_empty()
            raise
        finally:
            space.release()

    def is_complete(self, target: Path) -> bool:
        """Whether there is nothing to resume: ``target`` is what this plan makes."""
        return (
            self.options.resume
            and not partial_folder(target).exists()
            and self.plan.is_carried_out_in(target, ())
            and same_record(target, self.plan, self.choice)
        )

    # -- before the first byte ----------------------------------------------------------------------------------

    def _prepare(self, given: TextOptions) -> None:
        """Refuse what cannot be run on the text, and weights that running it says nothing about."""
        from .sequential import Prepared

        self._prepared = Prepared.of(self.source, given, dry_run=self.options.dry_run)
        check_covered(self.source, self.choice, self._prepared.names)

    def _module(self, name: str) -> DenseWeight:
        tensor = self.source.tensors[name]
        return DenseWeight(name, "dense", {"weight": tensor}, {"shape": tensor.shape})

    def _meaning(self) -> dict[str, Any]:
        """What decides the output; part of the plan."""
        stats, digest = self.options.stats, None
        if stats is not None and not self.options.dry_run:
            with contextlib.closing(SourceFile(stats.path)) as file:
                digest = hash_file(file)
        return {
            "layout": "dense",
            "name": self.options.name or self.source.folder.name,
            "revision": self.options.revision,
            "recipes": self.choice.recipes(),
            "weights": self.choice.weights,
            "stats": digest,
            "text": None if self.options.text is None else self.options.text.recorded(),
        }

    # -- the work -----------------------------------------------------------------------------------------------

    def _work(self, space: Workspace, tick: Tick, shard_done: ShardDone) -> None:
        """Batch after batch; the thread that finishes the last one of a shard assembles the shard."""
        jobs: list[Callable[[], None]] = []
        for shard in self.plan.shards:
            record = space.done(shard.file, self.plan)
            if record is not None:
                tick(shard.nbytes)
                shard_done(shard.file, record["size"])
                continue
            work = _ShardWork(shard, self._batches(shard))
            jobs += [partial(self._batch, space, work, key, tick, shard_done) for key in work.batches]
            if not work.batches:
                jobs.append(partial(self._shard, space, work, tick, shard_done))
        run_all(jobs, self.options.workers, self._stop)

    def _blocks(self, space: Workspace, given: TextOptions, say: Callable[[str], None]) -> None:
        """All weights of decoder layers, layer by layer, then trained; batches only collect them."""
        done = space.done("blocks", self.plan) or self._layers(space, given, say)
        for stage in range(done["count"]):
            self._take(space, _block(stage))
        if given.train:
            if space.done("trained", self.plan) is None:
                from .training import train_scales

                made = train_scales(self.source, given, {name: one.weight for name, one in self._ready.items()}, say)
                self._spool(space, "trained", [self._trained(weight) for weight in made.values()])
            self._take(space, "trained")

    def _layers(self, space: Workspace, given: TextOptions, say: Callable[[str], None]) -> dict[str, Any]:
        """The weights of every decoder layer in a spool file; how many layers there are."""
        from .sequential import Blocks

        lower = sorted({planes for name in self.modules for planes in self.choice.method_of(name).lower_precisions})
        prepared, self._prepared = self._prepared, None  # a model loaded whole goes with the blocks
        assert prepared is not None
        layers = prepared.names
        with Blocks(self.source, given, prepared, space.work / "text", say, lower) as blocks:
            del prepared
            for stage, names in enumerate(layers):
                chosen = [name for name in names if name in self.modules]
                if space.done(_block(stage), self.plan) is None:
                    self._spool(space, _block(stage), blocks.quantize(stage, chosen, self._one))
                if stage + 1 < len(layers):
                    blocks.advance(stage, self._take(space, _block(stage)))
        return space.finish("blocks", self.plan, {"count": len(layers)})

    def _spool(self, space: Workspace, key: str, made: Sequence[Measured | Finished]) -> None:
        """Write weights down, and that they are done."""
        written = write_spool(space.work / f"{key}.safetensors", made, self._stop.check)
        notes = {one.weight.name: one.record() for one in made}
        file = f"{WORK}/{key}.safetensors"
        space.finish(key, self.plan, {"file": file, **written._asdict(), "notes": notes})

    def _take(self, space: Workspace, key: str) -> dict[str, BcqWeight]:
        """The weights of a spool file, which batches will find; the file is closed with the process."""
        record = space.done(key, self.plan)
        assert record is not None  # it was finished in this run, or found complete
        source, held = read_spool(space.folder / record["file"])
        self._opened.append(source)
        self._ready |= {name: Finished(weight, record["notes"][name]) for name, weight in held.items()}
        return held

    def _trained(self, weight: BcqWeight) -> Finished:
        tensor, before = self.modules[weight.name].tensors["weight"], self._ready[weight.name].recorded
        return Finished(weight, {**before, **measured_again(tensor, weight, self.options.workers)})

    def _one(self, name: str, readings: Mapping[int, Reading]) -> Measured:
        """A weight of a decoder layer; ``readings`` by planes, 0: all."""
        self._stop.check()
        tensor, method, (stats, target) = self.modules[name].tensors["weight"], self.choice.method_of(name), readings[0]
        lower = tuple(readings[planes] for planes in method.lower_precisions)
        return quantize_tensor(tensor, method, stats, self.options.workers, target, lower)

    def _batches(self, shard: Shard) -> dict[str, list[str]]:
        """Step name -> weights: runs of a shard's weights, each about as much work as the next."""
        found: dict[str, list[str]] = {}
        room = 0
        for name in shard.weights:
            size = self.modules[name].nbytes
            if size > room or not found:
                found[f"batch-{shard.file.removesuffix('.safetensors')}-{len(found):06d}"] = []
                room = _BATCH
            found[next(reversed(found))].append(name)
            room -= size
        return found

    def _batch(self, space: Workspace, work: _ShardWork, key: str, tick: Tick, shard_done: ShardDone) -> None:
        names = work.batches[key]
        if space.done(key, self.plan) is None:
            self._spool(space, key, [self._quantized(name) for name in names])
        tick(sum(self.modules[name].nbytes for name in names))
        if work.one_less():
            self._shard(space, work, tick, shard_done)

    def _quantized(self, name: str) -> Measured | Finished:
        self._stop.check()
        if name in self._ready:
            return self._ready[name]
        module = self.modules[name]
        size = _matrix(module)
        with self._gate.hold(size):
            self._stop.check()
            threads = self._gate.share(size, self.options.workers)
            stats = LazyStats.of(self.options.stats, name)
            return quantize_tensor(module.tensors["weight"], self.choice.method_of(name), stats, threads)

    def _shard(self, space: Workspace, work: _ShardWork, tick: Tick, shard_done: ShardDone) -> None:
        """One output file, from the spool and the source's dense tensors."""
        opened: list[SourceFile] = []
        weights: dict[str, BcqWeight] = {}
        notes: dict[str, Any] = {}
        for key in work.batches:
            record = space.done(key, self.plan)
            assert record is not None  # it was finished in this run, or found complete
            source, held = read_spool(space.folder / record["file"])
            opened.append(source)
            weights.update(held)
            notes.update(record["notes"])
        units = [Unit.of_weight(weight) for weight in weights.values()]
        units += [Unit.of_dense(self.source.tensors[name]) for name in work.shard.dense]
        written = write_shard(space.folder / work.shard.file, units, weights, tick=self._stop.check)
        record = {"file": work.shard.file, **written._asdict(), "rules": {}, "notes": notes}
        space.finish(work.shard.file, self.plan, record)
        for source in opened:
            source.close()
        for key in work.batches:
            for suffix in (".safetensors", ".done.json"):
                with contextlib.suppress(OSError):  # what stays goes with the folder of the work
                    (space.work / f"{key}{suffix}").unlink()
        tick(sum(self.source.tensors[name].nbytes for name in work.shard.dense))
        shard_done(work.shard.file, written.size)

    def _records(self, space: Workspace) -> dict[str, dict[str, Any]]:
        """Weight -> what was measured; of shards that this run did not write, too."""
        found: dict[str, dict[str, Any]] = {}
        for shard in self.plan.shards:
            record = space.done(shard.file, self.plan)
            found.update(record["notes"] if record is not None else {})
        return found


class _ShardWork:
    """A shard, its batches, and how many are missing."""

    def __init__(self, shard: Shard, batches: dict[str, list[str]]) -> None:
        self.shard, self.batches = shard, batches
        self._left, self._lock = len(batches), threading.Lock()

    def one_less(self) -> bool:
        """True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0


def _block(stage: int) -> str:
    """The step of a decoder layer."""
    return f"block-{stage:06d}"


def _matrix(module: Module) -> int:
    """Elements of one matrix of a weight."""
    rows, columns = module.tensors["weight"].shape[-2:]
    return rows * columns
