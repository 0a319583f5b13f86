"""`make demo-llm` needs the network; how it ends when something goes wrong does not."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs.verbs import ROOT

Tour = Callable[[Path], int]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, with temporary folders under ``tmp_path`` and no handler of signals."""
    spec = importlib.util.spec_from_file_location("demo_llm_under_test", ROOT / "docs" / "examples" / "demo_llm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    return module


def ending(fault: BaseException) -> Tour:
    """A tour that leaves something behind and ends so."""

    def tour(work: Path) -> int:
        (work / "model").mkdir()
        raise fault

    return tour


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; nothing is left"),
        (subprocess.CalledProcessError(3, ["pip"]), 1, "the step failed: exit code 3"),
    ],
)
def test_nothing_is_left(
    demo: Any, fault: BaseException, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["demo_llm.py"])
    monkeypatch.setattr(demo, "tour", ending(fault))
    assert demo.main() == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_kept_stays(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo_llm.py", "--keep", str(tmp_path / "kept")])
    monkeypatch.setattr(demo, "tour", ending(KeyboardInterrupt()))
    assert demo.main() == 130
    assert (tmp_path / "kept" / "model").is_dir()
    with pytest.raises(SystemExit) as caught:  # and is not taken a second time
        demo.main()
    assert caught.value.code == 2
    assert "exists already" in capsys.readouterr().err
