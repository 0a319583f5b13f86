"""Checkpoints that are not BCQ: which files they have and what they seem to be."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import CONFIG, INDEX, SINGLE, model_layout, read_config
from bcqfmt.container.files import inside
from bcqfmt.errors import Sink, error, escape, refuse

_BY_NAME = (("qweight", "gptq or awq"), ("weight_packed", "compressed-tensors"), ("W_q", "hqq"))
_ANYBCQ = re.compile(r"alpha_[1-9][0-9]?")  # plane scales of one precision: only AnyBCQ has them
_GROUP_NUMBERS = (("bits", "num_bits"), ("group_size", "group_size"))
_NUMBERS = (("bits", "bits"), ("bits", "w_bit"), ("group_size", "group_size"), ("group_size", "q_group_size"))


def model_files(folder: Path) -> list[str]:
    """The usual names; else every safetensors file at the top, as some quantizers name theirs freely; else GGUF."""
    if not os.path.lexists(folder / SINGLE) and not os.path.lexists(folder / INDEX):
        names = [name for name in _listed(folder) if not name.startswith(".")]
        found = [name for name in names if name.endswith(".safetensors")]
        found = found or [name for name in names if name.endswith(".gguf")]
        if found:
            for name in found:
                inside(folder, name)
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


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as fault:
        raise error("BCQ-E102", folder.name, found=fault.strerror or str(fault)) from fault
