"""`bcqfmt validate`: findings, verdict, exit code."""

import json
from pathlib import Path

import numpy as np

import bcqfmt
from bcqfmt.codes import CODES
from programs.verbs import Run, flip
from sources.peers import PEERS


def test_valid_folder(run: Run, folder: Path) -> None:
    fast, deep = run("validate", folder), run("validate", "--deep", folder)
    assert (fast.exit_code, deep.exit_code) == (0, 0)
    assert "valid; 1 model file, 2 weights" in fast.stdout
    assert "content not checked" in fast.stdout
    assert "all content and digests checked" in deep.stdout


def test_json(run: Run, folder: Path) -> None:
    found = json.loads(run("validate", folder, "--json").stdout)
    assert found["valid"] is True
    assert found["findings"] == []
    assert (found["files"], found["weights"], found["exit_code"], found["deep"]) == (1, 2, 0, False)


def test_lone_file_says_what_is_not_covered(run: Run, lone_file: Path) -> None:
    for options in ((), ("--deep",)):
        result = run("validate", lone_file, *options)
        assert result.exit_code == 0
        assert "note: BCQ-E501" in result.stdout
        assert "covered by no digest" in result.stdout


def test_flipped_bit(run: Run, folder: Path) -> None:
    flip(folder / "model.safetensors")
    assert run("validate", folder).exit_code == 0
    result = run("validate", "--deep", folder)
    assert result.exit_code == 6
    assert "BCQ-V606 model.safetensors" in result.stdout
    assert "INVALID, " in result.stdout.splitlines()[-1]
    found = json.loads(run("validate", "--deep", folder, "--json").stdout)
    assert found["exit_code"] == 6
    assert found["findings"][0]["code"] == "BCQ-V606"


def test_exit_code_is_that_of_the_first_finding(run: Run, folder: Path) -> None:
    (folder / "config.json").unlink()
    assert run("validate", folder).exit_code == 3
    (folder / "bcq_manifest.json").unlink()
    assert "BCQ-V510" in (text := run("validate", folder).stdout)
    assert "BCQ-V601" in text
    assert "INVALID, 2 errors" in text


def test_max_findings_and_one_hint_per_code(run: Run, folder: Path) -> None:
    for number in range(5):
        (folder / f"extra{number}.txt").write_text("x")
    every = run("validate", folder).stdout
    assert every.count("note: BCQ-E505") == 5
    assert every.count("hint: ") == 1
    some = run("validate", folder, "--max-findings", "2")
    assert some.exit_code == 0
    assert some.stdout.count("BCQ-E505") == 2
    assert "3 more findings" in some.stdout
    found = json.loads(run("validate", folder, "--max-findings", "2", "--json").stdout)
    assert (len(found["findings"]), found["findings_total"]) == (2, 5)


def test_hostile_names_in_findings(run: Run, tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", {"x\x1b[31m": np.zeros(3, np.float32), "y": np.zeros(3, np.float32)})
    (tmp_path / "m" / "bad\x1b[2Jname\n").write_text("x")
    result = run("validate", tmp_path / "m")
    assert result.exit_code == 0
    assert "note: BCQ-E505 bad\\x1b[2Jname\\n" in result.stdout
    assert run("validate", tmp_path / "m", "--json").exit_code == 0


def test_cut_file(run: Run, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    result = run("validate", folder)
    assert result.exit_code == 4
    assert "BCQ-V116" in result.stdout
    assert "download the file again or, if it was made here, repeat the command that made it" in result.stdout


def test_a_bcq_folder_may_have_been_made_here() -> None:
    """A download is never the only way to get back what a rule misses."""
    hints = {code: entry.hint for code, entry in CODES.items() if code.startswith("BCQ-V") and "download" in entry.hint}
    assert len(hints) > 10
    assert all("made here, repeat the command that made it" in hint for hint in hints.values())


def test_a_file_that_cannot_be_read_is_not_told_once_more_for_each_of_its_tensors(run: Run, tmp_path: Path) -> None:
    """The record of the source names every tensor; without the file nothing can be said about them."""
    source = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
    assert run("convert", source, tmp_path / "bcq").exit_code == 0
    data = (tmp_path / "bcq" / "model.safetensors").read_bytes()
    (tmp_path / "bcq" / "model.safetensors").write_bytes(data[:50_000])
    found = json.loads(run("validate", tmp_path / "bcq", "--json").stdout)
    assert [finding["code"] for finding in found["findings"]] == ["BCQ-V116", "BCQ-V605", "BCQ-E504"]


def test_not_bcq(run: Run, gptq: Path) -> None:
    result = run("validate", gptq)
    assert result.exit_code == 5
    assert "BCQ-V201" in result.stdout
