"""Key values of a model, from config.json: what `source/gguf_config` does, back.

llama.cpp has parts of an architecture in its code, not in keys. A configuration that says otherwise is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from bcqfmt.container.gguf.writer import pair
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.gguf_config import CLASSES, LARGEST, NUMBERS

_KINDS: Final = {"mistral": "llama", "mixtral": "llama"} | {model: kind for kind, (model, _) in CLASSES.items()}
_NEEDED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
_PERIOD: Final = {"gemma2": 2, "gemma3": 6}  # every n-th layer attends to the whole text, the others to a window
_KEYS: Final = {  # of single architectures
    "qwen3moe": {"expert_count": "num_local_experts", "expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
}
_FLOATS: Final = {
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "attn_logit_softcapping",
    "final_logit_softcapping",
}  # fmt: skip
_FREQUENCIES: Final = "rope_freqs.weight"


class Unwritable(Exception):
    """A tokenizer or a model that has no form in GGUF here: what was found, what is expected, what to do instead."""

    def __init__(self, found: str, expected: str, hint: str | None = None) -> None:
        super().__init__(found, expected)
        self.found, self.expected, self.hint = found, expected, hint


def model_pairs(config: Mapping[str, Any], name: str) -> list[bytes]:
    """Everything but the tokenizer; ``name`` of the model."""
    model = config.get("model_type")
    if model not in _KINDS:
        raise Unwritable(f"model_type {model}", f"one of {', '.join(_KINDS)}")
    kind = _KINDS[model]
    values = {**config, **_rope(config), "rope_local_base_freq": _local_theta(config)}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    values.setdefault("num_local_experts", values.get("num_experts"))
    for key in (*_NEEDED, *_KEYS.get(kind, {}).values()):
        if type(values.get(key)) not in (int, float) or not values[key] > 0:
            raise Unwritable(f"no {key}, or none that is a positive number", "a configuration of the model")
    head = values["head_dim"] = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    for key, found, expected in _fixed(kind, values):
        if found != expected:
            raise Unwritable(f"{key} {found}", f"{expected}, as llama.cpp has it for {kind}")
    if kind not in _PERIOD:
        values["sliding_window"] = None
    found_ = [
        pair("general.architecture", "str", kind),
        pair("general.type", "str", "model"),
        pair("general.name", "str", name),
    ]
    for key, own in {**NUMBERS, **_KEYS.get(kind, {})}.items():
        value = values.get(own)
        if type(value) in (int, float):
            found_.append(pair(f"{kind}.{key}", "f32" if key in _FLOATS else "u32", value))
    found_.append(pair(f"{kind}.attention.value_length", "u32", head))
    found_.append(pair(f"{kind}.rope.dimension_count", "u32", int(head * values.get("partial_rotary_factor", 1))))
    found_.append(pair(f"{kind}.vocab_size", "u32", int(values.get("vocab_size", 0))))
    return found_ + _scaling(kind, _rope(config))


def _fixed(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names in config.json, their values, and those that llama.cpp's code has."""
    gemma = kind.startswith("gemma")
    act = "gelu_pytorch_tanh" if gemma else "silu"
    yield "hidden_act", values.get("hidden_activation") or values.get("hidden_act", act), act
    if kind == "qwen3moe":
        yield "norm_topk_prob", values.get("norm_topk_prob", False), True
        yield "decoder_sparse_step", values.get("decoder_sparse_step", 1), 1
        yield "mlp_only_layers", values.get("mlp_only_layers") or [], []
    if gemma:  # the head is the embedding
        yield "tie_word_embeddings", values.get("tie_word_embeddings", True), True
    if kind in _PERIOD:
        layers, period = values["num_hidden_layers"], _PERIOD[kind]
        largest = layers == LARGEST[kind]
        head = values["hidden_size"] // values["num_attention_heads"] if largest else values["head_dim"]
        yield "query_pre_attn_scalar", values.get("query_pre_attn_scalar", 256), head
        ways = ["sliding_attention"] * (period - 1) + ["full_attention"]
        order = [ways[i % period] for i in range(layers)]
        yield "layer_types", values.get("layer_types", order), order
        yield "sliding_window_pattern", values.get("sliding_window_pattern", period), period  # older files
        yield "use_bidirectional_attention", values.get("use_bidirectional_attention") or False, False
    if kind == "gemma3":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            yield key, values.get(key), None


def model_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the file does not say."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True) and type(window) is int
    used = used and _KINDS[config["model_type"]] not in _PERIOD
    return (f"sliding_window {window}: not written; llama.cpp attends to the whole context",) if used else ()


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says about rotary embeddings, under the old key or under the new one."""
    found = {"rope_theta": config.get("rope_theta", 10000.0)}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if isinstance(given, dict):
            found |= given.get("full_attention", given)  # gemma3 has others for layers with a window
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def _local_theta(config: Mapping[str, Any]) -> Any:
    """The base of rotations in layers with a window; gemma3 only."""
    given = config.get("rope_parameters")
    local = given.get("sliding_attention") if isinstance(given, dict) else None
    return local.get("rope_theta") if isinstance(local, dict) else config.get("rope_local_base_freq", 10000.0)


def _scaling(kind: str, rope: Mapping[str, Any]) -> list[bytes]:
    scaling = rope["rope_type"]
    if scaling in ("default", "llama3"):  # the latter is a tensor
        return []
    if scaling not in ("linear", "yarn") or type(rope.get("factor")) not in (int, float):
        raise Unwritable(f"rope_type {scaling}", "default, linear, yarn or llama3")
    found = [
        pair(f"{kind}.rope.scaling.type", "str", scaling),
        pair(f"{kind}.rope.scaling.factor", "f32", rope["factor"]),
    ]
    original = rope.get("original_max_position_embeddings")
    if type(original) is int:
        found.append(pair(f"{kind}.rope.scaling.original_context_length", "u32", original))
    return found


def frequencies(config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Of Llama 3: by how much every rotary frequency is divided, F32 [head size / 2]."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return {}
    try:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        factor, low, high, original = (
            float(rope[key])
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        exponent = np.arange(0, head, 2) / head
        turns = original / (2 * math.pi * float(rope["rope_theta"]) ** exponent)  # of a frequency over the context
    except (KeyError, TypeError, ValueError):
        raise Unwritable("rope_type llama3 without its numbers", "factor, low_freq_factor, high_freq_factor") from None
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divided = 1 / ((1 - smooth) / factor + smooth)
    return {_FREQUENCIES: StoredTensor.from_array(_FREQUENCIES, divided.astype(np.float32))}
