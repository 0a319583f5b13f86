"""A model folder: which files hold the model, and what its index and config.json say (spec section 9)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.container.files import cannot_list, inside, read_json
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.errors import BcqError, Finding, Sink, error, escape

FORGOTTEN_IMPORT = "this is BCQ: import bcqfmt.integrations.transformers before from_pretrained"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MANIFEST = "bcq_manifest.json"
SOURCE = "bcq_source"
WORK = ".bcq_work"  # in a folder that is being made: what a stopped run goes on from
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")  # BCQ-V502: nothing that could be a path
_DOCUMENTATION = re.compile(  # the list of spec section 9.3
    r"(?!.*\.safetensors\Z)((readme|licen[sc]e|notice).*|.*\.(md|pdf|avif|bmp|gif|ico|jpe?g|png|svg|webp)|\.gitattributes)",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_NUMBERED = re.compile(r"(.+)-([0-9]{1,6})-of-([0-9]{1,6})(\.safetensors|\.gguf)")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(slots=True)
class Layout:
    """The model files that can be opened, and the index (tensor -> file) where there is one."""

    files: list[str] = field(default_factory=list)
    weight_map: dict[str, str] | None = None


def model_layout(folder: Path, sink: Sink) -> Layout:
    """BCQ-V501, V502, V503, V506, V507, before any shard is opened."""
    single, index = (
        os.access(folder / SINGLE, os.F_OK),
        os.access(folder / INDEX, os.F_OK),
    )  # not links that lead nowhere
    if single and index:
        sink(Finding("BCQ-V506", folder.name, "", f"{SINGLE} and {INDEX}", "one of them"))
        return Layout()
    if not single and not index:
        finished = os.access(folder / MANIFEST, os.F_OK)
        nothing = f"neither {SINGLE} nor {INDEX}"
        sink(Finding("BCQ-V503", folder.name, "", nothing, "the model") if finished else _no_model(folder))
        return Layout()
    layout = Layout(files=[SINGLE])
    if index:
        layout.weight_map = _weight_map(folder, sink) or {}
        layout.files = _shard_names(folder, layout.weight_map, sink)
    kept = []
    for name in layout.files:
        try:
            inside(folder, name)
            kept.append(name)
        except BcqError as fault:
            sink(fault.finding)
    layout.files = kept
    return layout


def by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """File names by the model that they are of: ``model-00001-of-00003.safetensors`` goes with its siblings."""
    found: dict[str, list[str]] = {}
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        found.setdefault(f"{numbered[1]}-of-{numbered[3]}" if numbered else name, []).append(name)
    return found


def refuse_missing_shards(place: str, names: Iterable[str]) -> None:
    """BCQ-V503 where the files of one model are numbered by their names, and some of the numbers are missing."""
    numbered = [found for found in map(_NUMBERED.fullmatch, names) if found]
    if not numbered:
        return
    stem, _, count, ending = numbered[0].groups()
    numbers, width = {int(found[2]) for found in numbered}, min(len(found[2]) for found in numbered)
    first = min(1, *numbers)  # some count from 0
    missing = [i for i in range(first, first + int(count)) if i not in numbers]
    if missing:
        shown = ", ".join(escape(f"{stem}-{i:0{width}}-of-{count}{ending}") for i in missing[:8])
        found = f"{len(missing)} of {int(count)} shards missing: {shown}" + (" ..." if len(missing) > 8 else "")
        raise error("BCQ-V503", place, found=found, expected="all of them")


def read_config(folder: Path, sink: Sink) -> dict[str, Any] | None:
    """BCQ-V510, V511, V512 as far as config.json alone tells; the object, or None."""
    if not os.access(folder / CONFIG, os.F_OK):
        sink(Finding("BCQ-V510", CONFIG, "", "the file does not exist", "the model's configuration"))
        return None
    return _json_object(folder, CONFIG, limits.MAX_CONFIG_BYTES, limits.MAX_CONFIG_DEPTH, "BCQ-V511", sink)


def config_entries(features: Iterable[str]) -> dict[str, Any]:
    """What config.json of a BCQ folder says besides what the model's own says.

    transformers goes on without a quantization method that it does not know, with random weights. The second entry
    stops it: it is no name of a file, and stands in the message. Our bridge to transformers takes it off.
    """
    method = {"quant_method": "bcq", "format_version": "1.0", "features": list(features)}
    return {"quantization_config": method, "transformers_weights": FORGOTTEN_IMPORT}


def check_quantization_config(config: Mapping[str, Any], version: str, sink: Sink) -> None:
    """BCQ-V512."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        sink(Finding("BCQ-V512", CONFIG, "", "no quantization_config", "an object"))
        return
    for key, want in (("quant_method", "bcq"), ("format_version", version)):
        if found.get(key) != want:
            stated = f"{key} = {escape(repr(found[key]), 60)}" if key in found else f"no {key}"
            sink(Finding("BCQ-V512", CONFIG, "", stated, repr(want)))


def is_documentation(path: str) -> bool:
    """Whether a file of the folder may change without changing the model; writers leave such out of the manifest."""
    return not path.startswith(f"{SOURCE}/") and _DOCUMENTATION.fullmatch(path.rpartition("/")[2]) is not None


def file_list(folder: Path) -> list[str]:
    """Every file of the folder as a relative path, sorted; names that begin with a dot at the top are not its own.

    A link to a file counts as one. What a link to a folder leads to does not, nor do links that lead nowhere, pipes,
    sockets and devices.
    """
    return sorted(name for name in entries(folder) if (folder / name).is_file())


def leaving_links(folder: Path) -> list[BcqError]:
    """BCQ-V507 for every link of the folder, to whatever it leads."""
    found = []
    for name in entries(folder):
        try:
            if (folder / name).is_symlink():
                inside(folder, name)
        except BcqError as fault:
            found.append(fault)
    return found


def entries(folder: Path, *, hidden: bool = False) -> Iterator[str]:
    """Relative paths of all that is no folder itself; links are not followed. ``hidden``: dot files at the top too."""
    for top, folders, files in os.walk(folder, onerror=cannot_list):
        at_root = Path(top) == folder and not hidden
        if at_root:
            folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (Path(top) / name).is_symlink()]
        kept = [name for name in (*files, *links) if not (at_root and name.startswith("."))]
        yield from ((Path(top) / name).relative_to(folder).as_posix() for name in kept)


def _weight_map(folder: Path, sink: Sink) -> dict[str, str] | None:
    """BCQ-V501, and BCQ-V503 where it names no file."""
    value = _json_object(folder, INDEX, limits.MAX_JSON_FILE_BYTES, limits.MAX_JSON_DEPTH, "BCQ-V501", sink)
    if value is None:
        return None
    names = value.get("weight_map")
    if (
        not isinstance(names, dict)
        or not isinstance(value.get("metadata"), dict)
        or not all(isinstance(name, str) for name in names.values())
    ):
        sink(Finding("BCQ-V501", INDEX, "", "no object metadata, or no object weight_map of names", "both"))
        return None
    if not names:
        sink(Finding("BCQ-V503", INDEX, "", "weight_map is empty: it names no model file", "the files of the model"))
    return names


def _json_object(folder: Path, name: str, limit: int, depth: int, code: str, sink: Sink) -> dict[str, Any] | None:
    """A JSON file of at most ``limit`` bytes and ``depth`` levels; faults are reported under ``code``."""
    try:
        raw = read_json(inside(folder, name), limit, name, code)
        value = parse(raw, integers_only=False, constants=name == CONFIG, deepest=depth)
    except BcqError as fault:
        sink(fault.finding)
        return None
    except JsonFault as fault:
        sink(Finding(code, name, "", escape(fault.detail), "a JSON object without duplicate keys"))
        return None
    if not isinstance(value, dict):
        sink(Finding(code, name, "", f"a JSON {type(value).__name__}", "a JSON object"))
        return None
    return value


def _shard_names(folder: Path, weight_map: Mapping[str, str], sink: Sink) -> list[str]:
    names = sorted(set(weight_map.values()))
    bad = {name for name in names if not SHARD_NAME.fullmatch(name)}
    for name in sorted(bad):
        sink(Finding("BCQ-V502", INDEX, "", f"'{escape(name)}'", "a plain name of a .safetensors file in the folder"))
    good = [name for name in names if name not in bad]
    present = {path.name for path in folder.iterdir()}
    missing = [name for name in good if name not in present or not os.access(folder / name, os.F_OK)]
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        sink(Finding("BCQ-V503", INDEX, "", f"{len(missing)} of {len(good)} shards missing: {shown}", "all of them"))
    absent = set(missing)
    return [name for name in good if name not in absent]


def _no_model(folder: Path) -> Finding:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as fault:
        raise error("BCQ-E102", folder.name, found=fault.strerror or str(fault)) from fault
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return Finding("BCQ-E105", folder.name, "", f"only {escape(', '.join(pickles[:3]))}", "safetensors files")
    return Finding("BCQ-E104", folder.name, "", f"neither {SINGLE} nor {INDEX}")
