"""A tiny Llama whose tokens are the words w0 to w63, and text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS, HIDDEN, LAYERS = 64, 32, 3


def save_tokenizer(folder: Path) -> None:
    """A tokenizer that splits at spaces."""
    plain = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0").save_pretrained(folder)


def save_model(folder: Path, seed: int = 0, kind: str = "ForCausalLM", **more: Any) -> Path:
    """Random bfloat16 weights and the tokenizer; ``more``: values of the config."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64, **more,
    )  # fmt: skip
    getattr(transformers, f"Llama{kind}")(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_text(path: Path, count: int) -> Path:
    """That many random words."""
    numbers = np.random.default_rng(0).integers(0, WORDS, count)
    path.write_text(" ".join(f"w{i}" for i in numbers), encoding="utf-8")
    return path
