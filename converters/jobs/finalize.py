"""Closing a conversion: provenance, side files, index, config.json, model card, and the manifest last."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE, config_entries, is_documentation
from bcqfmt.checkpoint.manifest import FileRecord, Manifest, WeightRecord, manifest_bytes
from bcqfmt.checkpoint.model_file import ModelFile, read_model_file
from bcqfmt.checkpoint.provenance import RAW, RECORD
from bcqfmt.checkpoint.writer import write_tensors
from bcqfmt.container.durable import make_folders, write_file
from bcqfmt.container.files import SourceFile
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import canonical
from bcqfmt.converters.source.checkpoint import INDEX_SUFFIX, QUANT_FILES, SourceCheckpoint
from bcqfmt.converters.source.front_matter import CARD
from bcqfmt.converters.source.gguf import gaps
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import error, refuse
from bcqfmt.version import __version__
from bcqfmt.weight.scheme import features_of

from .model_card import Facts, How, converted, model_card
from .paths import written_anew
from .plan import Plan
from .source_files import SideFile, digest_step
from .workspace import Workspace


def finalize(
    source: SourceCheckpoint,
    plan: Plan,
    space: Workspace,
    settings: Settings,
    provenance: bool,
    extra: Mapping[str, bytes] | None = None,
    how: How | None = None,
) -> None:
    """Write everything but the shards. BCQ-E404 unless every shard has its record.

    ``extra``: more files of the folder, path -> content; they take the place of others of the same name. ``how``: what
    the model card says about the making, by default that it was converted.
    """
    records = _records(plan, space)
    sources = _source_digests(source, plan, space)
    folder = space.folder
    files = {record["file"]: FileRecord(record["size"], record["sha256"]) for record in records}
    opened = [_opened(folder, record["file"]) for record in records]
    verbatim = {path: SideFile(source, plan, path) for path in source.side_files}
    if provenance:
        _write_provenance(source, records, sources, verbatim, settings, folder, files)
    features = features_of(spec for file in opened for spec in file.specs.values())
    card = verbatim.get(CARD)
    facts = Facts(
        plan.options["name"],
        plan.options.get("revision", ""),
        source.config,
        card.start(limits.MAX_CONFIG_BYTES) if card else None,
        source.side_files,
        opened,
        plan.coverage,
        sum(record.size for record in sources.values()),
        provenance,
    )
    own = _folder_files(source, opened, features, verbatim)
    own[CARD] = model_card(facts, how or converted(settings, provenance))
    own |= extra or {}
    for name, data in own.items():
        _put(folder, name, data, files)
    for path, side in verbatim.items():
        if not provenance and own.get(path) is not side:  # not copied, so not compared yet
            side.check()
    weights = {name: WeightRecord(spec, file.source.shown) for file in opened for name, spec in file.specs.items()}
    known = {path: file.record for path, file in verbatim.items()}
    manifest = Manifest(
        generator={"name": "bcqfmt", "version": __version__},
        weights=weights,
        files=files,
        source={
            "format": settings.method or str(plan.options["layout"]),
            "files": {path: record._asdict() for path, record in {**sources, **known}.items()},
        },
        ignorable={"asked": plan.asked} if plan.asked else None,
    )
    write_file(folder / MANIFEST, _fitting(MANIFEST, manifest_bytes(manifest), limits.MAX_JSON_FILE_BYTES))


def config_text(source: SourceCheckpoint, features: Iterable[str]) -> bytes:
    """config.json of the folder: the model's own, without how it was quantized; BCQ-E803 beyond what readers take."""
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "compression_config")}
    return _pretty(CONFIG, config | config_entries(features), limits.MAX_CONFIG_BYTES, ensure_ascii=False)


def _fitting(name: str, data: bytes, most: int, hint: str | None = None) -> bytes:
    """``data``, or BCQ-E803 where :func:`bcqfmt.container.files.read_json` would refuse it."""
    items = sum(map(data.count, b",[{"))
    if len(data) > most or items > limits.MAX_JSON_FILE_ITEMS:
        found = f"it would have {len(data):,} bytes and {items:,} values"
        expected = f"at most {most:,} and {limits.MAX_JSON_FILE_ITEMS:,}"
        raise error("BCQ-E803", name, found=found, expected=expected, hint=hint)
    return data


def _pretty(name: str, value: Any, most: int, **options: Any) -> bytes:
    """Indented, unless it is too long for that."""
    data = json.dumps(value, indent=2, **options).encode() + b"\n"
    if len(data) > most:
        data = json.dumps(value, separators=(",", ":"), **options).encode() + b"\n"
    hint = "make the one of the source smaller" if name == CONFIG else None
    return _fitting(name, data, most, hint)


def _records(plan: Plan, space: Workspace) -> list[dict[str, Any]]:
    """The record of every shard. After a run in parts their files are hashed again, several at a time."""
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        records = list(pool.map(lambda shard: space.done(shard.file, plan), plan.shards))
    finally:
        pool.shutdown(cancel_futures=True)
    missing = [shard.file for shard, record in zip(plan.shards, records, strict=True) if record is None]
    if missing:
        found = f"{len(missing)} of {len(plan.shards)} shards are not done: {', '.join(missing[:3])}"
        raise error("BCQ-E404", str(space.folder), found=found, expected="all of them")
    return [record for record in records if record is not None]


def _source_digests(source: SourceCheckpoint, plan: Plan, space: Workspace) -> dict[str, FileRecord]:
    found = {}
    for i, path in enumerate(source.models):
        record = space.done(digest_step(i), plan)
        if record is None:
            expected = "all of them"
            raise error("BCQ-E404", str(space.folder), found=f"the digest of {path} is not done", expected=expected)
        found[path] = FileRecord(record["source_size"], record["source_sha256"])
    return found


def _opened(folder: Path, name: str) -> ModelFile:
    file = read_model_file(SourceFile(folder / name, name), refuse)
    assert file is not None  # refuse has raised otherwise
    return file


def _write_provenance(
    source: SourceCheckpoint,
    records: list[dict[str, Any]],
    sources: dict[str, FileRecord],
    verbatim: Mapping[str, SideFile],
    settings: Settings,
    folder: Path,
    files: dict[str, FileRecord],
) -> None:
    """``bcq_source/``: verbatim files, headers, the rules, and what no rule reproduces."""
    rules: dict[str, int] = {}
    tensors: dict[str, dict[str, list[Any]]] = {path: {} for path in source.models}
    for record in records:
        for name, (rule, *weight) in record["rules"].items():
            number = rules.setdefault(canonical(rule), len(rules))
            tensors[source.home[name]][name] = [number, *weight]
    between = {}  # the bytes of a GGUF file that belong to no tensor, unless they are all zero
    for path, model in source.models.items():
        if model.gguf is not None and (left := gaps(model.source, model.gguf)) is not None:
            between[path] = left
    for path in between:
        tensors[path][""] = [rules.setdefault(canonical({"rule": "raw"}), len(rules))]
    table = sorted(rules)
    order = {number: table.index(text) for text, number in rules.items()}
    listed = {
        path: {name: [order[entry[0]], *entry[1:]] for name, entry in entries.items()}
        for path, entries in tensors.items()
    }
    entries = {}
    for path, known in sources.items():
        kind = "safetensors" if source.models[path].gguf is None else "gguf"
        entries[path] = {"kind": kind, **known._asdict()}
    for path, file in verbatim.items():
        entries[path] = {"kind": "verbatim", **file.record._asdict()}
        _put(folder, f"{SOURCE}/files/{path}", file, files)
    for path, model in source.models.items():
        _put(folder, f"{SOURCE}/headers/{path}.header", model.header_bytes(), files)
    value = {
        "version": "1.0",
        "format": settings.method or "unknown",
        "files": entries,
        "rules": [json.loads(text) for text in table],
        "tensors": listed,
    }
    if source.left_out:
        value["ignorable"] = {"left_out": source.left_out}
    hint = "start anew without the source: --overwrite --no-provenance"
    text = canonical(value).encode("ascii") + b"\n"
    _put(folder, RECORD, _fitting(RECORD, text, limits.MAX_JSON_FILE_BYTES, hint), files)
    raw = {
        f"{path}/{name}": source.stored(name).renamed(f"{path}/{name}")
        for path, entries_of in listed.items()
        for name, entry in entries_of.items()
        if name and value["rules"][entry[0]] == {"rule": "raw"}  # type: ignore[index]
    }
    raw |= {f"{path}/": StoredTensor.from_array("", left) for path, left in between.items()}
    if raw:
        files[RAW] = write_tensors(folder / RAW, raw, {"format": "pt"})


def _folder_files(
    source: SourceCheckpoint, opened: list[ModelFile], features: list[str], verbatim: Mapping[str, SideFile]
) -> dict[str, bytes | SideFile]:
    """Side files as they are; new config.json and index; quantization files of other tools left out."""
    left_out = {*QUANT_FILES, *(path for path in verbatim if path.endswith(INDEX_SUFFIX) or written_anew(path))}
    found: dict[str, bytes | SideFile] = {
        path: file for path, file in verbatim.items() if path not in left_out and not path.startswith(".")
    }
    found[CONFIG] = config_text(source, features)
    if len(opened) > 1:
        total = sum(e.end - e.begin for file in opened for e in file.header.tensors.values())
        names = {name: file.source.shown for file in opened for name in file.header.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": names}
        found[INDEX] = _pretty(INDEX, index, limits.MAX_JSON_FILE_BYTES, sort_keys=True)
    return found


def _put(folder: Path, name: str, data: bytes | SideFile, files: dict[str, FileRecord]) -> None:
    if isinstance(data, SideFile):
        data.copy_to(folder / name)
        record = data.record
    else:
        make_folders((folder / name).parent)
        write_file(folder / name, data)
        record = FileRecord.of(data)
    if not is_documentation(name):
        files[name] = record
