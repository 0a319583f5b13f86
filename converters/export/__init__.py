"""Export: a BCQ folder to a checkpoint of another layout, where that loses nothing, or to a dense one.

Every weight is looked at before anything is written; the first that the layout cannot hold ends the export with
BCQ-E616. The tensors are computed by the rules that restore a source (``layouts/rebuild.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bcqfmt import limits
from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE, config_entries, file_list, read_config
from bcqfmt.checkpoint.provenance import source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.shards import Unit, plan_shards, shard_names
from bcqfmt.checkpoint.writer import DEFAULT_SHARD_BYTES, write_tensors
from bcqfmt.container.dtypes import FLOATS, logical_name
from bcqfmt.container.durable import OutputFile, folder_in_progress, make_folders, write_file
from bcqfmt.container.files import SourceFile, inside, read_small
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.converters.layouts.registry import rebuilders
from bcqfmt.converters.source.checkpoint import QUANT_FILES
from bcqfmt.converters.source.front_matter import CARD, front_lines, front_matter
from bcqfmt.errors import BcqError, error, escape, refuse
from bcqfmt.version import __version__

from .awq import to_awq
from .checks import check_folder, check_intact, check_target
from .compressed_tensors import to_compressed
from .gptq import to_gptq
from .names import dense_linears
from .readers import check_orientation, reader_notes
from .target import Target, dense_unit, uniform

TARGETS: Final = ("gptq", "awq", "compressed-tensors", "dense")
_COPY = 1 << 22
_CONFIG_NAMES = dict(zip(FLOATS, ("float16", "bfloat16", "float32"), strict=True))  # as config.json has them


@dataclass(slots=True)
class Export:
    """What was written; ``format`` as readers of the layout call it, ``notes`` what the user should know."""

    format: str
    weights: int = 0
    dense: int = 0
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"bytes" if key == "nbytes" else key: value for key, value in asdict(self).items()}


def export(
    checkpoint: Checkpoint,
    target: Path,
    layout: str,
    *,
    dtype: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    tick: Callable[[int], None] | None = None,
) -> Export:
    """Write ``checkpoint``, a BCQ folder, to the folder ``target`` in one of :data:`TARGETS`; all of it or nothing.

    ``dtype`` (dense only): the type that values are rounded to, once; by default each weight's own. ``tick`` is told
    the bytes written since the last call. A model file that is not the one of the manifest ends it: BCQ-V606.
    """
    folder = checkpoint.path
    kind = _check_arguments(checkpoint, target, layout, dtype)
    config = read_config(folder, refuse)
    assert config is not None  # refuse has raised otherwise
    for key in config_entries(()):
        config.pop(key, None)
    model_type = str(config.get("model_type", ""))
    oriented = check_orientation([weight for _, weight in checkpoint.weights()], model_type, layout)
    made = None if layout == "dense" else _decide(checkpoint, layout, model_type)
    result = Export("dense" if made is None else made.format, notes=oriented)
    dense = _dense(checkpoint, result)
    units = _units(checkpoint, made, kind, dense)
    if kind is not None:
        _state_dtype(config, _CONFIG_NAMES[kind])
    if made is not None:
        config["quantization_config"] = made.config
        result.notes += made.notes
    if "nonfinite" in checkpoint.features:
        result.notes.append("scales: infinities or NaNs among them go over as they are")
    result.notes += _lost(folder)
    texts = {CONFIG: _json(config)}
    if made is not None and made.config_file is not None:
        texts[made.config_file] = _json(made.config)
    with folder_in_progress(target, overwrite=overwrite, like="*.safetensors") as work:
        check_intact(checkpoint)
        _write_model(work, units, max_shard_size, texts, result, tick)
        _write_side_files(work, checkpoint, texts, result)
    result.weights, result.dense = len(units) - len(dense), len(dense)
    return result


def _check_arguments(checkpoint: Checkpoint, target: Path, layout: str, dtype: str | None) -> str | None:
    """The logical name of ``dtype``; errors of the caller."""
    if layout not in TARGETS:
        raise error("BCQ-E302", found=f"layout {layout}", expected=", ".join(TARGETS))
    check_folder(checkpoint)
    check_target(checkpoint, target)
    if dtype is None:
        return None
    kind = logical_name(dtype)
    if layout != "dense" or kind not in FLOATS:
        raise error("BCQ-E302", found=f"dtype {kind} for {layout}", expected="float16, bfloat16 or float32 for dense")
    return kind


def _state_dtype(config: dict[str, Any], name: str) -> None:
    """Readers cast to the type that the configuration states, so it has to be the one that was written."""
    for part in (config, *(value for key, value in config.items() if key.endswith("_config"))):
        if isinstance(part, dict):
            part.update({key: name for key in ("dtype", "torch_dtype") if key in part})
    if "dtype" not in config:
        config["torch_dtype"] = name


def _decide(checkpoint: Checkpoint, layout: str, model_type: str) -> Target:
    """Everything about the layout; BCQ-E616 when a weight does not fit."""
    weights = [uniform(weight) for _, weight in checkpoint.weights()]
    if not weights:
        raise error("BCQ-E616", checkpoint.path.name, found="no quantized weight", expected="at least one")
    linears = dense_linears(tensor for _, tensor in checkpoint.dense())
    if layout == "awq":
        made = to_awq(weights, linears)
    elif layout == "compressed-tensors":
        made = to_compressed(weights, linears)
    else:
        made = to_gptq(weights, linears, was_v2=_was_v2(checkpoint.path))
    made.notes.extend(reader_notes(layout, weights, model_type))
    return made


def _dense(checkpoint: Checkpoint, result: Export) -> dict[str, Unit]:
    """Tensors that are copied. Integers of a quantized module describe the layout it came from: they are left out."""
    modules = {name.removesuffix(".weight") for name, _ in checkpoint.weights()}
    found, left = {}, []
    for name, tensor in checkpoint.dense():
        if name.rpartition(".")[0] in modules and tensor.dtype[0] in "IUB" and tensor.dtype != "BF16":
            left.append(name)
        else:
            found[name] = Unit.of_dense(tensor)
    if left:
        result.notes.append(
            f"left out: {len(left)} tensors that describe the source's layout, '{escape(left[0])}' the first"
        )
    return found


def _units(checkpoint: Checkpoint, made: Target | None, kind: str | None, dense: dict[str, Unit]) -> list[Unit]:
    if made is None:
        return [*dense.values(), *(dense_unit(weight, kind) for _, weight in checkpoint.weights())]
    known = rebuilders()
    units = [recipe.unit(known) for recipe in made.recipes]
    for unit in units:
        for name in unit.tensors:
            if name in dense:
                found = f"a dense tensor is called '{name}' already"
                raise error("BCQ-E616", tensor=unit.name, found=found, expected="that name for the weight's own tensor")
    return [*dense.values(), *units]


def _write_model(
    work: Path,
    units: list[Unit],
    max_shard_size: int,
    texts: dict[str, bytes],
    result: Export,
    tick: Callable[[int], None] | None,
) -> None:
    shards = plan_shards(units, max_shard_size)
    weight_map: dict[str, str] = {}
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        tensors = {key: tensor for unit in shard for key, tensor in unit.tensors.items()}
        written = write_tensors(work / name, tensors, {"format": "pt"}, tick)
        weight_map.update(dict.fromkeys(tensors, name))
        result.files.append(name)
        result.nbytes += written.size
    if len(shards) > 1:
        total = sum(unit.nbytes for unit in units)
        texts[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_side_files(work: Path, checkpoint: Checkpoint, texts: dict[str, bytes], result: Export) -> None:
    """New ones, and those of the folder that say nothing about its format."""
    folder = checkpoint.path
    models = {file.source.shown for file in checkpoint.files()}
    left_out = {CONFIG, INDEX, MANIFEST, *QUANT_FILES, *models}
    for path in file_list(folder):
        if path in left_out or path.startswith(f"{SOURCE}/"):
            continue
        card = _card(folder, result.format) if path == CARD else None
        if card is not None:
            texts[CARD] = card
        else:
            _copy(folder, path, work)
    for name, data in texts.items():
        write_file(work / name, data)


def _copy(folder: Path, path: str, work: Path) -> None:
    place = work / path
    make_folders(place.parent)
    with closing(SourceFile(inside(folder, path), path)) as source, OutputFile(place) as output:
        for start in range(0, source.size, _COPY):
            output.write(source.read(start, min(_COPY, source.size - start)).data)


def _card(folder: Path, layout: str) -> bytes | None:
    """A model card in place of the one that a conversion wrote, which is about BCQ; None for any other."""
    with closing(SourceFile(inside(folder, CARD), CARD)) as source:
        front = front_matter(source.read(0, min(source.size, _COPY)).tobytes())
    if front.pop("library_name", "") != "bcqfmt":
        return None
    untrue = {"bcq", "quantized"} if layout == "dense" else {"bcq"}
    front["tags"] = [tag for tag in front.get("tags", []) if tag not in untrue]
    if layout == "dense":
        front.pop("base_model_relation", None)
    lines = front_lines({key: value for key, value in front.items() if value})
    body = f"Exported by bcqfmt {__version__} from a BCQ checkpoint: {layout}."
    return "\n".join(["---", *lines, "---", "", body, ""]).encode()


def _was_v2(folder: Path) -> bool:
    """Whether the record of the source says that its zero points were stored as they are."""
    record = source_record(folder, lambda _: None) if os.path.lexists(folder / SOURCE) else None
    rules = record["rules"] if record is not None else []
    stored = [rule.get("zero_point") for rule in rules if rule.get("rule") == "gptq.qzeros"]
    return bool(stored) and all(rule == "v2" for rule in stored)


def _lost(folder: Path) -> list[str]:
    """A note if the source quantizes activations: none of these layouts can say how."""
    place = f"{SOURCE}/files/{CONFIG}"
    if not os.path.lexists(folder / place):
        return []
    try:
        raw = read_small(inside(folder, place), limits.MAX_CONFIG_BYTES, place, "BCQ-V511")
        value = parse(raw, integers_only=False, deepest=limits.MAX_CONFIG_DEPTH)
        groups = value["quantization_config"]["config_groups"].values()
        quantized = any(group.get("input_activations") for group in groups)
    except (BcqError, JsonFault, KeyError, TypeError, AttributeError):
        return []
    return ["activations: the source quantizes them too; that is not exported"] if quantized else []


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
