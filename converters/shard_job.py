"""One output shard: its modules become weights, and every rule of the way back is tried on the spot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.checkpoint import SourceCheckpoint
from bcqfmt.converters.plan import Shard
from bcqfmt.converters.protocol import Converted, Layout, Module, Options, Rebuild, Rule
from bcqfmt.converters.rebuild import apply_rule, same_bytes
from bcqfmt.descriptor import digest_of
from bcqfmt.scheme import part_prefix
from bcqfmt.shards import Unit
from bcqfmt.stored import StoredTensor
from bcqfmt.weight import BcqWeight
from bcqfmt.writer import Written

__all__ = ["ShardJob"]

Array = npt.NDArray[Any]

# Converting holds source, planes and rebuilt words of a weight at once, and is fast beside hashing and writing: workers
# take turns at it, so that memory does not grow with their number.
_one_at_a_time = threading.Lock()


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
        self.weights: dict[str, BcqWeight] = {}
        self.rules: dict[str, tuple[Rule, str | None]] = {}
        self.units: list[Unit] = []
        for name in shard.weights:
            heed()
            module = modules[name]
            layout = layouts[module.layout]
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
            with _one_at_a_time:
                array = original.array()
                computed = {**weight.parts(), part: StoredTensor.from_array(part, array, original.dtype)}
                self._compare(BcqWeight(weight.name, weight.spec, computed), rule, tensor, known)
                return array

        return StoredTensor(part, original.dtype, original.shape, make=make)

    def _compare(self, weight: BcqWeight, rule: Rule, tensor: StoredTensor, known: dict[str, Rebuild]) -> None:
        rebuilt = np.ascontiguousarray(apply_rule(weight, rule, known)).reshape(-1).view(np.uint8)
        at = 0
        for chunk in tensor.chunks():  # piece by piece: the source is not held as a whole again
            if not same_bytes(rebuilt[at : at + chunk.size], chunk):
                break
            at += chunk.size
        if at != rebuilt.size or at != tensor.nbytes:
            self.rules[tensor.name] = ({"rule": "raw"}, None)
