"""What a checkpoint's configuration says about its quantization, under all the names that tools give it.

Configurations are claims: each is normalised, several must agree, and all are checked against the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bcqfmt.errors import error, escape

from .checkpoint import SourceCheckpoint

__all__ = ["Settings", "read_settings", "refuse_transforms"]

_ALIASES = {
    "bits": ("bits", "w_bit", "wbits", "weight_bits"),
    "group_size": ("group_size", "q_group_size"),
    "method": ("quant_method", "method"),
    "format": ("format", "checkpoint_format", "version"),
    "sym": ("sym",),
    "desc_act": ("desc_act",),
}


@dataclass(slots=True)
class Settings:
    """Normalised settings of a checkpoint; None where the configuration is silent."""

    method: str = ""
    format: str | None = None
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    packing: str | None = None
    tool: tuple[str, tuple[int, ...]] | None = None
    raw: dict[str, Any] = field(default_factory=dict)

    def of(self, module: str) -> dict[str, Any]:
        """The settings of one module: the general ones, with ``dynamic`` or ``extra_config`` on top."""
        found = {"bits": self.bits, "group_size": self.group_size, "sym": self.sym, "desc_act": self.desc_act}
        found.update(_dynamic(self.raw.get("dynamic"), module))
        found.update(_extra(self.raw.get("extra_config"), module))
        return found


def read_settings(source: SourceCheckpoint) -> Settings:
    """The settings of all configuration files, which must agree (BCQ-E602)."""
    readings = {name: _normalised(value) for name, value in source.quant.items()}
    if not readings:
        return Settings(tool=_tool({}, source.metadata))
    (first_name, first), *others = readings.items()
    for name, reading in others:
        for key in ("method", "bits", "group_size", "sym", "format"):
            left, right = first.get(key), reading.get(key)
            if left is not None and right is not None and left != right:
                raise error(
                    "BCQ-E602",
                    source.folder.name,
                    found=f"{key} is {escape(str(left))} in {first_name} and {escape(str(right))} in {name}",
                    expected="configurations that agree",
                )
    merged: dict[str, Any] = {}
    for reading in readings.values():
        merged.update({key: value for key, value in reading.items() if merged.get(key) is None})
    raw = dict(next(iter(source.quant.values())))
    for value in source.quant.values():
        raw = {**value, **raw}
    return Settings(
        method=str(merged.get("method") or "").lower().replace("_", "-"),
        format=None if merged.get("format") is None else str(merged["format"]).lower(),
        bits=_integer(merged.get("bits"), "bits"),
        group_size=_integer(merged.get("group_size"), "group_size"),
        sym=merged.get("sym"),
        desc_act=merged.get("desc_act"),
        packing=raw.get("packing_format") if isinstance(raw.get("packing_format"), str) else None,
        tool=_tool(raw, source.metadata),
        raw=raw,
    )


def refuse_transforms(settings: Settings, folder: str) -> None:
    """BCQ-E601 for checkpoints that need more than their weights at run time: rotations, or one kernel's packing."""
    for key in ("transform_config", "rotation"):
        value = settings.raw.get(key)
        if value not in (None, {}, [], False, "", "none"):
            raise error(
                "BCQ-E601",
                folder,
                found=f"a rotated checkpoint ({key} is set)",
                expected="weights that need no rotation at run time",
            )
    if settings.raw.get("is_marlin_format") or settings.format in ("marlin", "bitblas", "marlin-24"):
        raise error(
            "BCQ-E601",
            folder,
            found=f"a checkpoint packed for one kernel ({settings.format or 'marlin'})",
            expected="the plain GPTQ layout",
        )


def _normalised(value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, names in _ALIASES.items():
        present = [value[name] for name in names if value.get(name) is not None]
        if present:
            found[key] = present[0].lower() if isinstance(present[0], str) else present[0]
    if "sym" not in found and isinstance(value.get("zero_point"), bool):
        found["sym"] = not value["zero_point"]
    if found.get("method") == "compressed-tensors":
        found.pop("format", None)
        found.pop("bits", None)
    return found


def _tool(raw: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[str, tuple[int, ...]] | None:
    """The quantizer that wrote the checkpoint, and its version, where either is on record."""
    meta = raw.get("meta")
    quantizers = meta.get("quantizer") if isinstance(meta, dict) else None
    for entry in quantizers if isinstance(quantizers, list) else [quantizers]:
        name, _, version = entry.partition(":") if isinstance(entry, str) else ("", "", "")
        if name in ("gptqmodel", "bcqfmt"):
            return name, _version(version)
    if isinstance(raw.get("autoround_version"), str):
        return "auto-round", _version(raw["autoround_version"])
    if "auto_gptq_version" in metadata:
        return "auto-gptq", _version(metadata["auto_gptq_version"])
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text)[:3])


def _dynamic(rules: Any, module: str) -> dict[str, Any]:
    """GPTQModel's ordered map of patterns: matched from the start, negatives first, first hit wins."""
    if not isinstance(rules, dict):
        return {}
    ordered = sorted(rules.items(), key=lambda item: not item[0].startswith("-:"))
    for pattern, overrides in ordered:
        if _matches(pattern.removeprefix("-:").removeprefix("+:"), module, anchored=True):
            if pattern.startswith("-:"):
                return {"skipped": True}
            return {k: v for k, v in overrides.items() if k in ("bits", "group_size", "sym", "desc_act")}
    return {}


def _extra(rules: Any, module: str) -> dict[str, Any]:
    """auto-round's map of names or patterns; an exact name beats a pattern."""
    if not isinstance(rules, dict):
        return {}
    chosen = rules.get(module)
    if chosen is None:
        chosen = next((v for pattern, v in rules.items() if _matches(pattern, module, anchored=False)), None)
    if not isinstance(chosen, dict):
        return {}
    found = {k: v for k, v in chosen.items() if k in ("bits", "group_size", "sym")}
    return {"skipped": True} if isinstance(found.get("bits"), int) and found["bits"] >= 16 else found


def _matches(pattern: str, module: str, *, anchored: bool) -> bool:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return pattern == module
    return bool(compiled.match(module) if anchored else compiled.search(module))


def _integer(value: Any, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise error("BCQ-E602", found=f"{what} is {escape(repr(value), 40)}", expected="an integer")
    return value
