"""The pages that show commands tell the truth: they are run, and every output is compared."""

from pathlib import Path

import pytest

from console_blocks import ROOT, play

PAGES = {"tutorial.md": 20, "howto.md": 25, "troubleshooting.md": 25}  # page: at least so many steps


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(ROOT / "docs" / name, tmp_path, monkeypatch) >= PAGES[name]
