"""The reader for learning: short, by itself, and right on every vector that it says it covers."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weights import samples

FILE = samples.VECTORS.parent / "mini_reader.py"
spec = importlib.util.spec_from_file_location("bcq_mini_reader", FILE)
assert spec is not None
assert spec.loader is not None
mini_reader: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mini_reader)

FILES = {entry["id"]: entry for entry in samples.vector_index()["valid"] if entry["kind"] == "file"}
COVERED = {name: entry for name, entry in FILES.items() if set(entry["features"]) <= mini_reader.KNOWN}


def test_it_is_short_and_needs_nothing() -> None:
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) <= 120
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for a in node.names}
    assert {name.split(".")[0] for name in imported if name} <= sys.stdlib_module_names


def test_what_it_covers() -> None:
    assert {f for entry in COVERED.values() for f in entry["features"]} == mini_reader.KNOWN
    assert {e for entry in COVERED.values() for e in entry["encodings"]} == {"affine", "bcq"}
    for feature in ("float-zero", "offset", "second-order", "stack", "aligned64"):
        assert feature not in mini_reader.KNOWN
        assert feature in mini_reader.__doc__ or f"{feature}s" in mini_reader.__doc__


@pytest.mark.parametrize("name", COVERED)
def test_values(name: str) -> None:
    reader = mini_reader.MiniReader(samples.VECTORS / COVERED[name]["path"])
    assert set(reader.weights) == set(COVERED[name]["weights"])
    for weight, expected in COVERED[name]["weights"].items():
        for planes, value in {"8": expected, **expected.get("planes", {})}.items():
            found = reader.decode(weight, int(planes))
            assert hashlib.sha256(found).hexdigest() == value["sha256"], (weight, planes)


@pytest.mark.parametrize("name", sorted(FILES.keys() - COVERED.keys()))
def test_what_it_does_not_know_is_refused_by_name(name: str) -> None:
    unknown = set(FILES[name]["features"]) - mini_reader.KNOWN
    with pytest.raises(ValueError, match=min(unknown)):
        mini_reader.MiniReader(samples.VECTORS / FILES[name]["path"])


def test_nothing_outside_the_file_is_read(tmp_path: Path) -> None:
    data = (samples.VECTORS / FILES["worked-example"]["path"]).read_bytes()
    (tmp_path / "cut").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="outside the file"):
        mini_reader.MiniReader(tmp_path / "cut").decode("w.weight")


def test_the_command_prints_values() -> None:
    command = [sys.executable, str(FILE), str(samples.VECTORS / FILES["worked-example"]["path"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    asked = subprocess.run(command[:2], capture_output=True, text=True, check=False, timeout=60)
    assert (asked.returncode, asked.stderr) == (1, "usage: mini_reader.py FILE [PLANES]\n")
    assert "00bc00b80000003800380000" in done.stdout  # -1 -0.5 0 0.5 0.5 0, row 0 of section 14
