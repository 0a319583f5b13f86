"""Names in a source that the output cannot have: refused in the plan. What is carried comes back, the rest is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.container.files import unwritable
from sources.conversions import GPTQ, gptq_folder, gptq_layer, tree
from sources.peers import made_up


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert "BCQ-E999" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def source_with(scratch: Path, *paths: str) -> Path:
    """A small source with more files."""
    source = gptq_folder(scratch / "source", layers=1, n=32, k=64)
    for path in paths:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("evil")
    return source


def refused(source: Path, code: str, exit_code: int) -> str:
    """Refused by the plan, dry or not, and nothing is there afterwards; the message."""
    target = source.parent / "bcq"
    for more in ((), ("--dry-run",), ("--no-provenance",)):
        result = run("convert", source, target, *more)
        assert result.exit_code == exit_code, result.output
        assert code in result.stderr
        assert "hint: " in result.stderr
        assert [path.name for path in source.parent.iterdir()] == ["source"]
    return result.stderr


OURS = [
    ("bcq_source/source.json",),
    ("bcq_source/raw.safetensors",),
    ("bcq_source/files/config.json",),
    ("bcq_source/headers/x/y",),
    ("bcq_source",),
    ("BCQ_Source/source.json",),
    ("BCQ_MANIFEST.JSON",),
    ("bcq_manifest.json.d/../BCQ_Manifest.json/x",),
    ("MODEL.SAFETENSORS",),
    ("model.safetensors.index.json/x",),
    ("README.md/x",),
    ("readme.MD/x",),
    ("README.md", "readme.md"),
    ("Config.json",),
    ("docs/a", "Docs/b"),
    ("caf\u00e9.txt", "cafe\u0301.txt"),
    ("stra\u00dfe", "STRASSE"),
]


@pytest.mark.parametrize("paths", OURS, ids=str)
def test_a_path_that_the_output_has_itself(paths: tuple[str, ...], tmp_path: Path) -> None:
    refused(source_with(tmp_path, *(os.path.normpath(path) for path in paths)), "BCQ-E617", 5)


@pytest.mark.parametrize("path", ["a\\b", "..\\..\\x", "d/\\", "d/" * 70 + "x", ("d" * 99 + "/") * 10 + "x"], ids=len)
def test_a_path_that_not_every_system_has(path: str, tmp_path: Path) -> None:
    refused(source_with(tmp_path, path), "BCQ-E617", 5)


def test_a_very_deep_folder(tmp_path: Path) -> None:
    """Too deep for a function that calls itself for every level, as those that list and remove folders do."""
    source = source_with(tmp_path)
    here = os.open(source, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    try:
        refused(source, "BCQ-E617", 5)
    finally:
        subprocess.run(["rm", "-rf", source / "d"], check=True)  # shutil.rmtree is one of those functions


def test_the_record_of_the_source_is_ours(tmp_path: Path) -> None:
    """A source cannot say what `restore` will make of it."""
    source = source_with(tmp_path)
    assert run("convert", source, tmp_path / "bcq").exit_code == 0
    shutil.copytree(tmp_path / "bcq" / "bcq_source", source / "bcq_source")
    shutil.rmtree(tmp_path / "bcq")
    refused(source, "BCQ-E617", 5)


def test_other_names_are_carried(tmp_path: Path) -> None:
    """Line feeds, the longest names there are, what begins with a dot, and files that the output writes anew."""
    odd = ["a\nb", "a\n", " ", "x" * 255, "sub/" + "\u00e9" * 127, ".hidden/y", ".bcq_work/plan.json", "s/.x.tmp"]
    source = source_with(tmp_path, *odd, "readme.md", "bcq_quantization.json", "sub/bcq_source/x", "sub/config.json")
    assert run("convert", source, tmp_path / "bcq").exit_code == 0
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
    assert not (tmp_path / "bcq" / "bcq_quantization.json").exists()
    assert run("verify", source, tmp_path / "bcq").exit_code == 0
    assert run("restore", tmp_path / "bcq", tmp_path / "out").exit_code == 0
    assert tree(tmp_path / "out") == tree(source)


def test_the_longest_name_of_a_model_file(tmp_path: Path) -> None:
    """Its header is archived under a name that is longer by seven bytes."""
    source = source_with(tmp_path)
    for length, fits in ((248, True), (249, False)):
        name = "m" * (length - len(".safetensors")) + ".safetensors"
        next(source.glob("*.safetensors")).rename(source / name)
        if fits:
            assert run("convert", source, tmp_path / "bcq").exit_code == 0
            shutil.rmtree(tmp_path / "bcq")
        else:
            refused(source, "BCQ-E617", 5)


@pytest.mark.parametrize("name", ["..", "/etc/x", "a b", "\u00e9", "x" * 507, "a..b", "-x", "a\nb"], ids=ascii)
def test_a_module_name_that_a_weight_cannot_have(name: str, tmp_path: Path) -> None:
    layer = gptq_layer(np.random.default_rng(0), 32, 64, 32)
    made_up(tmp_path / "source", {f"{name}.{suffix}": array for suffix, array in layer.items()}, GPTQ)
    assert "model.safetensors" in refused(tmp_path / "source", "BCQ-V213", 4)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("a/b", ""), ("a" * 255, ""), ("a" * 256, "256 bytes"), ("\u00e9" * 128, "256 bytes"), ("a/" * 64 + "a", "65")],
)
def test_unwritable(path: str, reason: str) -> None:
    assert reason in unwritable(path)
    assert bool(reason) == bool(unwritable(path))


# -- what is not carried -----------------------------------------------------------------------------------------


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    source = source_with(tmp_path, "evil.pt", "old/x.gguf", ".git/HEAD", "sub/.cache/x", "kept.txt")
    (source / "empty" / "inner").mkdir(parents=True)
    (source / "link").symlink_to("old")
    left = {
        "evil.pt": "pickle",
        "old/x.gguf": "another format",
        ".git": "version control",
        "sub/.cache": "download cache",
        "empty/inner": "empty folder",
        "link": "link to a folder",
    }
    words = "6 left out: .git (version control), empty/inner (empty folder), evil.pt (pickle) ..."
    plan = run("convert", source, tmp_path / "bcq", "--dry-run")
    assert f"not carried  {words}" in plan.stdout
    assert json.loads(run("convert", source, tmp_path / "bcq", "--json").stdout)["warnings"][0]["found"] == words
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
    verified = run("verify", source, tmp_path / "bcq")
    assert f"holds 4 files of {source}, {words}" in verified.stdout
    assert "holds all" not in verified.stdout
    assert json.loads(run("verify", source, tmp_path / "bcq", "--json").stdout)["left_out"] == left
    restored = run("restore", tmp_path / "bcq", tmp_path / "out")
    assert f"4 files, {sum(p.stat().st_size for p in (tmp_path / 'out').iterdir()):,} bytes" in restored.stdout
    assert words in restored.stdout
    assert json.loads(run("restore", tmp_path / "bcq", tmp_path / "o2", "--json").stdout)["left_out"] == left
    again = json.loads(run("convert", source, tmp_path / "bcq", "--resume", "--json").stdout)
    assert again["complete"]


def test_nothing_is_left_out(tmp_path: Path) -> None:
    source = source_with(tmp_path, "a.txt")
    assert run("convert", source, tmp_path / "bcq").exit_code == 0
    assert f"holds all of {source}" in run("verify", source, tmp_path / "bcq").stdout
    assert "left out" not in run("restore", tmp_path / "bcq", tmp_path / "out").stdout
    assert "ignorable" not in json.loads((tmp_path / "bcq" / "bcq_source" / "source.json").read_text())
