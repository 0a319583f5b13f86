"""What the readers of a layout make of a model: notes for what only some take, refusals for what none does.

Tried with transformers 5.22, GPTQModel 7.6, AutoAWQ 0.2.9 and compressed-tensors 0.15 to 0.20; ``make peers`` tries it
again (docs/peers.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bcqfmt.weight.weight import BcqWeight

from .names import is_head
from .target import Uniform, not_lossless

_EXPERT = re.compile(r"\.experts\.\d+\.")
_RENAMED = {"mixtral": "the experts", "phi3": "the fused projections"}  # GPTQModel has other modules for these
# Models that have [in, out] weights in their own checkpoints, and the layers that show it: more outputs or more inputs
_CONV1D = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_MORE_OUTPUTS = re.compile(r"\.(c_attn|c_fc|q_attn)\.weight$")
_MORE_INPUTS = re.compile(r"\.mlp\.c_proj\.weight$")
_OLD_PACKING = (2, 4, 8)  # widths that compressed-tensors packs alike in all versions


def _transposed(weight: BcqWeight) -> bool:
    """Whether a weight of GPT-2 is [in, out], as its own checkpoints have it; in those of GPTQ it is [out, in]."""
    rows, columns = weight.shape[-2:]
    return bool(
        (_MORE_OUTPUTS.search(weight.name) and columns > rows) or (_MORE_INPUTS.search(weight.name) and rows > columns)
    )


def check_orientation(weights: Sequence[BcqWeight], model_type: str, layout: str) -> list[str]:
    """BCQ-E616 for a GPT-2 of [in, out] weights in a layout of [out, in]; a note for the opposite in ``dense``."""
    if model_type not in _CONV1D:
        return []
    wrong = next((weight for weight in weights if _transposed(weight)), None)
    if layout != "dense":
        if wrong is not None:
            raise not_lossless(wrong, "a weight of GPT-2, stored [in, out]", f"[out, in] in {layout}")
        return []
    if weights and wrong is None:
        return ["GPT-2: these weights are [out, in], as GPTQ has them; transformers wants them [in, out]"]
    return []


def reader_notes(layout: str, weights: Sequence[Uniform], model_type: str) -> list[str]:
    """What to know before giving the export to a reader; ``layout``: gptq, awq or compressed-tensors."""
    if layout == "compressed-tensors":
        return _compressed_notes(weights)
    notes = []
    if head := next((weight for weight in weights if is_head(weight.module)), None):
        if layout == "awq":
            raise not_lossless(
                head.weight, "a quantized output layer", "a dense one in AWQ: its readers run with a random one",
                "export --to compressed-tensors or gptq; export --to dense always works",
            )  # fmt: skip
        notes.append("lm_head is quantized: GPTQModel reads it; transformers would run with a random one")
    experts = any(_EXPERT.search(weight.module) for weight in weights)
    if experts:
        notes.append("experts: GPTQModel reads them; transformers would run with random ones")
    if model_type in _RENAMED and (experts or model_type == "phi3"):
        notes.append(f"{model_type}: GPTQModel has other names for {_RENAMED[model_type]} and does not load them")
    kinds = {weight.scale for weight in weights}
    if "F32" in kinds:
        notes.append(
            "scales of type F32: kept in the file; GPTQModel computes in 16 bits only and rounds or refuses them"
        )
    elif "BF16" in kinds:
        notes.append(
            "scales of type BF16: GPTQModel keeps them (dtype bfloat16); transformers and AutoAWQ round them to F16"
        )
    return notes


def _compressed_notes(weights: Sequence[Uniform]) -> list[str]:
    notes = []
    if any(_EXPERT.search(weight.module) for weight in weights):
        notes.append("experts: transformers 5 fuses them and refuses them quantized; export --to dense loads there")
    dense_packing = sorted({weight.bits for weight in weights} - set(_OLD_PACKING))
    if any(weight.scattered for weight in weights):
        versions = "0.18 only" if dense_packing else "0.15 to 0.18"
        notes.append(f"act order: read by compressed-tensors {versions}; 0.19 and later refuse it")
    elif dense_packing:
        notes.append(f"{dense_packing[0]} bits: read by compressed-tensors 0.18 and later")
    return notes
