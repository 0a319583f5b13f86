"""One output shard: its modules become weights, and every rule of the way back is tried on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from bcqfmt.checkpoint.manifest import FileRecord
from bcqfmt.checkpoint.shards import Unit
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.jobs.plan import Shard
from bcqfmt.converters.layouts.protocol import Converted, Layout, Module, Options, Rebuild, Rule
from bcqfmt.converters.layouts.rebuild import rebuilds
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.words.buffers import Turns, read_array, wait_for_room
from bcqfmt.converters.words.expected import proving
from bcqfmt.weight.weight import BcqWeight

__all__ = ["ShardJob"]

Array = npt.NDArray[Any]

# Converting holds source and planes of a weight at once, and is fast beside hashing and writing: workers take turns at
# it and wait until there is room, so that memory does not grow with their number.
_one_at_a_time = Turns()
_BESIDE = 1 << 26  # bytes of arrays beside twice the largest weight


class KeptModule:
    """A module whose tensors are read from the file once, when first asked for, and kept until told otherwise."""

    def __init__(self, module: Module) -> None:
        self._arrays: dict[str, Array] = {}
        self._keeps = True
        self.module = replace(module, tensors={suffix: self._kept(tensor) for suffix, tensor in module.tensors.items()})

    def keep(self) -> None:
        """What is read from now on is kept again."""
        self._keeps = True

    def forget(self) -> None:
        """Nothing is kept any more; whoever asks reads again. Scales are written last, those of all weights."""
        self._keeps = False
        self._arrays.clear()

    def _kept(self, tensor: StoredTensor) -> StoredTensor:
        def make() -> Array:
            found = self._arrays.get(tensor.name)
            if found is None:
                found = read_array(tensor)
                if self._keeps:
                    self._arrays[tensor.name] = found
            return found

        return StoredTensor(tensor.name, tensor.dtype, tensor.shape, make=make)


class ShardJob:
    """The weights of one shard, each with its rules proved."""

    def __init__(
        self,
        source: SourceCheckpoint,
        shard: Shard,
        modules: Mapping[str, Module],
        layouts: Mapping[str, Layout],
        options: Options,
        heed: Callable[[], None],
    ) -> None:
        """``heed`` is called before each weight and raises when the work is to stop."""
        self.shard = shard
        self.source = source
        self._heed = heed
        self._room = 2 * max((module.nbytes for module in modules.values()), default=0) + _BESIDE
        self.rules: dict[str, tuple[Rule, str | None]] = {}
        self.units: list[Unit] = []

        def converted(name: str) -> BcqWeight:
            heed()
            kept = KeptModule(modules[name])
            layout = layouts[kept.module.layout]
            try:
                return self._prove(kept, layout.convert(kept.module, options), layout.rebuilders())
            finally:
                kept.forget()

        with ThreadPoolExecutor(options.threads) as pool:
            self.weights = dict(zip(shard.weights, pool.map(converted, shard.weights), strict=True))
        for name, weight in self.weights.items():
            self.units.append(Unit(name, {part.name: part for part in weight.parts().values()}, True))
        for name in shard.dense:
            self.rules[name] = ({"rule": "copy"}, None)
            self.units.append(Unit(name, {name: self.source.tensors[name]}, False))

    def let_go(self) -> None:
        """All is written: nothing is kept but what the record needs."""
        self.weights, self.units = {}, []

    def record(self, written: FileRecord) -> dict[str, Any]:
        """What the finalizer needs to know of this shard."""
        rules = {name: [rule, weight] if weight else [rule] for name, (rule, weight) in self.rules.items()}
        return {"file": self.shard.file, **written._asdict(), "rules": rules}

    def _prove(self, kept: KeptModule, converted: Converted, known: Any) -> BcqWeight:
        """Apply each rule and compare; tensors that do not come out right are archived raw."""
        weight, module = converted.weight, kept.module
        for suffix, rule in converted.rules.items():
            tensor = module.tensors[suffix]
            self.rules[tensor.name] = (rule, module.weight_name)
            if suffix not in converted.heavy:
                self._compare(weight, rule, tensor, known)
        parts = weight.parts()
        for suffix, part in converted.heavy.items():
            parts[part] = self._watched(weight, part, converted.rules[suffix], kept, suffix, known)
        return BcqWeight(weight.name, weight.spec, parts)

    def _watched(
        self, weight: BcqWeight, part: str, rule: Rule, kept: KeptModule, suffix: str, known: Any
    ) -> StoredTensor:
        """The part, computed on demand; the first computation also proves the rule that goes back from it."""
        original = weight.parts()[part]

        def make() -> Array:
            with _one_at_a_time:
                wait_for_room(kept.module.nbytes + original.nbytes, self._room, self._heed)
                kept.keep()
                with proving(kept.module.tensors[suffix].array()):
                    array = original.array()
                    computed = {**weight.parts(), part: StoredTensor.from_array(part, array, original.dtype)}
                    whole = BcqWeight(weight.name, weight.spec, computed)
                    self._compare(whole, rule, kept.module.tensors[suffix], known)
                kept.forget()
                return array

        return StoredTensor(part, original.dtype, original.shape, make=make)

    def _compare(self, weight: BcqWeight, rule: Rule, tensor: StoredTensor, known: dict[str, Rebuild]) -> None:
        """Archive a tensor raw that the rule does not give back byte for byte."""
        if not rebuilds(weight, rule, tensor.array(), known):
            self.rules[tensor.name] = ({"rule": "raw"}, None)
