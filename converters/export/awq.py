"""To the AWQ GEMM layout: four bits, ``qweight``, ``qzeros`` and ``scales``, one group size for all modules."""

from __future__ import annotations

from bcqfmt.errors import escape

from .names import block_path, in_block, skip_rules
from .target import Recipe, Target, Uniform, best_group_size, not_lossless


def to_awq(weights: list[Uniform], dense: list[str]) -> Target:
    """The tensors and the configuration; ``dense``: linear layers that are not quantized."""
    for weight in weights:
        found, expected = _misfit(weight)
        if found:
            raise not_lossless(weight.weight, found, f"{expected} in AWQ")
    size = best_group_size(weights)
    for weight in weights:
        if not weight.fits(size):
            found = f"groups of {weight.group_size} columns, others of {'a row' if size == -1 else size}"
            raise not_lossless(weight.weight, found, "one group size for all modules in AWQ")
    quantized = [weight.module for weight in weights]
    kept, left = _skipped(dense, quantized)
    dynamic = skip_rules(dense, quantized)
    config = {
        "quant_method": "awq",
        "zero_point": True,
        "group_size": size,
        "bits": 4,
        "version": "gemm",
        "modules_to_not_convert": kept or None,
        **({"dynamic": dynamic} if dynamic else {}),  # read by GPTQModel
    }
    notes = []
    if left:
        notes.append(
            f"modules_to_not_convert: '{escape(left[0])}' is dense and not listed:"
            " its name is part of a quantized module's"
        )
    if any(block_path(name) for name in kept):
        notes.append("dense layers: in some blocks only, which transformers and GPTQModel read and AutoAWQ does not")
    if size not in (-1, 16, 32, 64, 128):
        notes.append(f"group size {size}: AutoAWQ reads it, GPTQModel and transformers refuse it")
    if any(weight.n % 32 for weight in weights):
        notes.append("rows: AutoAWQ itself writes multiples of 32 only; the layout has multiples of 8")
    return Target("awq", [_recipe(weight) for weight in weights], config, None, notes)


def _skipped(dense: list[str], quantized: list[str]) -> tuple[list[str], list[str]]:
    """Names for modules_to_not_convert, and the modules for which there is none.

    Names inside the block where all blocks have the module dense: AutoAWQ looks for those. Readers take entries for
    parts of names too, so one that is part of a quantized module's name would skip that one.
    """
    kept: dict[str, None] = {}
    left = []
    others = in_block(quantized)
    for name in dense:
        short = block_path(name)
        names = ([short] if short and short not in others else []) + [name]
        fit = next((n for n in names if not any(n in module for module in quantized)), None)
        if fit is None:
            left.append(name)
        else:
            kept[fit] = None
    return list(kept), left


def _misfit(weight: Uniform) -> tuple[str, str]:
    if len(weight.weight.shape) != 2:
        return f"a stack of {weight.weight.shape[0]} matrices", "one matrix a module"
    if weight.bits != 4:
        return f"{weight.bits} bits", "4"
    if weight.scale == "F32":
        return "F32 scales", "F16 or BF16"
    if weight.weight.scheme.perm:
        return "reordered columns (perm)", "groups of neighbouring columns"
    if weight.k % weight.group_size:
        return f"{weight.k} columns in groups of {weight.group_size}", "full groups"
    if weight.n % 8:
        return f"{weight.n} rows", "a multiple of 8"
    if weight.high > 15:
        return f"zero point {weight.high}", "0..15"
    return "", ""


def _recipe(weight: Uniform) -> Recipe:
    n, k, groups = weight.n, weight.k, weight.groups
    return Recipe(
        weight,
        {
            "qweight": ("I32", (k, n // 8), {"rule": "awq.qweight"}),
            "qzeros": ("I32", (groups, n // 8), {"rule": "awq.qzeros"}),
            "scales": (weight.scale, (groups, n), {"rule": "part", "part": "s0_scale", "transpose": True}),
        },
    )
