"""The C reader against spec/vectors: every value of the valid ones, the one rule of the invalid ones, none left out."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest

from programs import c_reader
from programs.c_reader import Opened, Runner
from weights import samples

pytestmark = pytest.mark.cc

INDEX = samples.vector_index()
VALID: list[dict[str, Any]] = INDEX["valid"]
INVALID: list[dict[str, Any]] = INDEX["invalid"]
NO_SUCH_VALUE = -4  # BCQ_ERROR_PLANES


def questions(entries: list[dict[str, Any]], scratch: Path) -> tuple[list[str], list[tuple[int, Any]]]:
    """Commands for valid vectors, and what each is about: the entry's position and None, or the expected values."""
    commands: list[str] = []
    about: list[tuple[int, Any]] = []
    for at, entry in enumerate(entries):
        commands.append(f"{entry['kind']}\t{c_reader.prepared(entry, scratch)}")
        about.append((at, None))
        for name, expected in entry["weights"].items():
            rows = expected["shape"][-2]
            wanted = {0: expected, **{int(p): value for p, value in expected.get("planes", {}).items()}}
            for planes, value in wanted.items():
                commands.append(c_reader.values(name, (0, rows), planes))
                about.append((at, {"name": name, "planes": planes, "value": value}))
    return commands, about


def check_opened(found: Opened, entry: dict[str, Any]) -> None:
    assert found.code == 0, (entry["id"], found.code, found.message)
    assert found.weights == {
        name: {key: expected[key] for key in ("dtype", "shape", "digest")}
        for name, expected in entry["weights"].items()
    }
    assert found.dense == {
        name: {"dtype": expected["dtype"], "shape": expected["shape"], "digest": expected["sha256"]}
        for name, expected in entry["dense"].items()
    }
    assert found.uncovered == entry.get("uncovered", [])


def check_valid(runner: Runner, entries: list[dict[str, Any]], scratch: Path) -> None:
    commands, about = questions(entries, scratch)
    for answer, (at, asked) in zip(runner.ask(commands), about, strict=True):
        entry = entries[at]
        if asked is None:
            check_opened(c_reader.opened(answer), entry)
            continue
        (line,) = answer
        place = (entry["id"], asked["name"], asked["planes"])
        if asked["value"] is None:
            assert line.startswith(f"refused\t{NO_SUCH_VALUE}\t"), place
            continue
        assert line == asked["value"].get("hex", line), place
        assert hashlib.sha256(bytes.fromhex(line)).hexdigest() == asked["value"]["sha256"], place


def check_invalid(runner: Runner, entries: list[dict[str, Any]], scratch: Path) -> None:
    commands = [f"{entry['kind']}\t{c_reader.prepared(entry, scratch)}" for entry in entries]
    found = {
        entry["id"]: f"BCQ-V{c_reader.opened(answer).code}"
        for answer, entry in zip(runner.ask(commands), entries, strict=True)
    }
    assert found == {entry["id"]: entry["rule"] for entry in entries}


def test_every_vector_is_asked() -> None:
    assert len(VALID) >= 40
    assert len(INVALID) >= 300
    assert {entry["kind"] for entry in VALID + INVALID} == {"file", "folder"}


def test_valid_vectors(runner: Runner, tmp_path: Path) -> None:
    check_valid(runner, VALID, tmp_path)


def test_invalid_vectors(runner: Runner, tmp_path: Path) -> None:
    check_invalid(runner, INVALID, tmp_path)


def test_every_way_to_compile_it_gives_the_same(variant: tuple[str, Runner], tmp_path: Path) -> None:
    """Standard C has no folders and no kinds of files; everything else is asked of every variant."""
    name, runner = variant
    kinds = ("file",) if name == "standard-c" else ("file", "folder")
    (tmp_path / "valid").mkdir()
    check_valid(runner, [entry for entry in VALID if entry["kind"] in kinds], tmp_path / "valid")
    check_invalid(runner, [entry for entry in INVALID if entry["kind"] in kinds], tmp_path)


def test_rounding_numbers(runner: Runner) -> None:
    cases = INDEX["numbers"]["rounding"]
    answers = runner.ask([f"round\t{case['binary64']}" for case in cases])
    for case, (line,) in zip(cases, answers, strict=True):
        assert line.split("\t") == [case["F16"], case["BF16"], case["F32"]], case


def test_packed_fields(runner: Runner) -> None:
    cases = INDEX["numbers"]["packed"]
    commands = []
    for case in cases:
        data = struct.pack(f"<{len(case['words'])}I", *(int(word, 16) for word in case["words"]))
        commands.append(f"packed\t{case['bits']}\t{len(case['fields'])}\t{data.hex()}")
    for case, (line,) in zip(cases, runner.ask(commands), strict=True):
        assert [int(value) for value in line.split(",")] == case["fields"]


def test_canonical_json(runner: Runner) -> None:
    """The vectors' texts are canonical; with a space, or written with other escapes, they are not."""
    texts = [case["text"] for case in INDEX["numbers"]["canonical_json"]]
    right = [f'{{"a":{text}}}' for text in texts]
    wrong = [f'{{"a": {text}}}' for text in texts] + [f'{{"a":{text}}} ' for text in texts]
    wrong += ['{"a":"\\u0061"}', '{"a":"\\/"}', '{"a":"\\u000a"}', '{"a":"\\u00E9"}', '{"a":"é"}', '{"a":-0}']
    wrong += ['{"b":1,"a":1}', '{"a":{"b":1,"B":1}}', '{"a":"\x7f"}']
    answers = runner.ask([f"canonical\t{text.encode().hex()}" for text in right + wrong])
    assert [line for (line,) in answers] == ["1"] * len(right) + ["0"] * len(wrong)
