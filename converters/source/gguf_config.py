"""config.json for a GGUF file: the architectures that have a table of names, from the key values alone.

A GGUF file does not say everything that Hugging Face's file did: what follows from the tensors is taken from there
(size of the vocabulary, biases, tied embeddings). Numbers of F32 are written as the shortest decimals that give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from bcqfmt.container.gguf.header import GgufHeader

from .gguf_names import architecture

__all__ = ["CLASSES", "NUMBERS", "config_of"]

CLASSES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
NUMBERS: Final = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_NEEDED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_IDS: Final = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The configuration; empty when the architecture has none, or the file lacks a number that it needs.

    ``shapes`` of all tensors by their names in GGUF.
    """
    kind = architecture(header)
    if kind not in CLASSES or "token_embd.weight" not in shapes:
        return {}
    found: dict[str, Any] = {}
    for key, name in NUMBERS.items():
        value = number(header.get(f"{kind}.{key}"))
        if value is not None:
            found[name] = value
    if any(name not in found for name in _NEEDED):
        return {}
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    model, name = CLASSES[kind]
    if found.get("num_local_experts"):
        model, name = ("mixtral", "MixtralForCausalLM") if kind == "llama" else (model, name)
    found |= {"architectures": [name], "model_type": model, "hidden_act": "silu"}
    found["vocab_size"] = shapes["token_embd.weight"][0]
    found["tie_word_embeddings"] = "output.weight" not in shapes
    if model == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in shapes
        found["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    rotary = number(header.get(f"{kind}.rope.dimension_count"))
    if kind == "phi3" and isinstance(rotary, int) and rotary < found["head_dim"]:
        found["partial_rotary_factor"] = rotary / found["head_dim"]
    found |= _rope_scaling(header, kind)
    for name, key in _IDS.items():
        value = number(header.get(f"tokenizer.ggml.{key}_token_id"))
        if isinstance(value, int):
            found[name] = value
    return {**found, "dtype": "float32"}  # of the weights' values; a model may be loaded in any other


def number(value: Any) -> int | float | None:
    """A number as JSON should have it; None for anything else, also for arrays with one number a layer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _rope_scaling(header: GgufHeader, kind: str) -> dict[str, Any]:
    scaling = header.get(f"{kind}.rope.scaling.type")
    factor = number(header.get(f"{kind}.rope.scaling.factor"))
    if scaling not in ("linear", "yarn") or factor is None:
        return {}
    found: dict[str, Any] = {"rope_type": scaling, "factor": factor}
    original = number(header.get(f"{kind}.rope.scaling.original_context_length"))
    if original is not None and scaling == "yarn":
        found["original_max_position_embeddings"] = original
    return {"rope_scaling": found}
