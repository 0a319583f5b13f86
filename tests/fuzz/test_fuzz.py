"""Any bytes through reader and validator: only our errors escape, quickly and in little memory."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import c_reader as fuzz_c
from fuzz import sources as fuzz_sources
from fuzz.files import SideBySide
from fuzz.folder_mutations import mutate_folder
from fuzz.header_mutations import mutated_text
from fuzz.inputs import VECTORS, first_inputs, mutate
from fuzz.target import MEMORY_LIMIT, Executions, from_text, look
from programs.verbs import ROOT
from weights.strategies import examples

INPUTS = first_inputs()
FUZZER = ROOT / "tests" / "fuzz" / "run.py"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"


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


def test_a_finding_is_kept_with_its_input() -> None:
    """Whatever a target raises is counted, and the first input of its kind is in the figures."""

    def broken(data: bytes) -> tuple[str, ...]:
        if len(data) > 3:
            raise ZeroDivisionError("out of nothing")
        return ("BCQ-V101",) if data else ()

    execute = Executions(broken)
    for data in (b"", b"abc", b"abcd", b"abcde"):
        execute(data)
    figures = execute.figures()
    assert figures["findings"] == {"ZeroDivisionError: out of nothing": 2}
    assert {what: from_text(text) for what, text in figures["inputs"].items()} == {
        "ZeroDivisionError: out of nothing": b"abcd"
    }
    assert (figures["executions"], figures["accepted"], figures["codes_seen"]) == (4, 1, ["BCQ-V101"])


def test_a_disagreement_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator that accepts what the reader refuses."""
    from bcqfmt.checkpoint.validation import Report

    monkeypatch.setattr("fuzz.target.bcqfmt.validate", lambda path, deep: Report(str(path), deep))
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    with pytest.raises(AssertionError, match="the reader refuses what the validator accepts"):
        look(tmp_path / "a.safetensors")


@pytest.mark.parametrize("target", ["sources", "gguf"])
def test_sources_that_fuzzing_has_found(target: str) -> None:
    """Each is refused with a code or converted; together they meet many codes."""
    execute = Executions(fuzz_sources.converted)
    for data in corpus(target):
        execute(data)
    assert not execute.found
    assert len(execute.codes) > 10


def corpus(name: str) -> list[bytes]:
    with zipfile.ZipFile(CORPUS / f"{name}.zip") as archive:
        return [archive.read(member) for member in sorted(archive.namelist())]


def test_the_corpus_is_small() -> None:
    assert 10_000 < sum(path.stat().st_size for path in CORPUS.iterdir()) < 1_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    fuzz_c.build(folder)
    return folder


@pytest.mark.cc
def test_files_that_fuzzing_has_found(built: Path, tmp_path: Path) -> None:
    """All readers agree on each of them."""
    execute = Executions(SideBySide(fuzz_c.Library(built / "libbcq.so"), tmp_path).file)
    for data in corpus("files"):
        execute(data)
    assert not execute.found
    assert len(execute.codes) > 30


@pytest.mark.cc
def test_what_the_c_reader_accepts_is_handed_on(built: Path, tmp_path: Path) -> None:
    """Every such input and some others; the same ones when the seed is the same, with sanitizers and without."""
    library = fuzz_c.Library(built / "libbcq.so")
    valid = sorted((VECTORS / "valid").glob("*.safetensors"))
    handed = {}
    for name, seed in (("fuzz_fast", 5), ("fuzz_fast ", 5), ("fuzz_fast", 6)):
        figures = fuzz_c.run(built / name.strip(), 4000, 60, seed, tmp_path, valid)
        assert (figures["executions"], figures["findings"]) == (4000, {})
        handed[name, seed] = list(fuzz_c.handed_on(tmp_path))
        accepted = [data for data in handed[name, seed] if library.file(data)[0] == 0]
        assert len(accepted) == figures["accepted"] > len(valid)
        assert 1 <= len(handed[name, seed]) - len(accepted) <= 4  # every thousandth too; some of them are accepted
    first, again, other = handed.values()
    assert first == again != other


def test_a_killed_process_is_named_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the input that it was working on is in the figures."""
    sys.path.insert(0, str(FUZZER.parent))
    import run

    program = tmp_path / "killed.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "(out.parent / 'last').write_bytes(b'the input')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(run, "__file__", str(program))
    found = run._start(argparse.Namespace(scratch=tmp_path, distill=False), "sources", 0, 1, 77)
    assert found["findings"] == {"sources, seed 77, exit -9: ": 1}
    assert [from_text(text) for text in found["inputs"].values()] == [b"the input"]


def test_only_what_is_slow_twice_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time something may be compiled."""
    clock = iter([0.0, 5.0, 5.0, 5.1, 6.0, 9.0, 9.0, 11.0])
    monkeypatch.setattr("fuzz.target.time.process_time", lambda: next(clock))
    execute = Executions(lambda data: ())
    execute(b"once")
    execute(b"twice")
    assert execute.inputs == {"slower than 1 s": b"twice"}
    assert execute.slowest == 2.0


def test_too_much_memory_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = Executions(lambda data: ())
    execute(b"a")
    monkeypatch.setattr("fuzz.target.peak_memory", lambda: 10**12)
    execute(b"b")
    execute(b"c")
    assert list(execute.figures()["findings"].values()) == [1]
    assert list(execute.inputs.values()) == [b"b"]


@pytest.mark.cc
def test_a_short_run(tmp_path: Path) -> None:
    """`make fuzz` for some seconds: every target runs, learns and finds nothing."""
    out = tmp_path / "figures.json"
    words = [sys.executable, str(FUZZER), "--time", "30", "--jobs", "2", "--seed", "1", "--out", str(out)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    targets = json.loads(out.read_text())["targets"]
    assert set(targets) == {"c", "c_fast", "files", "folders", "gguf", "sources"}
    for figures in targets.values():
        assert figures["executions"] > 20
        assert figures.get("peak_memory_mb", 0) * 10**6 < MEMORY_LIMIT
