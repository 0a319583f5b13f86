"""The pages of docs/benchmarks are what their figures give: generated again, they are the same."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from programs.verbs import ROOT

PAGES = ROOT / "docs" / "benchmarks"
SCRIPTS = ROOT / "tests" / "benchmarks"
WORDS = 1300  # of a page, tables included


_IMPORT = "import runpy, sys; [runpy.run_path(name, run_name='imported') for name in sys.argv[1:]]"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = SCRIPTS / name
    monkeypatch.syspath_prepend(str(place.parent))
    spec = importlib.util.spec_from_file_location(f"{place.stem}_under_test", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "generator"),
    [
        *((name, "page.py") for name in ("format", "conversion", "gguf", "scaling", "quantizing", "cpu_kernels")),
        ("quality", "models/smollm2_page.py"),
        ("nested", "models/nested_page.py"),
    ],
)
def test_generated_page(name: str, generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))
    assert script(generator, monkeypatch).page(record) == (PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_tables_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("gpu/kernel_tables.py", monkeypatch).TABLES
    assert sum(map(len, tables.values())) > 8
    for name, makers in tables.items():
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        for make in makers:
            assert make() in page, f"{name}.md: {make.__doc__}"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_is_short_and_names_scripts_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    named = [word.strip("`(),;:.") for word in text.split() if "tests/" in word and ".py" in word]
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_script_finds_what_it_imports() -> None:
    """They are run by hand: a name that moved would not be missed before the next figures are wanted."""
    names = sorted(map(str, SCRIPTS.rglob("*.py")))
    folders = [ROOT / "tests" / "support", *sorted({Path(name).parent for name in names})]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, *names], env=known, capture_output=True, text=True, check=False
    )
    assert (len(names) > 40, done.returncode) == (True, 0), done.stderr[-2000:]
