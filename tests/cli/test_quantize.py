"""`bcqfmt quantize`, `report` and `sweep`: what they say, write and return."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt.cli.options import given_settings
from bcqfmt.converters.methods.protocol import Job, Quantized
from bcqfmt.converters.methods.registry import METHODS, find_method
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.converters.quantize.record import RECORD
from hub.server import loopback_hub
from programs.verbs import Run
from sources.conversions import tree
from sources.dense_samples import dense_folder, dense_tensors
from sources.peers import PEERS

DENSE = PEERS / "dense-fp16" / "source"
GPTQ = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
RTN = ("--method", "rtn", "--group-size", "32")


@pytest.fixture
def bcq(run: Run, tmp_path: Path) -> Path:
    assert run("quantize", DENSE, tmp_path / "bcq", *RTN).exit_code == 0
    return tmp_path / "bcq"


# -------------------------------------------------------------------------------------------------------- quantize
def test_it_says_what_it_does(run: Run, tmp_path: Path) -> None:
    result = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--bits", "3", "--workers", "2")
    assert result.exit_code == 0
    for text in (
        "quantized  rtn (bits = 3, group_size = 32, symmetric = false",
        "dense      embedding: 1 tensor; 16.38 kB",
        "dense      vector: 3 tensors",
        "87.99 % of 139,648 parameters",
        "model.safetensors: ",
    ):
        assert text in result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("  model.layers")]
    assert len(rows) == 7
    decibels = [float(row.split()[-2]) for row in rows]
    assert decibels == sorted(decibels)
    assert "7 weights, 3.733 bits per weight, 57.34 kB and 33.54 kB dense, relative error 22.8 %" in result.stdout
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid


def test_json_has_every_weight(run: Run, tmp_path: Path) -> None:
    result = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--json")
    found = json.loads(result.stdout)
    assert len(found["weights"]) == 7
    assert {"mse", "relative", "sqnr_db", "bits_per_weight", "bytes"} <= found["weights"][0].keys()
    assert found["recipes"][0]["method"] == "rtn"
    assert {row["reason"] for row in found["dense"]} == {"embedding", "output head", "vector"}
    assert found["peak_rss_bytes"] > 10**7
    assert found["warnings"] == []


def test_dry_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--dry-run")
    assert result.exit_code == 0
    assert "7 weights; 245.76 kB" in result.stdout
    found = json.loads(run("quantize", DENSE, tmp_path / "bcq", *RTN, "--dry-run", "--json").stdout)
    assert found["recipes"][0]["weights"] == len(found["weights"]) == 7
    assert found["dense"]["vector"] == {"tensors": 3, "bytes": 768}
    assert list(tmp_path.iterdir()) == []


def test_of_a_hub_id_only_headers_are_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"a.q_proj.weight": np.zeros((1024, 1024), np.float16)}
    folder = dense_folder(tmp_path / "model", large)
    with loopback_hub(monkeypatch, tmp_path / "home") as hub:
        hub.commit("me/dense", {path.name: path.read_bytes() for path in folder.iterdir()})
        result = run("quantize", "me/dense", tmp_path / "bcq", *RTN, "--dry-run")
        sent = sum(seen.sent for seen in hub.asked(r"safetensors$", "GET"))
        assert result.exit_code == 0, result.stderr
        assert "1 weight; 2.10 MB" in result.stdout
        assert 0 < sent < 2_097_152 // 4
        assert not (tmp_path / "bcq").exists()
        result = run("quantize", "me/dense", tmp_path / "bcq", *RTN)
        assert result.exit_code == 0, result.stderr
    assert "base_model: me/dense\n" in (tmp_path / "bcq" / "README.md").read_text()


def test_rules(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "[[rule]]\nmatch='self_attn'\nmethod='bcq'\nbits=2\ngroup_size=32\n"
        "[[rule]]\nmatch='down_proj'\ndense=true\n[[rule]]\nmatch='nowhere'\noptional=true\n"
    )
    found = json.loads(run("quantize", DENSE, tmp_path / "bcq", *RTN, "--rules", rules, "--json").stdout)
    assert {recipe["method"] for recipe in found["recipes"]} == {"rtn", "bcq"}
    methods = {row["name"]: found["recipes"][row["recipe"]]["method"] for row in found["weights"]}
    assert all(method == ("bcq" if "attn" in name else "rtn") for name, method in methods.items())
    assert len(methods) == 6
    assert found["unused_rules"] == ["rules.toml, rule 3, line 9: 'nowhere' matches nothing"]
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        assert checkpoint.weight("model.layers.0.self_attn.q_proj.weight").scheme.segments[0].encoding == "bcq"


def test_rules_may_bring_their_own_method(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[default]\nmethod='rtn'\nbits=5\ngroup_size='row'\n")
    assert run("quantize", DENSE, tmp_path / "bcq", "--rules", rules).exit_code == 0
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for _, weight in checkpoint.weights():
            assert (weight.scheme.segments[0].bits, weight.scheme.segments[0].group_size) == (5, weight.shape[1])


def test_include_and_exclude(run: Run, tmp_path: Path) -> None:
    result = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--include", "lm_head", "--exclude", "mlp", "--json")
    names = {row["name"] for row in json.loads(result.stdout)["weights"]}
    assert "lm_head.weight" in names
    assert len(names) == 5


@pytest.mark.parametrize(
    ("args", "code", "exit_code", "text"),
    [
        (("--method", "rtm"), "BCQ-E620", 2, "rtn, perhaps"),
        (("--method", "rtn", "--bits", "9"), "BCQ-E620", 2, "bits = 9"),
        (("--method", "rtn", "--bits", "x"), "BCQ-E620", 2, "bits = x"),
        (("--method", "rtn", "--rounds", "3"), "BCQ-E620", 2, "no setting `rounds`"),
        (("--method", "rtn", "--set", "bitz=3"), "BCQ-E620", 2, "`bits`, perhaps"),
        (("--method", "mixed24", "--four-bit-ratio", "2"), "BCQ-E620", 2, "four_bit_ratio = 2"),
        (("--method", "gptq"), "BCQ-E623", 2, "Hessian"),
        (("--method", "atom"), "BCQ-E621", 5, "besides 128 outlier channels"),
        (("--preset", "w4a4", "--dry-run"), "BCQ-E621", 5, "besides 128 outlier channels"),
        (("--method", "mixed24", "--layout", "aligned64", "--four-bit-ratio", "0.5"), "BCQ-E621", 5, "aligned64"),
        ((*RTN, "--include", "nowhere"), "BCQ-E625", 2, "is in no tensor's name"),
        ((*RTN, "--exclude", "["), "--exclude", 2, "'[' is no regular expression: unterminated"),
        ((*RTN, "--include", ""), "--include", 2, "it is empty; expected a regular expression"),
        ((*RTN, "--rules", "none.toml"), "BCQ-E101", 3, "no such file"),
        ((*RTN, "--stats", "none.safetensors"), "BCQ-E101", 3, "none.safetensors"),
        ((*RTN, "--html", "nowhere/r.html"), "BCQ-E402", 7, "no such folder"),
    ],
)
def test_refusals(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    code: str,
    exit_code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("quantize", DENSE, tmp_path / "bcq", *args)
    assert result.exit_code == exit_code, result.stderr
    assert code in result.stderr
    assert text in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--bits", "4"),
        (*RTN, "--set", "bits"),
        (*RTN, "--set", "=4"),
        (*RTN, "--html", "report.txt"),
        (*RTN, "--workers", "0"),
        (*RTN, "--max-shard-size", "lots"),
        (*RTN, "--max-shard-size", "5"),
        (*RTN, "--nonsense", "3"),
        (*RTN, "--revision", "main"),
        (*RTN, "--rows", "3"),
        (*RTN, "--context", "64"),
        (*RTN, "--device", "cuda"),
        ("--preset", "plain", "--token-weights", "tokens"),  # also where it is the default
    ],
)
def test_usage(run: Run, tmp_path: Path, args: tuple[str, ...]) -> None:
    assert run("quantize", DENSE, tmp_path / "bcq", *args).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_quantized_sources_are_sent_to_convert(run: Run, tmp_path: Path) -> None:
    result = run("quantize", GPTQ, tmp_path / "bcq", *RTN)
    assert result.exit_code == 2
    assert "BCQ-E627" in result.stderr
    assert f"hint: convert it, without loss: bcqfmt convert {GPTQ} {tmp_path / 'bcq'}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_dense_sources_are_sent_to_quantize(run: Run, tmp_path: Path) -> None:
    for more in ((), ("--from", "dense")):
        result = run("convert", DENSE, tmp_path / "bcq", *more)
        assert result.exit_code == 2
        assert "BCQ-E610" in result.stderr
        assert "bcqfmt quantize" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bcq_folder_is_no_source(run: Run, bcq: Path, tmp_path: Path) -> None:
    result = run("quantize", bcq, tmp_path / "again", *RTN)
    assert result.exit_code == 2
    assert "BCQ-E612" in result.stderr


def test_there_is_no_way_back(run: Run, bcq: Path, tmp_path: Path) -> None:
    for args in (("restore", bcq, tmp_path / "out"), ("verify", DENSE, bcq)):
        result = run(*args)
        assert result.exit_code == 5
        assert "BCQ-E614" in result.stderr
        assert "which rounds" in result.stderr
    assert not (tmp_path / "out").exists()
    assert run("export", bcq, tmp_path / "out", "--to", "dense").exit_code == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_models(run: Run, tmp_path: Path, value: float) -> None:
    tensors = dense_tensors(1)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = value
    source = dense_folder(tmp_path / "model", tensors)
    result = run("quantize", source, tmp_path / "bcq", *RTN)
    assert result.exit_code == 4
    assert "BCQ-E622" in result.stderr
    assert "row 3, column 4" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_the_source_is_never_written_to(run: Run, tmp_path: Path, where: str) -> None:
    source = dense_folder(tmp_path / "home" / "model")
    before = tree(tmp_path)
    for more in ((), ("--overwrite",)):
        result = run("quantize", source, source / where, *RTN, *more)
        assert result.exit_code == 7
        assert "BCQ-E402" in result.stderr
    assert tree(tmp_path) == before


def test_an_unfinished_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Rtn, job: Job) -> Quantized:
        raise OSError(5, "Input/output error", "x")

    with monkeypatch.context() as patch:
        patch.setattr(Rtn, "quantize", failing)
        assert run("quantize", DENSE, tmp_path / "bcq", *RTN).exit_code == 3
    again = run("quantize", DENSE, tmp_path / "bcq", *RTN)
    assert again.exit_code == 7
    assert "expected --resume to go on with it, if source and options are the same, or --overwrite" in again.stderr
    assert "to start anew\nhint: repeat the command" in again.stderr
    closed = run("finalize", tmp_path / "bcq", DENSE)
    assert closed.exit_code == 7
    assert "BCQ-E404" in closed.stderr
    assert "quantize" in closed.stderr
    assert run("quantize", DENSE, tmp_path / "bcq", *RTN, "--resume").exit_code == 0
    assert not (tmp_path / "bcq.partial").exists()


def test_resuming_what_is_complete_says_so(run: Run, tmp_path: Path) -> None:
    first = run("quantize", DENSE, tmp_path / "bcq", *RTN)
    before = tree(tmp_path)
    again = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--resume")
    assert again.exit_code == 0
    assert "complete already" in again.stderr
    assert run("quantize", DENSE, tmp_path / "bcq", *RTN, "--dry-run").exit_code == 7  # as without it
    rows = [[line for line in one.stdout.splitlines() if line.startswith("  model.layers")] for one in (first, again)]
    assert rows[0] == rows[1] != []
    for other in (("--method", "rtn", "--bits", "5"), (*RTN, "--exclude", "q_proj"), (*RTN, "--max-shard-size", "1KB")):
        refused = run("quantize", DENSE, tmp_path / "bcq", *other, "--resume")
        assert refused.exit_code == 7
        assert "BCQ-E401" in refused.stderr
    assert tree(tmp_path) == before
    (tmp_path / "bcq" / RECORD).write_text("{}")
    assert run("quantize", DENSE, tmp_path / "bcq", *RTN, "--resume").exit_code == 7


def test_help_lists_the_settings_of_every_method(run: Run) -> None:
    text = " ".join(run("quantize", "--help").stdout.split())
    for name in METHODS:
        for parameter in find_method(name).parameters():
            assert f"--{parameter.name.replace('_', '-')} " in text
    assert "[4: rtn" in text


def test_every_setting_is_an_option_and_means_itself(run: Run, tmp_path: Path) -> None:
    """`--no-bias`, `--set` and dashes reach the method; what is not given stays the method's default."""
    args = ("--method", "bcq", "--no-bias", "--set", "group-size=32", "--rounds", "2", "--bits", "2")
    found = json.loads(run("quantize", DENSE, tmp_path / "bcq", *args, "--dry-run", "--json").stdout)
    want = find_method("bcq").build({"bias": False, "group_size": 32, "rounds": 2, "bits": 2}).settings()
    assert found["recipes"][0]["settings"] == want


def test_set_adds_settings() -> None:
    asked: dict[str, Any] = {"setting_bits": "4", "setting_clip": None, "other": 1}
    assert given_settings(asked, ["bits = 4", "four-bit-ratio=0.1"]) == {"bits": "4", "four_bit_ratio": "0.1"}
    assert asked == {"other": 1}


def test_settings_that_contradict_each_other(run: Run, tmp_path: Path) -> None:
    result = run("quantize", DENSE, tmp_path / "bcq", "--method", "rtn", "--bits", "3", "--set", "bits=4")
    assert (result.exit_code, "--bits 3 and --set bits=4 contradict each other" in result.stderr) == (2, True)


@pytest.mark.parametrize("words", [("--method", "multi", "--help"), ("--help", "--method=multi")])
def test_help_on_one_method(run: Run, words: tuple[str, ...]) -> None:
    text = run("quantize", *words).stdout
    assert "Settings of multi" in text
    assert "--lowest-bits" in text
    assert "--four-bit-ratio" not in text


# ---------------------------------------------------------------------------------------------------------- report
def test_report_of_a_quantization(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    result = run("quantize", DENSE, tmp_path / "bcq", *RTN, "--html", page)
    assert result.exit_code == 0
    assert f"report: {page}" in result.stdout
    value = json.loads((tmp_path / "r.json").read_text())
    assert len(value["weights"]) == 7
    assert page.read_text().startswith("<!doctype html>")
    assert bcqfmt.validate(tmp_path / "bcq").valid
    first = page.read_bytes(), (tmp_path / "r.json").read_bytes()
    assert run("report", tmp_path / "bcq", "--html", page).exit_code == 7  # nothing is replaced unasked
    assert run("report", tmp_path / "bcq", "--html", page, "--overwrite").exit_code == 0
    assert (page.read_bytes(), (tmp_path / "r.json").read_bytes()) == first


def test_report_on_the_screen(run: Run, bcq: Path) -> None:
    result = run("report", bcq)
    assert len([line for line in result.stdout.splitlines() if line.startswith("  model.layers")]) == 7
    short = run("report", bcq, "--top", "2").stdout
    assert "... and 5 more" in short
    found = json.loads(run("report", bcq, "--json").stdout)
    assert found["total"]["weights"] == 7


def test_report_of_a_converted_folder(run: Run, tmp_path: Path) -> None:
    assert run("convert", GPTQ, tmp_path / "bcq").exit_code == 0
    result = run("report", tmp_path / "bcq")
    assert result.exit_code == 0
    assert "SQNR" not in result.stdout
    assert "7 weights, 4.733 bits per weight" in result.stdout


def test_report_refusals(run: Run, bcq: Path, tmp_path: Path) -> None:
    inside = run("report", bcq, "--html", bcq / "r.html")
    assert inside.exit_code == 7
    assert "inside a model's folder; expected a place elsewhere\nhint: choose a place outside of it" in inside.stderr
    assert run("report", DENSE).exit_code == 5
    assert run("report", tmp_path / "nothing").exit_code == 3
    (bcq / "bcq_quantization.json").write_text("{}")
    assert run("report", bcq).exit_code == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq"]


# ----------------------------------------------------------------------------------------------------------- sweep
def test_sweep(run: Run, tmp_path: Path) -> None:
    out, plot = tmp_path / "s.json", tmp_path / "s.svg"
    args = ("--bits", "2,4", "--group-size", "32,row", "--method", "rtn,bcq", "--out", out, "--plot", plot)
    result = run("sweep", DENSE, *args)
    assert result.exit_code == 0
    assert len([line for line in result.stdout.splitlines() if " dB" in line]) == 8
    assert "* nothing smaller is as good" in result.stdout
    assert "(8 of 8)" in result.stderr
    value = json.loads(out.read_text())
    assert len(value["points"]) == 8
    assert any(point["front"] for point in value["points"])
    assert plot.read_text().startswith("<svg ")
    assert run("sweep", DENSE, *args).exit_code == 7
    assert run("sweep", DENSE, *args, "--overwrite", "--json").exit_code == 0


@pytest.mark.parametrize(
    ("args", "exit_code"),
    [
        (("--bits", "9"), 2),
        (("--bits", ""), 2),
        (("--group-size", "x"), 2),
        (("--group-size", "4"), 2),
        (("--method", "rtm"), 2),
        (("--out", "x.txt"), 2),
        (("--plot", "nowhere/x.svg"), 7),
        (("--text", "none.txt"), 3),
        (("--include", "nowhere"), 2),
        (("--include", "["), 2),
        (("--context", "64"), 2),
        (("--max-tokens", "64"), 2),
    ],
)
def test_sweep_refusals(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], exit_code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("sweep", DENSE, *args)
    assert result.exit_code == exit_code, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_sweep_sends_a_quantized_model_to_convert(run: Run, tmp_path: Path) -> None:
    shutil.copytree(GPTQ, tmp_path / "my model")
    result = run("sweep", tmp_path / "my model")
    assert (result.exit_code, "BCQ-E627" in result.stderr) == (2, True)
    hint = f"convert it, without loss: bcqfmt convert '{tmp_path}/my model' '{tmp_path}/my model-bcq'"
    assert f"hint: {hint}\n" in result.stderr


def test_outputs_never_go_into_the_source(run: Run, tmp_path: Path) -> None:
    source = dense_folder(tmp_path / "model")
    before = tree(tmp_path)
    for args in (
        ("quantize", source, tmp_path / "bcq", *RTN, "--html", source / "r.html"),
        ("sweep", source, "--out", source / "s.json"),
        ("sweep", source, "--plot", source / "s.svg"),
    ):
        result = run(*args)
        assert result.exit_code == 7
        assert "BCQ-E402" in result.stderr
    assert tree(tmp_path) == before


def test_sweep_refuses_what_is_quantized(run: Run) -> None:
    assert run("sweep", GPTQ).exit_code == 2


def test_rows_that_are_short_for_the_scheme(run: Run, tmp_path: Path) -> None:
    """mixed24 on rows of 128 columns: what is no number of a weight is counted here from the files."""
    result = run("quantize", DENSE, tmp_path / "bcq", "--method", "mixed24", "--json")
    found = json.loads(result.stdout)
    (warning,) = (finding for finding in found["warnings"] if finding["code"] == "BCQ-E658")
    stored = spare = numbers = 0
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for _, weight in checkpoint.weights():
            stored, numbers = stored + 8 * weight.nbytes, numbers + weight.size
            rows, columns = weight.shape
            two, four = (width for _, width in weight.segments)
            assert weight.segments[1][0].group_size >= four  # one 4-bit group a row

            def end(bits: int) -> int:
                return -bits % 32

            spare += rows * (2 * end(two) + 4 * end(four) + end(4 * two // 16) + end(2 * two // 16) + end(4))
            spare += 32 * (rows + 1) + -(-rows // 16) * end(4 * two // 16) + 32 * columns * weight.scheme.perm
    assert f"{stored / numbers:.2f} bits per weight, of which {spare / numbers:.2f} are" in warning["found"]
    plain = run("quantize", DENSE, tmp_path / "plain", *RTN, "--json")
    assert "BCQ-E658" not in plain.stdout
