"""Which modules a configuration has to name: patterns for those that are quantized otherwise, and for dense layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from bcqfmt.checkpoint.shards import natural
from bcqfmt.container.stored_tensor import StoredTensor

HEAD = "lm_head"
_EMBEDDINGS = re.compile(r"(^|[._])(embed|embeddings?|embed_tokens|wte|wpe|tok_embeddings)([._]|$)")


def is_head(module: str) -> bool:
    """Whether a module is the output layer of a language model."""
    return module.rpartition(".")[2] == HEAD


def block_path(module: str) -> str:
    """The name inside its block (``self_attn.q_proj`` of ``model.layers.0.self_attn.q_proj``); empty outside blocks."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else ""


def in_block(modules: Iterable[str]) -> set[str]:
    """The different :func:`block_path` of modules."""
    return {block_path(module) for module in modules} - {""}


def skip_rules(dense: Collection[str], quantized: Collection[str]) -> dict[str, dict[str, int]]:
    """GPTQModel's ``dynamic`` entries for layers in blocks that are not quantized."""
    skipped = [name for name in dense if not is_head(name) and block_path(name)]
    return {f"-:{expression}": {} for expression in expressions(skipped, quantized)}


def expressions(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions that match the chosen modules and none of the others."""
    classes, single = patterns(chosen, others)
    return [*classes, *(f"{re.escape(name)}$" for name in single)]


def dense_linears(dense: Iterable[StoredTensor]) -> list[str]:
    """Modules that seem to be linear layers and were left dense: matrices called weight, embeddings aside.

    A checkpoint names no classes, so a router or a head of another kind is listed too; naming it does no harm.
    """
    names = [
        tensor.name.removesuffix(".weight")
        for tensor in dense
        if tensor.name.endswith(".weight") and len(tensor.shape) in (2, 3)
    ]
    return sorted((name for name in names if not _EMBEDDINGS.search(name)), key=natural)


def patterns(chosen: Collection[str], others: Collection[str]) -> tuple[list[str], list[str]]:
    """Regular expressions for whole classes of modules, and the names of those that need one each.

    A class is what shares the last component of its name (``.*\\.down_proj$``), if none of ``others`` has it too.
    """
    taken = {name.rpartition(".")[2] for name in others}
    by_leaf: dict[str, list[str]] = {}
    for name in chosen:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    classes, single = [], []
    for leaf, names in sorted(by_leaf.items()):
        if len(names) > 1 and leaf not in taken and not leaf.isdecimal() and all("." in name for name in names):
            classes.append(rf".*\.{re.escape(leaf)}$")
        else:
            single += names
    return classes, sorted(single, key=natural)
