"""GGUF files to BCQ and back: the same bytes, the values of ggml, the names and rows of Hugging Face."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import Certificate, verify
from bcqfmt.converters.export.gguf import export_gguf
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.layouts import gguf
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.conversions import convert, tree
from sources.gguf_files import DATA, EXPECTED, FILES, Writer

NUMBER = {kind.name: number for number, kind in TYPES.items()}
GOOD = [name for name in FILES if name != "iq_grids.gguf"]


def proved(source: Path, target: Path, scratch: Path) -> Certificate:
    """Validate deeply, compare all values, restore: every file as it was."""
    report = bcqfmt.validate(target, deep=True)
    assert report.valid, report.errors[0].text()
    with bcqfmt.open(target) as checkpoint:
        certificate = verify(open_source(source), checkpoint, rows=None)
        digests = restore(checkpoint, scratch / "restored")
    assert tree(scratch / "restored") == digests == certificate.digests
    for path, digest in digests.items():
        place = source / path if source.is_dir() else source.parent / path
        assert hashlib.sha256(place.read_bytes()).hexdigest() == digest
    shutil.rmtree(scratch / "restored")
    return certificate


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()


@pytest.mark.parametrize("name", GOOD)
def test_real_files_come_back_with_the_values_of_other_programs(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "out")
    assert proved(DATA / name, tmp_path / "out", tmp_path).archived == 0
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        weights, dense = dict(checkpoint.weights()), dict(checkpoint.dense())
        companions = [t["name"] for t in EXPECTED[name]["tensors"] if t["name"].endswith(".scale")]
        for entry in EXPECTED[name]["tensors"]:
            wanted = entry.get("sha256_f32_hf_rows", entry["sha256_f32"])
            hf = entry.get("hf_name", entry["name"]).replace("experts.*.", "experts.")
            if entry["name"] in companions:
                continue
            if entry["type"] not in KINDS:
                assert digest(dense[hf].array().astype(np.float32)) == wanted, hf
                continue
            values = weights[hf].dequantize()
            assert (values.dtype, list(values.shape)) == (np.float32, entry["shape"])
            companion = f"{entry['name'].removesuffix('.weight')}.scale"
            if companion not in companions:
                assert digest(values) == wanted, hf
            else:  # NVFP4: the true weight is one number times the values of the blocks
                assert weights[hf].scheme.segments[0].scale.bits == "UE4M3"
                scale = weights[hf].parts()["s0_scale_scale"].array()[0, 0]
                assert digest(np.float32(scale) * plain(weights[hf])) != digest(plain(weights[hf]))
                assert digest(plain(weights[hf])) == wanted
        assert not any(name.endswith(".scale") for name in dense)


def plain(weight: Any) -> Any:
    """The values of a weight of NVFP4 with a second-order scale of one."""
    parts = {name: part.array() for name, part in weight.parts().items()}
    parts["s0_scale_scale"] = np.ones_like(parts["s0_scale_scale"])
    return bcqfmt.BcqWeight(weight.name, weight.spec, bcqfmt.weight.build.wrap(weight.spec, parts)).dequantize()


def test_vector_codebooks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BcqError, match="IQ1_S, a vector codebook") as caught:
        convert(DATA / "iq_grids.gguf", tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E601", 5)
    assert not list(tmp_path.iterdir())


def written(writer: Writer, folder: Path, name: str = "model.gguf") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(writer.bytes())
    return folder / name


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, order: str = "<") -> bytes:
    """Random blocks with finite scales."""
    rng = np.random.default_rng(seed)
    size = TYPES[NUMBER[kind]]
    raw = rng.integers(0, 256, (rows, columns // size.elements * size.nbytes), dtype=np.uint8)
    if kind == "NVFP4":
        raw.reshape(-1, 36)[:, :4] &= 0x3F
    blocks = raw.view(KINDS[kind].block(order))
    for field in ("d", "m", "dd", "dmin"):
        if field in blocks.dtype.fields:
            blocks[field] = rng.uniform(-1, 1, blocks[field].shape)
    return raw.tobytes()


def model(kinds: dict[str, str], order: str = "<", arch: str = "llama", **options: Any) -> Writer:
    """Weights [8, 256] of these types, and a norm; two heads."""
    writer = Writer(order=order, **options).pair("general.architecture", "str", arch)
    writer.pair(f"{arch}.attention.head_count", "u32", 2)
    for i, (name, kind) in enumerate(kinds.items()):
        writer.tensor(name, [8, 256], NUMBER[kind], random_blocks(kind, 8, 256, i, order))
    norm = np.arange(256, dtype=np.float32).astype(f"{order}f4")
    return writer.tensor("blk.0.attn_norm.weight", [256], 0, norm.tobytes())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "TQ1_0"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_any_blocks_in_either_byte_order(kind: str, order: str, tmp_path: Path) -> None:
    source = written(model({"blk.0.attn_q.weight": kind, "blk.0.ffn_up.weight": kind}, order), tmp_path / "in")
    convert(source, tmp_path / "out")
    assert proved(source, tmp_path / "out", tmp_path).archived == 0
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        norm = checkpoint["model.layers.0.input_layernorm.weight"]
        assert np.array_equal(norm.array(), np.arange(256, dtype=np.float32))


@pytest.mark.parametrize("kept", [0, 1 << 26])
def test_a_few_rows_at_a_time(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_TILE", 700)  # 3 rows of Q6_K, 4 of Q4_K, 2 of Q8_0
    monkeypatch.setattr(gguf, "_KEPT", kept)  # nothing, so that scales are read again; or all of them
    writer = model({"blk.0.attn_q.weight": "Q4_K", "blk.0.attn_k.weight": "Q8_0", "blk.0.ffn_up.weight": "Q6_K"})
    writer.tensor("blk.0.ffn_gate_exps.weight", [3, 8, 256], NUMBER["Q4_K"], random_blocks("Q4_K", 24, 256))
    writer.tensor("blk.0.attn_q.bias", [256], NUMBER["Q4_0"], random_blocks("Q4_0", 1, 256))  # elements, not rows
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out", workers=3)
    assert proved(source, tmp_path / "out", tmp_path).archived == 0


def test_rows_of_dense_q_and_biases_are_put_back(tmp_path: Path) -> None:
    writer = Writer(order=">").pair("general.architecture", "str", "llama").pair("llama.attention.head_count", "u32", 2)
    matrix = np.arange(12 * 4).reshape(12, 4)
    writer.tensor("blk.0.attn_q.weight", [12, 4], 1, matrix.astype(">f2").tobytes())
    writer.tensor("blk.0.attn_q.bias", [12], 0, np.arange(12).astype(">f4").tobytes())
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out")
    proved(source, tmp_path / "out", tmp_path)
    order = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        assert checkpoint["model.layers.0.self_attn.q_proj.bias"].array().tolist() == order
        assert np.array_equal(checkpoint["model.layers.0.self_attn.q_proj.weight"].array(), matrix[order])


def test_odd_bytes_padding_and_tail_come_back(tmp_path: Path) -> None:
    writer = model({"a.weight": "MXFP4", "b.weight": "Q5_1"}, alignment=256)
    ternary = bytearray(random_blocks("TQ2_0", 8, 256)[:54] * 8)
    ternary[52:54] = b"\0\0"
    writer.tensor(
        "c.weight", [8, 256], NUMBER["TQ1_0"], bytes(ternary[i % 52] if i % 54 < 52 else 0 for i in range(432))
    )
    writer.tensor("d", [1], 0, b"abcd")
    scales = bytearray(random_blocks("NVFP4", 8, 256))
    scales[0:3] = b"\x7f\x80\xfe"
    writer.tensor("e.weight", [8, 256], NUMBER["NVFP4"], bytes(scales))
    writer.fill, writer.tail = b"\xa5", b"bytes that nobody reads"
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out")
    assert proved(source, tmp_path / "out", tmp_path).archived == 54 * 8 + 36 * 4 * 8


def test_a_scale_of_480_as_ggml_reads_it(tmp_path: Path) -> None:
    blocks = bytearray(random_blocks("NVFP4", 8, 256))
    blocks[0:3] = b"\xff\x7e\x00"
    other = bytearray(blocks)
    other[36] |= 0x80  # ggml ignores this bit, so the byte is kept apart
    writer = model({}).tensor("e.weight", [8, 256], NUMBER["NVFP4"], bytes(blocks))
    writer.tensor("f.weight", [8, 256], NUMBER["NVFP4"], bytes(other))
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out")
    assert proved(source, tmp_path / "out", tmp_path).archived == len(other)
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        assert checkpoint.weight("e.weight").parts()["s0_scale"].array()[0, :3].tolist() == [480, 448, 0]
    writer.tensor("e.scale", [1], 0, b"\0\0\x80?")
    with pytest.raises(BcqError, match=r"0xFF, which ggml reads as 480, and a second scale in e\.scale") as caught:
        convert(written(writer, tmp_path / "in"), tmp_path / "other")
    assert (caught.value.code, caught.value.finding.tensor) == ("BCQ-E604", "e.weight")


def test_zero_scales_of_one_bit_keep_the_signs_of_zero(tmp_path: Path) -> None:
    writer = model({})
    writer.tensor("e.weight", [2, 128], NUMBER["Q1_0"], (bytes(2) + b"\x55" * 16) + (b"\0\x80" + b"\x33" * 16))
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out")
    proved(source, tmp_path / "out", tmp_path)


def test_infinite_scales_need_the_users_word(tmp_path: Path) -> None:
    writer = model({})
    writer.tensor("e.weight", [1, 32], NUMBER["Q4_0"], b"\0\x7c" + b"\x12" * 16)
    source = written(writer, tmp_path / "in")
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E609", 4)
    done: list[int] = []  # what was written before the scale was seen is taken back
    Conversion(open_source(source), ConvertOptions(allow_nonfinite=True)).run(tmp_path / "out", done.append)
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    assert sum(done) + 4096 > shard.stat().st_size > sum(done)  # all but the header
    proved(source, tmp_path / "out", tmp_path)


def test_other_architectures_keep_their_names_and_say_so(tmp_path: Path) -> None:
    source = written(model({"blk.0.attn_q.weight": "Q8_0"}, arch="mamba"), tmp_path / "in")
    conversion = convert(source, tmp_path / "out")
    assert [finding.code for finding in conversion.warnings] == ["BCQ-E656"]
    proved(source, tmp_path / "out", tmp_path)
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        assert set(checkpoint) == {"blk.0.attn_q.weight", "blk.0.attn_norm.weight"}


CONTRADICTIONS: dict[str, tuple[dict[str, int], str]] = {
    "odd heads": (
        {"attention.head_count": 3},
        "'blk.0.attn_q.weight' is 8 x 256, the key values say 3 heads",
    ),
    "more heads than fit": (
        {"attention.head_count": 2, "embedding_length": 256},
        "'blk.0.attn_q.weight' is 8 x 256, the key values say 2 heads of 128 rows",
    ),
    "no heads": ({}, "'blk.0.attn_q.weight' is 8 x 256, the key values say no number of heads"),
    "another width": (
        {"attention.head_count": 2, "embedding_length": 7},
        "llama.embedding_length is 7, token_embd.weight has 256 columns",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_numbers_that_contradict_the_tensors_leave_all_names_as_they_are(case: str, tmp_path: Path) -> None:
    numbers, reason = CONTRADICTIONS[case]
    writer = Writer().pair("general.architecture", "str", "llama")
    for key, value in {"feed_forward_length": 8, "block_count": 1, **numbers}.items():
        writer.pair(f"llama.{key}", "u32", value)
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"]
    for name in names:
        writer.tensor(name, [8, 256], NUMBER["Q8_0"], random_blocks("Q8_0", 8, 256))
    source = written(writer, tmp_path / "in")
    conversion = convert(source, tmp_path / "out")
    warned = [(finding.code, finding.file, finding.found) for finding in conversion.warnings]
    assert warned == [("BCQ-E656", "model.gguf", reason)]
    assert conversion.source.config == {}
    proved(source, tmp_path / "out", tmp_path)
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        assert set(checkpoint) == set(names)
        export_gguf(checkpoint, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == source.read_bytes()


NAMES: dict[str, tuple[str, str, int, str, str]] = {  # names and type; code, and what is shown
    "metadata": ("a.weight", "__metadata__", 0, "BCQ-V302", "a name that the format reserves"),
    "part": ("a.weight", "blk.0.bcq_s0_planes", 0, "BCQ-V302", "a name that the format reserves"),
    "two dense": (
        "output.weight",
        "lm_head.weight",
        0,
        "BCQ-V120",
        "another tensor would be 'lm_head.weight' too",
    ),
    "two weights": ("output.weight", "lm_head.weight", 8, "BCQ-V120", "it and 'output.weight' would both be 'lm_head"),
    "case": ("output.weight", "LM_head.weight", 0, "BCQ-V120", "equal to 'output.weight' but for case"),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_cannot_be_are_refused_first_and_as_the_source_has_them(case: str, tmp_path: Path) -> None:
    first, second, kind, code, shown = NAMES[case]
    writer = model({})
    for name in (first, second):
        writer.tensor(name, [8, 32], kind, bytes(8 * (128 if kind == 0 else 34)))
    with pytest.raises(BcqError, match=shown) as caught:
        convert(written(writer, tmp_path / "in"), tmp_path / "out")
    found = caught.value.finding
    assert (found.code, found.file, found.tensor) == (code, "model.gguf", second)
    assert caught.value.hint.startswith("rename")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_matrices_of_one_and_four_dimensions(tmp_path: Path) -> None:
    writer = model({})
    writer.tensor("v", [64], NUMBER["Q8_0"], random_blocks("Q8_0", 1, 64))
    writer.tensor("w.weight", [2, 3, 4, 32], NUMBER["Q4_0"], random_blocks("Q4_0", 24, 32))
    source = written(writer, tmp_path / "in")
    convert(source, tmp_path / "out")
    proved(source, tmp_path / "out", tmp_path)
    with bcqfmt.open(tmp_path / "out") as checkpoint:
        assert checkpoint.weight("w.weight").shape == (6, 4, 32)


# -------------------------------------------------------------------------------------------------------- splits
def split(folder: Path, change: dict[str, Any] | None = None) -> Path:
    """Two files of one model; ``change``: values of the second file's keys."""
    for i in range(2):
        keys = {"split.no": i, "split.count": 2, "split.tensors.count": 3, **(change or {} if i else {})}
        kinds = {f"blk.{i}.attn_q.weight": "Q4_K", **({} if i else {"output.weight": "Q6_K"})}
        writer = model(kinds) if i == 0 else Writer()
        if i:
            writer.tensor("blk.1.attn_q.weight", [8, 256], NUMBER["Q4_K"], random_blocks("Q4_K", 8, 256, 5))
        else:
            keys["split.tensors.count"] = 4
        for key, value in keys.items():
            writer.pair(key, "i32" if key.endswith("tensors.count") else "u16", value)
        written(writer, folder, f"m-0000{i + 1}-of-00002.gguf")
    return folder / "m-00001-of-00002.gguf"


def test_the_files_of_a_split_are_one_model(tmp_path: Path) -> None:
    first = split(tmp_path / "in")
    for source in (first, first.with_name("m-00002-of-00002.gguf"), first.parent):
        convert(source, tmp_path / "out")
        assert proved(source, tmp_path / "out", tmp_path).files == 2
        with bcqfmt.open(tmp_path / "out") as checkpoint:
            assert "model.layers.1.self_attn.q_proj.weight" in checkpoint
        shutil.rmtree(tmp_path / "out")


def test_the_files_of_a_split_may_be_links_when_one_is_named(tmp_path: Path) -> None:
    first = split(tmp_path / "store")
    (tmp_path / "in").mkdir()
    for file in first.parent.iterdir():
        (tmp_path / "in" / file.name).symlink_to(file)
    convert(tmp_path / "in" / first.name, tmp_path / "out")
    assert proved(tmp_path / "in" / first.name, tmp_path / "out", tmp_path).files == 2


def test_an_output_that_holds_a_file_which_a_link_leads_to(tmp_path: Path) -> None:
    """--overwrite would remove the source."""
    whole, out, place = split(tmp_path / "whole"), tmp_path / "out", tmp_path / "in"
    convert(whole, out)
    place.mkdir()
    shutil.move(whole, place)
    second = Path(shutil.move(whole.with_name("m-00002-of-00002.gguf"), out))
    (place / second.name).symlink_to(second)
    words = ["convert", str(place / whole.name), str(out), "--overwrite"]
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, "it holds the source" in done.stderr) == (7, True)
    assert second.is_file()


def test_a_missing_file_of_a_split(tmp_path: Path) -> None:
    first = split(tmp_path / "in")
    first.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(BcqError, match="1 of 2 files missing") as caught:
        open_source(first)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-V503", 3)


@pytest.mark.parametrize("change", [{"split.no": 0}, {"split.count": 3}])
def test_files_of_different_splits(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        open_source(split(tmp_path / "in", change))
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E218", 4)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [("u16[]", [1, 2], "an array"), ("str[]", ["x"], "an array"), ("str", "x", "x"), ("f32", 0.5, "0.5")],
)
def test_a_number_of_a_split_that_is_none(key: str, kind: str, value: Any, shown: str, tmp_path: Path) -> None:
    first = split(tmp_path / "in")
    writer = Writer()
    for name in ("split.no", "split.count", "split.tensors.count"):
        writer.pair(name, *((kind, value) if name == key else ("u16", 2 * (name == "split.count"))))
    first.write_bytes(writer.bytes())
    with pytest.raises(BcqError) as caught:
        open_source(first)
    found = caught.value.finding
    assert (found.code, found.file, found.tensor) == ("BCQ-E214", first.name, key)
    assert (found.found, found.expected) == (shown, "an integer")


def test_a_file_of_another_split_that_was_renamed(tmp_path: Path) -> None:
    source = written(model({"a.weight": "Q8_0"}), tmp_path / "in", "m-00001-of-00001.gguf")
    open_source(source)
    with pytest.raises(BcqError) as caught:
        open_source(written(model({}).pair("split.count", "u16", 2), tmp_path / "in", "lone.gguf"))
    assert caught.value.code == "BCQ-E218"
    assert caught.value.hint == "put all files of one split, and of no other, into one folder"
    renamed = split(tmp_path / "renamed").rename(tmp_path / "renamed/a.gguf")
    with pytest.raises(BcqError) as caught:
        open_source(renamed)
    first = "rename it to NAME-00001-of-00002.gguf, and the other files of the split likewise"
    assert (caught.value.code, caught.value.hint) == ("BCQ-E218", first)


# ------------------------------------------------------------------------------------------------------- folders
def test_a_folder_with_one_model_and_other_files(tmp_path: Path) -> None:
    source = written(model({"blk.0.attn_q.weight": "Q4_0"}), tmp_path / "in").parent
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    convert(source, tmp_path / "out")
    assert proved(source, tmp_path / "out", tmp_path).files == 2


def test_a_folder_with_two_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        written(model({"a.weight": "Q8_0"}), tmp_path / "in", name)
    with pytest.raises(BcqError, match="2 GGUF models") as caught:
        open_source(tmp_path / "in")
    assert caught.value.hint == "name the file itself instead of its folder"
    open_source(tmp_path / "in/a.gguf")


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_another_layout_cannot_be_asked_for(layout: str, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        convert(DATA / "q4_0.gguf", tmp_path / "out", layout=layout)
    assert caught.value.code == "BCQ-E604"
