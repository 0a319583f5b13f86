"""config.json for a GGUF file: the architectures that have a table of names, from the key values and a few tensors.

A GGUF file does not say everything that Hugging Face's file did: what follows from the tensors is taken from there
(size of the vocabulary, biases, tied embeddings, factors of the rotations). Numbers of F32 are written as the shortest
decimals that give them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from bcqfmt.container.gguf.header import GgufHeader
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error, escape

from .gguf_names import architecture

CLASSES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
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
_SCALING: Final = "rope.scaling.type"
_COUNTS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_MAX_FACTORS = 1 << 12
_NEEDED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LARGEST: Final = {"gemma2": 46, "gemma3": 62}  # layers of the models of 27 billion, which scale queries otherwise
_IDS: Final = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def check_values(header: GgufHeader, shown: str) -> None:
    """BCQ-E214 for a number of a known architecture that is none, a count that is not at least 1, a text that is none.

    Arrays of numbers, one for every layer, pass.
    """
    kind = architecture(header)
    for key, name in NUMBERS.items() if kind in CLASSES else ():
        value = header.get(f"{kind}.{key}")
        if value is None or isinstance(value, np.ndarray):
            continue
        found, count = number(value), name in _COUNTS
        if found is None or (count and (not isinstance(found, int) or found < 1)):
            text = f"'{escape(value, 40)}', a text" if isinstance(value, str) else escape(str(value), 40)
            expected = "an integer, at least 1" if count else "a number"
            raise error("BCQ-E214", shown, f"{kind}.{key}", text, expected)
    scaling = header.get(f"{kind}.{_SCALING}", "") if kind in CLASSES else ""
    if not isinstance(scaling, str):
        text = "an array" if isinstance(scaling, list | np.ndarray) else str(scaling)
        raise error("BCQ-E214", shown, f"{kind}.{_SCALING}", text, "a text")


def config_of(
    header: GgufHeader, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """The configuration; empty when the architecture has none, or the file lacks a number that it needs.

    ``shapes`` of all tensors by their names in GGUF; ``tensors``: those that have no name in Hugging Face are read.
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
    found |= _particular(header, kind, found)
    found |= _rope_scaling(header, kind, found, tensors)
    found["pad_token_id"] = None  # else transformers takes that of the first model of the family
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


def _particular(header: GgufHeader, kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What only one family has."""
    if kind == "qwen3moe":
        width = number(header.get(f"{kind}.expert_feed_forward_length"))
        known = {} if width is None else {"moe_intermediate_size": width}
        return {"num_experts": found.get("num_local_experts"), "norm_topk_prob": True, **known}
    if not kind.startswith("gemma"):
        return {}
    act = "gelu_pytorch_tanh"
    more: dict[str, Any] = {"hidden_act": act, "hidden_activation": act}
    if kind != "gemma":
        each = found["hidden_size"] // found["num_attention_heads"]
        more["query_pre_attn_scalar"] = each if found["num_hidden_layers"] == LARGEST[kind] else found["head_dim"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping") if kind == "gemma2" else ():
        more[key] = number(header.get(f"{kind}.{key}"))
    return more


def _rope_scaling(
    header: GgufHeader, kind: str, found: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """How rotations are stretched: by key values, or by a tensor with a factor for every pair of columns."""
    plain = _scaling_of_keys(header, kind)
    if kind == "gemma3":  # layers that see a window keep rotations of their own
        local = number(header.get(f"{kind}.rope.freq_base_swa")) or 10000.0
        whole = {"rope_type": "default", "rope_theta": found.get("rope_theta", 1e6), **plain}
        return {"rope_parameters": {"sliding_attention": _plain(local), "full_attention": whole}}
    original = number(header.get(f"{kind}.rope.scaling.original_context_length"))
    short, long = _factors(tensors, "rope_factors_short.weight"), _factors(tensors, "rope_factors_long.weight")
    if short and long and isinstance(original, int):
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    factors = _factors(tensors, "rope_freqs.weight")
    if factors and max(factors) > 1:
        return {"rope_scaling": _llama3(factors, found) or _any_factors(factors, found)}
    return {"rope_scaling": plain} if plain else {}


def _plain(theta: int | float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _scaling_of_keys(header: GgufHeader, kind: str) -> dict[str, Any]:
    scaling = header.get(f"{kind}.{_SCALING}")
    factor = number(header.get(f"{kind}.rope.scaling.factor"))
    if scaling not in ("linear", "yarn") or factor is None:
        return {}
    found: dict[str, Any] = {"rope_type": scaling, "factor": factor}
    original = number(header.get(f"{kind}.rope.scaling.original_context_length"))
    if original is not None and scaling == "yarn":
        found["original_max_position_embeddings"] = original
    return found


def _factors(tensors: Mapping[str, StoredTensor], name: str) -> list[float]:
    """The numbers of a tensor; none if it is not there, or not what it should be."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != "F32" or not 0 < math.prod(tensor.shape) <= _MAX_FACTORS:
        return []
    numbers = tensor.array().reshape(-1)
    return [float(str(number)) for number in numbers] if np.isfinite(numbers).all() and (numbers > 0).all() else []


def _llama3(factors: list[float], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The four numbers of Llama 3 if they give these factors: published models differ in the first one only."""
    low, high, original, most = 1.0, 4.0, 8192, max(factors)
    turns = original * found.get("rope_theta", 10000.0) ** (-np.arange(len(factors)) / len(factors)) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / most + smooth), rtol=1e-5):
        return None
    scaling = {"rope_type": "llama3", "factor": most, "low_freq_factor": low, "high_freq_factor": high}
    return {**scaling, "original_max_position_embeddings": original}


def _any_factors(factors: list[float], found: Mapping[str, Any]) -> dict[str, Any]:
    """Any factors, for texts of any length: transformers' longrope without its scaling of the attention."""
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {**scaling, "original_max_position_embeddings": found.get("max_position_embeddings", 4096)}
