"""Which tensors are quantized, and that their numbers are read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.methods.loops.halves import widen
from bcqfmt.converters.quantize.dense import check_finite, judge, read_matrix, refuse_quantized
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.dense_samples import DTYPES, dense_folder
from sources.peers import PEERS, any_words

QUANTIZED = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.10.mlp.experts.3.down_proj.weight",
    "model.decoder.layers.0.fc1.weight",
    "transformer.h.0.attn.c_proj.weight",
    "transformer.h.0.mlp.dense_h_to_4h.weight",
    "gpt_neox.layers.0.attention.query_key_value.weight",
    "bert.encoder.layer.0.output.dense.weight",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "backbone.layers.0.mixer.in_proj.weight",
    "multi_modal_projector.linear_1.weight",
    "transformer.blocks.0.ffn.up_proj.weight",
]
KEPT = {
    "model.embed_tokens.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "transformer.word_embeddings.weight": "embedding",
    "model.decoder.embed_positions.weight": "embedding",
    "shared.weight": "embedding",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
    "lm_head.weight": "output head",
    "embed_out.weight": "embedding",
    "output.weight": "output head",
    "score.weight": "output head",
    "transformer.output_layer.weight": "output head",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.block_sparse_moe.gate.weight": "router",
    "model.layers.0.feed_forward.router.weight": "router",
    "model.layers.0.mlp.shared_expert_gate.weight": "router",
    "model.layers.0.mlp.gate.wg.weight": "router",
    "model.layers.0.conv.conv.weight": "convolution",
    "model.layers.0.linear_attn.conv1d.weight": "convolution",
    "model.layers.0.qk_norm.weight": "norm",
    "transformer.h.0.ln_1.weight": "norm",
    "model.layers.0.mlp.experts.gate_up_proj_bias": "bias",
    "model.layers.0.mixer.A_log": "not called .weight",
}


def verdict(folder: Path, name: str, shape: tuple[int, ...] = (16, 32), dtype: type = np.float16, **config: str) -> str:
    made = judge(open_source(dense_folder(folder, {name: np.zeros(shape, dtype)}, **config)))[name]
    assert made.possible or made.reason
    return made.reason if made.possible else f"! {made.reason}"


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_layers_are_quantized(tmp_path: Path, name: str) -> None:
    assert verdict(tmp_path, name) == ""


@pytest.mark.parametrize(("name", "reason"), KEPT.items())
def test_others_are_kept(tmp_path: Path, name: str, reason: str) -> None:
    assert verdict(tmp_path, name) == reason


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((32,), np.float16, "! vector"),
        ((), np.float32, "! scalar"),
        ((4, 4, 4, 4), np.float16, "! 4 dimensions"),
        ((16, 7), np.float16, "! fewer than 8 columns"),
        ((0, 32), np.float16, "! fewer than 8 columns"),
        ((16, 32), np.float64, "! type F64"),
        ((16, 32), np.int32, "! type I32"),
        ((1, 8), np.float32, ""),
        ((2, 16, 32), np.float16, "stack, not of experts"),
    ],
)
def test_shapes_and_types(tmp_path: Path, shape: tuple[int, ...], dtype: type, reason: str) -> None:
    assert verdict(tmp_path, "a.b.weight", shape, dtype) == reason


def test_names_that_no_weight_can_have(tmp_path: Path) -> None:
    assert verdict(tmp_path, "a b.weight") == "! name that a weight cannot have"
    assert verdict(tmp_path, "a..b.weight") == "! name that a weight cannot have"
    assert verdict(tmp_path, f"{'a' * 490}.weight") == "! name that a weight cannot have"


def test_stacks_of_experts(tmp_path: Path) -> None:
    assert verdict(tmp_path, "model.layers.0.mlp.experts.gate_up_proj", (2, 16, 32)) == ""
    assert verdict(tmp_path, "model.layers.0.mlp.experts.down_proj.weight", (2, 16, 32)) == ""


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (32, 96)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (2, 16, 32)),
        ("llama4_text", "model.layers.0.feed_forward.experts.down_proj", (2, 16, 32)),
    ],
)
def test_turned_matrices(tmp_path: Path, kind: str, name: str, shape: tuple[int, ...]) -> None:
    """Groups along the outputs would be legal bytes and bad kernels: such weights are taken only when asked for."""
    assert verdict(tmp_path, name, shape, model_type=kind) == "stored as [in, out]"
    assert verdict(tmp_path, name, shape, model_type="other") == ""
    inner = {"text_config": {"model_type": kind}}
    made = judge(open_source(dense_folder(tmp_path / "x", {name: np.zeros(shape, np.float16)}, **inner)))[name]
    assert made.reason == "stored as [in, out]"


# ------------------------------------------------------------------------------------------- already quantized
@pytest.mark.parametrize(
    "kind", ["gptqmodel-gptq-4b-g32-asym", "autoawq-gemm-4b-g32-asym", "llmcompressor-pack_quantized-4b-g32-asym"]
)
def test_quantized_sources_are_refused(kind: str) -> None:
    with pytest.raises(BcqError) as caught:
        refuse_quantized(open_source(PEERS / kind / "source"))
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E627", 2)
    assert "bcqfmt convert" in caught.value.hint


def test_quantized_tensors_without_a_configuration(tmp_path: Path) -> None:
    dense_folder(tmp_path, {"a.qweight": np.zeros((4, 8), np.int32), "a.qzeros": np.zeros((1, 1), np.int32)})
    with pytest.raises(BcqError, match=r"there is a\.qweight"):
        refuse_quantized(open_source(tmp_path))


def test_formats_that_nobody_converts_are_named(tmp_path: Path) -> None:
    dense_folder(tmp_path, {"a.weight": np.zeros((4, 8), np.uint8), "a.weight.absmax": np.zeros(1, np.float32)})
    with pytest.raises(BcqError, match=r"BCQ-E601.*bitsandbytes"):
        refuse_quantized(open_source(tmp_path))


def test_dense_sources_pass() -> None:
    refuse_quantized(open_source(PEERS / "dense-bf16" / "source"))


# ------------------------------------------------------------------------------------------------------- numbers
@any_words
@given(st.sampled_from(["F16", "BF16", "F32"]), st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 70))
def test_numbers_are_read_as_they_are(dtype: str, seed: int, rows: int, columns: int) -> None:
    """Any finite bit pattern, signed zeros and subnormal numbers among them: the same value, found one by one."""
    rng = np.random.default_rng(seed)
    word = np.uint32 if dtype == "F32" else np.uint16
    bits = rng.integers(0, np.iinfo(word).max, (2, rows, columns), dtype=word, endpoint=True)
    exponent = word({"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[dtype])
    bits[(bits & exponent) == exponent] = word(1) << word(word(0).itemsize * 8 - 1)  # minus zero for NaN and infinity
    values = bits.view(DTYPES[dtype])
    tensor = StoredTensor.from_array("x", values)
    for index in range(2):
        read = read_matrix(tensor, index)
        assert read.dtype == np.float32
        assert read.shape == (rows, columns)
        for got, want in zip(read.reshape(-1), values[index].reshape(-1), strict=True):
            assert got.tobytes() == np.float32(float(want)).tobytes()


def test_every_half_becomes_the_same_single_on_every_machine() -> None:
    """Signalling NaNs too, which numpy's cast makes quiet on some processors."""
    halves = np.arange(65536, dtype=np.uint16)
    found = np.empty(65536, np.float32)
    widen(halves, found)
    wide = halves.astype(np.uint32)
    endless = (wide & 0x8000) << 16 | 0x7F800000 | (wide & 0x3FF) << 13
    special = (wide & 0x7C00) == 0x7C00
    numbers = np.where(special, 0, halves).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    assert np.array_equal(found.view(np.uint32), np.where(special, endless, numbers))


def test_blocks_of_a_large_matrix(tmp_path: Path) -> None:
    """More than one block, from a file."""
    values = np.arange(3000 * 1000, dtype=np.float32).reshape(3000, 1000)
    source = open_source(dense_folder(tmp_path, {"a.weight": values}))
    assert np.array_equal(read_matrix(source.tensors["a.weight"]), values)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize(("value", "word"), [(np.nan, "a NaN"), (np.inf, "an infinity"), (-np.inf, "an infinity")])
def test_not_finite(dtype: str, value: float, word: str) -> None:
    values = np.zeros((3, 5, 16), DTYPES[dtype])
    check_finite(StoredTensor.from_array("x", values), "f")
    values[2, 3, 7] = value
    with pytest.raises(BcqError) as caught:
        check_finite(StoredTensor.from_array("x", values), "f")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E622", 4)
    assert f"{word} in row 3, column 7" in str(caught.value)


def test_the_largest_numbers_are_finite() -> None:
    for dtype, largest in {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38}.items():
        check_finite(StoredTensor.from_array("x", np.array([[largest, -largest]]).astype(DTYPES[dtype])), "f")


def test_real_dense_models_have_the_expected_choice() -> None:
    found = judge(open_source(PEERS / "dense-fp16" / "source"))
    assert sum(not verdict.reason for verdict in found.values()) == 7
    assert json.dumps(sorted(verdict.reason for verdict in found.values() if verdict.reason)) == json.dumps(
        ["embedding", "output head", "vector", "vector", "vector"]
    )
