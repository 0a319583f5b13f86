"""Tiny transformers models with random weights: dense folders, BCQ folders of them, and what they compute."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import bcqfmt
import bcqfmt.integrations.transformers  # registers quant_method bcq
from bcqfmt.converters.export import export
from bcqfmt.integrations.torch.processor import dense_products
from sources.dense_samples import quantize

VOCABULARY = 96
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),  # q, k, v have a bias
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 4096}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {}),  # q, k, v in one matrix, gate and up too
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        transformers.Gemma2Config, transformers.Gemma2ForCausalLM,
        {"head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 16},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM,
        {"head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 16,
         "num_hidden_layers": 6},
    ),
    "deepseek_v3": (  # latent attention, of the only size that vLLM's CPU engine takes; no experts
        transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM,
        {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 99, "n_routed_experts": 8},
    ),
    "qwen3_5": (  # linear attention, whose input matrices vLLM puts together in another way than the file
        transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM,
        {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
         "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "mixtral": (
        transformers.MixtralConfig, transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
         "head_dim": 16},
    ),
}  # fmt: skip


def dense_model(
    folder: Path, kind: str = "llama", dtype: str = "float16", *, original: bool = True, **config: Any
) -> Path:
    """A model folder; ``original``: experts under the names of checkpoints, one by one, else stacked."""
    config_class, model_class, more = _KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**_COMMON, **more, **config})).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or not bool(parameter.any()):  # biases start at zero
                parameter.normal_(0, 0.1)
    with quiet():
        model.save_pretrained(folder, save_original_format=original)
    return folder


def bcq_model(folder: Path, dense: Path, **options: Any) -> Path:
    """A BCQ folder of a dense one."""
    quantize(dense, folder, **options)
    return folder


def as_dense(folder: Path, bcq: Path, dtype: str | None = None) -> Path:
    """The exact values of a BCQ folder as an ordinary model folder."""
    with bcqfmt.open(bcq) as checkpoint:
        export(checkpoint, folder, "dense", dtype=dtype)
    return folder


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder, loaded the ordinary way."""
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


def logits(model: Any, length: int = 24, rows: int = 2) -> torch.Tensor:
    """What it says about some tokens."""
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % model.config.vocab_size
    with torch.inference_mode(), dense_products(model.dtype):
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def edit_config(folder: Path, **values: Any) -> None:
    """Change config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars in the output of tests."""
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
