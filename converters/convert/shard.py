"""One output shard: its modules become weights, and every rule that rebuilds a source tensor is checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt

from bcqfmt.checkpoint.manifest import FileRecord
from bcqfmt.checkpoint.shards import Unit
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.jobs.plan import Shard
from bcqfmt.converters.layouts.protocol import Layout, Module, Options, Rebuilder, Rule
from bcqfmt.converters.layouts.rebuild import rebuilds
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.words.buffers import new_array, wait_for_room
from bcqfmt.weight.weight import BcqWeight

Array = npt.NDArray[Any]

# Packing a weight holds two arrays of its size, and is fast compared to hashing and writing: workers take turns at it
# and wait until there is room, so that memory does not grow with their number. The proof needs a few rows of it.
_one_at_a_time = threading.Lock()
_SPARE = 1 << 26  # bytes of arrays that may be alive in addition to twice the largest weight


class ReadOnce:
    """A module whose tensors are read when they are first asked for as a whole, and kept until :meth:`forget`."""

    def __init__(self, module: Module) -> None:
        self._arrays: dict[str, Array] = {}
        self._keeps = True
        tensors = {suffix: tensor.made_by(partial(self._read, tensor)) for suffix, tensor in module.tensors.items()}
        self.module = replace(module, tensors=tensors)

    def forget(self) -> None:
        """Keep nothing any more: from now on every use reads the file again."""
        self._keeps = False
        self._arrays.clear()

    def _read(self, tensor: StoredTensor) -> Array:
        found = self._arrays.get(tensor.name)
        if found is None:
            found = tensor.allocated_by(new_array).array()
            if self._keeps:
                self._arrays[tensor.name] = found
        return found


class ShardJob:
    """The weights of one shard, each source tensor of them with the rule that rebuilds it.

    Small tensors are proved here. A large one is proved when the writer asks for the part that it becomes: the part is
    computed, the tensor is rebuilt from it and compared with the source.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        shard: Shard,
        modules: Mapping[str, Module],
        layouts: Mapping[str, Layout],
        options: Options,
        check_stop: Callable[[], None],
    ) -> None:
        """``check_stop`` is called before each weight and raises when the work is to stop."""
        self._shard, self._modules, self._layouts, self._options = shard, modules, layouts, options
        self._check_stop = check_stop
        self._rebuilders = {name: layout.rebuilders() for name, layout in layouts.items()}
        self._room = 2 * max((module.nbytes for module in modules.values()), default=0) + _SPARE
        self.rules: dict[str, tuple[Rule, str | None]] = {}
        for name in shard.dense:
            copy = source.copies.get(name)
            if copy is None:
                self.rules[name] = {"rule": "copy"}, None
            elif copy.gives_back(source.tensors[name]):
                self.rules[copy.stored] = copy.rule, name
            else:
                self.rules[copy.stored] = {"rule": "raw"}, None
        with ThreadPoolExecutor(options.threads) as pool:
            self.weights = dict(zip(shard.weights, pool.map(self._converted, shard.weights), strict=True))
        self.units = [Unit.of_weight(weight) for weight in self.weights.values()]
        self.units += [Unit.of_dense(source.tensors[name]) for name in shard.dense]

    def record(self, written: FileRecord) -> dict[str, Any]:
        """What the finalizer needs to know of this shard."""
        rules = {name: [rule, weight] if weight else [rule] for name, (rule, weight) in self.rules.items()}
        return {"file": self._shard.file, **written._asdict(), "rules": rules}

    def forget(self) -> None:
        """Let go of the weights, which refer to this job: else their memory is free only after garbage collection."""
        self.weights, self.units = {}, []

    def _converted(self, name: str) -> BcqWeight:
        """The weight of a module, its small tensors proved."""
        self._check_stop()
        module = self._modules[name]
        layout, read_once = self._layouts[module.layout], ReadOnce(module)
        try:
            weight, rules, heavy, proofs = layout.convert(read_once.module, self._options)
            known = self._rebuilders[module.layout]
            for suffix, rule in rules.items():
                tensor = read_once.module.tensors[suffix]
                self.rules[tensor.name] = (rule, name)
                if suffix not in heavy:
                    self._prove(lambda: weight, rule, tensor, known)
        finally:
            read_once.forget()  # scales are written last, those of all weights: they are read once more then
        parts = weight.parts()
        for suffix, part in heavy.items():
            prove = partial(self._prove, rule=rules[suffix], tensor=module.tensors[suffix], known=known)
            parts |= self._proved_part(weight, part, module.nbytes, prove, proofs.get(suffix, []))
        return BcqWeight(name, weight.spec, parts)

    def _proved_part(
        self, weight: BcqWeight, part: str, source_size: int, prove: Callable[..., None], proof: list[bool]
    ) -> dict[str, StoredTensor]:
        """A large part, computed on demand; with it the rule is proved that rebuilds the source tensor from it.

        It is computed before the parts that the file has just before it: the layout may find them on the way.
        """
        parts = weight.parts()
        planned, held = parts[part], list[Array]()

        def make() -> Array:
            if held:
                return held.pop()
            with _one_at_a_time:
                wait_for_room(source_size + planned.nbytes, self._room, self._check_stop)
                array = planned.array()
            computed = StoredTensor.from_array(part, array, planned.dtype)
            prove(lambda: BcqWeight(weight.name, weight.spec, {**parts, part: computed}), proof=proof)
            return array

        def after(tensor: StoredTensor) -> Array:
            if not held:
                held.append(make())
            return tensor.array()

        before = {name: tensor for name, tensor in parts.items() if name < part and tensor.dtype == planned.dtype}
        found = {name: tensor.made_by(partial(after, tensor)) for name, tensor in before.items()}
        return {**found, part: StoredTensor(part, planned.dtype, planned.shape, make=make)}

    def _prove(
        self,
        weight: Callable[[], BcqWeight],
        rule: Rule,
        tensor: StoredTensor,
        known: Mapping[str, Rebuilder],
        proof: Sequence[bool] = (),
    ) -> None:
        """Archive a tensor raw that the rule does not rebuild byte for byte; ``proof``: what the layout has found."""
        if not (all(proof) if proof else rebuilds(weight(), rule, tensor, known)):
            self.rules[tensor.name] = ({"rule": "raw"}, None)
