"""A source checkpoint: a strict, read-only view of a model folder that some other tool wrote.

Only what the container itself demands is demanded here (spec BCQ-V101 to V116 and V118): a source may be
unaligned, have any names and any number of metadata keys, and must come back byte for byte.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, MANIFEST, SHARD_NAME
from bcqfmt.container.files import ByteSource, SourceFile, cannot_list, inside, read_small
from bcqfmt.container.header import Header, read_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, check_limits, parse
from bcqfmt.errors import BcqError, Finding, error, escape, refuse

__all__ = ["SourceCheckpoint", "SourceModel", "open_source"]

QUANT_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".ggml", ".onnx", ".msgpack", ".h5", ".npz")


@dataclass(slots=True)
class SourceModel:
    """A safetensors file of the source: its header as read, and the very bytes of it."""

    path: str
    source: ByteSource
    header: Header

    def header_bytes(self) -> bytes:
        """The first 8+N bytes of the file."""
        return self.source.read(0, self.header.data_start).tobytes()


@dataclass(slots=True)
class SourceCheckpoint:
    """A folder: model files, tensors by name, configurations, and every other file that must come back.

    ``foreign`` are weight files of other kinds that lie beside the model; they are listed, never opened or carried.
    """

    folder: Path
    models: dict[str, SourceModel]
    tensors: dict[str, StoredTensor]
    home: dict[str, str]
    config: dict[str, Any]
    quant: dict[str, dict[str, Any]]
    side_files: list[str]
    foreign: list[str]
    warnings: list[Finding] = field(default_factory=list)

    def warn(self, code: str, found: str, expected: str = "", tensor: str = "") -> None:
        """Note something that does not stop the conversion."""
        self.warnings.append(Finding(code, self.folder.name, tensor, found, expected))

    @property
    def metadata(self) -> dict[str, str]:
        """``__metadata__`` of all model files together; the first file wins."""
        found: dict[str, str] = {}
        for model in self.models.values():
            found = {**model.header.metadata, **found}
        return found


def open_source(folder: Path) -> SourceCheckpoint:
    """Open a source folder. Headers are read and checked; no data, and nothing is ever written to it."""
    if not folder.name:
        folder = folder.resolve()  # "." has no name to show
    if not folder.is_dir():
        lone = folder.exists()
        raise error(
            "BCQ-E101",
            str(folder),
            found="a file" if lone else "no such folder",
            expected="a model folder",
            hint="name the folder that it is in" if lone else None,
        )
    if os.path.lexists(folder / MANIFEST):
        raise error("BCQ-E612", folder.name, found=f"it has a {MANIFEST}", expected="a checkpoint of another format")
    _check_name(folder.name)
    files = _files(folder)
    models = _models(folder, files)
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, str] = {}
    for path, model in models.items():
        for name, entry in model.header.tensors.items():
            if name in home:
                raise error("BCQ-V505", path, name, f"also in {home[name]}", "one file")
            home[name] = path
            offset = model.header.data_start + entry.begin
            tensors[name] = StoredTensor(name, entry.dtype, entry.shape, source=model.source, offset=offset)
    foreign = [name for name in files if name.endswith(FOREIGN)]
    side = [name for name in files if name not in models and name not in foreign]
    config = _json(folder, CONFIG) if CONFIG in files else {}
    if CONFIG not in files:
        raise error("BCQ-V510", CONFIG, found="the file does not exist", expected="the model's configuration")
    quant = {name: _json(folder, name) for name in QUANT_FILES if name in files}
    if isinstance(config.get("quantization_config"), dict):
        quant[CONFIG] = config["quantization_config"]
    elif isinstance(config.get("compression_config"), dict):  # what compressed-tensors once called it
        quant[CONFIG] = config["compression_config"]
    return SourceCheckpoint(folder, models, tensors, home, config, quant, side, foreign)


def _check_name(name: str) -> None:
    """BCQ-E102 for a name that would be written down otherwise in another locale: all of them are UTF-8 here."""
    utf8 = sys.getfilesystemencoding().lower() == "utf-8"
    if not name.isascii() and (not utf8 or any("\ud800" <= character <= "\udfff" for character in name)):
        found = f"a name that {'this locale' if not utf8 else 'UTF-8'} cannot read"
        raise error("BCQ-E102", name, found=found, hint="set PYTHONUTF8=1; if that does not help, rename it to UTF-8")


def _files(folder: Path) -> list[str]:
    """Relative paths of the regular files; version control and download caches are not part of a model."""
    found = []
    for top, folders, names in os.walk(folder, onerror=cannot_list):
        folders[:] = sorted(name for name in folders if name not in (".git", ".cache"))
        for name in names:
            path = (Path(top) / name).relative_to(folder).as_posix()
            _check_name(path)
            inside(folder, path)
            found.append(path)
    return sorted(found)


def _models(folder: Path, files: list[str]) -> dict[str, SourceModel]:
    indexes = [name for name in files if name.endswith(".safetensors.index.json") and "/" not in name]
    top = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if len(indexes) > 1:
        raise error("BCQ-V506", folder.name, found=f"{len(indexes)} index files", expected="one")
    if indexes:
        names = _shards(folder, indexes[0])
        extra = sorted(set(top) - set(names))
        if extra:
            raise error(
                "BCQ-V506", folder.name, found=f"an index and, beside its shards, {escape(', '.join(extra[:3]))}"
            )
    elif len(top) > 1:
        raise error("BCQ-V506", folder.name, found=f"{len(top)} model files and no index", expected="one, or an index")
    elif top:
        names = top
    else:
        raise _nothing(folder, files)
    models = {}
    for name in names:
        source = SourceFile(inside(folder, name), name)
        header = read_header(source, refuse)
        assert header is not None  # refuse has raised otherwise
        models[name] = SourceModel(name, source, header)
    if indexes:
        _check_index(folder, indexes[0], models)
    return models


def _shards(folder: Path, index: str) -> list[str]:
    names = sorted(set(_weight_map(folder, index).values()))
    for name in names:
        if not SHARD_NAME.fullmatch(name):
            raise error("BCQ-V502", index, found=f"'{escape(name)}'", expected="a plain name of a .safetensors file")
    missing = [name for name in names if not os.path.lexists(folder / name)]
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise error("BCQ-V503", index, found=f"{len(missing)} of {len(names)} shards missing: {shown}")
    return names


def _weight_map(folder: Path, index: str) -> dict[str, str]:
    value = _json(folder, index, limits.MAX_JSON_FILE_BYTES, "BCQ-V501")
    names = value.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise error("BCQ-V501", index, found="no object weight_map of names")
    return names


def _check_index(folder: Path, index: str, models: dict[str, SourceModel]) -> None:
    stated = _weight_map(folder, index)
    real = {name: path for path, model in models.items() for name in model.header.tensors}
    wrong = [name for name in stated.keys() | real.keys() if stated.get(name) != real.get(name)]
    if wrong:
        shown = ", ".join(f"'{escape(name, 60)}'" for name in sorted(wrong)[:3])
        raise error("BCQ-V504", index, found=f"{len(wrong)} tensors are not where it says: {shown}")


def _json(folder: Path, name: str, limit: int = limits.MAX_CONFIG_BYTES, code: str = "BCQ-V511") -> dict[str, Any]:
    try:
        value = parse(read_small(inside(folder, name), limit, name, code), integers_only=False)
        check_limits(value, limits.MAX_CONFIG_DEPTH, integers=False)
    except JsonFault as fault:
        raise error(code, name, found=escape(fault.detail), expected="a JSON object") from None
    if not isinstance(value, dict):
        raise error(code, name, found=f"a JSON {type(value).__name__}", expected="a JSON object")
    return value


def _nothing(folder: Path, files: list[str]) -> BcqError:
    shown = escape(", ".join(name for name in files if name.endswith(FOREIGN))[:80])
    if any(name.endswith((".gguf", ".ggml")) for name in files):
        return error("BCQ-E601", folder.name, found=f"a GGUF model ({shown})", expected="a safetensors checkpoint")
    if shown:
        return error("BCQ-E105", folder.name, found=f"only {shown}", expected="safetensors files")
    return error("BCQ-E104", folder.name, found="no .safetensors file")
