"""The key values of a GGUF file: of a donor, of the file that the folder was made of, or written from config.json.

All end as a header of GGUF, so that names of tensors and numbers of heads are found by what reads such files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from bcqfmt.container.gguf.header import GgufHeader, TensorInfo, read_gguf
from bcqfmt.container.gguf.writer import copied_pair, header_bytes, pair
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.converters.source.gguf import read_files, split_names
from bcqfmt.converters.source.gguf_config import CLASSES, NUMBERS
from bcqfmt.errors import error, escape, refuse

from .tokenizer import Unwritable, tokenizer_pairs

__all__ = ["Metadata", "metadata_of"]

_PLACES: Final = ("split.", "general.alignment")  # of the data in the file that they are from
_TYPES: Final = ("general.file_type", "general.quantization_version", "quantize.imatrix.")  # of its tensors
_MODELS: Final = {"mistral": "llama", "mixtral": "llama", "gemma": "gemma"} | {
    model: kind for kind, (model, _) in CLASSES.items()
}
_GELU: Final = "gelu_pytorch_tanh"
_TESTED: Final = dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3"), "silu") | {"gemma": _GELU}
_FLOATS: Final = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
_NEEDED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
_FREQUENCIES: Final = "rope_freqs.weight"


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
        pairs = _model_pairs(config, folder.name)
        place = "tokenizer.json"
        settings = {**_template(folder), **_object(folder, "tokenizer_config.json")}
        pairs += tokenizer_pairs(_object(folder, place, needed=True), settings, config, _rows(checkpoint))
        freqs = _frequencies(config)
    except Unwritable as fault:
        raise error("BCQ-E641", place, found=escape(fault.found), expected=fault.expected) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ArithmeticError):
        raise error("BCQ-E641", place, found="numbers or names out of their place", expected="a valid file") from None
    header = read_gguf(_Memory(header_bytes(pairs, [])), whole=False)
    return Metadata(header, pairs, {}, freqs, CONFIG, notes=_notes(config))


def _rows(checkpoint: Checkpoint) -> int:
    name = "model.embed_tokens.weight"
    if name not in checkpoint:
        raise Unwritable(f"no tensor {name}", "the embedding of the model")
    return int(checkpoint[name].shape[0])


def _model_pairs(config: Mapping[str, Any], name: str) -> list[bytes]:
    model = config.get("model_type")
    if model not in _TESTED:
        raise Unwritable(f"model_type {model}", f"one of {', '.join(_TESTED)}")
    act = config.get("hidden_activation") or config.get("hidden_act", _TESTED[model])
    if act != _TESTED[model]:
        raise Unwritable(f"hidden_act {act}", _TESTED[model])
    if model == "gemma" and not config.get("tie_word_embeddings", True):
        raise Unwritable("a head of its own", "the embedding as the head, as llama.cpp takes it for gemma")
    kind = _MODELS[model]
    values = {**config, **_rope(config)}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    wrong = [key for key in _NEEDED if type(values.get(key)) not in (int, float) or not values[key] > 0]
    if wrong:
        raise Unwritable(f"no {wrong[0]}, or none that is a positive number", "a configuration of the model")
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    values |= {"head_dim": head, "sliding_window": None}
    found = [
        pair("general.architecture", "str", kind),
        pair("general.type", "str", "model"),
        pair("general.name", "str", name),
    ]
    for key, own in NUMBERS.items():
        value = values.get(own)
        if type(value) in (int, float):
            found.append(pair(f"{kind}.{key}", "f32" if key in _FLOATS else "u32", value))
    found.append(pair(f"{kind}.attention.value_length", "u32", head))
    found.append(pair(f"{kind}.rope.dimension_count", "u32", int(head * values.get("partial_rotary_factor", 1))))
    found.append(pair(f"{kind}.vocab_size", "u32", int(values.get("vocab_size", 0))))
    return found + _scaling(kind, _rope(config))


def _notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True) and type(window) is int
    return (f"sliding_window {window}: not written; llama.cpp attends to the whole context",) if used else ()


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says about rotary embeddings, under the old key or under the new one."""
    found = {"rope_theta": config.get("rope_theta", 10000.0)}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            found |= config[key]
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def _scaling(kind: str, rope: Mapping[str, Any]) -> list[bytes]:
    scaling = rope["rope_type"]
    if scaling in ("default", "llama3"):  # the latter is a tensor
        return []
    if scaling not in ("linear", "yarn") or type(rope.get("factor")) not in (int, float):
        raise Unwritable(f"rope_type {scaling}", "default, linear, yarn or llama3")
    found = [
        pair(f"{kind}.rope.scaling.type", "str", scaling),
        pair(f"{kind}.rope.scaling.factor", "f32", rope["factor"]),
    ]
    original = rope.get("original_max_position_embeddings")
    if type(original) is int:
        found.append(pair(f"{kind}.rope.scaling.original_context_length", "u32", original))
    return found


def _frequencies(config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Of Llama 3: by how much every rotary frequency is divided, F32 [head size / 2]."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return {}
    try:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        factor, low, high, original = (
            float(rope[key])
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        exponent = np.arange(0, head, 2) / head
        turns = original / (2 * math.pi * float(rope["rope_theta"]) ** exponent)  # of a frequency over the context
    except (KeyError, TypeError, ValueError):
        raise Unwritable("rope_type llama3 without its numbers", "factor, low_freq_factor, high_freq_factor") from None
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divided = 1 / ((1 - smooth) / factor + smooth)
    return {_FREQUENCIES: StoredTensor.from_array(_FREQUENCIES, divided.astype(np.float32))}


def _object(folder: Path, name: str, *, needed: bool = False) -> dict[str, Any]:
    """A JSON file of the folder; empty if there is none and none is needed."""
    if not (folder / name).exists():
        if needed:
            raise Unwritable("the file does not exist", "the tokenizer of the model")
        return {}
    try:
        raw = read_small(inside(folder, name), limits.MAX_JSON_FILE_BYTES, name, "BCQ-E641")
        value = parse(raw, integers_only=False)
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
