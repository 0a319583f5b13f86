"""bcq_manifest.json: written last; size and digest of every file that decides what the model is (spec section 9.3)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bcqfmt.container.strict_json import JsonFault, canonical, parse
from bcqfmt.errors import Finding, Sink, escape
from bcqfmt.limits import MAX_JSON_INTEGER
from bcqfmt.weight.scheme import WeightSpec, features_of
from bcqfmt.weight.scheme_json import Misfit, expect, expect_keys, integer

from .descriptor import (
    VERSION,
    check_tables,
    check_version,
    expect_tables,
    known_features,
    parse_entries,
    parse_schemes,
    parse_weights,
    tables_json,
)
from .folder import MANIFEST

_HEX = re.compile(r"[0-9a-f]{64}")


class FileRecord(NamedTuple):
    """Size and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        return cls(len(data), hashlib.sha256(data).hexdigest())


class WeightRecord(NamedTuple):
    """A weight: what it is, and the file that holds it."""

    spec: WeightSpec
    file: str


@dataclass(slots=True)
class Manifest:
    """The manifest as data."""

    generator: dict[str, str]
    weights: dict[str, WeightRecord]
    files: dict[str, FileRecord]
    version: str = VERSION
    source: dict[str, Any] | None = None
    ignorable: dict[str, Any] | None = None
    features: list[str] = field(default_factory=list)
    faulty: bool = False  # some entries were refused, so it may lack weights and files that exist

    def weights_by_file(self) -> dict[str, dict[str, WeightSpec]]:
        """File -> the weights that it holds, name -> spec."""
        found: dict[str, dict[str, WeightSpec]] = {}
        for name, record in self.weights.items():
            found.setdefault(record.file, {})[name] = record.spec
        return found


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file: canonical JSON with its own digest, and a line feed."""
    specs = {name: record.spec for name, record in manifest.weights.items()}
    schemes, entries = tables_json(specs)
    for name, record in manifest.weights.items():
        entries[name]["file"] = record.file
    value: dict[str, Any] = {
        "version": manifest.version,
        "generator": manifest.generator,
        "features": features_of(specs.values()),
        "schemes": schemes,
        "weights": entries,
        "files": {path: record._asdict() for path, record in manifest.files.items()},
    }
    for key in ("source", "ignorable"):
        if getattr(manifest, key) is not None:
            value[key] = getattr(manifest, key)
    value["sha256"] = hashlib.sha256(canonical(value).encode("ascii")).hexdigest()
    return canonical(value).encode("ascii") + b"\n"


def parse_manifest(raw: bytes, sink: Sink, *, check_digest: bool = True) -> Manifest | None:
    """BCQ-V602, V603 (V205 and V206 for its version and features); None when it cannot be used."""
    faults = 0

    def report(code: str, found: str, expected: str = "", weight: str = "") -> None:
        nonlocal faults
        faults += 1
        kept = code if code in ("BCQ-V205", "BCQ-V206", "BCQ-V603") else "BCQ-V602"
        sink(Finding(kept, MANIFEST, weight, found, expected))

    try:
        value = parse(raw)
        if not isinstance(value, dict):
            raise JsonFault("json", f"a {type(value).__name__}")
    except JsonFault as fault:
        report("BCQ-V602", escape(fault.detail), "a JSON object without duplicate keys")
        return None
    if not check_version(value, report) or not known_features(value, report):
        return None
    if raw != canonical(value).encode("ascii") + b"\n":
        report("BCQ-V602", "another spelling of the same JSON", "canonical JSON and a line feed")
    try:
        _check_form(value)
    except Misfit as misfit:
        report("BCQ-V602", str(misfit))
        return None
    digest = value.pop("sha256")
    if check_digest:
        real = hashlib.sha256(canonical(value).encode("ascii")).hexdigest()
        if real != digest:
            report("BCQ-V603", f"sha256 is stated as {digest}", real)
    schemes = parse_schemes(value["schemes"], report)
    specs = parse_weights(parse_entries(value["weights"], report, ("file",)), schemes, report)
    if len(specs) == len(value["weights"]):
        check_tables(value["features"], value["schemes"], value["weights"], specs, report)
    entries = value["weights"]
    return Manifest(
        version=value["version"],
        generator=value["generator"],
        features=value["features"],
        weights={name: WeightRecord(spec, entries[name]["file"]) for name, spec in specs.items()},
        files={path: FileRecord(entry["size"], entry["sha256"]) for path, entry in value["files"].items()},
        source=value.get("source"),
        ignorable=value.get("ignorable"),
        faulty=faults > 0,
    )


def _check_form(value: dict[str, Any]) -> None:
    required = {"version", "generator", "features", "schemes", "weights", "files", "sha256"}
    expect_keys(value, required, {"source", "ignorable"}, "manifest")
    expect_keys(value["generator"], {"name", "version"}, set(), "generator")
    for key in ("name", "version"):
        expect(value["generator"], key, str, "generator")
    expect_tables(value, "manifest")
    for name, entry in value["weights"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            raise Misfit(f"weights.{escape(name)} names no file")
    check_files(value["files"], "files")
    _digest(value["sha256"], "manifest")
    if "source" in value:
        expect_keys(value["source"], {"format", "files"}, set(), "source")
        expect(value["source"], "format", str, "source")
        check_files(value["source"]["files"], "source.files")


def check_files(files: Any, where: str) -> None:
    """path -> size and sha256, and nothing else."""
    if not isinstance(files, dict):
        raise Misfit(f"{where} is not an object")
    for path, entry in files.items():
        if not relative_path(path):
            raise Misfit(f"{where}: '{escape(path)}' is no relative path")
        place = f"{where}.{escape(path)}"
        expect_keys(entry, {"size", "sha256"}, set(), place)
        integer(entry, "size", 0, MAX_JSON_INTEGER, place)
        _digest(entry["sha256"], place)


def relative_path(path: str) -> bool:
    """Whether a path stays below its folder: components that are neither empty nor ``.`` nor ``..``."""
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _digest(value: Any, where: str) -> None:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise Misfit(f"{where}: sha256 is not 64 lower-case hexadecimal digits")
