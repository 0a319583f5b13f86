"""`bcqfmt export`: what it says, and how it ends."""

import json
import shutil
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.cli.verbs import export as verb
from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.converters.export import TARGETS
from bcqfmt.converters.source.gguf_tokenizer import tokenizer_files
from programs.verbs import DOWN, NORM, UP, Run, affine, tensors
from sources.conversions import convert
from sources.gguf_files import DATA
from sources.peers import PEERS


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    bcqfmt.save(path, {UP: affine(), NORM: tensors()[NORM]}, config={"model_type": "test"})
    return path


def test_the_verb_and_the_exporter_offer_the_same_layouts() -> None:
    assert (*TARGETS, "gguf") == verb._TARGETS


def test_it_says_what_it_wrote_and_why(run: Run, plain: Path, tmp_path: Path) -> None:
    result = run("export", plain, tmp_path / "out", "--to", "gptq")
    assert result.exit_code == 0
    first, *notes = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: gptq_v2; 1 weight, 1 other tensor, 1 model file, ")
    assert notes == ["  zero points: gptq_v2, because the weight is asymmetric, which GPTQModel refuses in gptq"]
    assert (tmp_path / "out" / "quantize_config.json").is_file()


def test_json(run: Run, plain: Path, tmp_path: Path) -> None:
    result = run("export", plain, tmp_path / "out", "--to", "compressed-tensors", "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert (value["format"], value["weights"], value["dense"]) == ("compressed-tensors", 1, 1)
    assert value["files"] == ["model.safetensors"]
    assert value["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_dense_works_for_everything(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "out", "--to", "dense", "--dtype", "bfloat16", "--max-shard-size", "1KB")
    assert result.exit_code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_a_refusal_names_the_weight_and_the_reason(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "out", "--to", "awq", "--json")
    assert result.exit_code == 5
    assert "error: BCQ-E616" in result.stderr
    assert "encoding bcq" in result.stderr
    assert "hint: export --to dense always works" in result.stderr
    assert json.loads(result.stdout)["error"]["tensor"] == DOWN
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_kept_unless_told_otherwise(run: Run, plain: Path, tmp_path: Path) -> None:
    assert run("export", plain, tmp_path / "out", "--to", "dense").exit_code == 0
    assert run("export", plain, tmp_path / "out", "--to", "awq").exit_code == 7
    assert run("export", plain, tmp_path / "out", "--to", "awq", "--overwrite").exit_code == 0


@pytest.mark.parametrize("layout", ["gptq", "gguf"])
def test_damaged_weights_do_not_go_over(run: Run, plain: Path, tmp_path: Path, layout: str) -> None:
    if layout == "gguf":
        convert(DATA / "q4_0.gguf", plain, overwrite=True)
    raw = bytearray((plain / "model.safetensors").read_bytes())
    raw[-10] ^= 1
    (plain / "model.safetensors").write_bytes(raw)
    result = run("export", plain, tmp_path / ("out.gguf" if layout == "gguf" else "out"), "--to", layout)
    assert (result.exit_code, "BCQ-V606 model.safetensors" in result.stderr) == (6, True), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--to", "gptq", "--allow-rounding"],
        ["--to", "dense", "--like", "donor.gguf"],
        ["--to", "gptq", "--dtype", "float16"],
        ["--to", "dense", "--dtype", "int8"],
        ["--to", "gguf", "--max-shard-size", "5GB"],
        ["--to", "dense", "--max-shard-size", "big"],
        ["--to", "dense", "--max-shard-size", "0"],
    ],
)
def test_usage(run: Run, plain: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = run("export", plain, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint(run: Run, tmp_path: Path, gptq: Path) -> None:
    assert run("export", tmp_path / "none", tmp_path / "out", "--to", "dense").exit_code == 3
    assert run("export", gptq, tmp_path / "out", "--to", "dense").exit_code == 5


@pytest.fixture
def from_gguf(tmp_path: Path) -> Path:
    convert(DATA / "q4_k_m.gguf", tmp_path / "from-gguf")
    return tmp_path / "from-gguf"


def test_gguf_tells_the_types(run: Run, from_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert run("export", from_gguf, tmp_path / "out", "--to", "gguf").exit_code == 2  # the name of a folder
    result = run("export", from_gguf, out, "--to", "gguf")
    assert result.exit_code == 0
    first, *types, then = result.stdout.splitlines()
    assert first.startswith(f"{out}: gguf, every value as in BCQ; 9 weights, 3 other tensors, ")
    assert types == ["  Q4_K    6 weights, exact, 4.5 bits", "  Q6_K    3 weights, exact, 6.5625 bits"]
    assert then == f"run it: llama-cli -m {out} -p 'Once upon a time'"
    assert run("export", from_gguf, out, "--to", "gguf").exit_code == 7
    value = json.loads(run("export", from_gguf, out, "--to", "gguf", "--overwrite", "--json").stdout)
    assert (value["exact"], value["bytes"], len(value["tensors"])) == (True, out.stat().st_size, 9)
    assert {entry["type"] for entry in value["tensors"]} == {"Q4_K", "Q6_K"}


def test_gguf_never_replaces_the_donor_or_a_folder(run: Run, from_gguf: Path, tmp_path: Path) -> None:
    donor = tmp_path / "donor.gguf"
    shutil.copy(DATA / "q4_k_m.gguf", donor)
    (tmp_path / "link.gguf").symlink_to(donor)
    (tmp_path / "folder.gguf").mkdir()
    for more in ((), ("--overwrite",)):
        for like in (donor, tmp_path / "link.gguf"):
            result = run("export", from_gguf, donor, "--to", "gguf", "--like", like, *more)
            assert (result.exit_code, "BCQ-E402" in result.stderr, "it is the donor" in result.stderr) == (
                7,
                True,
                True,
            )
        result = run("export", from_gguf, tmp_path / "folder.gguf", "--to", "gguf", *more)
        assert (result.exit_code, "BCQ-E401" in result.stderr) == (7, True)
        assert "it is a folder; expected a new file\nhint: choose another name\n" in result.stderr
    assert donor.read_bytes() == (DATA / "q4_k_m.gguf").read_bytes()


def test_gguf_rounds_only_when_told_and_says_so(run: Run, tmp_path: Path) -> None:
    convert(PEERS / "hqq-hqq-4b-g64-asym-axis1" / "source", tmp_path / "bcq")
    for name, content in tokenizer_files(read_gguf(SourceFile(DATA / "q4_0.gguf"))).items():
        (tmp_path / "bcq" / name).write_bytes(content)
    out = tmp_path / "out.gguf"
    result = run("export", tmp_path / "bcq", out, "--to", "gguf")
    assert result.exit_code == 5
    assert "BCQ-E616 'model.layers.0." in result.stderr
    assert "floating-point zero points (and 6 more weights)" in result.stderr
    assert "hint: --allow-rounding writes it as Q4_1" in result.stderr
    assert not out.exists()
    result = run("export", tmp_path / "bcq", out, "--to", "gguf", "--allow-rounding")
    assert result.exit_code == 0
    first, *lines = result.stdout.splitlines()
    assert "gguf, ROUNDED; 7 weights" in first
    assert len([line for line in lines if line.startswith("  Q4_1    model.layers.0.") and "error 0.000" in line]) == 7
    assert any(line.startswith("  rounded weights together: error 0.000") for line in lines)
