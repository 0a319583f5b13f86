"""Slightly wrong files and folders: the C reader names the same rule first as spec/decoder.py, file by file."""

from __future__ import annotations

import importlib.util
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bcqfmt
from fuzz.folder_mutations import mutate_folder
from fuzz.header_mutations import mutated_file, seeds
from programs import c_reader
from programs.c_reader import Runner
from weights import samples
from weights.strategies import EXPLORE

pytestmark = pytest.mark.cc

FILES, FOLDERS, JUDGED = 3000 * EXPLORE, 500 * EXPLORE, 300 * EXPLORE
SEED = 6 if EXPLORE == 1 else random.SystemRandom().randrange(2**32)


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bcq_decoder_for_c", c_reader.ROOT / "spec" / "decoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decoder = load_decoder()


def verdict(read: Any, what: Any) -> int:
    """The number of the rule that the Python decoder refuses by; 0 where it reads."""
    try:
        read(what)
    except decoder.Refused as refusal:
        return int(refusal.rule.removeprefix("BCQ-V"))
    return 0


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    rng = random.Random(SEED)
    sources = seeds(sorted((samples.VECTORS / "valid").glob("*.safetensors")), 12_000)
    assert len(sources) > 20
    zeros = [_with_negative_zero(data) for data in sources if _ZERO in data]
    assert len(zeros) > 10
    return [*(mutated_file(rng.choice(sources), rng) for _ in range(FILES)), *zeros]


_ZERO = b'"data_offsets":[0,'


def _with_negative_zero(data: bytes) -> bytes:
    """The first offset as -0, which is no integer to some readers of JSON."""
    longer = data[8:].replace(_ZERO, b'"data_offsets":[-0,', 1)
    return (int.from_bytes(data[:8], "little") + 1).to_bytes(8, "little") + longer


@pytest.fixture(scope="module")
def answers(runner: Runner, files: list[bytes]) -> list[int]:
    """The C reader's verdicts on them."""
    return [c_reader.opened(answer).code for answer in runner.ask([f"memory\t{data.hex()}" for data in files])]


def test_files(files: list[bytes], answers: list[int]) -> None:
    for data, code in zip(files, answers, strict=True):
        assert code == verdict(decoder.read_bytes, data), (SEED, data)
    assert len(set(answers)) > 30  # many rules were met, not one of them very often


def test_folders(runner: Runner, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    valid = [entry for entry in samples.vector_index()["valid"] if entry["kind"] == "folder" and not entry.get("setup")]
    made = []
    for i in range(FOLDERS):
        entry = next(e for e in valid if e["id"] == "folder-provenance") if i % 2 else rng.choice(valid)
        shutil.copytree(samples.VECTORS / entry["path"], tmp_path / str(i))
        mutate_folder(tmp_path / str(i), rng)
        made.append(tmp_path / str(i))
    codes = set()
    for path, answer in zip(made, runner.ask([f"folder\t{path}" for path in made]), strict=True):
        found = c_reader.opened(answer)
        assert found.code == verdict(decoder.read_folder, path), (SEED, path, found.message)
        codes.add(found.code)
    assert len(codes) > 25


def test_the_package_judges_alike(files: list[bytes], answers: list[int], tmp_path: Path) -> None:
    """Valid for one is valid for the other. Where several rules are broken the package may name others of them."""
    path = tmp_path / "file.safetensors"
    same = 0
    for data, code in list(zip(files, answers, strict=True))[:JUDGED]:
        path.write_bytes(data)
        rules = {finding.code for finding in bcqfmt.validate(path, deep=True).errors}
        assert bool(rules) == bool(code), (SEED, data, code, rules)
        same += f"BCQ-V{code}" in rules or not code
    assert same >= 0.95 * JUDGED
