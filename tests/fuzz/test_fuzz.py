"""Any bytes through reader and validator: only our errors escape, quickly and in little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folder_mutations import mutate_folder
from fuzz_inputs import VECTORS, first_inputs, mutate
from fuzz_target import MEMORY_LIMIT, Executions, look
from header_mutations import mutated_text
from soak_figures import record
from strategies import examples
from verbs import ROOT

INPUTS = first_inputs()
FUZZER = ROOT / "tests" / "soak" / "fuzz.py"


@given(st.data())
@examples(250)
def test_changed_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Mutations that know the format; Hypothesis shrinks the seed and the vector when one escapes."""
    raw = data.draw(st.sampled_from(INPUTS))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw = mutate(raw, rng)
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(raw)
    look(path)


@given(st.binary(max_size=200), st.booleans())
@examples(150)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, raw: bytes, framed: bool) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw if framed else raw)
    look(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.integers(0, 2**32))
@examples(150)
def test_any_descriptor(tmp_path_factory: pytest.TempPathFactory, value: Any, seed: int) -> None:
    """Any JSON value, whole or damaged, in the place of the descriptor."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if seed % 2:
        text = mutated_text(text, random.Random(seed))
    header = json.dumps({"__metadata__": {"format": "pt", "bcqfmt": text}}).encode("utf-8", "surrogatepass")
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    look(path)


@given(st.sampled_from(sorted(p.name for p in (VECTORS / "valid").iterdir() if p.is_dir())), st.integers(0, 2**32))
@examples(120)
def test_changed_folders(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(VECTORS / "valid" / name, folder)
    mutate_folder(folder, random.Random(seed))
    look(folder)


def fuzz(folder: Path, runs: int, *more: str) -> dict[str, Any]:
    out = folder / "figures.json"
    words = [sys.executable, "-P", str(FUZZER), "--runs", str(runs), "--json", str(out), *more]
    ran = subprocess.run(words, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    figures: dict[str, Any] = json.loads(out.read_text())
    assert figures["runs"] >= runs
    assert not figures["escaped"]
    assert figures["peak_memory_mb"] * 10**6 < MEMORY_LIMIT
    return figures


def test_the_guided_loop(tmp_path: Path) -> None:
    """A short run of what `make soak` runs long; it must learn, not only run."""
    figures = fuzz(tmp_path, 3000, "--engine", "own")
    assert figures["corpus"] > 150
    assert figures["blocks"] > 400
    assert len(figures["codes_seen"]) > 50


def test_the_fuzzer_sees_what_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets another exception out is reported, with the input kept."""

    def broken(path: Path, deep: bool) -> Any:
        raise ZeroDivisionError("out of nothing")

    monkeypatch.setattr("fuzz_target.bcqfmt.validate", broken)
    target = Executions(tmp_path / "a.safetensors", tmp_path / "crashes")
    target.file(b"12345678")
    assert dict(target.escaped) == {"ZeroDivisionError: out of nothing": 1}
    assert [path.read_bytes() for path in (tmp_path / "crashes").iterdir()] == [b"12345678"]


def test_the_fuzzer_sees_a_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator that accepts what the reader refuses is reported."""
    from bcqfmt.checkpoint.validation import Report

    monkeypatch.setattr("fuzz_target.bcqfmt.validate", lambda path, deep: Report(str(path), deep))
    target = Executions(tmp_path / "a.safetensors", tmp_path / "crashes")
    target.file(b"12345678")
    (text,) = target.escaped
    assert "the reader refuses what the validator accepts" in text


@pytest.mark.soak
def test_two_million_executions(tmp_path: Path) -> None:
    figures = fuzz(tmp_path, 2_000_000)
    assert not figures["slower_than_1_s"]  # in the soak alone, on a machine without other work
    record("fuzzing", **figures)
