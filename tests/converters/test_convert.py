"""Conversions: coverage, memory, warnings, the plan, and that `verify` sees differences."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt import limits
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import verify
from bcqfmt.converters.gguf import values
from bcqfmt.converters.layouts import reference
from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.layouts.reference import reference_rows
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.converters.source.quant_config import read_settings
from bcqfmt.errors import BcqError
from sources.conversions import GPTQ, convert, gptq_folder, gptq_layer, proved, tree
from sources.peers import PEERS, made_up, words

TINY = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
SHARDED = PEERS / "gptqmodel-gptq-4b-g32-sym-sharded" / "source"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "bcq"
    convert(TINY, target)
    return target


def codes(conversion: Conversion) -> list[str]:
    return sorted({finding.code for finding in conversion.warnings})


# ------------------------------------------------------------------------------------------------------ decisions
def test_coverage_can_be_demanded(tmp_path: Path) -> None:
    assert 85 < 100 * convert(TINY, tmp_path / "a", min_coverage=80).plan.coverage < 90
    with pytest.raises(BcqError) as caught:
        convert(TINY, tmp_path / "b", min_coverage=90)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E611", 5)
    assert not (tmp_path / "b.partial").exists()


def test_memory_limits_the_workers(tmp_path: Path) -> None:
    source = open_source(TINY)
    assert Conversion(source, ConvertOptions(workers=4)).workers == 4
    assert Conversion(source, ConvertOptions(workers=4, memory_limit=2**40)).workers == 4
    assert Conversion(source, ConvertOptions(workers=64, memory_limit=301_000_000)).workers < 64
    with pytest.raises(BcqError) as caught:
        Conversion(source, ConvertOptions(memory_limit=1_000_000)).run(tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E801", 9)
    assert list(tmp_path.iterdir()) == []


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    convert(TINY, tmp_path / "bcq", layout="gptq")
    for layout, code in (("awq", "BCQ-E604"), ("nonsense", "BCQ-E302")):
        with pytest.raises(BcqError) as caught:
            convert(TINY, tmp_path / "other", layout=layout)
        assert caught.value.code == code


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "source")
    (tmp_path / "source/model.safetensors.index.json").unlink()
    assert len(convert(tmp_path / "source", tmp_path / "bcq").modules) == 14
    proved(tmp_path / "source", tmp_path / "bcq", tmp_path)


@pytest.mark.parametrize(
    ("renamed", "missing"),
    [
        ({1: "model-00001-of-00003"}, "2 of 3 shards missing: model-00002-of-00003.safetensors, model-00003-of-00003."),
        ({1: "m-00001-of-00003", 3: "m-00003-of-00003"}, "1 of 3 shards missing: m-00002-of-00003.safetensors;"),
        ({1: "model-00001-of-000003", 2: "model-00002-of-000003"}, "missing: model-00003-of-000003.safetensors;"),
        ({1: "model-1-of-12", 2: "model-10-of-12"}, "10 of 12 shards missing: model-2-of-12.safetensors, "),
        ({1: "model-00000-of-00003", 2: "model-00001-of-00003"}, "1 of 3 shards missing: model-00002-of-00003."),
    ],
)
def test_a_name_that_counts_more_files_than_there_are(renamed: dict[int, str], missing: str, tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "source", ignore=shutil.ignore_patterns("model*"))
    for number, name in renamed.items():
        shutil.copy(SHARDED / f"model-{number:05}-of-00003.safetensors", tmp_path / f"source/{name}.safetensors")
    with pytest.raises(BcqError) as caught:
        convert(tmp_path / "source", tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-V503", 3)
    assert missing in str(caught.value)
    assert "download the missing files" in caught.value.hint


def test_an_index_that_names_no_file(tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "source", ignore=shutil.ignore_patterns("model-*"))
    (tmp_path / "source/model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(BcqError, match="weight_map is empty: it names no model file") as caught:
        convert(tmp_path / "source", tmp_path / "bcq")
    assert (caught.value.code, "download the missing files" in caught.value.hint) == ("BCQ-V503", True)


@pytest.mark.parametrize(
    "name", ["other.safetensors", "other-00001-of-00001.safetensors", "model-00001-of-00001.safetensors"]
)
def test_two_models_in_a_folder(name: str, tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "source")
    (tmp_path / "source/model.safetensors.index.json").unlink()
    shutil.copy(TINY / "model.safetensors", tmp_path / "source" / name)
    with pytest.raises(BcqError) as caught:
        convert(tmp_path / "source", tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-V506", 2)
    assert "more than one model in the folder: 4 model files and no index: " in str(caught.value)
    (tmp_path / "source" / name).unlink()  # as the hint says
    convert(tmp_path / "source", tmp_path / "bcq")


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "source")
    config = tmp_path / "source/config.json"
    config.write_text(config.read_text().replace("{", '{"vocab_size": 64, ', 1))
    with pytest.raises(BcqError) as caught:
        convert(tmp_path / "source", tmp_path / "bcq")
    assert (caught.value.code, caught.value.finding.found) == ("BCQ-V511", "the key 'vocab_size' stands twice")


@pytest.mark.parametrize(
    ("stated", "both"),
    [
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "format is gptq and checkpoint_format is gptq_v2"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "format is gptq_v2 and checkpoint_format is gptq"),
        ({"w_bit": 8}, "bits is 4 and w_bit is 8"),
        ({"q_group_size": 64}, "group_size is 32 and q_group_size is 64"),
        ({"method": "awq"}, "quant_method is gptq and method is awq"),
        ({"quant_method": "awq", "format": "gemm", "version": "gemv"}, "format is gemm and version is gemv"),
    ],
)
def test_names_of_one_setting_must_agree(stated: dict[str, Any], both: str, tmp_path: Path) -> None:
    source = made_up(tmp_path / "source", {}, PLAIN | stated)
    with pytest.raises(BcqError) as caught:
        read_settings(source)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E602", 4)
    assert str(caught.value).startswith("BCQ-E602 config.json: ")
    assert both in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "form"),
    [
        ({"format": "gptq_v2", "checkpoint_format": "GPTQ_V2", "method": "gptq"}, "gptq_v2"),
        ({"format": None, "checkpoint_format": "gptq_v2", "w_bit": 4}, "gptq_v2"),
        ({"format": "gptq", "version": "1.0"}, "gptq"),
        # as transformers writes it: symmetric by default
        ({"quant_method": "awq", "format": "gemm", "version": "GEMM", "sym": True, "zero_point": True}, "gemm"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.19.0"}, None),
        ({"quant_method": "sinq", "method": "asinq"}, None),
    ],
)
def test_other_settings_of_the_same_name(stated: dict[str, Any], form: str | None, tmp_path: Path) -> None:
    assert read_settings(made_up(tmp_path / "source", {}, PLAIN | stated)).format == form


def test_plan_does_not_depend_on_how_it_is_carried_out() -> None:
    one = Conversion(open_source(TINY), ConvertOptions(workers=1)).plan
    many = Conversion(open_source(TINY), ConvertOptions(workers=8, memory_limit=10**12, resume=True)).plan
    other = Conversion(open_source(TINY), ConvertOptions(max_shard_size=1000)).plan
    assert one.digest == many.digest != other.digest


def test_without_provenance_there_is_no_way_back(tmp_path: Path) -> None:
    convert(TINY, tmp_path / "bcq", provenance=False)
    assert not (tmp_path / "bcq/bcq_source").exists()
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
    with bcqfmt.open(tmp_path / "bcq") as checkpoint, pytest.raises(BcqError) as caught:
        restore(checkpoint, tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E614", 5)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- warnings
def test_a_clean_source_gives_no_warning() -> None:
    assert codes(Conversion(open_source(TINY), ConvertOptions())) == []


def test_scattered_g_idx_and_desc_act(tmp_path: Path) -> None:
    layer = gptq_layer(np.random.default_rng(0), 32, 64, 32)
    layer["g_idx"][[0, 32]] = [1, 0]
    tensors = {f"layer.{suffix}": array for suffix, array in layer.items()}
    conversion = Conversion(made_up(tmp_path / "a", tensors, GPTQ), ConvertOptions())
    assert [(finding.code, finding.tensor) for finding in conversion.warnings] == [("BCQ-E651", "layer.g_idx")]
    stated = {**GPTQ, "desc_act": True}
    assert codes(Conversion(made_up(tmp_path / "b", tensors, stated), ConvertOptions())) == []
    conversion.run(tmp_path / "bcq")
    proved(tmp_path / "a", tmp_path / "bcq", tmp_path)


@pytest.mark.parametrize(
    ("dataset", "warned"),
    [
        ("wikitext2", False),
        (["c4", "ptb"], False),
        (["The quick brown fox."], True),
        ([["a" * 50]], True),
        (None, False),
    ],
)
def test_calibration_text(tmp_path: Path, dataset: Any, warned: bool) -> None:
    source = gptq_folder(tmp_path / "source", layers=1, dataset=dataset)
    assert codes(Conversion(open_source(source), ConvertOptions())) == (["BCQ-E652"] if warned else [])


def test_foreign_files_are_named_and_left_behind(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", layers=1)
    for name in ("pytorch_model.bin", "model.gguf"):
        (source / name).write_bytes(b"x")
    conversion = convert(source, tmp_path / "bcq")
    (finding,) = conversion.warnings
    assert finding.code == "BCQ-E653"
    assert finding.found == "2 left out: model.gguf (another format), pytorch_model.bin (pickle)"
    assert not [path for path in tree(tmp_path / "bcq") if path.endswith((".bin", ".gguf"))]


# --------------------------------------------------------------------------------------------------------- folder
def test_what_the_folder_holds(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", layers=2)
    (source / "README.md").write_text("---\nlicense: mit\nlanguage:\n- de\ntags:\n- gptq\nlibrary_name: x\n---\nText\n")
    (source / "extra").mkdir()
    (source / "extra" / "notes.txt").write_text("keep me")
    convert(source, tmp_path / "bcq", name="me/my-model")
    files = tree(tmp_path / "bcq")
    assert {"README.md", "config.json", "model.safetensors", "bcq_manifest.json", "tokenizer.json"} <= set(files)
    assert (tmp_path / "bcq/extra/notes.txt").read_text() == "keep me"
    card = (tmp_path / "bcq/README.md").read_text()
    for line in ("license: mit", "language:\n- de", "base_model: me/my-model", "library_name: bcqfmt"):
        assert line in card
    assert "- gptq" not in card
    config = json.loads((tmp_path / "bcq/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bcq"
    assert config["model_type"] == "llama"
    proved(source, tmp_path / "bcq", tmp_path)


@pytest.mark.parametrize(
    ("name", "card", "expected"),
    [
        ("me/my-model", None, ["base_model: me/my-model", "base_model_relation: quantized"]),
        ("me/my-model", "base_model: other/one", ["base_model: me/my-model", "base_model_relation: quantized"]),
        ("", "base_model: other/one", ["base_model: other/one", "base_model_relation: quantized"]),
        ("", 'base_model:\n- "a/b"\n- c/d', ["base_model:", "- a/b", "- c/d", "base_model_relation: quantized"]),
        ("", "base_model: /home/me/model", []),
        ("", "base_model: model", []),
        ("", None, []),
    ],
)
def test_the_base_model_is_never_a_folder(tmp_path: Path, name: str, card: str | None, expected: list[str]) -> None:
    source = gptq_folder(tmp_path / "source", layers=1)
    if card is not None:
        (source / "README.md").write_text(f"---\nlicense: mit\n{card}\n---\nText\n")
    convert(source, tmp_path / "bcq", name=name)
    lines = (tmp_path / "bcq/README.md").read_text().split("---")[1].split("library_name")[0].split("\n")
    assert [line for line in lines if line and line != "license: mit"] == expected


def test_umask_decides_the_modes(converted: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in converted.rglob("*") if path.is_file()}
    probe = converted.parent / "probe"
    probe.write_text("")
    assert modes == {probe.stat().st_mode & 0o777}


# --------------------------------------------------------------------------------------------------------- verify
def test_certificate(converted: Path) -> None:
    with bcqfmt.open(converted) as checkpoint:
        some, every = (verify(open_source(TINY), checkpoint, rows=rows) for rows in (8, None))
    assert (every.weights, every.codes, every.values) == (7, 122_880, 122_880)
    assert some.values == 8 * (6 * 128 + 192)
    assert (every.scales, every.zeros, every.archived, every.by_specification) == (3840, 3840, 0, 0)
    assert every.files == len(tree(TINY))


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_verify_sees_one_other_bit_in_the_source(converted: Path, tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    data = bytearray((source / "model.safetensors").read_bytes())
    tensor = open_source(source).tensors[f"model.layers.0.mlp.up_proj.{suffix}"]
    data[tensor.offset + tensor.nbytes // 2] ^= 1
    (source / "model.safetensors").write_bytes(data)
    with bcqfmt.open(converted) as checkpoint, pytest.raises(BcqError) as caught:
        verify(open_source(source), checkpoint)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E613", 6)


@pytest.mark.parametrize("change", ["added", "missing", "edited"])
def test_verify_sees_other_files(converted: Path, tmp_path: Path, change: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    if change == "added":
        (source / "more.txt").write_text("x")
    elif change == "missing":
        (source / "tokenizer.json").unlink()
    else:
        (source / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes() + b"\n")
    with bcqfmt.open(converted) as checkpoint, pytest.raises(BcqError) as caught:
        verify(open_source(source), checkpoint)
    assert caught.value.exit_code == 6


def test_verify_sees_values_that_the_tool_would_not_give(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes may all be right and the meaning wrong: then it is the values that tell."""
    real = reference._scaled
    monkeypatch.setattr(reference, "_scaled", lambda codes, scale, zeros: real(codes, scale, zeros + 1))
    with bcqfmt.open(converted) as checkpoint, pytest.raises(BcqError, match="values differ") as caught:
        verify(open_source(TINY), checkpoint)
    assert caught.value.exit_code == 6


def test_verify_and_restore_see_one_other_bit_in_the_result(converted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "bcq"
    shutil.copytree(converted, broken)
    with bcqfmt.open(broken) as checkpoint:
        part = checkpoint.weight("model.layers.0.mlp.up_proj.weight").parts()["s0_planes"]
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[part.offset + part.nbytes // 2] ^= 4
    (broken / "model.safetensors").write_bytes(data)
    with bcqfmt.open(broken) as checkpoint:
        for attempt in (lambda: verify(open_source(TINY), checkpoint), lambda: restore(checkpoint, tmp_path / "out")):
            with pytest.raises(BcqError) as caught:
                attempt()
            assert (caught.value.code, caught.value.exit_code) == ("BCQ-E613", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_restore_does_not_overwrite_unasked(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with bcqfmt.open(converted) as checkpoint:
        with pytest.raises(BcqError, match="BCQ-E401"):
            restore(checkpoint, tmp_path / "out")
        with pytest.raises(BcqError, match="no checkpoint"):
            restore(checkpoint, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out" / "mine").exists()
        (tmp_path / "out" / "config.json").write_text("{}")
        with pytest.raises(BcqError, match="no checkpoint"):
            restore(checkpoint, tmp_path / "out", overwrite=True)
        (tmp_path / "out" / "old.safetensors").write_text("")
        restore(checkpoint, tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") == tree(TINY)


# ------------------------------------------------------------------------------------------- the reference reader
def golden(bits: int, text: str) -> list[int]:
    """Codes (5*j+3) mod 2^bits and the words that stand for 32 of them in source-formats.md."""
    assert len(text.split()) == bits
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("bits", "packed", "unpack"),
    [
        (2, "93939393 93939393", reference._stream),
        (3, "43c67543 7543c675 c67543c6", reference._stream),
        (4, "61c72d83 e94fa50b 61c72d83 e94fa50b", reference._stream),
        (3, "93939393 93939393 b4b4b4b4", reference._planar),
        (5, "61c72d83 e94fa50b 61c72d83 e94fa50b e1c71e38", reference._planar),
        (6, "61c72d83 e94fa50b 61c72d83 e94fa50b 03fea540 5403fa95", reference._planar),
        (7, "61c72d83 e94fa50b 61c72d83 e94fa50b 03fea540 5403fa95 01ffe000", reference._planar),
    ],
)
def test_reference_reader_knows_the_golden_words(bits: int, packed: str, unpack: Any) -> None:
    stored = np.array([golden(bits, packed)], np.uint32)
    assert unpack(stored, bits, 32).tolist() == [[(5 * j + 3) % 2**bits for j in range(32)]]


def test_every_shard_is_reported_once(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", layers=20)
    reported: list[str] = []
    conversion = Conversion(open_source(source), ConvertOptions(max_shard_size=20_000, workers=3))
    assert conversion.run(tmp_path / "bcq", shard_done=lambda name, _: reported.append(name))
    assert len(reported) > 3
    assert sorted(reported) == [shard.file for shard in conversion.plan.shards]


def test_reference_reader_shares_nothing_with_the_converters() -> None:
    for module, allowed in ((reference, ["bcqfmt.converters.gguf.values", ".protocol"]), (values, [])):
        text = Path(str(module.__file__)).read_text()
        assert re.findall(r"^(?:from|import) ((?:bcqfmt|\.)\S*)", text, re.MULTILINE) == allowed


def test_reference_rounds_bfloat16_once() -> None:
    """1 + 2^-8 + 2^-40 is just above the middle between two bfloat16 numbers; float32 would let it fall back."""
    import ml_dtypes

    exact = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40])
    rounded = reference._rounded(exact, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert rounded.tolist() == [1 + 2.0**-7, 1.0, 1 + 2.0**-7]
    far = reference._sum_rounded(np.array([1 + 2.0**-8]), np.array([2.0**-100]), np.dtype(ml_dtypes.bfloat16))
    assert float(far[0]) == 1 + 2.0**-7


def test_reference_says_so_where_the_format_defines_the_values() -> None:
    blank = StoredTensor.from_array("x", words(np.random.default_rng(0), 2, 2))
    assert reference_rows(Module("m", "anybcq", {"qweight": blank}, {"bits": 2})) is None


def test_what_is_called_like_a_replaced_folder_is_kept(tmp_path: Path) -> None:
    """`--overwrite` moves the old folder to `.NAME.old`: what a user has there is not removed."""
    source = gptq_folder(tmp_path / "source", layers=1)
    convert(source, tmp_path / "bcq")
    mine = tmp_path / ".bcq.old"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    before = tree(tmp_path / "bcq")
    convert(source, tmp_path / "bcq", overwrite=True)
    assert tree(tmp_path / "bcq") == before
    assert (mine / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".bcq.old", "bcq", "source"]
    shutil.rmtree(mine)
    shutil.copytree(tmp_path / "bcq", mine)  # left by a run that was interrupted
    convert(source, tmp_path / "bcq", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq", "source"]


# --------------------------------------------------------------------------------------------------------- limits
def configured(folder: Path, **more: Any) -> Path:
    """A source whose config.json has more in it."""
    source = gptq_folder(folder, layers=2)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **more}))
    return source


def test_a_configuration_too_long_to_be_indented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = configured(tmp_path / "source", list=[0] * 1000)
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", (source / "config.json").stat().st_size)
    convert(source, tmp_path / "bcq")
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
    assert json.loads((tmp_path / "bcq/config.json").read_bytes())["list"] == [0] * 1000


@pytest.mark.parametrize(("limit", "most"), [("MAX_CONFIG_BYTES", 2000), ("MAX_JSON_FILE_ITEMS", 1000)])
def test_a_configuration_that_no_reader_takes(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = configured(tmp_path / "source", list=[0] * 1000)
    monkeypatch.setattr(limits, limit, most)
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code, caught.value.finding.file) == ("BCQ-E803", 9, "config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("limit", ["MAX_JSON_FILE_BYTES", "MAX_JSON_FILE_ITEMS"])
@pytest.mark.parametrize(("name", "provenance"), [("bcq_source/source.json", True), ("bcq_manifest.json", False)])
def test_a_folder_that_no_reader_takes_is_not_finished(
    name: str, provenance: bool, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gptq_folder(tmp_path / "source", layers=12)  # so that the record of the source is the longest file
    convert(source, tmp_path / "bcq", provenance=provenance)
    written = (tmp_path / "bcq" / name).read_bytes()
    size = len(written) if limit == "MAX_JSON_FILE_BYTES" else sum(map(written.count, b",[{"))
    monkeypatch.setattr(limits, limit, size)
    convert(source, tmp_path / "same", provenance=provenance)
    monkeypatch.setattr(limits, limit, size - 1)
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "other", provenance=provenance)
    assert (caught.value.code, caught.value.exit_code, caught.value.finding.file) == ("BCQ-E803", 9, name)
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "other.partial/bcq_manifest.json").exists()
