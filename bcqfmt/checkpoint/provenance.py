"""bcq_source/: what rebuilds the source checkpoint, and whether it is all there (spec/provenance-1.0.md)."""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.container.files import SourceFile, hash_file, inside, read_json, read_small
from bcqfmt.container.gguf.header import MAGIC
from bcqfmt.container.header import read_header
from bcqfmt.container.strict_json import JsonFault, canonical, parse
from bcqfmt.errors import BcqError, Finding, Sink, error, escape, refuse
from bcqfmt.weight.scheme_json import Misfit, expect, expect_keys, integer

from .descriptor import check_version
from .folder import SOURCE
from .manifest import check_files, relative_path

RECORD = f"{SOURCE}/source.json"
RAW = f"{SOURCE}/raw.safetensors"


def source_record(folder: Path, sink: Sink) -> dict[str, Any] | None:
    """BCQ-V701: the parsed ``source.json``, or None."""
    try:
        inside(folder, RECORD)
        raw = read_json(folder / RECORD, limits.MAX_JSON_FILE_BYTES, RECORD, "BCQ-V701")
        value = parse(raw)
        if raw != canonical(value).encode("ascii") + b"\n":
            raise Misfit("not canonical JSON and a line feed")
        _check_form(value)
    except BcqError as fault:
        sink(Finding("BCQ-V701", RECORD, "", fault.finding.found, "the record of the source"))
    except (JsonFault, Misfit) as fault:
        sink(Finding("BCQ-V701", RECORD, "", escape(str(fault)), "the record of the source"))
    else:
        record: dict[str, Any] = value
        return record
    return None


def check_provenance(
    folder: Path, files: Collection[str], names: tuple[Collection[str], Collection[str]] | None, sink: Sink
) -> None:
    """BCQ-V701 to V704 for a folder that has ``bcq_source/``.

    ``files`` of the folder; ``names``: of its dense tensors and of its weights; None if not all of them are known.
    """
    record = source_record(folder, sink)
    if record is None:
        return
    archived: dict[str, list[str]] = {}
    for path, entry in record["files"].items():
        verbatim = entry["kind"] == "verbatim"
        place = f"{SOURCE}/files/{path}" if verbatim else f"{SOURCE}/headers/{path}.header"
        if place not in files:
            sink(Finding("BCQ-V702", place, "", "the file does not exist", "the archived file"))
        elif verbatim:
            _check_verbatim(folder, path, entry, sink)
        elif entry["kind"] == "gguf":
            _check_gguf(folder, path, sink)
        else:
            found = _header_names(folder, path, sink)
            if found is not None:
                archived[path] = found
    check_raw(folder, RAW in files, check_rules(record, archived, names, sink), sink)


def _check_form(value: Any) -> None:
    expect_keys(value, {"version", "format", "files", "rules", "tensors"}, {"ignorable"}, "source")
    expect(value, "format", str, "source")
    if not check_version(value, lambda *_: None):
        raise Misfit(f"version {escape(str(value['version']), 40)}")
    kinds = {}
    for path, entry in expect(value, "files", dict, "source").items():
        expect_keys(entry, {"kind", "size", "sha256"}, set(), f"files.{escape(path)}")
        if entry["kind"] not in ("verbatim", "safetensors", "gguf"):
            raise Misfit(f"files.{escape(path)}.kind is none of verbatim, safetensors, gguf")
        kinds[path] = {"size": entry["size"], "sha256": entry["sha256"]}
    check_files(kinds, "files")
    for i, rule in enumerate(expect(value, "rules", list, "source")):
        if not isinstance(rule, dict) or not isinstance(rule.get("rule"), str):
            raise Misfit(f"rules[{i}] has no name")
    if len({canonical(rule) for rule in value["rules"]}) != len(value["rules"]):
        raise Misfit("two equal rules")
    for path, tensors in expect(value, "tensors", dict, "source").items():
        if not relative_path(path) or not isinstance(tensors, dict):
            raise Misfit(f"tensors.{escape(path)} is not an object of a file's tensors")
        for name, entry in tensors.items():
            where = f"tensors.{escape(path)}.{escape(name)}"
            if not isinstance(entry, list) or len(entry) not in (1, 2):
                raise Misfit(f"{where} is not [rule] or [rule, weight]")
            integer({"rule": entry[0]}, "rule", 0, limits.MAX_JSON_INTEGER, where)
            if len(entry) == 2 and not isinstance(entry[1], str):
                raise Misfit(f"{where} names no weight")
    if "ignorable" in value:
        expect(value, "ignorable", dict, "source")


def _check_verbatim(folder: Path, path: str, entry: dict[str, Any], sink: Sink) -> None:
    place = f"{SOURCE}/files/{path}"
    try:
        inside(folder, place)
        opened = SourceFile(folder / place, place)
        digest = hash_file(opened)
        opened.close()
    except BcqError as fault:
        sink(Finding("BCQ-V702", place, "", fault.finding.found, "the archived file"))
        return
    if opened.size != entry["size"] or digest != entry["sha256"]:
        found = f"{opened.size} bytes, sha256 {digest}"
        sink(Finding("BCQ-V702", place, "", found, f"{entry['size']} bytes, sha256 {entry['sha256']}"))


def _header_names(folder: Path, path: str, sink: Sink) -> list[str] | None:
    place = f"{SOURCE}/headers/{path}.header"
    try:
        inside(folder, place)
        # sources may have headers up to the library's own limit, above ours
        raw = read_small(folder / place, limits.MAX_JSON_FILE_BYTES + 8, place, "BCQ-V702")
        if len(raw) < 8 or struct.unpack("<Q", raw[:8])[0] != len(raw) - 8:
            raise JsonFault("json", f"{len(raw)} bytes do not start with their own length")
        value = parse(raw[8:], integers_only=False, constants=False)
        if not isinstance(value, dict):
            raise JsonFault("json", "not an object")
    except BcqError as fault:
        sink(Finding("BCQ-V702", place, "", fault.finding.found, "the archived header"))
        return None
    except JsonFault as fault:
        sink(Finding("BCQ-V702", place, "", escape(fault.detail), "8 bytes of length and that much JSON"))
        return None
    return [name for name in value if name != "__metadata__"]


def _check_gguf(folder: Path, path: str, sink: Sink) -> None:
    """BCQ-V702 for an archived header of GGUF. What it says is the converter's business: it is read when restoring."""
    place = f"{SOURCE}/headers/{path}.header"
    try:
        with closing(SourceFile(inside(folder, place), place)) as opened:
            head = opened.read(0, min(len(MAGIC), opened.size)).tobytes()
            if opened.size > limits.MAX_JSON_FILE_BYTES:
                raise error("BCQ-V702", place, found=f"{opened.size} bytes", expected=f"{limits.MAX_JSON_FILE_BYTES}")
    except BcqError as fault:
        sink(Finding("BCQ-V702", place, "", fault.finding.found, "the archived header"))
        return
    if head != MAGIC:
        sink(Finding("BCQ-V702", place, "", f"a file that begins with {head!a}", f"{MAGIC!a}"))


def check_rules(
    record: dict[str, Any],
    archived: dict[str, list[str]],
    names: tuple[Collection[str], Collection[str]] | None,
    sink: Sink,
) -> set[str]:
    """BCQ-V703; the names that ``raw.safetensors`` has to hold."""

    def report(found: str, expected: str, tensor: str = "") -> None:
        sink(Finding("BCQ-V703", RECORD, tensor, found, expected))

    raw: set[str] = set()
    listed = {path for path, entry in record["files"].items() if entry["kind"] != "verbatim"}
    for path in sorted(set(record["tensors"]) | listed):
        tensors = record["tensors"].get(path, {})
        if path not in listed:
            report(f"tensors of {escape(path)}", "tensors of the model files")
        if path in archived and set(tensors) != set(archived[path]):
            report(f"{len(tensors)} rules for the {len(archived[path])} tensors of {escape(path)}", "one for each")
        for name, entry in tensors.items():
            if entry[0] >= len(record["rules"]):
                report(f"rule {entry[0]}", f"0..{len(record['rules']) - 1}", name)
                continue
            rule = record["rules"][entry[0]]["rule"]
            if rule == "raw" and len(entry) == 2:
                report("rule raw with a weight", "none", name)
            if rule == "raw":
                raw.add(f"{path}/{name}")
            elif rule == "copy":
                if names is not None and (entry[1] if len(entry) == 2 else name) not in names[0]:
                    report("no dense tensor of that name", "the tensor to copy", name)
            elif len(entry) != 2 or (names is not None and entry[1] not in names[1]):
                report(f"weight '{escape(str(entry[-1]))}'", "a weight of this folder", name)
    return raw


def check_raw(folder: Path, there: bool, wanted: set[str], sink: Sink) -> None:
    """BCQ-V704: ``raw.safetensors`` is ``there`` and holds the ``wanted`` tensors and no other, or neither."""
    if not there:
        if wanted:
            sink(Finding("BCQ-V704", RAW, "", "the file does not exist", f"{len(wanted)} tensors"))
        return
    if not wanted:
        sink(Finding("BCQ-V704", RAW, "", "a file that no rule uses", "none"))
        return
    try:
        inside(folder, RAW)
        header = read_header(SourceFile(folder / RAW, RAW), refuse)
    except BcqError as fault:
        sink(Finding("BCQ-V704", RAW, "", fault.finding.found, "a safetensors file"))
        return
    if header is not None and set(header.tensors) != wanted:
        found = set(header.tensors) ^ wanted
        sink(
            Finding("BCQ-V704", RAW, min(found), f"{len(found)} tensors too many or too few", "those with the rule raw")
        )
