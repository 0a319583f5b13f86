"""The package against spec/vectors: every value of the valid ones, the one rule of the invalid ones."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt import BcqError, StoredTensor, UnsupportedError
from bcqfmt.container.dtypes import round_to
from bcqfmt.container.strict_json import canonical, parse
from bcqfmt.weight.packing import pack, unpack
from weights import samples

INDEX = samples.vector_index()
VALID = {entry["id"]: entry for entry in INDEX["valid"]}
INVALID = {entry["id"]: entry for entry in INDEX["invalid"]}


def prepared(entry: dict[str, Any], scratch: Path) -> Path:
    """The vector where it can be read: expanded, copied, its setup applied."""
    source = samples.VECTORS / entry["path"]
    if entry["kind"] == "file":
        if not entry.get("gzip"):
            return source
        data = source.read_bytes()
        for _ in range(int(entry["gzip"])):
            data = gzip.decompress(data)
        target = scratch / f"{entry['id']}.safetensors"
        target.write_bytes(data)
        return target
    if not entry.get("setup") and not entry.get("place"):
        return source
    folder = scratch / (entry.get("place") or "folder/model")
    folder.parent.mkdir(parents=True)
    shutil.copytree(source, folder)
    for step in entry.get("setup", []):
        ((action, what),) = step.items()
        apply(folder, action, what)
    return folder


def apply(folder: Path, action: str, what: Any) -> None:
    if action == "remove":
        (folder / what).unlink()
    elif action == "move":
        target = folder / what["to"]
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / what["path"]).rename(target)
    elif action == "symlink":
        (folder / what["path"]).symlink_to(what["target"])
    elif action == "fifo":
        os.mkfifo(folder / what)
    elif action == "mkdir":
        (folder / what).mkdir()
    elif action == "repeat":
        path, piece = folder / what["path"], what["text"].encode()
        path.write_bytes(path.read_bytes().replace(piece, piece * what["count"]))
    elif action == "append_spaces":
        with (folder / what["path"]).open("ab") as file:
            file.write(b" " * what["count"])
    else:
        raise AssertionError(f"a step that this test does not know: {action}")


def test_there_is_something_to_test() -> None:
    assert INDEX["format"] == "bcq-vectors-1"
    assert len(VALID) >= 40
    assert len(INVALID) >= 200


@pytest.mark.parametrize("name", VALID)
def test_valid(name: str, tmp_path: Path) -> None:
    entry = VALID[name]
    path = prepared(entry, tmp_path)
    report = bcqfmt.validate(path, deep=True)
    assert not report.errors
    notes = {"BCQ-E504", "BCQ-E505"}
    assert {f.code for f in report.findings} - notes <= {"BCQ-E501", "BCQ-E503"}
    assert sorted(f.file for f in report.findings if f.code in notes) == entry.get("uncovered", [])
    assert ("BCQ-E501" in {f.code for f in report.findings}) == (entry["kind"] == "file")
    with bcqfmt.open(path) as checkpoint:
        assert checkpoint.features == entry["features"]
        weights = dict(checkpoint.weights())
        assert set(weights) == set(entry["weights"])
        assert {s.encoding for w in weights.values() for s in w.scheme.segments} == set(entry["encodings"])
        for weight_name, expected in entry["weights"].items():
            check_weight(checkpoint.weight(weight_name), expected)
        dense = dict(checkpoint.dense())
        assert set(dense) == set(entry["dense"])
        for tensor_name, expected in entry["dense"].items():
            found = checkpoint[tensor_name]
            assert isinstance(found, StoredTensor)
            assert (found.dtype, list(found.shape)) == (expected["dtype"], expected["shape"])
            assert hashlib.sha256(found.tobytes()).hexdigest() == expected["sha256"]
        assert not checkpoint.warnings


def check_weight(weight: bcqfmt.BcqWeight, expected: dict[str, Any]) -> None:
    assert (weight.dtype, list(weight.shape)) == (expected["dtype"], expected["shape"])
    assert weight.digest() == expected["digest"]
    check_values(weight.dequantize().tobytes(), expected)
    for planes, wanted in expected.get("planes", {}).items():
        if wanted is None:
            with pytest.raises(UnsupportedError) as caught:
                weight.dequantize(planes=int(planes))
            assert caught.value.code == "BCQ-E304"
        else:
            check_values(weight.dequantize(planes=int(planes)).tobytes(), wanted)
    for row in range(min(weight.spec.out, 3)):
        rows = weight.dequantize(rows=(row, row + 1))
        assert rows.tobytes() == weight.dequantize()[..., row : row + 1, :].tobytes()


def check_values(raw: bytes, expected: dict[str, Any]) -> None:
    if "hex" in expected:
        assert raw.hex() == expected["hex"]
    assert hashlib.sha256(raw).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str, tmp_path: Path) -> None:
    """Exactly this rule, and a reader that is given the file gets an error of ours or nothing at all."""
    entry = INVALID[name]
    path = prepared(entry, tmp_path)
    report = bcqfmt.validate(path, deep=True)
    assert {finding.code for finding in report.errors} == {entry["rule"]}
    assert refused_with(path) in (entry["rule"], None)


def refused_with(path: Path) -> str | None:
    """The code with which the reader refuses; None when it finds nothing to refuse."""
    try:
        with bcqfmt.open(path) as checkpoint:
            for _, weight in checkpoint.weights():
                weight.check()
            list(checkpoint.dense())
    except BcqError as fault:
        return fault.code
    return None


UNOPENED = {"v508-config-pipe", "v508-config-folder"}  # this reader does not open config.json
OPENING = [name for name, entry in INVALID.items() if entry["level"] == "open" and name not in UNOPENED]
READING = [name for name, entry in INVALID.items() if entry["level"] == "read"]


@pytest.mark.parametrize("name", OPENING)
def test_the_reader_refuses_when_it_opens(name: str, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught, bcqfmt.open(prepared(INVALID[name], tmp_path)) as checkpoint:
        list(checkpoint.files())
    assert caught.value.code == INVALID[name]["rule"]


@pytest.mark.parametrize("name", READING)
def test_the_reader_refuses_when_it_reads_a_weight(name: str, tmp_path: Path) -> None:
    assert refused_with(prepared(INVALID[name], tmp_path)) == INVALID[name]["rule"]


@pytest.mark.parametrize("i", range(len(INDEX["numbers"]["packed"])))
def test_packed(i: int) -> None:
    case = INDEX["numbers"]["packed"][i]
    words = pack(np.array(case["fields"]), case["bits"])
    assert [f"{word:08x}" for word in words] == case["words"]
    assert unpack(words, case["bits"], len(case["fields"])).tolist() == case["fields"]


def test_rounding() -> None:
    cases = INDEX["numbers"]["rounding"]
    assert len(cases) > 50
    values = np.array([struct.unpack(">d", bytes.fromhex(case["binary64"]))[0] for case in cases])
    for dtype, digits in (("F16", 4), ("BF16", 4), ("F32", 8)):
        kind = np.uint16 if digits == 4 else np.uint32
        found = [f"{pattern:0{digits}x}" for pattern in round_to(values, dtype).view(kind)]
        assert found == [case[dtype] for case in cases]


def test_canonical_json() -> None:
    for case in INDEX["numbers"]["canonical_json"]:
        assert canonical(case["value"]) == case["text"]
        assert parse(case["text"].encode()) == case["value"]


def test_every_kind_of_number_is_known_here() -> None:
    assert set(INDEX["numbers"]) == {"packed", "rounding", "canonical_json"}
