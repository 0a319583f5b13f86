"""`bcqfmt convert`, `verify`, `restore` and `finalize`: what they say, write and return."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

import bcqfmt
from bcqfmt.cli import reports
from bcqfmt.cli.command import command_line
from bcqfmt.cli.options import PART, SIZE
from bcqfmt.errors import error
from hub.server import HubServer, loopback_hub
from programs.verbs import Run, command, environment, program
from sources.conversions import gptq_folder, tree
from sources.peers import PEERS

SOURCE = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
SHARDED = PEERS / "gptqmodel-gptq-4b-g32-sym-sharded" / "source"


@pytest.fixture
def bcq(run: Run, tmp_path: Path) -> Path:
    assert run("convert", SOURCE, tmp_path / "bcq").exit_code == 0
    return tmp_path / "bcq"


def test_convert_says_what_it_does(run: Run, tmp_path: Path) -> None:
    result = run("convert", SHARDED, tmp_path / "bcq", "--max-shard-size", "100kB", "--workers", "2")
    assert result.exit_code == 0
    for text in (
        "layout     gptq",
        "config.json says gptq",
        "written by gptqmodel 7.6.0",
        "93.52 % of 262,784",
        "free",
    ):
        assert text in result.stderr
    assert sorted(re.findall(r"model-0000\d-of-00002.safetensors: \d+\.\d\d kB", result.stderr))
    assert "(2 of 2)" in result.stderr
    assert "2 shards, 14 weights, 4.500 bits per weight" in result.stdout
    assert "peak memory" in result.stdout
    assert result.stdout.splitlines()[-1] == f"prove it: bcqfmt verify {SHARDED} {tmp_path / 'bcq'}"


def test_convert_json(run: Run, tmp_path: Path) -> None:
    found = json.loads(run("convert", SOURCE, tmp_path / "bcq", "--json").stdout)
    assert (found["complete"], found["shards"], found["weights"]) == (True, 1, 7)
    assert found["warnings"] == []
    assert found["peak_rss_bytes"] > 10**7
    assert found["bits_per_weight"] == pytest.approx((4.75 * 4 + (4.5 + 1 / 6)) / 5)  # a word of zeros a row


def test_convert_writes_a_report(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    asked = ("convert", SOURCE, tmp_path / "bcq", "--html", page)
    for more in (("--dry-run",), ("--part", "1/2")):
        assert run(*asked, *more).exit_code == 2
    assert list(tmp_path.iterdir()) == []
    result = run(*asked)
    assert result.exit_code == 0
    assert f"report: {page}" in result.stdout
    assert page.read_text().startswith("<!doctype html>")
    assert len(json.loads(page.with_suffix(".json").read_text())["weights"]) == 7
    assert run(*asked, "--resume").exit_code == 7  # the page is there already


def test_a_report_that_cannot_be_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the work; where it shows later only, the message says that the folder is complete."""
    bcq, made = tmp_path / "bcq", reports.OutputFile

    def refused(path: Path) -> NoReturn:
        raise error("BCQ-E402", str(path), found="Permission denied")

    nowhere = run("convert", SOURCE, bcq, "--html", tmp_path / "no" / "r.html")
    assert (nowhere.exit_code, f"hint: make it (mkdir -p {tmp_path / 'no'})" in nowhere.stderr) == (7, True)
    monkeypatch.setattr(reports, "OutputFile", refused)
    assert run("convert", SOURCE, bcq, "--html", tmp_path / "r.html").exit_code == 7
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(reports, "OutputFile", made)
    monkeypatch.setattr(reports, "write_file", lambda path, data: refused(path))
    late = run("convert", SOURCE, bcq, "--html", tmp_path / "r.html")
    assert (late.exit_code, f"hint: {bcq} is complete; " in late.stderr) == (7, True)
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_dry_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("convert", SOURCE, tmp_path / "bcq", "--dry-run")
    assert result.exit_code == 0
    assert "7 modules, 4 bit, groups of 32, zero points v1-carry" in result.stdout
    found = json.loads(run("convert", SOURCE, tmp_path / "bcq", "--dry-run", "--json").stdout)
    assert found["fits"] is True
    assert found["quantized"][0]["layout"] == "gptq"
    assert found["input_bytes"] == sum(path.stat().st_size for path in SOURCE.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_forecast_is_near_the_truth(run: Run, tmp_path: Path) -> None:
    """Fixed costs weigh much in so small a model; in a real one they vanish."""
    planned = json.loads(run("convert", SOURCE, tmp_path / "bcq", "--dry-run", "--json").stdout)["output_bytes"]
    real = json.loads(run("convert", SOURCE, tmp_path / "bcq", "--json").stdout)["output_bytes"]
    assert abs(planned - real) < 0.1 * real


def test_warnings_come_with_their_codes(run: Run, tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", dataset=["Some text of somebody."])
    (source / "old.bin").write_bytes(b"x")
    result = run("convert", source, tmp_path / "bcq")
    assert "warning: BCQ-E652 source: " in result.stdout
    assert "warning: BCQ-E653 source: " in result.stdout


def test_dense_sources_get_the_command_to_type(run: Run, tmp_path: Path) -> None:
    source = PEERS / "dense-fp16" / "source"
    result = run("convert", source, tmp_path / "bcq")
    assert result.exit_code == 2
    assert "BCQ-E610" in result.stderr
    assert f"hint: quantize it: bcqfmt quantize {source} {tmp_path / 'bcq'} --method rtn" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_refusals_have_their_exit_codes(run: Run, tmp_path: Path) -> None:
    assert run("convert", PEERS / "hqq-hqq-2b-g32-asym-axis0" / "source", tmp_path / "x").exit_code == 5
    assert run("convert", tmp_path / "nothing", tmp_path / "x").exit_code == 3
    assert run("convert", tmp_path, tmp_path / "x" / "y").exit_code in (3, 7)
    assert run("convert", SOURCE, tmp_path / "x", "--from", "nonsense").exit_code == 2
    assert run("convert", SOURCE, tmp_path / "x", "--memory-limit", "1MB").exit_code == 9
    assert run("convert", SOURCE, tmp_path / "x", "--min-coverage", "99").exit_code == 5
    assert list(tmp_path.iterdir()) == []


def test_a_bcq_folder_is_no_source(run: Run, bcq: Path, tmp_path: Path) -> None:
    result = run("convert", bcq, tmp_path / "again")
    assert result.exit_code == 2
    assert "BCQ-E612" in result.stderr


def test_a_file_is_no_model_folder(run: Run, tmp_path: Path) -> None:
    result = run("convert", SOURCE / "model.safetensors", tmp_path / "bcq")
    words = f"bcqfmt convert {SOURCE} {tmp_path / 'bcq'}"
    assert (result.exit_code, f"hint: it is part of a GPTQ folder, name that: {words}\n" in result.stderr) == (5, True)


@pytest.mark.parametrize("where", [".", "inside", "..", "../source", "link"])
def test_the_source_is_never_written_to(run: Run, tmp_path: Path, where: str) -> None:
    source = gptq_folder(tmp_path / "home" / "source", layers=1)
    (tmp_path / "home" / "link").symlink_to(source)
    before = tree(tmp_path)
    target = tmp_path / "home" / "link" / "x" if where == "link" else source / where
    for more in ((), ("--overwrite",)):
        result = run("convert", source, target, *more)
        assert result.exit_code == 7
        assert "BCQ-E402" in result.stderr
    assert tree(tmp_path) == before


def test_a_source_named_like_the_work_folder(run: Run, tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "bcq.partial", layers=1)
    before = tree(source)
    for more in ((), ("--overwrite",), ("--resume",)):
        assert run("convert", source, tmp_path / "bcq", *more).exit_code == 7
    assert tree(source) == before


def test_existing_targets(run: Run, bcq: Path) -> None:
    again = run("convert", SOURCE, bcq)
    assert again.exit_code == 7
    assert "BCQ-E401" in again.stderr
    before = tree(bcq)
    planned = run("convert", SOURCE, bcq, "--dry-run")
    assert (planned.exit_code, planned.stderr) == (again.exit_code, again.stderr)
    assert run("convert", SOURCE, bcq, "--dry-run", "--overwrite").exit_code == 0
    assert run("convert", SOURCE, bcq, "--overwrite").exit_code == 0
    assert tree(bcq) == before


@pytest.mark.parametrize("more", [(), ("--resume",), ("--dry-run",)])
def test_names_that_are_too_long(run: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    """With the ending that the folder has until it is complete."""
    result = run("convert", SOURCE, tmp_path / ("n" * 250), *more)
    assert (result.exit_code, "the name is too long\nhint: choose a shorter one" in result.stderr) == (7, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        ("--part", "3/2"),
        ("--part", "0/2"),
        ("--part", "x"),
        ("--part", "1/2", "--overwrite"),
        ("--part", "1/2", "--push", "a/b"),
        ("--dry-run", "--push", "a/b"),
        ("--private",),
        ("--push", "no-owner"),
        ("--max-shard-size", "lots"),
        ("--max-shard-size", "0"),
        ("--workers", "0"),
        ("--zero-point", "v3"),
        ("--min-coverage", "101"),
        ("--revision", "main"),
    ],
)
def test_usage(run: Run, tmp_path: Path, args: tuple[str, ...]) -> None:
    assert run("convert", SOURCE, tmp_path / "bcq", *args).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "layout"),
    [("autoawq-gemm-4b-g32-asym", "awq"), ("llmcompressor-pack_quantized-4b-g32-asym", "compressed-tensors")],
)
@pytest.mark.parametrize("option", [("--zero-point", "v2"), ("--against", "model")])
def test_zero_points_of_other_layouts_have_one_reading(
    run: Run, tmp_path: Path, source: str, layout: str, option: tuple[str, str]
) -> None:
    result = run("convert", PEERS / source / "source", tmp_path / "bcq", *option)
    assert (result.exit_code, f"{option[0]} is for GPTQ, " in result.stderr) == (2, True)
    assert f"SRC is {layout}." in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_to_compare_with_that_is_not_needed_is_said_to_be_so(run: Run, tmp_path: Path) -> None:
    words = ("convert", PEERS / "gptqmodel-gptq-4b-g32-asym" / "source", tmp_path / "bcq", "--against")
    missing = run(*words, "model")
    assert (missing.exit_code, "BCQ-E101 model: no such file or folder" in missing.stderr) == (3, True)
    result = run(*words, PEERS / "dense-fp16" / "source")
    assert (result.exit_code, "--against is not needed: it is clear how" in result.stderr) == (0, True)
    words = (*words[:2], tmp_path / "other", "--zero-point", "v2", "--against", PEERS / "dense-fp16" / "source")
    assert "--against is not needed: --zero-point says how" in run(*words).stderr


def test_sizes_and_parts() -> None:
    known = {"5GB": 5_000_000_000, "5GiB": 5 * 2**30, "1.5 MB": 1_500_000, "1500": 1500, "1k": 1000, "2tib": 2**41}
    assert {text: SIZE.convert(text, None, None) for text in known} == known
    assert PART.convert("2/8", None, None) == (2, 8)
    assert command_line("bcqfmt", "verify", "a b", "$(x)") == "bcqfmt verify 'a b' '$(x)'"


# ------------------------------------------------------------------------------------------------- the way back
def test_verify(run: Run, bcq: Path) -> None:
    result = run("verify", SOURCE, bcq)
    assert result.exit_code == 0
    assert result.stdout.startswith("verified: ")
    for text in ("codes     122,880", "scales    3,840", "zeros     3,840", "archived  0 bytes", "up to 64 rows"):
        assert text in result.stdout
    found = json.loads(run("verify", SOURCE, bcq, "--values", "all", "--json").stdout)
    assert (found["equal"], found["values"], found["codes"]) == (True, 122_880, 122_880)


def test_verify_the_wrong_way_round(run: Run, bcq: Path) -> None:
    result = run("verify", bcq, SOURCE)
    assert (result.exit_code, "BCQ-E612" in result.stderr) == (2, True)
    assert f"hint: the source comes first: bcqfmt verify {SOURCE} {bcq}\n" in result.stderr


def test_verify_finds_another_source(run: Run, bcq: Path) -> None:
    result = run("verify", PEERS / "gptqmodel-gptq-4b-g32-sym-desc_act" / "source", bcq)
    assert result.exit_code == 6
    assert "BCQ-E613" in result.stderr
    assert "hint: this is another source, or it was changed since" in result.stderr
    assert json.loads(run("verify", SHARDED, bcq, "--json").stdout)["error"]["exit_code"] == 6


def test_verify_says_whose_values_anybcq_has(run: Run, tmp_path: Path) -> None:
    import numpy as np

    from sources.peers import made_up, words

    rng = np.random.default_rng(0)
    tensors = {"layer.qweight": words(rng, 2, 3, 16), "layer.q_bias": np.full((1, 16), np.nan, np.float16)}
    for p in (2, 3):
        tensors[f"layer.alpha_{p}"] = rng.uniform(0.1, 1, (1, p, 16)).astype(np.float16)
        tensors[f"layer.beta_{p}"] = np.zeros((1, 16), np.float16)
    made_up(tmp_path / "source", tensors, None, anybcq={"parent_precision": 3, "group_size": 64})
    assert run("convert", tmp_path / "source", tmp_path / "bcq").exit_code == 0
    result = run("verify", tmp_path / "source", tmp_path / "bcq")
    assert result.exit_code == 0, result.stderr
    assert "of 1 weight follow the BCQ specification" in result.stdout


def test_restore(run: Run, bcq: Path, tmp_path: Path) -> None:
    result = run("restore", bcq, tmp_path / "out")
    assert result.exit_code == 0
    assert tree(tmp_path / "out") == tree(SOURCE)
    assert "every SHA-256 as recorded" in result.stdout
    assert run("restore", bcq, tmp_path / "out").exit_code == 7
    found = json.loads(run("restore", bcq, tmp_path / "out", "--overwrite", "--json").stdout)
    assert found["files"] == tree(SOURCE)
    for target in (bcq, bcq / "x", bcq.parent):
        assert run("restore", bcq, target, "--overwrite").exit_code == 7
    assert bcqfmt.validate(bcq, deep=True).valid


def test_restore_needs_provenance(run: Run, tmp_path: Path) -> None:
    assert run("convert", SOURCE, tmp_path / "bcq", "--no-provenance").exit_code == 0
    for args in (("restore", tmp_path / "bcq", tmp_path / "out"), ("verify", SOURCE, tmp_path / "bcq")):
        result = run(*args)
        assert result.exit_code == 5
        assert "BCQ-E614" in result.stderr
    assert not (tmp_path / "out").exists()


def test_parts_and_finalize(run: Run, tmp_path: Path) -> None:
    size = ("--max-shard-size", "60kB")
    run("convert", SHARDED, tmp_path / "plain", *size)
    assert run("finalize", tmp_path / "bcq", SHARDED).exit_code == 7
    assert list(tmp_path.iterdir()) == [tmp_path / "plain"]
    first = run("convert", SHARDED, tmp_path / "bcq", *size, "--part", "1/2")
    assert first.exit_code == 0
    assert first.stdout.splitlines()[-1] == f"when all parts are done: bcqfmt finalize {tmp_path / 'bcq'} {SHARDED}"
    missing = run("finalize", tmp_path / "bcq", SHARDED)
    assert missing.exit_code == 7
    assert "BCQ-E404" in missing.stderr
    assert run("convert", SHARDED, tmp_path / "bcq", *size, "--part", "2/2").exit_code == 0
    other = run("finalize", tmp_path / "bcq", SOURCE)
    assert (other.exit_code, "hint: name the source that the parts were made from" in other.stderr) == (7, True)
    swapped = run("finalize", SHARDED, tmp_path / "bcq")
    assert swapped.exit_code == 7
    assert f"hint: DST comes first: bcqfmt finalize {tmp_path / 'bcq'} {SHARDED}" in swapped.stderr
    assert run("finalize", tmp_path / "bcq", SHARDED).exit_code == 0
    assert tree(tmp_path / "bcq") == tree(tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq", "plain"]
    again = run("finalize", tmp_path / "bcq", SHARDED)
    assert (again.exit_code, "closed already" in again.stderr) == (7, True)
    assert f"hint: prove it: bcqfmt verify {SHARDED} {tmp_path / 'bcq'}\n" in again.stderr
    swapped = run("finalize", SHARDED, tmp_path / "bcq")
    assert f"hint: DST comes first: bcqfmt finalize {tmp_path / 'bcq'} {SHARDED}\n" in swapped.stderr


def test_parts_are_never_told_to_overwrite(run: Run, bcq: Path, tmp_path: Path) -> None:
    refused = run("convert", SOURCE, bcq, "--part", "1/2")
    assert refused.exit_code == 7
    assert "hint: choose another DST, or remove that one yourself" in refused.stderr
    assert run("convert", SHARDED, tmp_path / "other", "--part", "1/2", "--max-shard-size", "60kB").exit_code == 0
    refused = run("convert", SHARDED, tmp_path / "other", "--part", "2/2")
    assert refused.exit_code == 7
    assert "hint: give every part the same options, or remove other.partial and start anew" in refused.stderr


# ------------------------------------------------------------------------------------------- the program for real
def test_relative_paths_and_a_second_run_in_place(tmp_path: Path) -> None:
    gptq_folder(tmp_path / "source", layers=1)
    done = program("convert", ".", "../bcq", cwd=tmp_path / "source")
    assert done.returncode == 0, done.stderr
    assert "plan: source -> ../bcq" in done.stderr
    assert program("verify", ".", "../bcq", cwd=tmp_path / "source").returncode == 0


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    asked = command("convert", SHARDED, tmp_path / "bcq")
    with subprocess.Popen(asked, env=environment(), stdout=subprocess.DEVNULL, stderr=follower) as process:
        os.close(follower)
        seen = b""
        try:
            while chunk := os.read(leader, 4096):
                seen += chunk
        except OSError:  # the other side is gone
            pass
        finally:
            os.close(leader)
    assert process.returncode == 0
    assert b"converting" in seen
    assert b"B/s" in seen


@pytest.mark.parametrize("verb", ["convert", "verify", "restore", "finalize"])
def test_help_is_quick(verb: str) -> None:
    loaded = "import sys\nfrom bcqfmt.cli.main import cli\ntry:\n    cli.main([sys.argv[1], '--help'])\n"
    loaded += "except SystemExit: pass\nbad = {'numba', 'torch', 'tqdm', 'huggingface_hub'} & set(sys.modules)\n"
    done = subprocess.run(
        [*command()[:2], "-c", loaded + "sys.exit(3 if bad else 0)", verb],
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


# -------------------------------------------------------------------------------------------------------- the hub
NAME = "some-org/tiny-gptq"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        server.commit(NAME, {path.name: path.read_bytes() for path in SOURCE.iterdir()})
        yield server


def test_hub_ids(hub: HubServer, run: Run, tmp_path: Path) -> None:
    assert run("convert", NAME, tmp_path / "bcq").exit_code == 0
    assert "base_model: some-org/tiny-gptq\n" in (tmp_path / "bcq/README.md").read_text()
    result = run("verify", NAME, tmp_path / "bcq")
    assert result.exit_code == 0, result.stderr
    assert run("restore", tmp_path / "bcq", tmp_path / "out").exit_code == 0
    assert tree(tmp_path / "out") == tree(SOURCE)
    before = len(hub.log)
    assert run("verify", NAME, tmp_path / "bcq", "--offline").exit_code == 0
    assert len(hub.log) == before


def test_what_is_not_downloaded_is_counted(hub: HubServer, run: Run, tmp_path: Path) -> None:
    """As in a folder: in the plan, before and after the download, by verify and by restore."""
    extra = {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"import os"}
    hub.commit(NAME, {**{path.name: path.read_bytes() for path in SOURCE.iterdir()}, **extra})
    told = "2 left out: modeling_evil.py (not downloaded), pytorch_model.bin (pickle)"
    assert told in run("convert", NAME, tmp_path / "bcq", "--dry-run").stdout
    assert told in run("convert", NAME, tmp_path / "bcq").stderr
    assert told in run("verify", NAME, tmp_path / "bcq").stdout
    assert told in run("verify", NAME, tmp_path / "bcq", "--offline").stdout
    restored = run("restore", tmp_path / "bcq", tmp_path / "out")
    assert told in restored.stdout + restored.stderr
    assert not any(name.rpartition("/")[2] in extra for name in (seen.path for seen in hub.log))


def test_dry_run_of_a_hub_id_reads_headers_only(hub: HubServer, run: Run, tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "large", layers=2, n=1024, k=2048)  # well beyond the first range that is asked for
    hub.commit("some-org/large", {path.name: path.read_bytes() for path in source.iterdir()})
    size = (source / "model.safetensors").stat().st_size
    found = json.loads(run("convert", "some-org/large", tmp_path / "bcq", "--dry-run", "--json").stdout)
    assert found["quantized"][0]["modules"] == 2
    assert 0 < found["network_bytes"] < 300_000 < size
    assert re.fullmatch("[0-9a-f]{40}", found["revision"])
    assert "bytes read in" in run("convert", "some-org/large", tmp_path / "bcq", "--dry-run").stdout
    assert not (tmp_path / "bcq").exists()


def test_hub_ids_that_are_not_there(hub: HubServer, run: Run, tmp_path: Path) -> None:
    assert run("convert", "some-org/other", tmp_path / "bcq").exit_code == 8
    assert run("convert", NAME, tmp_path / "bcq", "--revision", "nope").exit_code == 8
    assert run("convert", NAME, tmp_path / "bcq", "--offline").exit_code == 8
    assert not (tmp_path / "bcq").exists()


def test_a_path_that_is_not_there_may_be_a_name_on_the_hub(hub: HubServer, run: Run, tmp_path: Path) -> None:
    told = "models/llma: nothing here has this name; asking the hub"
    for words in (("convert", "models/llma", tmp_path / "bcq"), ("inspect", "models/llma")):
        assert told in run(*words).stderr
        assert told not in run(*words, "--offline").stderr
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            assert told not in run(*words).stderr


def test_without_a_connection_a_folder_may_have_been_meant(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("bcqfmt.converters.hub.errors.PAUSES", ())
    for offline, code in (([], "BCQ-E704"), (["--offline"], "BCQ-E705")):
        result = run("convert", "models/llma", tmp_path / "bcq", "--json", *offline)
        told = json.loads(result.stdout)["error"]
        assert (result.exit_code, told["code"]) == (8, code)
        assert told["hint"].endswith("if a folder or file was meant, there is none of this name")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_another_folder_has_the_name_of_an_unfinished_one(run: Run, tmp_path: Path, overwrite: list[str]) -> None:
    (tmp_path / "bcq.partial").mkdir()
    (tmp_path / "bcq.partial" / "notes.txt").write_text("mine")
    result = run("convert", gptq_folder(tmp_path / "source", layers=1), tmp_path / "bcq", *overwrite)
    assert (result.exit_code, "something that is no unfinished conversion" in result.stderr) == (7, True)
    assert "hint: move it away, or choose another name for the output\n" in result.stderr
    assert (tmp_path / "bcq.partial" / "notes.txt").read_text() == "mine"


def test_resuming_what_is_complete_says_so(run: Run, tmp_path: Path) -> None:
    source = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
    assert run("convert", source, tmp_path / "bcq").exit_code == 0
    again = run("convert", source, tmp_path / "bcq", "--resume")
    assert again.exit_code == 0
    assert "complete already" in again.stderr
    assert "7 weights" in again.stdout
    other = run("convert", source, tmp_path / "bcq", "--resume", "--no-provenance")
    assert other.exit_code == 7
    assert "BCQ-E401" in other.stderr


def test_two_points_behind_a_link_lead_where_the_system_says(run: Run, tmp_path: Path) -> None:
    """``link/../model`` is beside what the link leads to, not beside the link."""
    (tmp_path / "away" / "inner").mkdir(parents=True)
    gptq = gptq_folder(tmp_path / "away" / "model")
    (tmp_path / "link").symlink_to(Path("away") / "inner")
    (tmp_path / "out").mkdir()  # what the name without its "link/.." means
    (tmp_path / "model").mkdir()
    result = run("convert", f"{tmp_path}/link/../model", f"{tmp_path}/link/../out")
    assert result.exit_code == 0, result.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert run("verify", tmp_path / "away" / "model", tmp_path / "away" / "out").exit_code == 0
    missing = run("convert", gptq, f"{tmp_path}/nothing/../other")
    assert (missing.exit_code, "BCQ-E402" in missing.stderr) == (7, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("words", [["convert", ""], ["validate", ""], ["restore", "", "out"], ["inspect", ""]])
def test_an_empty_path_is_not_the_working_folder(run: Run, words: list[str]) -> None:
    result = run(*words, *(["out"] if words[0] == "convert" else []))
    assert (result.exit_code, "it is empty; expected a path" in result.stderr) == (2, True)


def test_the_hint_takes_the_target_and_not_the_value_of_an_option(run: Run, tmp_path: Path) -> None:
    source, made = gptq_folder(tmp_path / "source", layers=1), tmp_path / "made"
    result = run("quantize", source, "--workers", "2", made, "--method", "rtn")
    assert f"hint: convert it, without loss: bcqfmt convert {source} {made}\n" in result.stderr


@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_a_bcq_folder_without_its_manifest(run: Run, tmp_path: Path, verb: str) -> None:
    assert run("convert", gptq_folder(tmp_path / "source", layers=1), tmp_path / "bcq").exit_code == 0
    (tmp_path / "bcq" / "bcq_manifest.json").unlink()
    options = ["--method", "rtn"] if verb == "quantize" else []
    result = run(verb, tmp_path / "bcq", tmp_path / "out", *options)
    assert (result.exit_code, "BCQ-V601" in result.stderr) == (4, True)
    assert not (tmp_path / "out").exists()
