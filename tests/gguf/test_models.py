"""Tiny models of transformers as GGUF files, made as llama.cpp's converter makes them: to BCQ, loaded, the same logits.

Names in the file are gguf-py's. The model that is compared with has the values that gguf-py decodes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf

import bcqfmt
import bcqfmt.integrations.transformers
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import verify
from bcqfmt.converters.export.gguf import export_gguf
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.conversions import convert
from sources.gguf_files import Writer

IDS = torch.arange(34).reshape(2, 17) * 7 % 48
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KEYS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, Any]] = {
    "llama": ("llama", hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "llama 3": (
        "llama",
        hf.LlamaConfig(
            **{**SIZES, "max_position_embeddings": 65536},
            rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
        ),
    ),
    "qwen3": ("qwen3", hf.Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_theta": 1e6})),
    "phi3": ("phi3", hf.Phi3Config(**SIZES, sliding_window=8)),
    "phi3, long": (
        "phi3",
        hf.Phi3Config(
            **SIZES,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    "gemma": ("gemma", hf.GemmaConfig(**SIZES, head_dim=32)),
    "gemma2": (
        "gemma2",
        hf.Gemma2Config(
            **SIZES,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=8,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": ("gemma3", hf.Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=8)),
    "mixtral": ("llama", hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3moe": (
        "qwen3moe",
        hf.Qwen3MoeConfig(
            **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
        ),
    ),
}


ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def make_model(config: Any) -> Any:
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.2))
    return model.eval()


def pieces_of(name: str, values: Any) -> dict[str, Any]:
    """Experts as a checkpoint has them: gate and up apart."""
    if not name.endswith("experts.gate_up_proj"):
        return {name: values}
    halves = zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True)
    return {name.replace("gate_up_proj", part): half for part, half in halves}


def gguf_file(model: Any, arch: str, path: Path) -> None:
    """The model as llama.cpp's converter writes it, Q8_0; the model gets the values that are in the file."""
    config = model.config.to_dict()
    writer = Writer().pair("general.architecture", "str", arch)
    for key, name in KEYS.items():
        if config.get(name) is not None:
            writer.pair(f"{arch}.{key}", "f32" if isinstance(config[name], float) else "u32", config[name])
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    writer.pair(f"{arch}.rope.freq_base", "f32", rope["rope_theta"])
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config["num_hidden_layers"])
    values_of = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = []
        for piece, array in pieces_of(name, tensor.numpy()).items():
            stored = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            assert stored is not None, piece
            stored += "" if stored.endswith(".weight") else ".weight"
            values.append(write(writer, stored, array, arch, config))
        values_of[name] = torch.from_numpy(np.concatenate(values, axis=1 if len(values) > 1 else 0))
    for stored, factors in rope_tensors(model, arch, rope).items():
        writer.tensor(stored, [len(factors)], 0, np.asarray(factors, "<f4").tobytes())
    model.load_state_dict(values_of, strict=False)
    model.tie_weights()
    path.write_bytes(writer.bytes())


def write(writer: Writer, stored: str, array: Any, arch: str, config: dict[str, Any]) -> Any:
    """Add a tensor; the values that a reader finds."""
    if array.ndim == 1 or "ffn_gate_inp" in stored:
        added = np.float32(1 if arch.startswith("gemma") and "norm" in stored else 0)
        data = array.astype(np.float32) + added
        writer.tensor(stored, list(array.shape), 0, data.tobytes())
        return data - added
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(np.ascontiguousarray(array), kind)
    values = gguf.quants.dequantize(blocks, kind)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stored.split(".")[-2])
    if arch == "llama" and heads:
        pairs = blocks.reshape(config[heads], 2, -1, blocks.shape[1])
        blocks = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(blocks.shape))
    writer.tensor(stored, list(array.shape), int(kind), blocks.tobytes())
    return values


def rope_tensors(model: Any, arch: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Factors of the rotations, as transformers has them."""
    if rope["rope_type"] == "longrope" and arch == "phi3":
        return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}
    if rope["rope_type"] == "default":
        return {}
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    plain = rope["rope_theta"] ** (-np.arange(len(frequencies)) / len(frequencies))
    return {"rope_freqs.weight": plain / frequencies}


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_model(source: Path, expected: Any, folder: Path) -> Any:
    """Convert, verify, restore and load; the logits of the exact mode are close to the expected ones."""
    conversion = convert(source, folder / "out")
    assert conversion.warnings == []
    with bcqfmt.open(folder / "out") as checkpoint:
        verify(open_source(source), checkpoint, rows=None)
        restore(checkpoint, folder / "back")
    assert digest(folder / "back" / source.name) == digest(source)
    model, info = hf.AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not info["missing_keys"], info
    bcqfmt.integrations.transformers.set_mode(model.eval(), exact=True)
    found = logits(model)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_converted_file_is_the_model_that_it_was_made_from(case: str, tmp_path: Path) -> None:
    arch, config = CASES[case]
    model = make_model(config)
    gguf_file(model, arch, tmp_path / "model.gguf")
    expected = logits(model)
    loaded = same_model(tmp_path / "model.gguf", expected, tmp_path)
    assert type(loaded) is type(model)
    if case not in ("mixtral", "qwen3moe", "gemma"):  # modules of kinds that others do not have
        return
    loaded.save_pretrained(tmp_path / "again")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    limits = {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}
    assert torch.allclose(logits(again), expected, **limits)  # by the kernels
    assert torch.allclose(logits(again.dequantize()), expected, **limits)


def norms(values: Any, arch: str = "gemma", dtype: int = 0) -> Writer:
    """A file with the weights of one norm."""
    kinds = {0: "<f4", 1: "<f2"}
    writer = Writer().pair("general.architecture", "str", arch)
    return writer.tensor("blk.0.attn_norm.weight", [len(values)], dtype, np.asarray(values, kinds[dtype]).tobytes())


def proved(writer: Writer, folder: Path) -> tuple[dict[str, Any], int]:
    """Dense tensors of the converted file by name, and the bytes that were archived; it comes back."""
    (folder / "m.gguf").write_bytes(writer.bytes())
    convert(folder / "m.gguf", folder / "out")
    with bcqfmt.open(folder / "out") as checkpoint:
        archived = verify(open_source(folder / "m.gguf"), checkpoint).archived
        restore(checkpoint, folder / "back")
        assert digest(folder / "back/m.gguf") == digest(folder / "m.gguf")
        return {name: tensor.array() for name, tensor in checkpoint.dense()}, archived


NORM = "model.layers.0.input_layernorm.weight"


def test_one_is_taken_from_the_norms_of_gemma(tmp_path: Path) -> None:
    dense, archived = proved(norms([1.0, 1.25, -3.0, 100.5]), tmp_path)
    assert (dense[NORM].tolist(), archived) == ([0.0, 0.25, -4.0, 99.5], 0)


@pytest.mark.parametrize("like", [False, True])
def test_an_export_adds_the_one_again(like: bool, tmp_path: Path) -> None:
    proved(norms([1.0, 1.25, -3.0, 100.5]), tmp_path)
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        export_gguf(checkpoint, tmp_path / "made.gguf", like=tmp_path / "m.gguf" if like else None)
    (found,) = gguf.GGUFReader(tmp_path / "made.gguf").tensors
    assert (found.name, found.data.tolist()) == ("blk.0.attn_norm.weight", [1.0, 1.25, -3.0, 100.5])


@pytest.mark.parametrize("odd", [1e-10, 0.0625 + 2**-27, -0.0])
def test_norms_that_adding_one_does_not_give_back_are_archived(odd: float, tmp_path: Path) -> None:
    dense, archived = proved(norms([1.0, odd]), tmp_path)
    assert archived == 8
    assert np.array_equal(dense[NORM], np.array([1, odd], np.float32) - np.float32(1))


def test_norms_of_other_types_keep_the_name_that_they_have(tmp_path: Path) -> None:
    dense, archived = proved(norms([1.0, 1.25], dtype=1), tmp_path)
    assert (dense["blk.0.attn_norm.weight"].tolist(), archived) == ([1.0, 1.25], 0)


@pytest.mark.parametrize("add", [2, True, 1.0, -1])
def test_a_record_that_adds_something_else_is_refused(add: Any, tmp_path: Path) -> None:
    proved(norms([1.0, 1.25]), tmp_path)
    record = tmp_path / "out/bcq_source/source.json"
    record.write_text(record.read_text().replace('"add":1', f'"add":{json.dumps(add)}'))
    with bcqfmt.open(tmp_path / "out") as checkpoint, pytest.raises(BcqError) as caught:
        restore(checkpoint, tmp_path / "again")
    assert caught.value.code in ("BCQ-V701", "BCQ-V703")


def test_factors_of_no_known_formula_are_carried_as_they_are(tmp_path: Path) -> None:
    config = hf.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.0, "short_factor": [1.0, 3.0] * 4,
            "long_factor": [1.0, 3.0] * 4, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    model = make_model(config)
    gguf_file(model, "llama", tmp_path / "m.gguf")
    same_model(tmp_path / "m.gguf", logits(model), tmp_path)
    assert open_source(tmp_path / "m.gguf").config["rope_scaling"]["rope_type"] == "longrope"
