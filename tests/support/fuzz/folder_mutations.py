"""Folders that are slightly wrong, made from a right one; signed again, so that deeper rules are reached too."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from fuzz.header_mutations import mutate_value, mutated_file, mutated_text, with_header

MANIFEST = "bcq_manifest.json"


def canonical(value: Any) -> bytes:
    """Canonical JSON and a line feed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def sign(folder: Path, files: bool) -> None:
    """The manifest's own digest made right; with ``files`` also the size and digest of every file it names."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(manifest, dict):
        return
    table = manifest.get("files")
    for name, entry in table.items() if files and isinstance(table, dict) else ():
        if isinstance(entry, dict) and (folder / name).is_file():
            data = (folder / name).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest.pop("sha256", None)
    manifest["sha256"] = hashlib.sha256(canonical(manifest)[:-1]).hexdigest()
    path.write_bytes(canonical(manifest))


def mutate_json(data: bytes, rng: random.Random, canonical_text: bool) -> bytes:
    """A JSON file with one place changed as text, or as a value."""
    if rng.random() < 0.2:
        return mutated_text(data.decode(), rng).encode("utf-8", "surrogatepass")
    value = json.loads(data)
    mutate_value(value, rng)
    return canonical(value) if canonical_text else json.dumps(value, indent=rng.choice((None, 2))).encode()


def mutate_folder(folder: Path, rng: random.Random) -> None:
    """One file of the folder changed, in place; mostly signed again."""
    path = rng.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
    data = path.read_bytes()
    read = data[8:] if path.suffix in (".safetensors", ".header") else data
    if not read.startswith(b"{"):  # whatever it is called, bytes to us
        path.write_bytes(data[:-1] if data else b"x")
    elif path.suffix == ".json":
        path.write_bytes(mutate_json(data, rng, path.name in (MANIFEST, "source.json")))
    elif path.suffix == ".safetensors":
        path.write_bytes(mutated_file(data, rng))
    elif path.suffix == ".header":
        path.write_bytes(with_header(mutate_json(data[8:], rng, False), b"", rng))
    elif rng.random() < 0.5:
        path.write_bytes(data + b"x")
    else:
        path.unlink()
    roll = rng.random()
    if roll < 0.8:
        sign(folder, files=roll < 0.7)
