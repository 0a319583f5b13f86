"""The decoder of the specification delivers what the vectors say and refuses what they break, naming the rule."""

import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"
VECTORS = SPEC / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text("ascii"))


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decoder = load("bcq_spec_decoder_under_test", SPEC / "decoder.py")


# 200,000 tensors take the decoder, which is plain Python, seconds; the package and the C reader read them every time.
_LONG = dict.fromkeys(("v108-too-many-tensors", "v115-200000-tensors"), pytest.mark.soak)


def by_id(group: str) -> list[Any]:
    return [pytest.param(vector, id=vector["id"], marks=_LONG.get(vector["id"], ())) for vector in INDEX[group]]


def prepare(vector: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the vector with its `setup` applied."""
    source: Path = VECTORS / vector["path"]
    target: Path = tmp_path / vector.get("place", vector["id"])
    if vector["kind"] == "folder":
        shutil.copytree(source, target)
    else:
        data = source.read_bytes()
        for _ in range(vector.get("gzip", 0)):
            data = gzip.decompress(data)
        target.write_bytes(data)
    for step in vector.get("setup", []):
        ((action, what),) = step.items()
        if action == "remove":
            (target / what).unlink()
        elif action == "move":
            (target / what["to"]).parent.mkdir(parents=True, exist_ok=True)
            (target / what["path"]).rename(target / what["to"])
        elif action == "symlink":
            (target / what["path"]).symlink_to(what["target"])
        elif action == "fifo":
            os.mkfifo(target / what)
        elif action == "mkdir":
            (target / what).mkdir()
        elif action == "repeat":
            path, piece = target / what["path"], what["text"].encode()
            path.write_bytes(path.read_bytes().replace(piece, piece * what["count"]))
        elif action == "append_spaces":
            with (target / what["path"]).open("ab") as stream:
                stream.write(b" " * what["count"])
        else:
            pytest.fail(f"unknown step {action}")
    return target


def read(vector: dict[str, Any], tmp_path: Path) -> Any:
    target = prepare(vector, tmp_path)
    return decoder.read_folder(target) if vector["kind"] == "folder" else decoder.read_file(target)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def assert_values(data: bytes, expected: dict[str, Any]) -> None:
    if "hex" in expected:
        assert data.hex() == expected["hex"]
    assert digest(data) == expected["sha256"]


@pytest.mark.parametrize("vector", by_id("valid"))
def test_valid_vectors_give_the_expected_values(vector: dict[str, Any], tmp_path: Path) -> None:
    content = read(vector, tmp_path)
    assert set(content["weights"]) == set(vector["weights"])
    assert content.get("uncovered", []) == vector.get("uncovered", [])
    for name, expected in vector["weights"].items():
        weight = content["weights"][name]
        assert (weight["dtype"], list(weight["shape"])) == (expected["dtype"], expected["shape"])
        assert decoder.weight_digest(weight) == expected["digest"]
        assert_values(decoder.decode(weight), expected)
        for planes, fewer in expected.get("planes", {}).items():
            if fewer is None:
                with pytest.raises(decoder.Refused):
                    decoder.decode(weight, int(planes))
            else:
                assert_values(decoder.decode(weight, int(planes)), fewer)
    assert set(content["dense"]) == set(vector["dense"])
    for name, (dtype, shape, data) in content["dense"].items():
        assert {"dtype": dtype, "shape": list(shape), "sha256": digest(bytes(data))} == vector["dense"][name]


@pytest.mark.parametrize("vector", by_id("invalid"))
def test_invalid_vectors_are_refused_by_their_rule(vector: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(decoder.Refused) as refusal:
        read(vector, tmp_path)
    assert refusal.value.rule == vector["rule"]


def test_folders_with_setup_are_stored_as_they_would_be_without_it(tmp_path: Path) -> None:
    """The committed folder of such a vector is valid by itself, unless `setup` adds bytes or a link to nothing."""
    for vector in INDEX["invalid"]:
        steps = vector.get("setup", [])
        if any("move" in step or "fifo" in step for step in steps):
            read({**vector, "setup": []}, tmp_path)


def test_every_rule_of_the_text_has_a_vector() -> None:
    text = "".join((SPEC / name).read_text("utf-8") for name in ("bcq-1.0.md", "provenance-1.0.md"))
    rules = {f"BCQ-V{number}" for number in range(100, 1000) if f"BCQ-V{number}" in text}
    rules -= set(re.findall(r"^\| (BCQ-V\d{3}) \|", text, re.MULTILINE))  # the table of retired ones
    assert {vector["rule"] for vector in INDEX["invalid"]} == rules


def test_every_feature_and_encoding_has_a_vector() -> None:
    known = {
        "aligned64", "bcq", "byte-floats", "float-zero", "multi-precision", "nonfinite", "offset", "outliers", "perm",
        "second-order", "second-order-offset", "segments", "stack", "super-groups", "table",
    }  # fmt: skip
    assert {feature for vector in INDEX["valid"] for feature in vector["features"]} == known
    encodings = {encoding for vector in INDEX["valid"] for encoding in vector["encodings"]}
    assert encodings == {"affine", "bcq", "float-zero", "offset", "table"}


def test_tiles_and_their_canonical_twins_have_equal_values() -> None:
    tiled, twin = (next(v for v in INDEX["valid"] if v["id"] == i) for i in ("aligned64", "aligned64-twin"))
    assert set(tiled["weights"]) == set(twin["weights"])
    for name, expected in tiled["weights"].items():
        other = twin["weights"][name]
        assert expected["digest"] != other["digest"]
        assert {**expected, "digest": ""} == {**other, "digest": ""}


def test_rounding_numbers() -> None:
    for case in INDEX["numbers"]["rounding"]:
        (x,) = struct.unpack(">d", bytes.fromhex(case["binary64"]))
        for dtype in ("F16", "BF16", "F32"):
            assert decoder.round_once(x, dtype) == int(case[dtype], 16), case


def test_packed_fields() -> None:
    for case in INDEX["numbers"]["packed"]:
        data = struct.pack(f"<{len(case['words'])}I", *(int(word, 16) for word in case["words"]))
        assert decoder.unpack(data, len(case["fields"]), case["bits"]) == case["fields"]
        assert decoder.pack(case["fields"], len(case["fields"]), case["bits"]) == data


def test_canonical_json() -> None:
    for case in INDEX["numbers"]["canonical_json"]:
        assert decoder.canonical(case["value"]) == case["text"]
        assert json.loads(case["text"]) == case["value"]
