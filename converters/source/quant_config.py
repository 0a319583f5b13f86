"""What a checkpoint's configuration says about its quantization, under all the names that tools give it.

Configurations are claims: each is normalised, several must agree, and all are checked against the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bcqfmt.errors import error, escape

from .checkpoint import SourceCheckpoint
from .patterns import Patterns

_ALIASES = {
    "bits": ("bits", "w_bit", "wbits", "weight_bits"),
    "group_size": ("group_size", "q_group_size"),
    "method": ("quant_method", "method"),
    "format": ("format", "checkpoint_format", "version"),
    "sym": ("sym",),
    "desc_act": ("desc_act",),
}
# names that mean this with some methods only: compressed-tensors has its own version there, SINQ a variant of itself
_ONLY_WITH: Final = {"version": ("awq", "llm-awq"), "method": ("awq", "gptq")}
_PACKING: Final = ("packing_format", "backend")  # auto-round's new name and its old one, since then a kernel
AUTO_ROUND: Final = ("auto-round", "intel/auto-round")  # the latter until April 2025 (0.4.7)


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
    place: str = ""  # the files that say so
    patterns: Patterns = field(default_factory=lambda: Patterns(""))

    def of(self, module: str) -> dict[str, Any]:
        """The settings of one module: the general ones, with ``dynamic`` or ``extra_config`` on top."""
        found = {"bits": self.bits, "group_size": self.group_size, "sym": self.sym, "desc_act": self.desc_act}
        for own in (self._dynamic(module), self._extra(module)):
            for key in own.keys() & found.keys():
                kind = int if key in ("bits", "group_size") else bool
                found[key] = _typed(own[key], kind, f"{key} of {escape(module)}", self.place)
        return found

    def _dynamic(self, module: str) -> dict[str, Any]:
        """GPTQModel's ordered map of patterns: matched from the start, negatives first, first hit wins."""
        rules = self.raw.get("dynamic")
        if not isinstance(rules, dict):
            return {}
        for skips in (True, False):
            for pattern, overrides in rules.items():
                if pattern.startswith("-:") != skips:
                    self.patterns.spend(1)
                elif self.patterns.fits(pattern.removeprefix("-:").removeprefix("+:"), module):
                    return {} if skips else _object(overrides, "dynamic", pattern, self.place)
        return {}

    def _extra(self, module: str) -> dict[str, Any]:
        """auto-round's map of names or patterns; an exact name beats a pattern."""
        rules = self.raw.get("extra_config")
        if not isinstance(rules, dict):
            return {}
        found = module if module in rules else None
        if found is None:
            found = next((pattern for pattern in rules if self.patterns.fits(pattern, module, anywhere=True)), None)
        chosen = {} if found is None else _object(rules[found], "extra_config", found, self.place)
        bits = chosen.get("bits")
        if isinstance(bits, int) and bits >= 16:  # a dense module, whose other settings mean nothing
            return {}
        return {key: chosen[key] for key in ("bits", "group_size", "sym") if key in chosen}


def read_settings(source: SourceCheckpoint) -> Settings:
    """The settings of all configuration files, which must agree (BCQ-E602)."""
    readings = {name: _normalised(value, name) for name, value in source.quant.items()}
    if not readings:
        return Settings(tool=_tool({}, source.metadata))
    (first_name, first), *others = readings.items()
    for name, reading in others:
        for key in ("method", "bits", "group_size", "sym", "format"):
            left, right = first.get(key), reading.get(key)
            if left is not None and right is not None and left != right:
                found = f"{key} is {escape(str(left))} in {first_name} and {escape(str(right))} in {name}"
                raise error("BCQ-E602", source.folder.name, found=found, expected="configurations that agree")
    merged: dict[str, Any] = {}
    for reading in readings.values():
        merged.update({key: value for key, value in reading.items() if merged.get(key) is None})

    def typed(key: str, kind: type) -> Any:
        place = next((name for name, reading in readings.items() if reading.get(key) is not None), "")
        return _typed(merged.get(key), kind, key, place)

    raw = dict(next(iter(source.quant.values())))
    for value in source.quant.values():
        raw = {**value, **raw}
    return Settings(
        method=str(merged.get("method") or "").lower().replace("_", "-"),
        format=None if merged.get("format") is None else str(merged["format"]).lower(),
        bits=typed("bits", int),
        group_size=typed("group_size", int),
        sym=typed("sym", bool),
        desc_act=typed("desc_act", bool),
        packing=next((raw[key] for key in _PACKING if isinstance(raw.get(key), str)), None),
        tool=_tool(raw, source.metadata),
        raw=raw,
        place=", ".join(source.quant),
        patterns=Patterns(source.folder.name),
    )


def refuse_transforms(settings: Settings, folder: str) -> None:
    """BCQ-E601 for checkpoints that need more than their weights at run time: rotations, or one kernel's packing."""
    for key in ("transform_config", "rotation"):
        value = settings.raw.get(key)
        if value not in (None, {}, [], False, "", "none"):
            expected = "weights that need no rotation at run time"
            raise error("BCQ-E601", folder, found=f"a rotated checkpoint ({key} is set)", expected=expected)
    if settings.raw.get("is_marlin_format") or settings.format in ("marlin", "bitblas", "marlin-24"):
        found = f"a checkpoint packed for one kernel ({settings.format or 'marlin'})"
        raise error("BCQ-E601", folder, found=found, expected="the plain GPTQ layout")


def _normalised(value: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The settings of one file, whose names for the same setting must agree (BCQ-E602)."""
    found: dict[str, Any] = {}
    for key, names in _ALIASES.items():
        present = {name: value[name] for name in names if value.get(name) is not None}
        for name, stated in present.items():
            said = stated.lower() if isinstance(stated, str) else stated
            differs, method = found.setdefault(key, said) != said, found.get("method")
            if differs and method in _ONLY_WITH.get(name, (method,)):
                first = next(iter(present))  # tools differ in which one they read
                both = f"{first} is {escape(str(present[first]))} and {name} is {escape(str(stated))}"
                raise error("BCQ-E602", place, found=both, expected="names of one setting that agree")
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
        if name == "gptqmodel":
            return name, version_of(version)
    if isinstance(raw.get("autoround_version"), str):
        return "auto-round", version_of(raw["autoround_version"])
    if "auto_gptq_version" in metadata:
        return "auto-gptq", version_of(metadata["auto_gptq_version"])
    return None


def version_of(text: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(part[:9]) for part in re.findall(r"[0-9]+", text[:80])[:3])


def _object(value: Any, key: str, pattern: str, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        found = f"{key}: '{escape(pattern, 60)}' is {escape(repr(value), 40)}"
        raise error("BCQ-E602", place, found=found, expected="an object of settings")
    return value


def _typed(value: Any, kind: type, what: str, place: str) -> Any:
    """A value that is an integer or a bool, or None."""
    if value is not None and type(value) is not kind:
        expected = "an integer" if kind is int else "true or false"
        raise error("BCQ-E602", place, found=f"{what} is {escape(repr(value), 40)}", expected=expected)
    return value
