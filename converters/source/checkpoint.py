"""A source checkpoint: a strict, read-only view of a model that some other tool wrote, in a folder or on the hub.

Only what the container itself demands is demanded here (spec BCQ-V101 to V116 and V118): a source may be
unaligned, have any names and any number of metadata keys, and must come back byte for byte.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, MANIFEST, PICKLES, SHARD_NAME, by_model, refuse_missing_shards
from bcqfmt.container.files import ByteSource, SourceFile, cannot_list, inside, unwritable
from bcqfmt.container.gguf.header import GgufHeader
from bcqfmt.container.header import Header, require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.errors import BcqError, Finding, error, escape
from bcqfmt.system import real_path

from .gguf import Blocks, Copy, place_tensors, read_files, split_names
from .gguf_config import check_values, config_of
from .gguf_tokenizer import tokenizer_files

INDEX_SUFFIX = ".safetensors.index.json"
QUANT_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
FOREIGN = (*PICKLES, ".gguf", ".ggml", ".onnx", ".msgpack", ".h5", ".npz")
_NOT_A_MODEL = {".git": "version control", ".cache": "download cache"}
OpenFile = Callable[[str], ByteSource]
_MAX_FILES = 20_000  # the largest models have some hundred
_MAX_TENSORS = 1_000_000  # the largest have 300,000


@dataclass(slots=True)
class SourceModel:
    """A safetensors or GGUF file of the source and its header; ``gguf``: all that the latter says."""

    path: str
    source: ByteSource
    header: Header
    gguf: GgufHeader | None = None

    def header_bytes(self) -> bytes:
        return self.source.read(0, self.header.data_start).tobytes()


@dataclass(slots=True)
class SourceCheckpoint:
    """Model files, tensors by name, configurations, and every other file that must come back.

    ``home``: tensor -> model file. ``left_out``: path -> why it is not carried; no such file is ever opened.
    Of GGUF files: ``blocks``, tensors that become weights; ``copies``, dense tensors by their new names; ``home`` has
    the old names and the new ones.
    """

    folder: Path
    models: dict[str, SourceModel]
    tensors: dict[str, StoredTensor]
    home: dict[str, str]
    config: dict[str, Any]
    quant: dict[str, dict[str, Any]]
    side_files: list[str]
    left_out: dict[str, str]
    warnings: list[Finding] = field(default_factory=list)
    blocks: dict[str, Blocks] = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    lone: str = ""  # the file that was named, if it was one

    @property
    def place(self) -> Path:
        """What the user named: the folder, or a file in it."""
        return self.folder / self.lone

    @property
    def name(self) -> str:
        """What the model is called: the folder, or the file without its ending."""
        return self.place.stem if self.lone else self.folder.name

    def path_of(self, name: str) -> Path:
        """Where a file is; BCQ-V507 for a link that leaves the folder. The files of a model that was named may."""
        return self.folder / name if self.lone else inside(self.folder, name)

    @property
    def places(self) -> list[Path]:
        """Where nothing may be written: the folder, or the files of a model that was named."""
        return [self.folder / name for name in self.models] if self.lone else [self.folder]

    def made_files(self) -> dict[str, bytes]:
        """Files that the source has in another form: the tokenizer of a GGUF file, unless the folder has one."""
        header = next(iter(self.models.values())).gguf
        if header is None or any(name.startswith("tokenizer") for name in self.side_files):
            return {}
        return tokenizer_files(header)

    def stored(self, name: str) -> StoredTensor:
        """The tensor that a file calls ``name``, as it is there."""
        changed = {copy.stored: copy.original for copy in self.copies.values() if copy.original is not None}
        return changed.get(name) or self.tensors[name]

    @property
    def is_gguf(self) -> bool:
        return any(model.gguf is not None for model in self.models.values())

    def warn(self, code: str, found: str, tensor: str = "") -> None:
        """Note something that does not stop the conversion."""
        self.warnings.append(Finding(code, self.place.name, tensor, found))

    @property
    def metadata(self) -> dict[str, str]:
        """``__metadata__`` of all model files together; the first file wins."""
        found: dict[str, str] = {}
        for model in self.models.values():
            found = {**model.header.metadata, **found}
        return found


def open_source(folder: Path) -> SourceCheckpoint:
    """Open a source folder, or a GGUF file. Headers are read and checked; no data. Nothing is ever written to it."""
    if not folder.name:
        folder = real_path(folder)  # "." has no name to show
    if folder.suffix == ".gguf" and os.path.lexists(folder) and not folder.is_dir():
        return _open_gguf(folder)
    if not folder.is_dir():
        lone = folder.exists()
        found = "a file" if lone else "no such folder"
        hint = None if not lone else _named_file(folder)
        raise error("BCQ-E101", str(folder), found=found, expected="a model folder, or a .gguf file", hint=hint)
    if os.path.lexists(folder / MANIFEST):
        raise error("BCQ-E612", folder.name, found=f"it has a {MANIFEST}", expected="a checkpoint of another format")
    _check_name(folder.name)
    files, left_out = _files(folder)
    gguf = _gguf_model(folder.name, files)
    if gguf:
        return read_gguf_source(
            folder, files, gguf, lambda name: SourceFile(inside(folder, name), name), left_out=left_out
        )
    return read_source(folder, files, lambda name: SourceFile(inside(folder, name), name), left_out=left_out)


def _named_file(path: Path) -> str:
    """What to do about a file that is no source by its name."""
    if path.is_file():  # a pipe would block
        with contextlib.suppress(OSError), path.open("rb") as opened:
            if opened.read(4) == b"GGUF":
                link = shlex.join(["ln", "-s", str(path), f"{path.name}.gguf"])
                return f"it is a GGUF file: give it a name that ends in .gguf, or a link that has one ({link})"
    return "name the folder that it is in"


def read_source(
    folder: Path,
    files: list[str],
    open_file: OpenFile,
    each: Callable[..., Any] = map,
    left_out: Mapping[str, str] | None = None,
) -> SourceCheckpoint:
    """The checkpoint that consists of these ``files``: headers and configurations are read and checked, no data.

    ``each`` is ``map``, or something like it that reads the headers of several files at once. No file is opened before
    its name has been checked. ``left_out``: what the folder holds besides, path -> why it is not carried.
    """
    _check_number(folder.name, len(files), _MAX_FILES, "files")
    names, weight_map = _model_names(folder.name, files, open_file)
    sources = [open_file(name) for name in names]
    models: dict[str, SourceModel] = {}
    tensors_so_far = 0
    for name, source, header in zip(names, sources, each(require_header, sources), strict=True):
        models[name] = SourceModel(name, source, header)
        tensors_so_far += len(header.tensors)
        _check_number(folder.name, tensors_so_far, _MAX_TENSORS, "tensors")
    home = _homes({name: model.header for name, model in models.items()}, weight_map)
    tensors = {}
    for name, path in home.items():
        tensors[name] = StoredTensor.in_file(name, models[path].header, models[path].source)
    foreign = foreign_files(files, models)
    side = [name for name in files if name not in models and name not in foreign]
    if CONFIG not in files:
        raise error("BCQ-V510", CONFIG, found="the file does not exist", expected="the model's configuration")
    config = _json(open_file, CONFIG)
    quant = {name: _json(open_file, name) for name in QUANT_FILES if name in files}
    for key in ("quantization_config", "compression_config"):  # the latter is an old name of compressed-tensors
        if isinstance(config.get(key), dict):
            quant.setdefault(CONFIG, config[key])
    return SourceCheckpoint(folder, models, tensors, home, config, quant, side, {**foreign, **(left_out or {})})


def foreign_files(files: Iterable[str], models: Container[str] = ()) -> dict[str, str]:
    """Weight files that are not carried, with the reason."""
    found = [name for name in files if name.endswith(FOREIGN) and name not in models]
    return {name: "pickle" if name.endswith(PICKLES) else "another format" for name in found}


def _gguf_model(place: str, files: list[str]) -> list[str]:
    """The files of the one GGUF model in a folder without safetensors files; BCQ-V506 if there are several."""
    top = [name for name in files if "/" not in name]
    models = {split_names(name)[0]: split_names(name) for name in top if name.endswith(".gguf")}
    if not models or any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in top):
        return []
    if len(models) > 1:
        shown = escape(", ".join(sorted(models)[:3]))
        hint = "name the file itself instead of its folder"
        raise error("BCQ-V506", place, found=f"{len(models)} GGUF models: {shown}", expected="one", hint=hint)
    return next(iter(models.values()))


def _open_gguf(path: Path) -> SourceCheckpoint:
    """A GGUF file alone, with the other files of its split."""
    folder = path.parent
    _check_name(path.name)
    names = split_names(path.name)
    there = [name for name in names if os.path.lexists(folder / name)]
    # who names a model's file means what it leads to; the other files of a split may be links as well
    return read_gguf_source(folder, there, names, lambda name: SourceFile(folder / name, name), lone=path.name)


def read_gguf_source(
    folder: Path,
    files: list[str],
    names: list[str],
    open_file: OpenFile,
    each: Callable[..., Any] = map,
    left_out: Mapping[str, str] | None = None,
    lone: str = "",
) -> SourceCheckpoint:
    """As :func:`read_source`, for the GGUF model that consists of ``names``; ``lone``: the file that was named."""
    missing = [name for name in names if name not in files]
    if missing:
        shown = escape(", ".join(missing[:3])) + (" ..." if len(missing) > 3 else "")
        raise error("BCQ-V503", folder.name, found=f"{len(missing)} of {len(names)} files missing: {shown}")
    opened = dict(zip(names, read_files(names, open_file, each), strict=True))
    first = opened[names[0]].gguf
    check_values(first, names[0])
    models = {name: SourceModel(name, file.source, file.header, file.gguf) for name, file in opened.items()}
    home = _homes({name: file.header for name, file in opened.items()}, None)
    tensors, blocks, copies, kept = place_tensors(list(opened.values()))
    home |= {name: home[copy.stored] for name, copy in copies.items()}
    foreign = foreign_files(files, models)
    side = [name for name in files if name not in models and name not in foreign]
    shapes = {info.name: info.shape for file in opened.values() for info in file.gguf.tensors.values()}
    made = {} if kept else config_of(first, shapes, tensors)
    config = _json(open_file, CONFIG) if CONFIG in side else made
    found = SourceCheckpoint(folder, models, tensors, home, config, {}, side, {**foreign, **(left_out or {})})
    found.blocks, found.copies, found.lone = blocks, copies, lone
    if not kept and not config:
        found.warn("BCQ-E657", "no config.json was made")
    if kept:
        found.warn("BCQ-E656", kept)
    return found


def _check_name(name: str) -> None:
    """BCQ-E102 for a name that would be written down otherwise in another locale: all of them are UTF-8 here."""
    utf8 = sys.getfilesystemencoding().lower() == "utf-8"
    if not name.isascii() and (not utf8 or any("\ud800" <= character <= "\udfff" for character in name)):
        found = f"a name that {'this locale' if not utf8 else 'UTF-8'} cannot read"
        raise error("BCQ-E102", name, found=found, hint="set PYTHONUTF8=1; if that does not help, rename it to UTF-8")


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Relative paths of the regular files, and of what is not carried, with the reason."""
    found, left_out = [], {}
    for top, folders, names in os.walk(folder, onerror=cannot_list):
        place = Path(top).relative_to(folder)
        for name in folders:
            path = (place / name).as_posix()
            _check_name(path)
            if reason := unwritable(path):  # walking on would recurse as deep as the folder goes
                raise error("BCQ-E617", path, found=reason, expected="a path that every file system can hold")
            if name in _NOT_A_MODEL:
                left_out[path] = _NOT_A_MODEL[name]
            elif (folder / path).is_symlink():
                left_out[path] = "link to a folder"
        if not folders and not names and Path(top) != folder:
            left_out[place.as_posix()] = "empty folder"
        folders[:] = sorted(name for name in folders if (place / name).as_posix() not in left_out)
        for name in names:
            path = (place / name).as_posix()
            _check_name(path)
            inside(folder, path)
            found.append(path)
            _check_number(folder.name, len(found), _MAX_FILES, "files")
    return sorted(found), left_out


def _model_names(place: str, files: list[str], open_file: OpenFile) -> tuple[list[str], dict[str, str] | None]:
    """Names of the model files, and tensor -> file where there is an index; BCQ-V501, V502, V503, V506."""
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX) and "/" not in name]
    top = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if not indexes and not top:
        raise _nothing(place, files)
    models = indexes or list(by_model(top))
    if len(models) > 1:
        found = f"{len(models)} index files" if indexes else f"{len(top)} model files and no index"
        shown = escape(", ".join((indexes or top)[:3])) + (" ..." if len(indexes or top) > 3 else "")
        raise error("BCQ-V506", place, found=f"{found}: {shown}", expected="one model")
    if not indexes:  # files that are numbered, and all there, are a model too
        refuse_missing_shards(place, top)
        return top, None
    index = indexes[0]
    weight_map = _json(open_file, index, limits.MAX_JSON_FILE_BYTES, "BCQ-V501", _MAX_TENSORS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise error("BCQ-V501", index, found="no object weight_map of names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not SHARD_NAME.fullmatch(name):
            raise error("BCQ-V502", index, found=f"'{escape(name)}'", expected="a plain name of a .safetensors file")
    present = set(files)
    missing = [name for name in names if name not in present]
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise error("BCQ-V503", index, found=f"{len(missing)} of {len(names)} shards missing: {shown}")
    extra = sorted(set(top) - set(names))
    if extra:
        raise error(
            "BCQ-V506", place, found=f"model files that the index does not name: {escape(', '.join(extra[:3]))}"
        )
    if not names:
        found = "weight_map is empty: it names no model file"
        raise error("BCQ-V503", index, found=found, expected="the files of the model")
    return names, weight_map


def _homes(headers: Mapping[str, Header], weight_map: Mapping[str, str] | None) -> dict[str, str]:
    """Tensor -> file; every tensor once (BCQ-V505), and where the index says (BCQ-V504)."""
    home: dict[str, str] = {}
    for path, header in headers.items():
        for name in header.tensors:
            if name in home:
                raise error("BCQ-V505", path, name, f"also in {home[name]}", "one file")
            home[name] = path
    stated = home if weight_map is None else weight_map
    wrong = sorted(name for name in stated.keys() | home.keys() if stated.get(name) != home.get(name))
    if wrong:
        shown = ", ".join(f"'{escape(name, 60)}'" for name in wrong[:3])
        raise error("BCQ-V504", "index", found=f"{len(wrong)} tensors are not where it says: {shown}")
    return home


def _check_number(place: str, number: int, most: int, what: str) -> None:
    if number > most:
        raise error("BCQ-E803", place, found=f"more than {most:,} {what}", expected=f"at most {most:,} {what}")


def _json(
    open_file: OpenFile,
    name: str,
    limit: int = limits.MAX_CONFIG_BYTES,
    code: str = "BCQ-V511",
    entries: int = limits.MAX_CONFIG_BYTES,
) -> dict[str, Any]:
    """A JSON object; ``entries``: the most that it may have, all levels together, counted before it is parsed."""
    with closing(open_file(name)) as source:
        if source.size > limit:
            raise error(code, name, found=f"{source.size} bytes", expected=f"at most {limit}")
        data = source.read(0, source.size).tobytes()
    _check_number(name, data.count(b":"), entries, "entries")
    try:
        value = parse(data, integers_only=False, deepest=limits.MAX_CONFIG_DEPTH)
    except JsonFault as fault:
        raise error(code, name, found=escape(fault.detail), expected="a JSON object without duplicate keys") from None
    if not isinstance(value, dict):
        raise error(code, name, found=f"a JSON {type(value).__name__}", expected="a JSON object")
    return value


def _nothing(place: str, files: Iterable[str]) -> BcqError:
    found = [name for name in files if name.endswith(FOREIGN)]
    shown = escape(", ".join(found)[:80])
    if any(name.endswith((".gguf", ".ggml")) for name in found):
        hint = "name the GGUF file: owner/name:FILE.gguf on the hub, FOLDER/FILE.gguf here"
        return error("BCQ-E601", place, found=f"GGUF files ({shown})", expected="a safetensors checkpoint", hint=hint)
    if shown:
        return error("BCQ-E105", place, found=f"only {shown}", expected="safetensors files")
    return error("BCQ-E104", place, found="no .safetensors file")
