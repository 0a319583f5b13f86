"""`bcqfmt seal`, and what the owner of a converted folder may do to it."""

import json
import shutil
from pathlib import Path

import pytest

from programs.verbs import Run, flip
from sources.conversions import tree
from sources.peers import WITH_TOKENIZER


@pytest.fixture
def converted(model: Path, tmp_path: Path) -> Path:
    """A converted GPTQ model with a tokenizer; a copy to change."""
    return Path(shutil.copytree(model, tmp_path / "bcq"))


def test_model_card_and_pictures_are_the_owners(run: Run, converted: Path) -> None:
    with (converted / "README.md").open("a") as card:
        card.write("\nTrained with care.\n")
    (converted / "assets").mkdir()
    (converted / "assets" / "logo.png").write_bytes(b"\x89PNG")
    result = run("validate", "--deep", converted)
    assert result.exit_code == 0
    assert "note: BCQ-E504 README.md: documentation is covered by no digest" in result.stdout
    assert "note: BCQ-E504 assets/logo.png: " in result.stdout
    assert ": valid, 2 notes; " in result.stdout
    found = json.loads(run("validate", converted, "--json").stdout)
    notes = [(f["code"], f["severity"], f["file"], f["found"]) for f in found["findings"]]
    assert notes == [("BCQ-E504", "note", name, "its owner may edit it") for name in ("README.md", "assets/logo.png")]
    assert (found["valid"], found["exit_code"]) == (True, 0)
    assert "nothing has changed" in run("seal", converted).stdout
    assert run("verify", WITH_TOKENIZER, converted).exit_code == 0


def test_restore_takes_the_source_not_the_edited_copies(run: Run, tmp_path: Path) -> None:
    """Card, licence and tokenizer of the source come from bcq_source/, whatever became of the folder's own."""
    source, folder, back = (tmp_path / name for name in ("source", "bcq", "back"))
    shutil.copytree(WITH_TOKENIZER, source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n# The original\n")
    (source / "LICENSE").write_text("MIT\n")
    assert run("convert", source, folder).exit_code == 0
    for name in ("README.md", "LICENSE", "tokenizer.json"):
        (folder / name).write_text("{}\n")
    assert run("seal", folder).exit_code == 0
    assert run("restore", folder, back).exit_code == 0
    assert tree(back) == tree(source)
    (folder / "LICENSE").unlink()
    assert run("verify", source, folder).exit_code == 0


def test_another_tokenizer(run: Run, converted: Path) -> None:
    """Invalid with the next step; the next step works."""
    flip(converted / "tokenizer.json")
    result = run("validate", "--deep", converted)
    assert result.exit_code == 6
    assert "BCQ-V606 tokenizer.json" in result.stdout
    assert "if it was changed on purpose: bcqfmt seal FOLDER" in result.stdout
    shown = run("seal", "--dry-run", converted)
    assert (shown.exit_code, "nothing was written" in shown.stdout) == (0, True)
    assert run("validate", "--deep", converted).exit_code == 6
    sealed = run("seal", converted)
    assert sealed.exit_code == 0
    line, last = sealed.stdout.splitlines()
    size = f"{(converted / 'tokenizer.json').stat().st_size:,} bytes, sha256 "
    assert line.startswith("changed   tokenizer.json: ")
    assert line.count(size) == 2
    assert last.endswith(": sealed: 1 changed; the manifest names 12 files")
    assert run("validate", "--deep", converted).exit_code == 0


def test_damage_is_not_sealed(run: Run, converted: Path) -> None:
    for name in ("model.safetensors", "bcq_source/source.json"):
        before = (converted / "bcq_manifest.json").read_bytes()
        flip(converted / name)
        result = run("seal", converted)
        assert result.exit_code == 6
        assert f"changed   {name}: " in result.stdout
        assert "BCQ-E405" in result.stdout
        assert "--accept" in result.stdout
        assert "NOT sealed: 1 changed" in result.stdout.splitlines()[-1]
        assert (converted / "bcq_manifest.json").read_bytes() == before
        flip(converted / name)
    assert run("validate", "--deep", converted).exit_code == 0


def test_a_removed_archive_has_to_be_accepted(run: Run, converted: Path) -> None:
    shutil.rmtree(converted / "bcq_source")
    assert "BCQ-V604" in run("validate", converted).stdout
    assert run("seal", converted).exit_code == 6
    assert run("seal", "--accept", converted).exit_code == 0
    assert run("validate", "--deep", converted).exit_code == 0


def test_json(run: Run, converted: Path) -> None:
    (converted / "chat_template.jinja").write_text("{{ messages }}")
    flip(converted / "model.safetensors")
    found = json.loads(run("seal", converted, "--json").stdout)
    assert (found["written"], found["exit_code"], found["dry_run"]) == (False, 6, False)
    assert [(change["path"], change["kind"]) for change in found["changes"]] == [
        ("chat_template.jinja", "added"),
        ("model.safetensors", "changed"),
    ]
    assert found["changes"][0]["old"] is None
    assert found["changes"][0]["new"]["size"] == 14
    assert len(found["changes"][1]["old"]["sha256"]) == 64
    assert [finding["code"] for finding in found["findings"]] == ["BCQ-E405"]
    assert "--accept" in found["findings"][0]["hint"]
    found = json.loads(run("seal", "--accept", "--json", converted).stdout)
    assert (found["written"], found["exit_code"], found["findings"]) == (True, 0, [])


def test_what_cannot_be_sealed(run: Run, folder: Path, lone_file: Path, tmp_path: Path) -> None:
    result = run("seal", lone_file)
    assert (result.exit_code, "BCQ-E203" in result.stderr) == (5, True)
    assert f"hint: look at it: bcqfmt inspect {lone_file}\n" in result.stderr
    assert run("seal", tmp_path / "nothing").exit_code == 3
    (folder / "bcq_manifest.json").unlink()
    result = run("seal", folder)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "BCQ-V601" in result.stderr
    assert "hint: finish or repeat the run that writes the folder, or download bcq_manifest.json again" in result.stderr
    assert json.loads(run("seal", folder, "--json").stdout)["error"]["exit_code"] == 4


def test_names_are_shown_escaped(run: Run, folder: Path) -> None:
    (folder / "x\x1b[31m\n").write_text("")
    result = run("seal", folder)
    assert (result.exit_code, "added     x\\x1b[31m\\n: 0 bytes" in result.stdout) == (0, True)
    assert run("validate", "--deep", folder).exit_code == 0
    (folder / "x\udcff").write_text("")
    result = run("seal", folder)
    assert (result.exit_code, "rename the file" in result.stderr) == (2, True)
