"""The key values of a GGUF file: of a donor, of the file that the folder was made of, or written from config.json.

All end as a header of GGUF, so that names of tensors and numbers of heads are found by what reads such files.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, SOURCE, read_config
from bcqfmt.checkpoint.provenance import source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import ByteSource, SourceFile, inside, read_small
from bcqfmt.container.gguf.header import MAX_ITEMS, GgufHeader, TensorInfo, read_gguf
from bcqfmt.container.gguf.writer import copied_pair, header_bytes
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.converters.source.gguf import read_files, split_names
from bcqfmt.errors import error, escape, refuse

from .model import Unwritable, frequencies, model_notes, model_pairs
from .tokenizer import tokenizer_pairs

_PLACES: Final = ("split.", "general.alignment")  # of the data in the file that they are from
_TYPES: Final = ("general.file_type", "general.quantization_version", "quantize.imatrix.")  # of its tensors


class Metadata(NamedTuple):
    """``tensors``: of the file that ``header`` is from, none for one that is written; ``donated``: those of its dense
    tensors that no folder has (factors of rotary frequencies); ``origin`` for messages."""

    header: GgufHeader
    pairs: list[bytes]
    tensors: dict[str, TensorInfo]
    donated: dict[str, StoredTensor]
    origin: str
    own: bool = False
    notes: tuple[str, ...] = ()


def metadata_of(checkpoint: Checkpoint, like: Path | None) -> Metadata:
    """From the donor if there is one, else from the source's own header, else from config.json and tokenizer.json."""
    if like is not None:
        return _donor(like)
    return _own(checkpoint.path) or _written(checkpoint)


def _donor(path: Path) -> Metadata:
    """A whole file, or a file of a split with the others next to it."""
    if path.is_dir():
        hint = "name the .gguf file itself"
        raise error("BCQ-E302", str(path), found="a folder", expected="a GGUF file of the same model", hint=hint)
    files = read_files(split_names(path.name), lambda name: SourceFile(path.parent / name, name), map)
    header, donated = files[0].gguf, {}
    for source, each, _ in files:
        for info in each.tensors.values():
            if info.name.startswith("rope_f") and info.type.name == "F32":
                stored = StoredTensor(info.name, "F32", info.shape, source=source, offset=info.offset)
                donated[info.name] = stored
    tensors = {name: info for file in files for name, info in file.gguf.tensors.items()}
    return Metadata(header, _copied(header, str(path), _PLACES + _TYPES), tensors, donated, str(path))


def _own(folder: Path) -> Metadata | None:
    """The archived header of the GGUF file that the folder was made of."""
    if not (folder / SOURCE).is_dir():
        return None
    record = source_record(folder, refuse)
    assert record is not None  # refuse has raised otherwise
    paths = sorted(path for path, entry in record["files"].items() if entry["kind"] == "gguf")
    headers = []
    for place in (f"{SOURCE}/headers/{path}.header" for path in paths):
        with closing(SourceFile(inside(folder, place), place)) as stored:
            headers.append(read_gguf(stored, whole=False))
    if not headers:
        return None
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    return Metadata(headers[0], _copied(headers[0], paths[0], _PLACES), tensors, {}, paths[0], own=True)


def _copied(header: GgufHeader, shown: str, left_out: tuple[str, ...]) -> list[bytes]:
    if header.order != "<":
        hint = "name a little-endian file of the model with --like; `bcqfmt restore` gives a big-endian source back"
        raise error("BCQ-E640", shown, found="a big-endian file", expected="a little-endian one", hint=hint)
    return [copied_pair(header, key) for key in header.values if not key.startswith(left_out)]


# ------------------------------------------------------------------------------------------- from config.json
class _Memory(ByteSource):
    """Bytes as a file."""

    def __init__(self, data: bytes) -> None:
        self.path, self.shown, self.size, self.bytes_read = Path(), CONFIG, len(data), 0
        self._data = np.frombuffer(data, np.uint8)

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        buffer[:] = self._data[offset : offset + buffer.size]

    def close(self) -> None:
        """Nothing is held."""


def _written(checkpoint: Checkpoint) -> Metadata:
    folder = checkpoint.path
    config = read_config(folder, refuse)
    assert config is not None  # refuse has raised otherwise
    place = CONFIG
    try:
        pairs = model_pairs(config, folder.name)
        place = "tokenizer.json"
        settings = {**_template(folder), **_object(folder, "tokenizer_config.json")}
        pairs += tokenizer_pairs(_object(folder, place, needed=True), settings, config, _rows(checkpoint))
        freqs = frequencies(config)
    except Unwritable as fault:
        raise error("BCQ-E641", place, found=escape(fault.found), expected=fault.expected, hint=fault.hint) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ArithmeticError):
        raise error("BCQ-E641", place, found="numbers or names out of their place", expected="a valid file") from None
    header = read_gguf(_Memory(header_bytes(pairs, [])), whole=False)
    return Metadata(header, pairs, {}, freqs, CONFIG, notes=model_notes(config))


def _rows(checkpoint: Checkpoint) -> int:
    name = "model.embed_tokens.weight"
    if name not in checkpoint:
        raise Unwritable(f"no tensor {name}", "the embedding of the model")
    shape = checkpoint[name].shape
    if len(shape) != 2 or 0 in shape or shape[0] > MAX_ITEMS:  # else a file of a few bytes could name any number
        raise Unwritable(f"'{name}' of shape {list(shape)}", f"a matrix with at most {MAX_ITEMS} rows")
    return int(shape[0])


def _object(folder: Path, name: str, *, needed: bool = False) -> dict[str, Any]:
    """A JSON file of the folder; empty if there is none and none is needed."""
    if not (folder / name).exists():
        if needed:
            raise Unwritable("the file does not exist", "the tokenizer of the model")
        return {}
    try:
        raw = read_small(inside(folder, name), limits.MAX_JSON_FILE_BYTES, name, "BCQ-E641")
        value = parse(raw, integers_only=False, deepest=limits.MAX_CONFIG_DEPTH)
    except JsonFault as fault:
        raise error("BCQ-E641", name, found=escape(fault.detail), expected="JSON") from None
    if not isinstance(value, dict):
        raise error("BCQ-E641", name, found="no object", expected="a JSON object")
    return value


def _template(folder: Path) -> dict[str, str]:
    """The chat template, where it has a file of its own."""
    name = "chat_template.jinja"
    if not (folder / name).exists():
        return {}
    raw = read_small(inside(folder, name), limits.MAX_CONFIG_BYTES, name, "BCQ-E641")
    return {"chat_template": raw.decode("utf-8", "replace")}
