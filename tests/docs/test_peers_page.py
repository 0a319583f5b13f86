"""The page of readers is what the last run of `make peers` found; no reader runs with wrong numbers untold."""

from __future__ import annotations

import importlib.util
import json

from programs.verbs import ROOT


def test_the_page_is_the_run() -> None:
    spec = importlib.util.spec_from_file_location("peers_run", ROOT / "tests" / "peers" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    cells = json.loads(run.CELLS.read_text())
    text = run.PAGE.read_text(encoding="utf-8")
    lines = run.page(cells).splitlines()
    assert lines[2:] == text[text.index(run.BEGIN) + len(run.BEGIN) : text.index(run.END)].splitlines()[2:]
    assert {cell["verdict"] for cell in cells.values()} <= {"equal", "rounded", "wrong", "refused", "-"}
    assert all(cell["notes"] for cell in cells.values() if cell["verdict"] == "wrong")
