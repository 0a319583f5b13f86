"""Which module of a transformers model holds which weight of a checkpoint, and what the checkpoint lacks.

The names of a checkpoint are first renamed as transformers renames them. Then a weight is one of

- the weight of an nn.Linear: a `BcqLinear` takes its place;
- the table of an nn.Embedding: a `BcqEmbedding` does, and a head that is tied to it multiplies with the same weight;
- a stack of experts that the model holds as one parameter: an `ExpertStack` takes its place;
- one expert's matrix, which transformers would stack with others: the matrices stay apart, an `ExpertList` joins them;
- a stack of such matrices, as GGUF has them: the same.

Anything else is refused by name (BCQ-E305) before a byte of weights is read. Tensors that the model has and the
checkpoint has not, which transformers draws at random with a warning, are refused too (BCQ-E602).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.core_model_loading import rename_source_key as rename

from bcqfmt.checkpoint.folder import CONFIG
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.integrations.torch.embedding import BcqEmbedding, TiedHead
from bcqfmt.integrations.torch.layers import BcqLinear, BcqModule
from bcqfmt.weight.scheme import part_prefix
from bcqfmt.weight.weight import BcqWeight

from .experts import ExpertList, ExpertsForward, ExpertStack
from .scaled import ScaledEmbedding, is_scaled

_HOOK = "_adjust_missing_and_unexpected_keys"  # of transformers' models
_STACKED = re.compile(r"\.experts\.(?!\d)")
_SHOWN = 4
_NOT_CALLED = "?"


class _Expert(NamedTuple):
    """A matrix of one expert: its weight, the path of its module, the number of the expert, which piece it is."""

    weight: BcqWeight
    path: str
    number: int
    piece: int


def place_weights(model: Any, weights: Mapping[str, BcqWeight], conversions: Sequence[Any]) -> list[tuple[str, str]]:
    """Put empty BCQ modules into a model on the meta device; ``conversions``: how transformers renames its tensors.

    Returns further renamings, (pattern, replacement), by which parts find their buffers.
    """
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    known, prefix = dict(model.state_dict()), model.base_model_prefix
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    more: set[tuple[str, str]] = set()
    experts: dict[str, list[_Expert]] = {}
    for name, weight in weights.items():
        target, pattern = rename(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        single = name if pattern is not None or target in known else _of_one_expert(weight)
        if single != name:
            target, pattern = rename(single, renamings, converters, prefix, known)
        if target not in known:
            if not any(pattern.search(name) for pattern in ignored):
                raise _refusal(weight, "the model has no such tensor")
            continue
        if pattern is not None:
            converter = next(entry for entry in converters if pattern in entry.source_patterns)
            plain = rename(single, renamings, [], prefix, None)[0]
            experts.setdefault(target, []).append(_expert(weight, plain, target, pattern, converter))
        elif target.endswith(".weight"):
            path = target.removesuffix(".weight")
            _place_matrix(model, path, weight)
            _check_parts(name, path, renamings, prefix, more)
        else:
            _place_stack(model, target, weight)
            leaf = target.rpartition(".")[2]
            more.add((rf"\.{re.escape(leaf)}_bcq_", f".{leaf}.bcq_"))
    for target, found in experts.items():
        _place_experts(model, target, known[target].shape, found)
    tied = getattr(model, "all_tied_weights_keys", {})
    _tie_heads(model, tied)
    for name in [name for name in tied if name not in model.state_dict()]:
        del tied[name]  # a head with a weight of its own is no longer the embedding
    return sorted(more)


def _place_matrix(model: Any, path: str, weight: BcqWeight) -> None:
    old = model.get_submodule(path)
    table = is_scaled(old) or (isinstance(old, nn.Embedding) and type(old).forward is nn.Embedding.forward)
    if not table and (not isinstance(old, nn.Linear) or type(old).forward is not nn.Linear.forward):
        raise _refusal(weight, f"the model holds it in a {type(old).__name__}", "an nn.Linear or nn.Embedding")
    if tuple(old.weight.shape) != weight.shape:
        raise _refusal(weight, f"shape {list(weight.shape)}", f"{list(old.weight.shape)} as in the model")
    if is_scaled(old):
        made = _empty(ScaledEmbedding, weight, old, dtype=old.weight.dtype)
    elif table:
        made = _empty(BcqEmbedding, weight, dtype=old.weight.dtype)
    else:
        made = _empty(BcqLinear, weight, bias=old.bias is not None, dtype=getattr(old.bias, "dtype", None))
    _put(model, path, made)


def _tie_heads(model: Any, tied: Mapping[str, str]) -> None:
    """Heads that are tied to an embedding which has become a BCQ weight multiply with that."""
    for head, source in tied.items():
        place, other = head.removesuffix(".weight"), source.removesuffix(".weight")
        modules: dict[str, Any] = dict(model.named_modules())
        embedding, old = modules.get(other), modules.get(place)
        if isinstance(embedding, BcqEmbedding) and type(old) is nn.Linear and getattr(old, "bias", None) is None:
            tied_head: Any = TiedHead(embedding)
            tied_head._is_hf_initialized = True
            _put(model, place, tied_head)


def _place_stack(model: Any, target: str, weight: BcqWeight) -> None:
    owner, _, leaf = target.rpartition(".")
    experts = model.get_submodule(owner)
    held = experts._parameters.get(leaf)
    if held is None or len(weight.shape) != 3 or tuple(held.shape) != weight.shape:
        stored = f"a weight of shape {list(weight.shape)}"
        raise _refusal(weight, stored, "a stack as large as the model's parameter of that name")
    del experts._parameters[leaf]
    experts.add_module(leaf, _empty(ExpertStack, weight))
    _prepare(experts, leaf)


def _expert(weight: BcqWeight, name: str, target: str, pattern: str, converter: Any) -> _Expert:
    """Where one expert's matrix belongs in the parameter that transformers would make of all of them."""
    kinds = [type(operation) for operation in converter.operations]
    dims = [operation.dim for operation in converter.operations if hasattr(operation, "dim")]
    owner = target.rpartition(".")[0]
    inner = re.fullmatch(rf"{re.escape(owner)}\.(\d+)\.(.+)\.weight", name)
    if (kinds, dims) not in (([MergeModulelist], [0]), ([MergeModulelist, Concatenate], [0, 1])) or inner is None:
        done = ", ".join(kind.__name__ for kind in kinds)
        raise _refusal(weight, f"transformers makes '{target}' of it ({done})", "a matrix that is used as it is")
    path = name.removesuffix(".weight") if len(weight.shape) == 2 else f"{owner}.{inner[2]}"
    return _Expert(weight, path, int(inner[1]), converter.source_patterns.index(pattern))


def _of_one_expert(weight: BcqWeight) -> str:
    """The name that the first matrix of a stack of experts would have alone; the weight's own if it is none."""
    return _STACKED.sub(".experts.0.", weight.name, count=1) if len(weight.shape) == 3 else weight.name


def _place_experts(model: Any, target: str, shape: Any, found: list[_Expert]) -> None:
    """Matrices side by side, or stacks of them, as modules of their own, and a list in place of the parameter."""
    owner, _, leaf = target.rpartition(".")
    experts = model.get_submodule(owner)
    if [item.path for item in found] == [target]:
        _place_stack(model, target, found[0].weight)
        return
    rows = _rows_of_stacks if len(found[0].weight.shape) == 3 else _rows_of_matrices
    experts.__dict__[leaf] = ExpertList(rows(model, target, shape, found))
    del experts._parameters[leaf]
    _prepare(experts, leaf)


def _rows_of_stacks(model: Any, target: str, shape: Any, found: list[_Expert]) -> list[list[tuple[BcqModule, int]]]:
    pieces = sorted(found, key=lambda item: item.piece)
    held = [len(shape), *(item.piece for item in pieces)] == [3, *range(len(pieces))]
    high = sum(item.weight.spec.out for item in pieces)
    for item in pieces:
        if not held or (item.weight.spec.stack, high, item.weight.spec.columns) != tuple(shape):
            stored = f"{len(pieces)} stacks, this one of shape {list(item.weight.shape)}"
            raise _refusal(item.weight, stored, f"'{target}' {list(shape)} in all")
    stacks = [_empty(ExpertStack, item.weight) for item in pieces]
    for item, stack in zip(pieces, stacks, strict=True):
        _put(model, item.path, stack)
    return [[(stack, number) for stack in stacks] for number in range(shape[0])]


def _rows_of_matrices(model: Any, target: str, shape: Any, found: list[_Expert]) -> list[list[tuple[BcqModule, int]]]:
    pieces = 1 + max(item.piece for item in found)
    table = {(item.number, item.piece): item for item in found}
    wanted = {(number, piece) for number in range(shape[0]) for piece in range(pieces)}
    first = found[0].weight
    if table.keys() != wanted or len(table) != len(found):
        raise _refusal(first, f"{len(found)} matrices for '{target}'", f"{len(wanted)}: every expert's, or none")
    rows: list[list[tuple[BcqModule, int]]] = []
    for number in range(shape[0]):
        items = [table[number, piece] for piece in range(pieces)]
        high, wide = sum(item.weight.spec.out for item in items), items[0].weight.spec.columns
        if (high, wide) != tuple(shape[1:]) or any(len(item.weight.shape) != 2 for item in items):
            raise _refusal(items[0].weight, f"expert {number} has shape {[high, wide]}", f"{list(shape[1:])}")
        rows.append([(_empty(BcqLinear, item.weight), 0) for item in items])
        for item, (layer, _) in zip(items, rows[-1], strict=True):
            _put(model, item.path, layer)
    return rows


def _prepare(experts: Any, leaf: str) -> None:
    """One expert after the other, not all in one product; and nothing in them is drawn at random."""
    if hasattr(experts, "config"):
        experts.__dict__.setdefault("forward", ExpertsForward(experts)).leaves.append(leaf)
    experts._is_hf_initialized = True


def _put(model: Any, path: str, layer: nn.Module) -> None:
    """A module under a path, whose last steps may not be there yet."""
    owner, (*steps, leaf) = model, path.split(".")
    for step in steps:
        if not hasattr(owner, step):
            owner.add_module(step, nn.Module())
        owner = getattr(owner, step)
    setattr(owner, leaf, layer)


def _check_parts(name: str, path: str, renamings: Any, prefix: str, more: set[tuple[str, str]]) -> None:
    """Transformers renames parts by the same patterns; one that ends in ``weight`` misses them: add a renaming."""
    part = part_prefix(name) + "s0_planes"
    got = rename(part, renamings, [], prefix, {f"{path}.bcq_s0_planes": True})[0]
    if got != f"{path}.bcq_s0_planes":
        more.add((rf"^{re.escape(got.removesuffix('s0_planes'))}", f"{path}.bcq_"))


def _empty(kind: Any, weight: BcqWeight, *plain: Any, **options: Any) -> Any:
    """A module without content: with the weight's name in files, and a mark that makes transformers leave it alone."""
    outliers = weight.parts().get("outlier_values")
    nnz = 0 if outliers is None else outliers.shape[0]
    module = kind(weight.spec, *plain, device="meta", nnz=nnz, **options)
    module.weight_name, module._is_hf_initialized = weight.name, True
    return module


def _refusal(weight: BcqWeight, found: str, expected: str = "") -> BcqError:
    return error("BCQ-E305", tensor=weight.name, found=found, expected=expected, hint="bcqfmt export --to dense works")


def collect_missing(model: Any) -> list[str]:
    """A list that holds the names of missing tensors once the model has been loaded, without tied weights and the like.

    Transformers does not tell quantizers; the last to see the list is a method of the model, which is wrapped.
    """
    found = [_NOT_CALLED]
    own = getattr(model, _HOOK)

    def collect(info: Any) -> None:
        own(info)
        found[:] = sorted(info.missing_keys)

    model.__dict__[_HOOK] = collect
    return found


def refuse_missing(model: Any, missing: list[str], source: Path | None) -> None:
    """BCQ-E602 for a model that lacks tensors; ``missing``: what :func:`collect_missing` gave.

    A head may be new where another class is loaded than the one that was saved, a classifier over a language model.
    """
    del model.__dict__[_HOOK]
    assert missing != [_NOT_CALLED], f"transformers no longer calls {_HOOK}"
    names, base = model.config.architectures, f"{model.base_model_prefix}."
    if names and type(model).__name__ not in names and model.base_model is not model:
        parts = [f"{path}." for path, module in model.named_modules() if isinstance(module, BcqModule)]
        missing = [name for name in missing if name.startswith((base, *parts))]
    if missing:
        more = " ..." if len(missing) > _SHOWN else ""
        raise error(
            "BCQ-E602", CONFIG if source is None else f"{source.name}/{CONFIG}",
            found=f"{len(missing)} tensors of the model are not in the files: "
            f"{escape(', '.join(missing[:_SHOWN]))}{more}",
            expected="all of them",
            hint="correct config.json (the number of layers, biases), or get the complete checkpoint",
        )  # fmt: skip
