"""BCQ to GGUF: which types, the same values by gguf-py's own reading, whole files or none."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError, BcqWeight
from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.container.gguf.types import TYPES as FILE_TYPES
from bcqfmt.container.gguf.writer import copied_pair
from bcqfmt.converters.export.gguf import GgufExport, export_gguf
from bcqfmt.converters.export.gguf.choice import choose
from bcqfmt.converters.export.gguf.encode import Error, encoded
from bcqfmt.converters.export.gguf.model import Unwritable, model_pairs
from bcqfmt.converters.source.gguf_tokenizer import tokenizer_files
from faults import interrupted
from programs import llama_cpp
from sources.conversions import convert
from sources.gguf_files import DATA, FILES, Writer, small
from sources.peers import PEERS, any_words

NAME = "model.layers.0.mlp.up_proj.weight"
Folder = Callable[[str], Path]
TYPES = {
    "gptqmodel-gptq-4b-g32-sym-sharded": {"Q4_0"},
    "gptqmodel-gptq-4b-g32-asym": {"Q5_0"},
    "autogptq-gptq-3b-g64-asym": {"Q4_0"},
    "autogptq-gptq-4b-g32-asym-bf16scales": {"Q5_0"},
    "gptqmodel-gptq_p-6b-g32-sym": {"Q8_0"},
    "gptqmodel-gptq-8b-g-1-sym": {"Q8_0"},
    "gptqmodel-gptq-mixed-g32-sym-dynamic": {"Q4_0", "Q8_0"},
    "autoround-auto_gptq-4b-g128-asym-ragged": {"Q5_0"},
    "autoawq-gemm-4b-g32-asym": {"Q5_0"},
    "llmcompressor-pack_quantized-4b-g64-sym-bf16": {"Q4_0"},
}
ROUNDED = {
    "gptqmodel-gptq-4b-g32-sym-desc_act": ("Q8_0", "act order", 0.004, 0.008),
    "hqq-hqq-4b-g64-asym-axis1": ("Q4_1", "floating-point zero points", 1e-4, 1e-3),
}


def with_tokenizer(folder: Path) -> Path:
    """The tokenizer of a stored GGUF file, which has 64 tokens as the tiny models have."""
    header = read_gguf(SourceFile(DATA / "q4_0.gguf"))
    for name, content in tokenizer_files(header).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The BCQ folder of a real checkpoint, with a tokenizer, converted once."""
    made: dict[str, Path] = {}

    def once(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("bcq") / kind
            convert(PEERS / kind / "source", made[kind])
            with_tokenizer(made[kind])
        return made[kind]

    return once


def exported(bcq: Path, out: Path, **options: Any) -> GgufExport:
    with bcqfmt.open(bcq) as checkpoint:
        return export_gguf(checkpoint, out, **options)


def refused(bcq: Path, out: Path, **options: Any) -> BcqError:
    """The refusal; nothing is left behind by it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(BcqError) as caught:
        exported(bcq, out, **options)
    assert sorted(out.parent.iterdir()) == before
    return caught.value


def expected_values(bcq: Path) -> dict[str, Any]:
    """Every tensor of a folder in F32, by the name of GGUF, rows of q and k moved one by one."""
    config = json.loads((bcq / "config.json").read_text())
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm"}
    parts |= {"post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "lm_head": "output"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    heads = heads if config["model_type"] == "llama" else {}
    found = {}
    with bcqfmt.open(bcq) as checkpoint:
        values = {name: weight.dequantize("float32") for name, weight in checkpoint.weights()}
        values |= {name: t.array().astype(np.float32) for name, t in checkpoint.dense() if t.dtype[0] in "FB"}
    for name, array in values.items():
        *path, part, end = name.split(".")
        layer = f"blk.{path[2]}." if "layers" in path else ""
        stem = "output_norm" if part == "norm" else parts[part]
        found[f"{layer}{stem}.{end}"] = llama_cpp.rotary_rows(array, heads[stem]) if stem in heads else array
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_real_checkpoints_go_over_exactly(converted: Folder, tmp_path: Path, kind: str) -> None:
    done = exported(converted(kind), tmp_path / "out.gguf")
    assert done.exact
    assert {tensor.type for tensor in done.weights} == TYPES[kind]
    assert done.nbytes == (tmp_path / "out.gguf").stat().st_size
    found, wanted = llama_cpp.values(tmp_path / "out.gguf"), expected_values(converted(kind))
    assert found.keys() == wanted.keys()
    for name, (_, values) in found.items():
        assert values.tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("kind", ROUNDED)
def test_what_no_type_holds_is_refused_or_rounded_with_its_error(converted: Folder, tmp_path: Path, kind: str) -> None:
    bcq = converted(kind)
    form, reason, low, high = ROUNDED[kind]
    fault = refused(bcq, tmp_path / "out.gguf")
    assert (fault.code, fault.exit_code) == ("BCQ-E616", 5)
    assert reason in fault.finding.found
    assert "and 6 more weights" in fault.finding.found
    assert f"--allow-rounding writes it as {form}" in fault.hint
    done = exported(bcq, tmp_path / "out.gguf", allow_rounding=True)
    assert not done.exact
    assert {tensor.type for tensor in done.weights} == {form}
    found, wanted = llama_cpp.values(tmp_path / "out.gguf"), expected_values(bcq)
    squares = power = 0.0
    for entry in done.as_dict()["tensors"]:
        name = entry["tensor"]
        lost = found[name][1].astype(np.float64) - wanted[name]
        squares, power = squares + (lost**2).sum(), power + (wanted[name].astype(np.float64) ** 2).sum()
        relative = np.sqrt((lost**2).sum() / (wanted[name].astype(np.float64) ** 2).sum())
        assert entry["error"]["relative_rms"] == pytest.approx(relative, rel=1e-9)
        assert entry["error"]["largest"] == pytest.approx(np.abs(lost).max(), rel=1e-9)
        assert reason in entry["reason"]
    assert done.error.relative == pytest.approx(np.sqrt(squares / power), rel=1e-9)
    assert low < done.error.relative < high


@pytest.mark.parametrize("name", [name for name in FILES if name != "iq_grids.gguf"])
def test_what_came_from_gguf_is_the_same_file_again(tmp_path: Path, name: str) -> None:
    convert(DATA / name, tmp_path / "bcq")
    done = exported(tmp_path / "bcq", tmp_path / "out.gguf")
    assert done.exact
    assert done.metadata == name
    assert (tmp_path / "out.gguf").read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize("kind", ["llama", "exotic"])
def test_names_that_no_table_knows_stay(tmp_path: Path, kind: str) -> None:
    writer = Writer().pair("general.architecture", "str", kind)
    writer.tensor("odd.weight", [3, 4], 0, bytes(48)).tensor("other.weight", [2, 32], 2, bytes(range(36)))
    (tmp_path / "in.gguf").write_bytes(writer.bytes())
    convert(tmp_path / "in.gguf", tmp_path / "bcq")
    exported(tmp_path / "bcq", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "in.gguf").read_bytes()


def test_a_big_endian_source_is_only_restored(tmp_path: Path) -> None:
    (tmp_path / "in.gguf").write_bytes(small(order=">").bytes())
    convert(tmp_path / "in.gguf", tmp_path / "bcq")
    fault = refused(tmp_path / "bcq", tmp_path / "out.gguf")
    assert (fault.code, fault.finding.found) == ("BCQ-E640", "a big-endian file")
    assert "bcqfmt restore" in fault.hint


# ------------------------------------------------------------------------------------------------- single weights
def blocks(weight: BcqWeight) -> tuple[Any, Any, Error]:
    """The choice, the values that gguf-py finds in the blocks, the error that was counted."""
    import gguf

    choice, counted = choose(weight), Error()
    raw = np.concatenate(list(encoded(weight, choice, 0, counted)))
    kind = gguf.GGMLQuantizationType[choice.type]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows = raw.reshape(-1, weight.spec.columns // elements * size)
    return choice, gguf.quants.dequantize(rows, kind).reshape(weight.shape), counted


@any_words
@given(st.integers(1, 8), st.sampled_from([32, 64, 96, "row"]), st.booleans(), st.data())
def test_any_affine_weight_has_the_smallest_exact_type(bits: int, group: Any, symmetric: bool, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    groups = 1 if group == "row" else -(-192 // group)
    low, high = sorted(data.draw(st.tuples(st.integers(0, 2**bits), st.integers(0, 2**bits))))
    zeros = rng.integers(low, high + 1, (6, groups))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scale = (rng.integers(0, 0x7C00, (6, groups)) | rng.integers(0, 2, (6, groups)) << 15).astype(np.uint16)
    codes = rng.integers(0, 2**bits, (6, 192))
    weight = BcqWeight.from_affine(codes, scale.view(np.float16), zeros, group_size=group, bits=bits, dtype="float32")
    choice, found, _ = blocks(weight)
    below, above = -int(zeros.max()), 2**bits - 1 - int(zeros.min())
    fits = [kind for kind, size in (("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 128)) if -size <= below and above < size]
    assert choice.exact == bool(fits)
    if fits:
        assert choice.type == fits[0]
        assert found.astype(np.float32).tobytes() == weight.dequantize("float32").tobytes()


def affine(scale: Any = None, group_size: int = 32, columns: int = 64, bits: int = 4) -> BcqWeight:
    rng = np.random.default_rng(5)
    groups = -(-columns // group_size)
    numbers = rng.normal(size=(8, groups)).astype(np.float16) if scale is None else np.full((8, groups), scale)
    return BcqWeight.from_affine(rng.integers(0, 2**bits, (8, columns)), numbers, 3, group_size=group_size, bits=bits)


def named(weight: BcqWeight) -> BcqWeight:
    return BcqWeight(NAME, weight.spec, weight.parts())


def offset(scale: Any, offset: Any) -> BcqWeight:
    codes = np.random.default_rng(6).integers(0, 16, (8, 64))
    return BcqWeight.from_offset(codes, np.full((8, 2), scale), np.full((8, 2), offset), group_size=32, bits=4)


SCALE, TINY = np.float32(0.1), np.float32(1e-12)
REASONS: list[tuple[str, Callable[[], BcqWeight], str, str]] = [
    ("group", lambda: affine(group_size=16), "Q8_0", "groups of 16 columns"),
    ("columns", lambda: affine(columns=40), "F16", "40 columns"),
    ("eight bits", lambda: affine(bits=8), "Q8_0", "codes less zero points in -3..252"),
    ("F32 scales", lambda: affine(SCALE), "Q5_0", "scales that are no F16 numbers"),
    ("scales too small for F16", lambda: affine(TINY), "Q8_0", "scales that are no F16 numbers"),
    ("F32 offsets", lambda: offset(np.float32(0.5), SCALE), "Q4_1", "offsets that are no F16 numbers"),
    ("act order", lambda: affine().with_perm(np.random.default_rng(1).permutation(64)), "Q8_0", "act order"),
    ("outliers", lambda: affine().with_outliers([0, 1] + [1] * 7, [3], np.ones(1, np.float16)), "Q8_0", "1 outliers"),
    ("segments", lambda: BcqWeight.from_segments([affine(), affine(bits=3)]), "Q8_0", "2 segments"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "reason"), [row[1:] for row in REASONS], ids=[row[0] for row in REASONS])
def test_reasons(make: Callable[[], BcqWeight], kind: str, reason: str) -> None:
    choice = choose(named(make()))
    assert not choice.exact
    assert choice.type == kind
    assert reason in choice.found


def test_offsets_that_are_f16_numbers_are_exact() -> None:
    weight = named(offset(np.float16(0.3), np.float16(-1.7)))
    choice, found, _ = blocks(weight)
    assert (choice.type, choice.exact) == ("Q4_1", True)
    assert found.tobytes() == weight.dequantize("float32").tobytes()


def test_an_order_of_columns_within_groups_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    perm = np.concatenate([rng.permutation(32), 32 + rng.permutation(32)])
    weight = named(affine().with_perm(perm))
    choice, found, _ = blocks(weight)
    assert choice.exact
    assert found.tobytes() == weight.dequantize("float32").tobytes()


# --------------------------------------------------------------------------------------------- whole files or none
def test_a_failure_leaves_nothing_and_keeps_what_was_there(
    converted: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcq, out = converted("gptqmodel-gptq-4b-g32-asym"), tmp_path / "out.gguf"
    exported(bcq, out)
    before = out.read_bytes()
    assert refused(bcq, out).code == "BCQ-E401"
    (tmp_path / "notes.gguf").write_text("mine")
    assert refused(bcq, tmp_path / "notes.gguf", overwrite=True).code == "BCQ-E401"

    def damaged(*arguments: Any) -> Any:
        made = right(*arguments)
        made[0, 5] ^= 1
        return made

    from bcqfmt.converters.export.gguf import encode

    right = encode.blocks_of
    monkeypatch.setattr(encode, "blocks_of", damaged)
    assert refused(bcq, out, overwrite=True).code == "BCQ-E613"  # every block is decoded again
    assert out.read_bytes() == before
    monkeypatch.undo()
    exported(bcq, out, overwrite=True)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(converted: Folder, tmp_path: Path, number: int, status: int) -> None:
    program = Path(interrupted.__file__)
    arguments = ["export", str(converted("gptqmodel-gptq-4b-g32-asym")), "out.gguf", "--to", "gguf"]
    command = [sys.executable, str(program), str(int(number)), "9", *arguments]  # at the ninth write
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "BCQ-E901" in done.stderr
    assert "nothing is left of it" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(converted: Folder, tmp_path: Path) -> None:
    bcq = converted("gptqmodel-gptq-4b-g32-asym")
    assert refused(bcq, tmp_path / "out.bin").code == "BCQ-E302"
    inside = refused(bcq, bcq / "out.gguf")
    assert (inside.code, inside.hint) == ("BCQ-E402", "choose another place")
    single = refused(next(bcq.glob("*.safetensors")), tmp_path / "out.gguf")
    assert (single.code, single.hint) == ("BCQ-E302", "name the folder that it is in")
    exported(bcq, tmp_path / "new/folder/out.gguf")
    with pytest.raises(BcqError, match="BCQ-E402"):
        exported(bcq, tmp_path / "new/folder/out.gguf/out.gguf")


# ------------------------------------------------------------------------------------------------------- metadata
def test_a_donor_gives_key_values_and_must_have_the_same_tensors(converted: Folder, tmp_path: Path) -> None:
    two = converted("gptqmodel-gptq-4b-g32-sym-sharded")  # two layers, as the stored files have
    done = exported(two, tmp_path / "out.gguf", like=DATA / "q5_0.gguf")
    assert done.metadata == str(DATA / "q5_0.gguf")
    donor, made = (read_gguf(SourceFile(path)) for path in (DATA / "q5_0.gguf", tmp_path / "out.gguf"))
    assert list(made.tensors) == list(donor.tensors)
    for key in donor.values.keys() - {"general.file_type", "general.quantization_version"}:
        assert str(made.get(key)) == str(donor.get(key))
    assert made.get("general.file_type") == 2
    one = converted("gptqmodel-gptq-4b-g32-asym")
    fault = refused(one, tmp_path / "no.gguf", like=DATA / "q5_0.gguf")
    assert (fault.code, fault.exit_code) == ("BCQ-E640", 5)
    assert "it has 'blk.1.attn_norm.weight' and 8 more" in fault.finding.found
    assert refused(two, tmp_path / "no.gguf", like=DATA / "q4_k_m.gguf").code == "BCQ-E640"  # other shapes
    assert refused(two, tmp_path / "no.gguf", like=DATA / "qwen2_q8_0_bias.gguf").code == "BCQ-E640"
    assert refused(two, tmp_path / "no.gguf", like=tmp_path / "none.gguf").code == "BCQ-E101"
    assert refused(two, tmp_path / "no.gguf", like=PEERS / "README.md").code == "BCQ-E211"
    folder = refused(two, tmp_path / "no.gguf", like=tmp_path)
    assert (folder.code, folder.hint) == ("BCQ-E302", "name the .gguf file itself")


def test_a_donor_may_be_a_split(converted: Folder, tmp_path: Path) -> None:
    donor = read_gguf(SourceFile(DATA / "q5_0.gguf"))
    infos, data = list(donor.tensors.values()), (DATA / "q5_0.gguf").read_bytes()
    numbers = {kind.name: number for number, kind in FILE_TYPES.items()}
    for i, part in enumerate((infos[:9], infos[9:])):
        writer = Writer()
        writer.pairs = [copied_pair(donor, key) for key in donor.values] if i == 0 else []
        writer.pair("split.no", "u16", i).pair("split.count", "u16", 2).pair("split.tensors.count", "i32", len(infos))
        for info in part:
            raw = data[info.offset : info.offset + info.nbytes]
            writer.tensor(info.name, list(info.shape), numbers[info.type.name], raw)
        (tmp_path / f"donor-0000{i + 1}-of-00002.gguf").write_bytes(writer.bytes())
    bcq = converted("gptqmodel-gptq-4b-g32-sym-sharded")
    exported(bcq, tmp_path / "whole.gguf", like=DATA / "q5_0.gguf")
    exported(bcq, tmp_path / "out.gguf", like=tmp_path / "donor-00001-of-00002.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    second = tmp_path / "donor-00002-of-00002.gguf"
    assert refused(bcq, second, like=tmp_path / "donor-00001-of-00002.gguf", overwrite=True).code == "BCQ-E402"
    second.unlink()
    assert refused(bcq, tmp_path / "no.gguf", like=tmp_path / "donor-00001-of-00002.gguf").code == "BCQ-E101"


def test_memory_does_not_grow_with_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcqfmt.converters.export.gguf.encode._CHUNK", 1 << 15)
    peaks = []
    for rows in (256, 2048):
        codes = np.random.default_rng(0).integers(0, 16, (rows, 1024), np.uint8)
        weight = named(BcqWeight.from_affine(codes, np.ones((rows, 8), np.float16), 3, group_size=128, bits=4))
        choice = choose(weight)
        tracemalloc.start()
        made = sum(piece.size for piece in encoded(weight, choice, 0, Error()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert made == rows * 1024 // 32 * 22
    assert peaks[1] < 1.2 * peaks[0]


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 16}
GEMMA2 = {**GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text", "rope_local_base_freq": 10000.0}
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (GEMMA2, {}, ""),
        (GEMMA2, {"final_logit_softcapping": None}, "no final_logit_softcapping"),
        (GEMMA2, {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar 32"),
        (GEMMA2, {"layer_types": ["full_attention"] * 12}, "layer_types"),
        (GEMMA3, {}, ""),
        (GEMMA3, {"rope_local_base_freq": None}, "no rope_local_base_freq"),
        (GEMMA3, {"sliding_window": None}, "no sliding_window"),
        (GEMMA3, {"sliding_window_pattern": 4}, "sliding_window_pattern 4"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (MOE, {}, ""),
        (MOE, {"num_experts": None}, "no num_local_experts"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob False"),
        (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ],
)
def test_what_llama_cpp_has_in_its_code_must_be_so(kind: dict[str, Any], change: dict[str, Any], said: str) -> None:
    config: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "head_dim": 16}
    config |= {"num_attention_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 16, **kind}
    period = 2 if kind is GEMMA2 else 6
    layers = ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(12)]
    config |= {"layer_types": layers, **change}
    if not said:
        assert len(model_pairs(config, "name")) > 15
        return
    with pytest.raises(Unwritable) as fault:
        model_pairs(config, "name")
    assert said in fault.value.found


def test_a_name_is_not_corrected_for_a_file_that_cannot_be(converted: Folder, tmp_path: Path) -> None:
    bcq = shutil.copytree(converted("gptqmodel-gptq-4b-g32-asym"), tmp_path / "bcq")
    assert refused(bcq, tmp_path / "out").code == "BCQ-E302"
    (bcq / "tokenizer.json").unlink()
    assert refused(bcq, tmp_path / "out").code == "BCQ-E641"


def test_what_cannot_be_written_asks_for_a_donor(converted: Folder, tmp_path: Path) -> None:
    bcq = shutil.copytree(converted("gptqmodel-gptq-4b-g32-asym"), tmp_path / "bcq")
    config = json.loads((bcq / "config.json").read_text())
    own = json.loads((bcq / "tokenizer.json").read_text())

    def changed(path: str, value: Any) -> BcqError:
        (bcq / path).write_text(json.dumps(value))
        fault = refused(bcq, tmp_path / "out.gguf")
        (bcq / "config.json").write_text(json.dumps(config))
        (bcq / "tokenizer.json").write_text(json.dumps(own))
        assert (fault.code, fault.exit_code) == ("BCQ-E641", 5)
        assert "--like" in fault.hint
        return fault

    assert "model_type gemma9" in changed("config.json", {**config, "model_type": "gemma9"}).finding.found
    assert "rms_norm_eps" in changed("config.json", {**config, "rms_norm_eps": None}).finding.found
    assert "gelu" in changed("config.json", {**config, "hidden_act": "gelu"}).finding.found
    untied = {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": False}
    assert "tie_word_embeddings False" in changed("config.json", {**config, **untied}).finding.found
    rope = {"rope_type": "longrope", "factor": 2.0}
    assert "longrope" in changed("config.json", {**config, "rope_parameters": rope}).finding.found
    changed("config.json", {**config, "num_attention_heads": 2**40})
    changed("config.json", {**config, "num_attention_heads": 3})  # rows of q do not divide
    words = changed("tokenizer.json", {"model": {"type": "WordLevel"}})
    assert "WordLevel" in words.finding.found
    assert "--to dense" in words.hint
    changed("tokenizer.json", {**own, "normalizer": None})
    changed("tokenizer.json", {**own, "added_tokens": [{"content": 5}]})
    changed("tokenizer.json", {**own, "model": {**own["model"], "vocab": {"a": 64}}})
    changed("tokenizer.json", [])
    (bcq / "tokenizer.json").unlink()
    assert "does not exist" in refused(bcq, tmp_path / "out.gguf").finding.found


@pytest.mark.parametrize("shape", [(1 << 10, 0), (0, 64), (1 << 10, 64), (), (64,)])
def test_an_embedding_that_no_file_can_have(
    shape: tuple[int, ...], converted: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows become tokens: without columns they take no place, however many there are."""
    monkeypatch.setattr("bcqfmt.converters.export.gguf.metadata.MAX_ITEMS", 1000)
    like, bcq = converted("gptqmodel-gptq-4b-g32-asym"), tmp_path / "bcq"
    tensors = {"model.embed_tokens.weight": np.zeros(shape, np.float16)}
    bcqfmt.save(bcq, tensors, config=json.loads((like / "config.json").read_text()))
    with_tokenizer(bcq)
    fault = refused(bcq, tmp_path / "out.gguf")
    assert (fault.code, fault.exit_code) == ("BCQ-E641", 5)
    assert fault.finding.found == f"'model.embed_tokens.weight' of shape {list(shape)}"


@pytest.mark.parametrize("name", ["q4_0.gguf", "qwen2_q8_0_bias.gguf"])
def test_a_tokenizer_that_came_from_gguf_has_the_same_key_values_again(tmp_path: Path, name: str) -> None:
    convert(DATA / name, tmp_path / "bcq")
    shutil.rmtree(tmp_path / "bcq" / "bcq_source")
    done = exported(tmp_path / "bcq", tmp_path / "out.gguf")
    assert done.metadata == "config.json"
    before, after = (read_gguf(SourceFile(path)) for path in (DATA / name, tmp_path / "out.gguf"))
    lost = ("general.", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.add_space_prefix")
    same = [key for key in before.values if not key.startswith(lost)]
    assert len(same) > 15
    assert {key: str(after.get(key)) for key in same} == {key: str(before.get(key)) for key in same}
