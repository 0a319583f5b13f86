"""To the GPTQ layout, as GPTQModel writes it: ``qweight``, ``qzeros``, ``scales``, ``g_idx``.

Symmetric weights get ``gptq`` (v1: zero points are stored minus one), which every reader knows; asymmetric ones
``gptq_v2`` (as they are), because GPTQModel refuses them in v1. A zero point of 2^bits fits v1 only, 0 fits v2 only: a
checkpoint with both fits neither.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.weight.packing import words_for

from .names import expressions, in_block, is_head, skip_rules
from .target import Recipe, Target, Uniform, best_group_size, not_lossless

_BITS = (2, 3, 4, 8)
_KERNELS = (-1, 16, 32, 64, 128, 256, 512, 1024)
_OTHER_BITS = (
    "export --to compressed-tensors has 2 to 8 bits; if the source was GPTQ (gptq_p), bcqfmt restore writes it again;"
    " export --to dense always works"
)
_IN_BLOCK = "modules_in_block_to_quantize"


def to_gptq(weights: list[Uniform], dense: list[str], *, was_v2: bool) -> Target:
    """The tensors and the configuration; ``dense``: linear layers that are not quantized."""
    for weight in weights:
        _check(weight)
    version, why = _zero_version(weights, was_v2)
    rule = "v2" if version == "gptq_v2" else "v1-nowrap"
    config = _config(weights, dense, version)
    notes = [f"zero points: {version}, {why}"]
    if rule != "v2" and any(weight.high == 2**weight.bits for weight in weights):
        notes.append(
            "zero points: some are 2^bits, stored with all bits set: GPTQModel refuses them, transformers reads them"
            " as 0; bcqfmt convert wants --zero-point v1-nowrap for them"
        )
    if "dynamic" in config and any(key.startswith("-:") for key in config["dynamic"]) and _IN_BLOCK not in config:
        notes.append("dense layers: in some blocks only, which GPTQModel reads and transformers does not")
    sizes = {config["group_size"], *(entry.get("group_size", -1) for entry in config.get("dynamic", {}).values())}
    if odd := sorted(sizes - set(_KERNELS)):
        notes.append(f"group size {odd[0]}: the layout has it, GPTQModel and transformers refuse it")
    return Target(version, [_recipe(weight, rule) for weight in weights], config, "quantize_config.json", notes)


def _check(weight: Uniform) -> None:
    if len(weight.weight.shape) != 2:
        raise not_lossless(
            weight.weight, f"a stack of {weight.weight.shape[0]} matrices", "one matrix a module in GPTQ"
        )
    if weight.bits not in _BITS:
        raise not_lossless(weight.weight, f"{weight.bits} bits", "2, 3, 4 or 8 in GPTQ", _OTHER_BITS)
    for what, count in (("rows", weight.n), ("columns", weight.k)):
        if count * weight.bits % 32:
            found = f"{count} {what} of {weight.bits} bits"
            raise not_lossless(weight.weight, found, f"whole 32-bit words in GPTQ: {what} * bits a multiple of 32")


def _zero_version(weights: list[Uniform], was_v2: bool) -> tuple[str, str]:
    past = [weight for weight in weights if weight.high == 2**weight.bits]
    none = [weight for weight in weights if weight.low == 0]
    if past and none:
        first, other = past[0].weight, none[0].weight
        where = "in it" if first.name == other.name else f"in '{other.name}'"
        found = f"zero point {past[0].high} and, {where}, zero point 0"
        raise not_lossless(first, found, "zero points 1..2^bits (gptq) or 0..2^bits-1 (gptq_v2) in all weights")
    if past:
        return "gptq", f"minus one, because there is a zero point {past[0].high} ('{past[0].weight.name}')"
    if was_v2:
        return "gptq_v2", "as the source had them"
    if asymmetric := [weight for weight in weights if not weight.symmetric]:
        many = f"{len(asymmetric)} of {len(weights)} weights are" if len(weights) > 1 else "the weight is"
        return "gptq_v2", f"because {many} asymmetric, which GPTQModel refuses in gptq"
    return "gptq", "minus one; all are symmetric"


def _recipe(weight: Uniform, rule: str) -> Recipe:
    n, k, bits, groups = weight.n, weight.k, weight.bits, weight.groups
    return Recipe(
        weight,
        {
            "qweight": ("I32", (words_for(k, bits), n), {"rule": "gptq.qweight", "bits": bits}),
            "qzeros": ("I32", (groups, words_for(n, bits)), {"rule": "gptq.qzeros", "bits": bits, "zero_point": rule}),
            "scales": (weight.scale, (groups, n), {"rule": "part", "part": "s0_scale", "transpose": True}),
            "g_idx": ("I32", (k,), {"rule": "g_idx"}),
        },
    )


def _config(weights: list[Uniform], dense: list[str], version: str) -> dict[str, Any]:
    counts = {bits: sum(weight.bits == bits for weight in weights) for bits in _BITS}
    bits = max(_BITS, key=lambda width: counts[width])
    size = best_group_size([weight for weight in weights if weight.bits == bits])
    dynamic = _dynamic(weights, dense, bits, size)
    quantized, skipped = in_block(weight.module for weight in weights), in_block(dense)
    named = {_IN_BLOCK: [sorted(quantized)]} if skipped and not quantized & skipped else {}
    return {
        "bits": bits,
        **({"dynamic": dynamic} if dynamic else {}),
        **named,
        "group_size": size,
        "desc_act": any(weight.scattered for weight in weights),
        "lm_head": any(is_head(weight.module) for weight in weights),
        "method": "gptq",
        "quant_method": "gptq",
        "format": version,
        "checkpoint_format": version,
        "pack_dtype": "int32",
        "sym": all(weight.symmetric for weight in weights),
    }


def _dynamic(weights: list[Uniform], dense: list[str], bits: int, size: int) -> dict[str, dict[str, int]]:
    """GPTQModel's map of patterns: what is skipped in the blocks, and what has another width or group size."""
    quantized = [weight.module for weight in weights]
    found: dict[str, dict[str, int]] = {**skip_rules(dense, quantized)}
    classes: dict[tuple[int, int], list[str]] = {}
    for weight in weights:
        if weight.bits != bits or not weight.fits(size):
            own = size if weight.fits(size) else -1 if weight.fits(-1) else weight.group_size
            classes.setdefault((weight.bits, own), []).append(weight.module)
    for (width, own), modules in classes.items():
        others = [*(name for name in quantized if name not in set(modules)), *dense]
        overrides = {"bits": width, "group_size": own}
        found.update({f"+:{p}": overrides for p in expressions(modules, others)})
    return found
