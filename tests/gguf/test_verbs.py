"""The verbs on GGUF files, and their exit codes on broken ones."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bcqfmt.cli.main import cli
from sources.gguf_files import DATA

BROKEN = sorted((DATA / "broken").iterdir())


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_convert_verify_and_restore(tmp_path: Path) -> None:
    source, out, back = tmp_path / "model.gguf", tmp_path / "out", tmp_path / "back"
    shutil.copy(DATA / "q4_k_m.gguf", source)
    done = run("convert", source, out, "--json")  # next to its source: the folder is not what is read
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["weights"], found["complete"]) == (9, True)
    assert run("validate", "--deep", out).exit_code == 0
    checked = run("verify", source, out, "--values", "all", "--json")
    assert json.loads(checked.stdout)["equal"] is True
    assert run("restore", out, back).exit_code == 0
    assert [path.name for path in back.iterdir()] == ["model.gguf"]
    assert (back / "model.gguf").read_bytes() == source.read_bytes()


def test_restore_replaces_what_it_restored(tmp_path: Path) -> None:
    back = tmp_path / "back"
    assert run("convert", DATA / "q4_0.gguf", tmp_path / "out").exit_code == 0
    assert run("restore", tmp_path / "out", back).exit_code == 0
    (back / "q4_0.gguf").write_bytes(b"changed")
    assert "BCQ-E401" in run("restore", tmp_path / "out", back).stderr
    done = run("restore", tmp_path / "out", back, "--overwrite")
    assert done.exit_code == 0, done.stderr
    assert (back / "q4_0.gguf").read_bytes() == (DATA / "q4_0.gguf").read_bytes()


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    shutil.copy(DATA / "q4_0.gguf", source)
    assert run("convert", source, tmp_path / "out").exit_code == 0
    data = bytearray(source.read_bytes())
    data[-100] ^= 1
    source.write_bytes(data)
    assert run("verify", source, tmp_path / "out").exit_code == 6


def test_a_renamed_source_is_not_taken_for_another(tmp_path: Path) -> None:
    source, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    shutil.copy(DATA / "q4_0.gguf", source)
    assert run("convert", source, tmp_path / "out").exit_code == 0
    source.rename(other)
    done = run("verify", other, tmp_path / "out")
    assert done.exit_code == 6
    assert "BCQ-E613 other.gguf: verification failed: a file of another name; expected model.gguf" in done.stderr
    assert f"give it that name: mv {other} {source}" in done.stderr
    shutil.copy(other, source)
    assert f"verify {source}\n" in run("verify", other, tmp_path / "out").stderr
    shutil.copy(DATA / "q4_1.gguf", other)
    assert "this is another source" in run("verify", other, tmp_path / "out").stderr


@pytest.mark.parametrize("blob", ["model.gguf", "sha256-0f1e"])
def test_a_file_that_is_a_link_out_of_its_folder(blob: str, tmp_path: Path) -> None:
    """Whatever it leads to: who names it means that. Other programs call their files by digests."""
    (tmp_path / "store").mkdir()
    (tmp_path / "here").mkdir()
    shutil.copy(DATA / "q4_0.gguf", tmp_path / "store" / blob)
    source = tmp_path / "here" / "link.gguf"
    source.symlink_to(tmp_path / "store" / blob)
    assert run("convert", source, tmp_path / "out").exit_code == 0
    assert run("verify", source, tmp_path / "out").exit_code == 0
    assert run("restore", tmp_path / "out", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back" / "link.gguf").read_bytes() == (DATA / "q4_0.gguf").read_bytes()
    folder = run("convert", tmp_path / "here", tmp_path / "other")  # a folder is as it was published
    assert (folder.exit_code, "BCQ-V507 link.gguf" in folder.stderr) == (4, True)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    nowhere = "BCQ-E101 none.gguf: no such file or folder: a link to nothing, which is not there"
    for name, leads_to, told in (("none.gguf", "nothing", nowhere), ("loop.gguf", "loop.gguf", "BCQ-E102 loop.gguf")):
        (tmp_path / name).symlink_to(leads_to)
        done = run("convert", tmp_path / name, tmp_path / "out")
        assert (done.exit_code, told in done.stderr) == (3, True)
    assert not (tmp_path / "out").exists()


def test_a_file_without_the_ending_is_told_how_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "q4_0.gguf", tmp_path / "sha256-0f1e")
    done = run("convert", "sha256-0f1e", "out")
    assert (done.exit_code, "it is a GGUF file: give it a name that ends in .gguf" in done.stderr) == (3, True)
    source, link = shlex.split(done.stderr.rpartition("(")[2].rstrip(")\n"))[2:]
    Path(link).symlink_to(source)
    assert run("convert", link, "out").exit_code == 0
    done = run("inspect", "sha256-0f1e")
    assert (done.exit_code, "GGUF files whose names end in .gguf" in done.stderr) == (5, True)


def test_names_that_begin_with_a_hyphen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that are told work."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "q4_0.gguf", tmp_path / "-m.gguf")
    told = run("inspect", "--", "-m.gguf").stdout.rpartition(": bcqfmt ")[2]
    assert run(*shlex.split(told)).exit_code == 0
    done = run("convert", "--", "-m.gguf", "-o")
    assert done.exit_code == 0
    for following in (done, run("restore", "--", "-o", "-r")):
        told = following.stdout.rpartition("prove it: bcqfmt ")[2]
        assert run(*shlex.split(told)).exit_code == 0, told


def test_parts_and_resume(tmp_path: Path) -> None:
    source = DATA / "q4_0.gguf"
    for i in (1, 2):
        done = run("convert", source, tmp_path / "out", "--part", f"{i}/2", "--max-shard-size", "60kB")
        assert done.exit_code == 0, done.stderr
    done = run("finalize", tmp_path / "out", source)
    assert done.exit_code == 0, done.stderr
    assert run("verify", source, tmp_path / "out").exit_code == 0
    again = run("convert", source, tmp_path / "out", "--resume", "--max-shard-size", "60kB")
    assert (again.exit_code, "nothing to do" in again.stderr) == (0, True)


def test_a_dry_run_reads_the_header_and_writes_nothing(tmp_path: Path) -> None:
    done = run("convert", DATA / "q3_k.gguf", tmp_path / "out", "--dry-run", "--json")
    found = json.loads(done.stdout)
    assert {(row["layout"], row["scheme"]) for row in found["quantized"]} == {
        ("gguf", "3 bit, groups of 16, Q3_K"),
        ("gguf", "6 bit, groups of 16, Q6_K"),
    }
    assert not list(tmp_path.iterdir())


def test_dense_files_pass_through(tmp_path: Path) -> None:
    done = run("convert", DATA / "f16.gguf", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "0 weights" in done.stdout


def test_inspect_shows_types_and_modules() -> None:
    done = run("inspect", DATA / "q4_k_m.gguf")
    assert "GGUF version 3, architecture llama" in done.stdout
    assert "Q6_K" in done.stdout
    found = json.loads(run("inspect", DATA / "q4_k_m.gguf", "--modules", "--json").stdout)
    assert (found["format"], found["quantization"]["architecture"]) == ("gguf", "llama")
    assert found["dense_types"]["Q4_K"] == {"tensors": 6, "elements": 294912, "bytes": 165888}
    assert "model.layers.0.self_attn.q_proj" in [row["name"] for row in found["modules"]]


def test_inspect_of_a_folder(tmp_path: Path) -> None:
    shutil.copy(DATA / "q4_0.gguf", tmp_path / "model.gguf")
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["format"] == "gguf"


def test_inspect_does_not_advise_what_convert_refuses(tmp_path: Path) -> None:
    shutil.copy(DATA / "q4_0.gguf", tmp_path / "m-00001-of-00002.gguf")
    for path, code in ((DATA / "iq_grids.gguf", "BCQ-E601"), (tmp_path / "m-00001-of-00002.gguf", "BCQ-V503")):
        for more in ([], ["--modules"]):
            shown = run("inspect", path, *more).stdout
            assert shown.count(f"not converted: {code}") == 1
            assert "convert it, without loss" not in shown
    assert "hint: convert it" in run("inspect", DATA / "q4_0.gguf").stdout


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_files_exit_with_4_and_leave_nothing(path: Path, tmp_path: Path) -> None:
    for done in (run("inspect", path), run("convert", path, tmp_path / "out"), run("verify", path, tmp_path)):
        assert done.exit_code == 4, done.stderr
        assert done.stderr.startswith("error: BCQ-E2")
        assert path.name in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_quantizing_a_gguf_file_is_refused_with_the_verb_that_takes_it(tmp_path: Path) -> None:
    done = run("quantize", DATA / "f16.gguf", tmp_path / "out", "--method", "rtn")
    assert done.exit_code == 5
    stem = DATA / "f16"
    assert f"hint: convert it, without loss: bcqfmt convert {stem}.gguf {stem}-bcq; to quantize" in done.stderr
    assert f"bcqfmt export {stem}-bcq {stem}-dense --to dense\n" in done.stderr


def test_a_target_that_holds_the_source_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(DATA / "q4_0.gguf", folder / "model.gguf")
    assert run("convert", folder / "model.gguf", folder, "--overwrite").exit_code == 7
    assert (folder / "model.gguf").exists()
