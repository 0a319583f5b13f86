"""index.json: what every vector is expected to give, found by the decoder and by the oracle."""

import importlib.util
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .build import exact, little, sha256
from .catalogue import Invalid, Valid
from .oracle import NoValueError, values
from .primitives import numbers
from .weights import Weight, digest, features

SMALL = 256  # elements up to which the values themselves stand in the index


def load_decoder(path: Path) -> ModuleType:
    """spec/decoder.py, which knows nothing of this package."""
    spec = importlib.util.spec_from_file_location("bcq_spec_decoder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store(content: bytes | dict[str, bytes], target: Path) -> None:
    """Writes a file or a folder."""
    if isinstance(content, bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return
    for path, data in content.items():
        store(data, target / path)


def apply(steps: Iterable[Any], folder: Path) -> None:
    """The steps of `setup`, on a copy of a folder."""
    for step in steps:
        ((action, what),) = step.items()
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
            text = (folder / what["path"]).read_bytes()
            (folder / what["path"]).write_bytes(
                text.replace(what["text"].encode(), what["text"].encode() * what["count"])
            )
        else:
            assert action == "append_spaces", action
            with (folder / what["path"]).open("ab") as f:
                f.write(b" " * what["count"])


def decoded(data: bytes, elements: int) -> dict[str, Any]:
    """A digest, and the values where they are few."""
    return {"sha256": sha256(data), **({"hex": data.hex()} if elements <= SMALL else {})}


def hand_bytes(weight: Weight, expected: list[float] | str) -> bytes:
    """Values found by hand as raw bytes."""
    if isinstance(expected, str):
        return bytes.fromhex(expected)
    return little(weight.dtype, [exact(weight.dtype, x) for x in expected])


def weight_entry(vector: Valid, weight: Weight, found: Any, decoder: ModuleType) -> dict[str, Any]:
    """The expectation for one weight: decoder, oracle and hand must agree."""
    where = f"{vector.id}: {weight.name}"
    data = decoder.decode(found)
    assert data == values(weight), f"{where}: decoder and oracle disagree"
    if weight.name in vector.expect:
        assert data == hand_bytes(weight, vector.expect[weight.name]), f"{where}: not what was found by hand"
    assert decoder.weight_digest(found) == digest(weight), f"{where}: digest"
    elements = 1
    for d in weight.shape:
        elements *= d
    entry = {
        "dtype": weight.dtype,
        "shape": weight.shape,
        "digest": digest(weight),
        **decoded(data, elements),
    }
    if vector.planes:
        entry["planes"] = {
            str(p): fewer(weight, found, decoder, p, elements, where) for p in range(1, weight.planes + 1)
        }
    return entry


def fewer(weight: Weight, found: Any, decoder: ModuleType, p: int, elements: int, where: str) -> Any:
    """The expectation for the first p planes; null where there is no value."""
    try:
        data = values(weight, p)
    except NoValueError:
        try:
            decoder.decode(found, p)
        except decoder.Refused:
            return None
        raise AssertionError(f"{where}: the decoder delivers {p} planes") from None
    assert decoder.decode(found, p) == data, f"{where}: decoder and oracle disagree for {p} planes"
    return decoded(data, elements)


def valid_entry(vector: Valid, decoder: ModuleType, scratch: Path) -> dict[str, Any]:
    """The entry of a valid vector, read from a copy on disk."""
    folder = isinstance(vector.content, dict)
    target = scratch / (vector.place or vector.id)
    store(vector.content, target)
    apply(vector.setup, target)
    found = decoder.read_folder(target) if folder else decoder.read_file(target)
    assert set(found["weights"]) == {w.name for w in vector.weights}, vector.id
    dense = {n: (t.dtype, list(t.shape), t.data) for n, t in vector.dense.items()}
    assert {n: (d, list(s), bytes(b)) for n, (d, s, b) in found["dense"].items()} == dense, vector.id
    assert found.get("uncovered", []) == vector.uncovered, vector.id
    shutil.rmtree(target) if folder else target.unlink()
    return {
        "id": vector.id,
        "path": path_of("valid", vector.id, vector.content),
        "kind": "folder" if folder else "file",
        "comment": vector.comment,
        "features": features(vector.weights),
        "encodings": sorted({s.spec["encoding"] for w in vector.weights for s in w.segments}),
        "weights": {w.name: weight_entry(vector, w, found["weights"][w.name], decoder) for w in vector.weights},
        "dense": {n: {"dtype": d, "shape": s, "sha256": sha256(b)} for n, (d, s, b) in dense.items()},
        **({"uncovered": vector.uncovered} if vector.uncovered else {}),
        **({"place": vector.place} if vector.place else {}),
        **({"setup": vector.setup} if vector.setup else {}),
    }


def path_of(group: str, name: str, content: bytes | dict[str, bytes], zipped: bool = False) -> str:
    """Where a vector lies. Compressed ones are compressed twice: the second time takes off the most."""
    suffix = "" if isinstance(content, dict) else ".safetensors"
    return f"{group}/{name}{suffix}{'.gz.gz' if zipped else ''}"


def level(rule: str) -> str:
    """The level of reading that judges a rule (section 1.1)."""
    if rule[1] == "4":
        return "read"
    later = {
        "V504",
        "V507",
        *(f"V{number}" for number in range(510, 514)),
        *(f"V{number}" for number in range(603, 705)),
    }
    return "verify" if rule in later else "open"


def invalid_entry(vector: Invalid) -> dict[str, Any]:
    """The entry of an invalid vector."""
    return {
        "id": vector.id,
        "path": path_of("invalid", vector.id, vector.content, vector.gzip),
        "kind": "folder" if isinstance(vector.content, dict) else "file",
        "rule": f"BCQ-{vector.rule}",
        "level": level(vector.rule),
        "comment": vector.comment,
        **({"gzip": 2} if vector.gzip else {}),
        **({"setup": vector.setup} if vector.setup else {}),
        **({"schema": vector.schema} if vector.schema else {}),
    }


def index(valid: list[Valid], invalid: list[Invalid], decoder: ModuleType) -> dict[str, Any]:
    """The whole index."""
    with tempfile.TemporaryDirectory() as scratch:
        entries = [valid_entry(v, decoder, Path(scratch).resolve()) for v in valid]
    for group in (valid, invalid):
        ids = [v.id for v in group]
        assert len(set(ids)) == len(ids), sorted(i for i in ids if ids.count(i) > 1)
    numbers_found = numbers()
    for case in numbers_found["rounding"]:
        x = float_of(case["binary64"])
        for dtype in ("F16", "BF16", "F32"):
            assert decoder.round_once(x, dtype) == int(case[dtype], 16), (dtype, case)
    return {
        "format": "bcq-vectors-1",
        "valid": sorted(entries, key=lambda e: str(e["id"])),
        "invalid": sorted((invalid_entry(v) for v in invalid), key=lambda e: str(e["id"])),
        "numbers": numbers_found,
    }


def float_of(pattern: str) -> float:
    """binary64 from sixteen hexadecimal digits."""
    value: float = struct.unpack(">d", bytes.fromhex(pattern))[0]
    return value
