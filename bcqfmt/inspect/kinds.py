"""What lies at a path, in words: one answer for all verbs, found in a moment and without an error.

Names, the first bytes of a file and the header of one model file decide. What cannot be read, or is damaged, is
``unclear``: the reader that opens it says what is wrong with it. Then, of checkpoints that are not BCQ: which files
they have and what they seem to be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from bcqfmt.checkpoint.folder import (
    CONFIG,
    INDEX,
    MANIFEST,
    PICKLES,
    SINGLE,
    WORK,
    by_model,
    model_layout,
    read_config,
    refuse_missing_shards,
)
from bcqfmt.container.files import inside
from bcqfmt.container.header import Header, header_of
from bcqfmt.container.other_files import other_kind
from bcqfmt.errors import BcqError, Sink, error, escape, refuse

_BY_NAME = (("qweight", "gptq or awq"), ("weight_packed", "compressed-tensors"), ("W_q", "hqq"))
_ANYBCQ = re.compile(r"alpha_[1-9][0-9]?")  # plane scales of one precision: only AnyBCQ has them
_GROUP_NUMBERS = (("bits", "num_bits"), ("group_size", "group_size"))
_NUMBERS = (("bits", "bits"), ("bits", "w_bit"), ("group_size", "group_size"), ("group_size", "q_group_size"))
STATS_KEY: Final = "bcqfmt_stats"  # in the metadata of what `bcqfmt calibrate` writes
_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "hqq": "HQQ", "anybcq": "AnyBCQ", "gptq or awq": "GPTQ or AWQ"}
_CODES = {"BCQ-E201": ("lfs", "a git-lfs pointer"), "BCQ-E202": ("page", "a web page or an error text")}
_HEAD = 4096


class Found(NamedTuple):
    """``kind``: bcq, bcq file, unfinished, stopped, quantized, dense, gguf, stats, pickle, lfs, page, text, archive,
    empty, missing or unclear. ``words``: the same for people. ``home``: the model folder that a file lies in.
    """

    kind: str
    words: str
    home: Path | None = None


_STOPPED = Found("stopped", "the work folder of a run")


def look(path: str | os.PathLike[str]) -> Found:
    """What lies at ``path``; never an error."""
    place = Path(path)
    try:
        if place.is_dir():
            return _folder(place)
        if place.is_file():
            return _file(place)
    except (BcqError, OSError, UnicodeError):
        return Found("unclear", "something that cannot be read")
    return Found("unclear", "something that is no file") if os.path.lexists(place) else Found("missing", "nothing")


def _folder(place: Path) -> Found:
    if os.path.lexists(place / MANIFEST):
        return Found("bcq", "a BCQ folder")
    names = sorted(entry.name for entry in place.iterdir())
    models = [name for name in names if name.endswith(".safetensors")]
    if models:
        return _model_folder(place, models[0])
    if any(name.endswith(".gguf") for name in names):
        return Found("gguf", "a folder of GGUF files")
    if any(name.endswith(PICKLES) for name in names):
        return Found("pickle", "a folder of pickled weights")
    if any(name.endswith(".safetensors.index.json") for name in names):
        return Found("unclear", "a folder without the files that its index names")
    if (place / WORK).is_dir():
        return _STOPPED
    return Found("empty", "a folder without a model" if names else "an empty folder")


def _model_folder(place: Path, first: str) -> Found:
    """A folder with safetensors files, judged by config.json and the header of one of them."""
    if not (place / first).is_file():  # a pipe would block
        return Found("unclear", "a folder whose model file cannot be read")
    one = _file(place / first)
    if one.kind in ("lfs", "page"):
        return Found(one.kind, f"a folder with {one.words} in place of {first}")
    header = _header(place / first)
    if header is None:
        return Found("unclear", "a folder whose model file cannot be read")
    config = model_config(place, lambda finding: None)
    method, facts = kind_of(config, {name.rpartition(".")[2] for name in header.tensors})
    if "bcqfmt" in header.metadata or method == "bcq":
        if (place / WORK).is_dir():
            return _STOPPED
        return Found("unfinished", f"a BCQ folder without {MANIFEST}")
    if STATS_KEY in header.metadata:
        return Found("empty", "a folder without a model")
    return Found("quantized", f"a {_name(method)} folder") if facts else Found("dense", "a dense model's folder")


def _file(place: Path) -> Found:
    with place.open("rb") as opened:
        head = opened.read(_HEAD)
    home = place.parent if (place.parent / CONFIG).is_file() else None
    if head.startswith(b"GGUF"):
        return Found("gguf", "a GGUF file")
    if place.suffix == ".gguf":
        return Found("unclear", "a damaged GGUF file", home)
    other = other_kind(head, "")
    if other is not None:
        kind, words = _CODES.get(other[0], ("archive", other[1]))
        pickle = place.name.endswith(PICKLES) or words == "a Python pickle"
        return Found("pickle", "a pickled file", home) if pickle and kind == "archive" else Found(kind, words, home)
    if place.suffix == ".safetensors" or (head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30):
        return _safetensors(place, home)
    if not head:
        return Found("text", "an empty file", home)
    if b"\0" in head:
        return Found("pickle" if place.name.endswith(PICKLES) else "archive", "a binary file", home)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as fault:
        if fault.start < len(head) - 4:  # not just a character that was cut
            return Found("archive", "a binary file", home)
    json = head.lstrip().startswith((b"{", b"["))
    return Found("text", "a JSON file" if json else "a text", home)


def _safetensors(place: Path, home: Path | None) -> Found:
    header = _header(place)
    if header is None:
        return Found("unclear", "a damaged safetensors file", home)
    if "bcqfmt" in header.metadata:
        return Found("bcq file", "a BCQ file", home)
    if STATS_KEY in header.metadata:
        return Found("stats", "calibration statistics")
    method, facts = kind_of({}, {name.rpartition(".")[2] for name in header.tensors})
    return Found("quantized", f"a {_name(method)} file", home) if facts else Found("dense", "a safetensors file", home)


def _name(method: str) -> str:
    return _NAMES.get(method, method)


def _header(path: Path) -> Header | None:
    try:
        return header_of(path)
    except BcqError:
        return None


def model_files(folder: Path) -> list[str]:
    """The usual names; else every safetensors file at the top, as some quantizers name theirs freely; else GGUF.

    BCQ-V503 where the names say that there are more.
    """
    if not os.path.lexists(folder / SINGLE) and not os.path.lexists(folder / INDEX):
        try:
            names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        except OSError as fault:
            raise error("BCQ-E102", folder.name, found=fault.strerror or str(fault)) from fault
        found = [name for name in names if name.endswith(".safetensors")]
        found = found or [name for name in names if name.endswith(".gguf")]
        if found:
            for name in found:
                inside(folder, name)
            if len(by_model(found)) == 1:
                refuse_missing_shards(folder.name, found)
            return found
    return model_layout(folder, refuse).files


def model_config(folder: Path, sink: Sink) -> dict[str, Any]:
    """config.json; empty when there is none, or none that can be read."""
    if not os.path.lexists(folder / CONFIG):
        return {}
    return read_config(folder, sink) or {}


def method_of(config: Mapping[str, Any]) -> str | None:
    """``quant_method``, escaped; None when the configuration names none."""
    method = _entry(config).get("quant_method")
    return escape(method, 40) if isinstance(method, str) and method else None


def kind_of(config: Mapping[str, Any], endings: set[str]) -> tuple[str, dict[str, Any]]:
    """What a checkpoint seems to be, and the evidence: config.json first, then the ends of its tensors' names."""
    method = method_of(config)
    if method is not None:
        entry = _entry(config)
        numbers = _numbers(entry, _NUMBERS)
        groups = entry.get("config_groups")
        if isinstance(groups, dict):  # compressed-tensors: one entry a group of modules; used when there is only one
            found = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
            if len(found) == 1 and isinstance(found[0], dict):
                numbers = _numbers(found[0], _GROUP_NUMBERS)
        return method, {"method": method, **numbers, "evidence": CONFIG}
    for ending, name in _BY_NAME:
        if ending in endings:
            name = "anybcq" if ending == "qweight" and any(map(_ANYBCQ.fullmatch, endings)) else name
            return name, {"method": name, "evidence": "tensor names"}
    return "safetensors", {}


def _numbers(entry: Mapping[str, Any], names: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Integers of a foreign file, under our own names, as far as they are plausible."""
    return {key: entry[name] for key, name in names if type(entry.get(name)) is int and abs(entry[name]) < 2**31}


def _entry(config: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), dict):
            return dict(config[key])
    return {}
