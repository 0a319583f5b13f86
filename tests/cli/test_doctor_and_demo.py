"""`bcqfmt doctor` and `bcqfmt demo`."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.cli.machine import doctor
from bcqfmt.kernels.runtime import device
from faults.os_faults import FAULTS, OsFaults
from programs.verbs import ROOT, Run
from sources.peers import WITH_TOKENIZER


def test_doctor(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "the core works" in result.stdout
    assert bcqfmt.__version__ in result.stdout


def test_doctor_json(run: Run) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["works"] is True
    names = {check["name"] for check in found["checks"]}
    assert {"python", "numpy", "torch", "vllm", "ray", "CUDA driver", "umask", "SHA-256", "self-test"} <= names
    for check in found["checks"]:
        assert check["status"] == "ok" or check["fix"], check


def test_doctor_knows_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in project["dependencies"])  # type: ignore[union-attr]
    for name, minimum in doctor.MINIMUM.items():
        assert asked[name] == ".".join(map(str, minimum))
    named = {extra for extra, _ in doctor._OPTIONAL.values() if extra}
    assert named == project["optional-dependencies"].keys() - {"docs", "test", "dev"}


def test_doctor_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("torch", "numpy") else "999.0")
    result = run("doctor")
    assert result.exit_code == 1
    assert "fix: pip install 'torch>=2.4'" in result.stdout
    assert "the core does NOT work" in result.stdout
    monkeypatch.setattr(doctor, "_version", lambda name: "0.1.dev3+x")
    assert "older than" in run("doctor").stdout


def test_a_package_that_cannot_be_imported(run: Run, tmp_path: Path) -> None:
    """As numba raises for a numpy that it does not know: `doctor` tries it, and other verbs send there."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.0 or less')")

    def alone(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bcqfmt", *map(str, words)]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    doctored = alone("doctor")
    assert doctored.returncode == 1
    assert "cannot be imported: ImportError: Numba needs NumPy 2.0 or less" in doctored.stdout
    assert "fix: pip install --force-reinstall 'numba>=" in doctored.stdout
    assert "the core does NOT work here" in doctored.stdout
    converted = alone("convert", WITH_TOKENIZER, tmp_path / "bcq")
    assert converted.returncode == 2
    assert "BCQ-E306: package missing or not usable: numba cannot be imported: Numba needs NumPy" in converted.stderr
    assert "hint: `bcqfmt doctor` shows" in converted.stderr


def test_doctor_survives_a_broken_temporary_folder(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    result = run("doctor")
    assert result.exit_code == 1
    assert "PermissionError" in result.stdout


def test_demo_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("demo")
    assert result.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    for text in ("262,144 values, 0 different", "65,536 bytes read", "BCQ-V606", "nothing is left behind"):
        assert text in result.stdout
    assert 15 <= len(result.stdout.splitlines()) <= 30
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_demo_keeps_what_it_made(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("demo", "--keep", kept).exit_code == 0
    assert bcqfmt.validate(kept / "bcq", deep=True).valid
    assert {path.name for path in kept.iterdir()} == {"gptq", "bcq"}
    assert run("convert", kept / "gptq", tmp_path / "converted").exit_code == 0
    again = run("demo", "--keep", kept)
    assert again.exit_code == 7
    assert "BCQ-E401" in again.stderr
    assert "hint: choose another folder\n" in again.stderr


@pytest.mark.parametrize("at", [2, 3, 10, 30])
def test_demo_on_a_full_disk_keeps_nothing(run: Run, tmp_path: Path, at: int) -> None:
    """While the folder is made, the sample copied, the BCQ folder written."""
    kinds, action = FAULTS["ENOSPC"]
    with OsFaults((tmp_path,), kinds, at, action).installed():
        result = run("demo", "--keep", tmp_path / "kept")
    assert (result.exit_code, "BCQ-E402" in result.stderr, "No space left" in result.stderr) == (7, True, True)
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_measured_on_a_gpu_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_trouble", lambda: ("BCQ-E551", "no GPU here", None))
    none = run("bench", "kernels")
    assert (none.exit_code, "BCQ-E551: no usable GPU: no GPU here" in none.stderr) == (5, True)
    assert "hint: run it on a machine that has one; `bcqfmt doctor` shows what is missing here" in none.stderr
    monkeypatch.setattr(device, "_trouble", lambda: ("BCQ-E551", "simulated", "unset IT"))
    assert "hint: unset IT" in run("bench", "kernels").stderr


def test_figures_of_kernels_replace_no_other_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_trouble", lambda: ("BCQ-E551", "no GPU here", None))
    kept = tmp_path / "kernels.json"
    kept.write_text("mine")
    result = run("bench", "kernels", "--out", str(kept))
    assert (result.exit_code, "BCQ-E401" in result.stderr) == (7, True)
    assert run("bench", "kernels", "--out", str(kept), "--overwrite").exit_code == 5  # no GPU, no figures
    assert kept.read_text() == "mine"
