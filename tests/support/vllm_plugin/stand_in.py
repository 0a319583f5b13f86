"""A stand-in for vLLM, made of its signatures: classes and functions of the right names that do nothing by themselves.

What layers do around our plugin (which sizes they work out, what they call with which arguments, how tensors reach
weight loaders) is written here again, and only through attributes and arguments that the signatures have.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_plugin.signatures import VERSIONS

_FOLDER = Path(__file__).parents[2] / "integrations" / "vllm"
_ALL = {one: json.loads((_FOLDER / f"vllm-{one}.json").read_text(encoding="utf-8")) for one in VERSIONS}
SIGNATURES: dict[str, Any] = dict(_ALL[VERSIONS[-1]])  # of the version that is installed
_LAYERS = "vllm.model_executor.layers"
_LINEAR, _HEAD = f"{_LAYERS}.linear", f"{_LAYERS}.vocab_parallel_embedding"
_WORLD = {"ABC": object, "PluggableLayer": nn.Module}
_OURS = tuple(f"bcqfmt.integrations.vllm.{name}" for name in ("config", "method", "warm_up"))


@contextmanager
def installed(version: str = VERSIONS[-1]) -> Iterator[types.SimpleNamespace]:
    """Within the block ``import vllm...`` finds the stand-in; what was registered is in ``registered``."""
    SIGNATURES.update(_ALL[version])
    found = _modules()
    held = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm" or name in _OURS}
    for name in held:
        del sys.modules[name]
    sys.modules.update(found)
    registered: dict[str, Any] = {}
    found[f"{_LAYERS}.quantization"].register_quantization_config = lambda name: (
        lambda cls: (  # type: ignore[attr-defined]
            registered.__setitem__(name, cls) or cls
        )
    )
    found["vllm.transformers_utils.repo_utils"].get_hf_file_bytes = _file  # type: ignore[attr-defined]
    found[_LINEAR].UnquantizedLinearMethod.__init__ = lambda self: None  # type: ignore[attr-defined]
    found[_LINEAR].UnquantizedLinearMethod.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    limits = types.SimpleNamespace(max_num_batched_tokens=4)
    found["vllm.config.vllm"].get_current_vllm_config_or_none = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]
        scheduler_config=limits
    )
    base = found[f"{_LAYERS}.quantization.base_config"].QuantizationConfig  # type: ignore[attr-defined]
    base.__init__ = lambda self: setattr(self, "packed_modules_mapping", {})
    try:
        yield types.SimpleNamespace(modules=found, registered=registered)
    finally:
        SIGNATURES.update(_ALL[VERSIONS[-1]])
        for name in [*found, *_OURS]:
            sys.modules.pop(name, None)
        sys.modules.update(held)


def _file(file_name: str, model: str | Path, revision: str | None = "main") -> bytes | None:
    place = Path(model) / file_name
    return place.read_bytes() if place.is_file() else None


def _modules() -> dict[str, types.ModuleType]:
    known: dict[str, Any] = dict(_WORLD)
    found: dict[str, types.ModuleType] = {}
    order = sorted(SIGNATURES["modules"], key=lambda name: "base_config" not in name)
    for name in order:
        for depth in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:depth])
            found.setdefault(part, types.ModuleType(part)).__path__ = []
        entry = SIGNATURES["modules"][name]
        waiting = [one for one in entry["classes"] if "bases" in entry["classes"][one]]
        while waiting:
            one = next(c for c in waiting if all(b in known for b in entry["classes"][c]["bases"]))
            waiting.remove(one)
            known[one] = _class(one, entry["classes"][one], known)
            setattr(found[name], one, known[one])
        for one, about in entry["functions"].items():
            setattr(found[name], one, _function(one, about))
    return found


def _class(name: str, about: dict[str, Any], known: dict[str, Any]) -> type:
    import abc

    bases = tuple(known[base] for base in about["bases"]) or (object,)
    inside = {one: _function(one, entry) for one, entry in about["methods"].items() if one != "__init__"}
    meta = abc.ABCMeta if about["bases"] == ["ABC"] or isinstance(bases[0], abc.ABCMeta) else type
    return meta(name, bases, inside)


def _function(name: str, about: dict[str, Any]) -> Any:
    import abc

    space: dict[str, Any] = {}
    exec(f"def {name}{about['signature']}: raise NotImplementedError({name!r})", space)
    made: Any = abc.abstractmethod(space[name]) if about["abstract"] else space[name]
    wrap = {"classmethod": classmethod, "staticmethod": staticmethod, "property": property}.get(about["kind"])
    return made if wrap is None else wrap(made)


def attributes_of(name: str) -> set[str]:
    """Attributes that a class of layers gives itself, those of its bases among them."""
    for entry in SIGNATURES["modules"].values():
        if name in entry["classes"]:
            about = entry["classes"][name]
            return {*about["attributes"], *(a for base in about["bases"] for a in attributes_of(base))}
    return set()


# -- layers: what vLLM's own do before and after they call the plugin ---------------------------------------------


class Rank:
    """One of ``ranks`` processes that share layers out."""

    def __init__(self, modules: dict[str, types.ModuleType], rank: int = 0, ranks: int = 1) -> None:
        self.modules, self.rank, self.ranks = modules, rank, ranks

    def column(self, config: Any, prefix: str, out: int, columns: int) -> Any:
        """ColumnParallelLinear."""
        return self._linear("ColumnParallelLinear", config, prefix, [out], columns)

    def merged(self, config: Any, prefix: str, outs: Sequence[int], columns: int) -> Any:
        """MergedColumnParallelLinear."""
        return self._linear("MergedColumnParallelLinear", config, prefix, list(outs), columns, output_sizes=list(outs))

    def qkv(self, config: Any, prefix: str, heads: int, few: int, head: int, columns: int) -> Any:
        """QKVParallelLinear; ``few``: heads of keys and values, copied where there are more ranks."""
        copies = max(1, self.ranks // few)
        sizes = [heads * head, *[few * copies * head] * 2]
        return self._linear(
            "QKVParallelLinear", config, prefix, sizes, columns, output_sizes=sizes, num_kv_head_replicas=copies
        )

    def row(self, config: Any, prefix: str, out: int, columns: int) -> Any:
        """RowParallelLinear."""
        return self._linear("RowParallelLinear", config, prefix, [out], columns)

    def replicated(self, config: Any, prefix: str, out: int, columns: int) -> Any:
        """ReplicatedLinear."""
        return self._linear("ReplicatedLinear", config, prefix, [out], columns)

    def _linear(self, kind: str, config: Any, prefix: str, outs: list[int], columns: int, **more: Any) -> Any:
        layer = self._layer(_LINEAR, kind, tp_rank=self.rank, tp_size=self.ranks, prefix=prefix, **more)
        layer.quant_method = config.get_quant_method(layer, prefix)
        split = not kind.startswith(("Row", "Replicated"))
        sizes = [out // self.ranks if split else out for out in outs]
        own = columns // self.ranks if kind.startswith("Row") else columns
        loader = {"weight_loader": lambda *given: None}
        if kind.startswith("Replicated"):
            layer.quant_method.create_weights(layer, own, sizes, columns, sum(outs), torch.float32, **loader)
        else:
            layer.quant_method.create_weights(
                layer=layer, input_size_per_partition=own, output_partition_sizes=sizes, input_size=columns,
                output_size=sum(outs), params_dtype=torch.float32, **loader,
            )  # fmt: skip
        return layer

    def head(self, config: Any, prefix: str, tokens: int, columns: int, kind: str = "ParallelLMHead") -> Any:
        """ParallelLMHead or VocabParallelEmbedding: tokens padded to a multiple of 64, then shared out."""
        padded = -(-tokens // 64) * 64
        each = padded // self.ranks
        first, last = (min(tokens, each * rank) for rank in (self.rank, self.rank + 1))
        indices = types.SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
        layer = self._layer(
            _HEAD, kind, tp_size=self.ranks, shard_indices=indices, org_vocab_size=tokens, embedding_dim=columns
        )
        layer.quant_method = config.get_quant_method(layer, prefix)
        if layer.quant_method is not None:
            layer.quant_method.create_weights(
                layer, columns, [each], columns, padded, params_dtype=torch.float32, weight_loader=lambda *given: None
            )
        return layer

    def other(self, module: str, kind: str) -> Any:
        """A layer that is not linear."""
        return self._layer(module, kind)

    def _layer(self, module: str, kind: str, **attributes: Any) -> Any:
        unknown = set(attributes) - attributes_of(kind)
        assert not unknown, f"{kind} has no {unknown}"
        cls = getattr(self.modules[module], kind)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer


def load(layer: Any, tensors: dict[str, Tensor], shard: Any = None) -> None:
    """Hand tensors (suffix -> tensor) to a layer as vLLM does; with ``shard`` where a layer has several pieces."""
    parameters = dict(layer.named_parameters(recurse=False))
    for suffix, tensor in tensors.items():
        inlet = parameters["weight" if suffix == "weight" else f"bcq_{suffix}"]
        assert inlet.dtype == tensor.dtype  # vLLM logs a warning for every other one
        if shard is None:
            inlet.weight_loader(inlet, tensor)
        else:
            inlet.weight_loader(inlet, tensor, shard)


def finish(layer: Any) -> None:
    """After loading: every module that has a quantization method is told."""
    for _, module in list(layer.named_modules()):
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def fill(layer: Any, tensors: Sequence[dict[str, Tensor]], shards: Sequence[Any] = (None,)) -> Any:
    """Load the tensors of every weight, and finish."""
    for one, shard in zip(tensors, shards, strict=True):
        load(layer, one, shard)
    finish(layer)
    return layer
