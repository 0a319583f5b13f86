"""Which files the manifest names, and what sealing makes of a folder that was changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError
from bcqfmt.checkpoint.folder import is_documentation
from bcqfmt.checkpoint.seal import seal
from weights import samples

TEXT = (Path(__file__).resolve().parents[2] / "spec" / "bcq-1.0.md").read_text(encoding="utf-8")
GENERATOR = {"name": "another writer", "version": "7"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    bcqfmt.save(
        place, samples.tensors(), config=samples.CONFIG, files={**samples.SIDE, "LICENSE": b"", "notes.md": b"x"},
        max_shard_size=1500, generator=GENERATOR, ignorable={"note": [1]},
    )  # fmt: skip
    return place


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "bcq_manifest.json").read_bytes())
    return found


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


# -- which files are documentation -------------------------------------------------------------------------------


def listed(sentence: str) -> tuple[str, ...]:
    """The names of one item of the list in section 9.3."""
    (line,) = re.findall(rf"^- {sentence} (`.*)$", TEXT, re.MULTILINE)
    return tuple(name.lower() for name in re.findall(r"`([^`]+)`", line))


BEGINS, ENDS, IS = listed("begins with"), listed("ends in"), listed("is")


def upper_to_lower(text: str) -> str:
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)


def as_the_text_says(path: str) -> bool:
    name = upper_to_lower(path.rpartition("/")[2])
    if path.startswith("bcq_source/") or name.endswith(".safetensors"):
        return False
    return name.startswith(BEGINS) or name.endswith(ENDS) or name in IS


pieces = st.sampled_from([
    *BEGINS, *ENDS, *IS, "README", "Licen\u017fe", "LICENSE", "NOT\u0130CE", ".\u212aMD", ".Md", ".PNG", ".txt",
    ".safetensors", "bcq_source", "/", "\n", "a", "\u00e9", "-",
])  # fmt: skip


@given(st.lists(pieces, min_size=1, max_size=4).map("".join))
def test_documentation_is_what_the_text_lists(path: str) -> None:
    assert is_documentation(path) == as_the_text_says(path)


def test_documentation_by_example() -> None:
    for name in (
        "README.md", "readme", "README_zh.txt", "LICENSE", "license.txt", "LICENSE-MODEL", "Notice", "USE_POLICY.md",
        "logo.PNG", "assets/x.jpeg", "paper.pdf", "sub/.gitattributes",
    ):  # fmt: skip
        assert is_documentation(name), name
    for name in (
        "config.json", "vocab.txt", "merges.txt", "chat_template.jinja", "tokenizer.model", "modeling_x.py",
        "README.safetensors", "bcq_source/files/README.md", "md", "spng", "mdx.mdx", "model.safetensors",
    ):  # fmt: skip
        assert not is_documentation(name), name


def test_writers_name_everything_else(folder: Path) -> None:
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present - manifest(folder)["files"].keys() == {"bcq_manifest.json", "LICENSE", "notes.md", "docs/card.md"}


# -- sealing -----------------------------------------------------------------------------------------------------


def test_nothing_changed_and_nothing_written(folder: Path) -> None:
    (folder / "LICENSE").write_text("all rights reserved")
    before = (folder / "bcq_manifest.json").stat()
    done = seal(folder)
    after = (folder / "bcq_manifest.json").stat()
    assert (done.changes, done.findings, done.written, done.exit_code) == ([], [], False, 0)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_changes_of_side_files_are_shown_and_sealed(folder: Path) -> None:
    old = manifest(folder)
    (folder / "tokenizer.json").write_bytes(b'{"a": 2}\n')
    (folder / "empty.txt").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "template.jinja").write_bytes(b"{{ x }}")
    assert not bcqfmt.validate(folder, deep=True).valid
    shown = seal(folder, dry_run=True)
    assert manifest(folder) == old
    done = seal(folder)
    assert [(c.path, c.kind) for c in done.changes] == [
        ("empty.txt", "removed"), ("sub/template.jinja", "added"), ("tokenizer.json", "changed"),
    ]  # fmt: skip
    assert (shown.changes, shown.written, done.written) == (done.changes, False, True)
    assert bcqfmt.validate(folder, deep=True).valid
    new = manifest(folder)
    assert new["files"].keys() == old["files"].keys() - {"empty.txt"} | {"sub/template.jinja"}
    kept = ("generator", "ignorable", "version", "features", "schemes", "weights")
    assert {key: new[key] for key in kept} == {key: old[key] for key in kept}
    assert new["generator"] == GENERATOR
    assert done.files == len(new["files"])
    assert seal(folder).changes == []


def test_documentation_that_a_manifest_names_is_released(tmp_path: Path) -> None:
    """A folder of a writer that named its model card: the card must match, until the folder is sealed."""
    named = tmp_path / "named"
    shutil.copytree(samples.VECTORS / "valid" / "folder-side-files", named)
    (named / "README.md").write_text("# Edited\n")
    assert [f.code for f in bcqfmt.validate(named).errors] == ["BCQ-V605"]
    done = seal(named)
    assert ("README.md", "released") in [(c.path, c.kind) for c in done.changes]
    report = bcqfmt.validate(named, deep=True)
    assert (report.valid, [f.file for f in report.findings]) == (True, ["README.md"])


def test_a_flipped_model_file_is_refused_without_accept(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    before = (folder / "bcq_manifest.json").read_bytes()
    flip(shard)
    for dry in (False, True):
        done = seal(folder, dry_run=dry)
        assert ([f.code for f in done.findings], done.exit_code, done.written) == (["BCQ-E405"], 6, False)
        assert shard.name in done.findings[0].text()
    assert (folder / "bcq_manifest.json").read_bytes() == before
    assert seal(folder, accept=True).written
    assert bcqfmt.validate(folder, deep=True).valid


def test_a_folder_that_would_not_be_valid_keeps_its_manifest(folder: Path) -> None:
    before = (folder / "bcq_manifest.json").read_bytes()
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_text("{}")
    done = seal(folder)
    assert ([f.code for f in done.findings], done.exit_code, done.written) == (["BCQ-V512"], 4, False)
    (folder / "config.json").write_bytes(config)
    flip(min(folder.glob("*.safetensors")), 8)  # the header no longer begins with {
    with pytest.raises(BcqError) as caught:
        seal(folder, accept=True)
    assert caught.value.code == "BCQ-V104"
    assert (folder / "bcq_manifest.json").read_bytes() == before


def test_accepted_content_is_checked_to_the_last_bit(tmp_path: Path) -> None:
    """The digests of a new manifest are right by definition; padding bits are not."""
    weight = samples.affine(1, 40)
    bcqfmt.save(tmp_path / "m", {"w.weight": weight})
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        part = checkpoint.weight("w.weight").parts()["s0_planes"]
        offset = part.offset
    flip(tmp_path / "m" / "model.safetensors", offset + 7)  # columns 56 to 63 of 40
    done = seal(tmp_path / "m", accept=True)
    assert ([f.code for f in done.findings], done.written) == (["BCQ-V401"], False)


def test_other_weights_are_described_anew(folder: Path, tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "other", {"other.weight": samples.affine(4, 32)}, config=samples.CONFIG)
    for path in (*folder.glob("model*"),):
        path.unlink()
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    shutil.copy(tmp_path / "other" / "config.json", folder)
    assert seal(folder).exit_code == 6
    assert seal(folder, accept=True).written
    assert manifest(folder)["weights"].keys() == {"other.weight"}
    assert bcqfmt.validate(folder, deep=True).valid


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.unlink(), "BCQ-V601"),
        (lambda path: path.write_bytes(b"{}"), "BCQ-V205"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "BCQ-V602"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"another writer", b"another Writer")), "BCQ-V603"),
    ],
)
def test_without_a_sound_manifest_there_is_nothing_to_renew(folder: Path, damage: Any, code: str) -> None:
    damage(folder / "bcq_manifest.json")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BcqError) as caught:
        seal(folder, accept=True)
    assert caught.value.code == code
    assert caught.value.hint
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_files_that_no_manifest_can_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"")
    (folder / "link").symlink_to("../outside")
    with pytest.raises(BcqError) as caught:
        seal(folder)
    assert caught.value.code == "BCQ-V507"
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")  # no file of the folder; nobody waits for it
    assert seal(folder).changes == []
    (folder / "back\\slash").write_bytes(b"")
    with pytest.raises(BcqError) as caught:
        seal(folder)
    assert (caught.value.code, caught.value.hint) == ("BCQ-E302", "rename the file, or remove it")


def test_a_full_disk_leaves_the_old_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").write_bytes(b"{}")
    before = (folder / "bcq_manifest.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BcqError) as caught:
        seal(folder)
    assert caught.value.code == "BCQ-E402"
    assert (folder / "bcq_manifest.json").read_bytes() == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
