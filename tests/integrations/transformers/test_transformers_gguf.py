"""A converted GGUF file in transformers: the model of gguf-py's values, with its embedding and head still quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import bcqfmt
import bcqfmt.integrations.transformers
from bcqfmt.integrations.torch import BcqEmbedding
from bcqfmt.integrations.torch.embedding import TiedHead
from sources.conversions import convert
from sources.gguf_files import DATA, EXPECTED

IDS = torch.arange(34).reshape(2, 17) * 7 % 32
FILES = ["q4_0.gguf", "q4_1.gguf", "q4_k_m.gguf", "q2_k.gguf", "iq4_xs.gguf", "qwen2_q8_0_bias.gguf"]


def dense_model(name: str, folder: Path) -> Any:
    """The model with the values that gguf-py computes, rows in the order of Hugging Face."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    entries = {entry["name"]: entry for entry in EXPECTED[name]["tensors"]}
    state = {}
    for tensor in gguf.GGUFReader(DATA / name).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = entries[tensor.name].get("row_permutation", {}).get("heads")
        if heads:
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        state[entries[tensor.name]["hf_name"]] = torch.from_numpy(np.array(values, np.float32))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tie_word_embeddings else [], [])
    model.tie_weights()
    return model.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", FILES)
def test_the_model_is_the_one_of_the_dense_values(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = logits(dense_model(name, tmp_path / "out"))
    assert torch.allclose(logits(model), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    bcqfmt.integrations.transformers.set_mode(model, exact=True)
    assert torch.equal(logits(model), expected)
    assert isinstance(model.get_input_embeddings(), BcqEmbedding)
    assert isinstance(model.get_output_embeddings(), TiedHead) == model.config.tie_word_embeddings


def test_a_tied_model_is_saved_loaded_and_made_dense(tmp_path: Path) -> None:
    convert(DATA / "q4_1.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = logits(model)
    model.save_pretrained(tmp_path / "again")
    assert bcqfmt.validate(tmp_path / "again", deep=True).valid
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()), expected)
    dense = model.dequantize()
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    assert torch.allclose(logits(dense), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_it_generates_text_in_another_type(tmp_path: Path) -> None:
    convert(DATA / "q4_1.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    assert model.model.embed_tokens(IDS).dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    made = model.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 5)
