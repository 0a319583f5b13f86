"""schema.json is a schema, and says of the vectors' JSON texts what the rules of their form say."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SPEC = Path(__file__).resolve().parents[2] / "spec"
VECTORS = SPEC / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text("ascii"))
SCHEMA = json.loads((SPEC / "schema.json").read_text("utf-8"))
RULES = {"BCQ-V208": "descriptor", "BCQ-V602": "manifest", "BCQ-V701": "source"}


def fits(definition: str, value: Any) -> bool:
    schema = {"$ref": f"#/$defs/{definition}", "$defs": SCHEMA["$defs"]}
    return bool(Draft202012Validator(schema).is_valid(value))


def header(path: Path) -> Any:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def texts(vector: dict[str, Any]) -> list[tuple[str, Any]]:
    """Definition and value of every JSON text of a vector that is read as strictly as a schema can say."""
    path = VECTORS / vector["path"]
    models = [path] if vector["kind"] == "file" else [path / "model.safetensors", *path.glob("model-*.safetensors")]
    found: list[tuple[str, Any]] = []
    for model in models:
        if model.exists():
            entries = header(model)
            found += [("header", entries), ("descriptor", json.loads(entries["__metadata__"]["bcqfmt"]))]
    for name, definition in (("bcq_manifest.json", "manifest"), ("bcq_source/source.json", "source")):
        if vector["kind"] == "folder" and (path / name).exists():
            found.append((definition, json.loads((path / name).read_bytes())))
    return found


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def objects(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        return [node, *(found for value in node.values() for found in objects(value))]
    return [found for value in node for found in objects(value)] if isinstance(node, list) else []


def test_only_ignorable_and_the_parameters_of_rules_are_open() -> None:
    free = [SCHEMA["$defs"]["ignorable"], SCHEMA["$defs"]["rule"]]
    declared = [node for node in objects(SCHEMA) if node.get("type") == "object"]
    assert [node for node in declared if "additionalProperties" not in node] == free


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in INDEX["valid"]])
def test_it_accepts_valid_texts(vector: dict[str, Any]) -> None:
    found = texts(vector)
    assert found
    for definition, value in found:
        assert fits(definition, value), definition
        if definition != "header":
            assert Draft202012Validator(SCHEMA).is_valid(value)


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in INDEX["invalid"] if "schema" in v])
def test_it_rejects_texts_of_the_wrong_form(vector: dict[str, Any]) -> None:
    assert RULES[vector["rule"]] == vector["schema"]
    verdicts = {definition: fits(definition, value) for definition, value in texts(vector) if definition != "header"}
    assert verdicts[vector["schema"]] is False
    assert all(good for definition, good in verdicts.items() if definition != vector["schema"])


@pytest.mark.parametrize("prefix", ["v205-", "v206-", "v207-", "v209-", "v210-", "v211-", "v212-", "v213-", "v608-"])
def test_it_leaves_other_rules_alone(prefix: str) -> None:
    """What has a rule of its own does not break the rule of form as well."""
    for vector in INDEX["invalid"]:
        if vector["id"].startswith(prefix) and vector["id"] not in ("v205-absent", "v205-not-string"):
            for definition, value in texts(vector):
                assert fits(definition, value), (vector["id"], definition)
