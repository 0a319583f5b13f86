"""The committed vectors are what the generator makes, and the generator notices when they are not."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"


def make(spec: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(spec / "vectors" / "make.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=spec.parent, timeout=300)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("vectors") / "spec"
    shutil.copytree(SPEC, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_check_passes_without_a_difference(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that are there for those that are generated: the next test tells whether these are the same."""
    monkeypatch.syspath_prepend(str(SPEC / "vectors"))
    cli = importlib.import_module("maker.cli")
    files = {name: cli.plain_bytes(path) for name, path in cli.present(SPEC / "vectors").items()}
    monkeypatch.setattr(cli, "generate", lambda: files)
    assert cli.main(["--check"]) == 0
    assert capsys.readouterr().out == "vectors: as generated\n"


def test_check_names_every_difference(copy: Path) -> None:
    valid = copy / "vectors" / "valid"
    content = (valid / "bcq.safetensors").read_bytes()
    (valid / "bcq.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (valid / "perm.safetensors").unlink()
    (copy / "vectors" / "invalid" / "v604-missing-file" / "more.txt").write_bytes(b"")
    text = (copy / "bcq-1.0.md").read_text("utf-8")
    (copy / "bcq-1.0.md").write_text(text.replace("L = 416", "L = 417"), "utf-8")
    result = make(copy, "--check")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "different: valid/bcq.safetensors",
        "extra: invalid/v604-missing-file/more.txt",
        "missing: valid/perm.safetensors",
        "different: the example in section 14 of bcq-1.0.md (make.py --write-example)",
    ]


@pytest.mark.soak  # `--check` makes and compares the same
def test_out_writes_the_same_elsewhere(tmp_path: Path) -> None:
    assert make(SPEC, "--out", str(tmp_path)).returncode == 0
    made = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {"index.json", "valid/bcq.safetensors"} < made.keys()
    for name, path in made.items():
        assert path.read_bytes() == (SPEC / "vectors" / name).read_bytes(), name


def test_example_is_a_fenced_block() -> None:
    result = make(SPEC, "--example")
    assert result.stdout.startswith("```text\n")
    assert result.stdout.endswith("```\n")
    assert result.stdout in (SPEC / "bcq-1.0.md").read_text("utf-8")


def test_vectors_stay_small() -> None:
    files = [path for path in (SPEC / "vectors").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(os.path.getsize(path) for path in files) < 7 << 18  # noqa: PTH202
