"""To the layout pack-quantized of compressed-tensors, densely packed (0.18 and later), stacks of experts included."""

from __future__ import annotations

from typing import Any, NamedTuple

from bcqfmt.weight.packing import words_for

from .names import HEAD, is_head, patterns
from .target import Recipe, Shaped, Target, Uniform, not_lossless

_FORMAT = "pack-quantized"
# The first version that packs densely; the next minor one no longer knows weight_g_idx.
_VERSION = "0.18.0"


class _Kind(NamedTuple):
    """What the modules of a group of the configuration share; ``group_size`` None: one scale a row."""

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool


def to_compressed(weights: list[Uniform], dense: list[str]) -> Target:
    """The tensors and the configuration; ``dense``: linear layers that are not quantized."""
    for weight in weights:
        _check(weight)
    grouped = {weight.group_size for weight in weights if weight.group_size < weight.k}
    kinds: dict[_Kind, list[str]] = {}
    for weight in weights:
        size = weight.group_size if weight.group_size in grouped else None
        kind = _Kind(weight.bits, size, weight.symmetric, weight.scattered)
        kinds.setdefault(kind, []).append(weight.module)
    groups = {}
    for i, (kind, modules) in enumerate(kinds.items()):
        others = [name for other, names in kinds.items() if other != kind for name in names]
        groups[f"group_{i}"] = _group(kind, modules, others, dense)
    head = [] if any(is_head(weight.module) for weight in weights) or any(is_head(name) for name in dense) else [HEAD]
    config = {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*head, *dense],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": _VERSION,
    }
    return Target("compressed-tensors", [_recipe(weight) for weight in weights], config, None, [])


def _check(weight: Uniform) -> None:
    if weight.bits < 2:
        raise not_lossless(weight.weight, f"{weight.bits} bit", "2 to 8 bits in compressed-tensors")
    if weight.k % weight.group_size:
        found = f"{weight.k} columns in groups of {weight.group_size}"
        raise not_lossless(weight.weight, found, "full groups in compressed-tensors")
    if weight.high == 2**weight.bits:
        raise not_lossless(
            weight.weight, f"zero point {weight.high}", f"0..{weight.high - 1} in compressed-tensors: a code"
        )


def _group(kind: _Kind, modules: list[str], others: list[str], dense: list[str]) -> dict[str, Any]:
    targets = ["Linear"]
    if others:
        classes, single = patterns(modules, [*others, *dense])
        targets = [*(f"re:{expression}" for expression in classes), *single]
    return {
        "targets": targets,
        "weights": {
            "num_bits": kind.bits,
            "type": "int",
            "symmetric": kind.symmetric,
            "group_size": kind.group_size,
            "strategy": "channel" if kind.group_size is None else "group",
            "block_structure": None,
            "dynamic": False,
            "actorder": "group" if kind.act_order else None,
            "observer": "minmax",
            "observer_kwargs": {},
        },
        "input_activations": None,
        "output_activations": None,
        "format": _FORMAT,
    }


def _recipe(weight: Uniform) -> Recipe:
    shape, bits = weight.weight.shape, weight.bits
    lead, n, k, groups = shape[:-2], weight.n, weight.k, weight.groups
    packing = {"packing": "dense"}
    tensors: Shaped = {
        "weight_packed": ("I32", (*lead, n, words_for(k, bits)), {"rule": "compressed.weight_packed", **packing}),
        "weight_scale": (weight.scale, (*lead, n, groups), {"rule": "part", "part": "s0_scale"}),
        "weight_shape": ("I64", (len(shape),), {"rule": "compressed.weight_shape", "dtype": "I64"}),
    }
    if not weight.symmetric:
        rule = {"rule": "compressed.zero_packed", **packing}
        tensors["weight_zero_point"] = ("I32", (*lead, words_for(n, bits), groups), rule)
    if weight.scattered:
        index = {"rule": "compressed.g_idx", "shape": [*lead, k], "dtype": "I32"}
        tensors["weight_g_idx"] = ("I32", (*lead, k), index)
    return Recipe(weight, tensors)
