"""What a compressed-tensors configuration says about a module: ``config_groups``, their targets, their weights.

A target is a module's name, a pattern (``re:...``, matched from the start) or the name of a class (``Linear``). Classes
are not in a checkpoint, so a group with such a target may stand for any module that no name or pattern claims; if
several do, the tensors decide between them. The ``ignore`` list is of no use here for the same reason: what has packed
tensors is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings, version_of
from bcqfmt.errors import error, escape

_STRATEGIES: Final = ("group", "channel", "tensor")
_FORMATS: Final = {
    "marlin-24": "packed for the sparse Marlin kernel",
    "sparse-24-bitmask": "2:4 sparsity behind a bit mask",
    "sparse-bitmask": "sparsity behind a bit mask",
}


class CtScheme(NamedTuple):
    """How the weights of a module are quantized; ``activations`` is passed on as it stands."""

    bits: int
    strategy: str
    group_size: int  # -1: the whole row
    symmetric: bool
    act_order: bool
    activations: dict[str, Any] | None


def library_version(settings: Settings) -> tuple[int, ...] | None:
    """The version of compressed-tensors that wrote the configuration; auto-round leaves it out."""
    stated = settings.raw.get("version")
    if not isinstance(stated, str):
        return None
    return version_of(stated) or None


def refuse_formats(source: SourceCheckpoint, settings: Settings) -> None:
    """Formats of the same library whose tensors bear the same names."""
    sparsity = settings.raw.get("sparsity_config")
    stated = [settings.raw.get("format"), sparsity.get("format") if isinstance(sparsity, dict) else None]
    stated += [group.get("format") for group in _groups(settings).values()]
    for kind in stated:
        if isinstance(kind, str) and kind in _FORMATS:
            found = f"compressed-tensors format {kind}, {_FORMATS[kind]}"
            raise error("BCQ-E601", source.folder.name, found=found, expected="pack-quantized or int-quantized")


class Targets:
    """The groups of a configuration, and whose they are."""

    def __init__(self, source: SourceCheckpoint, settings: Settings) -> None:
        self._place, self._patterns = source.folder.name, settings.patterns
        self._groups = []
        for group in _groups(settings).values():
            targets = group.get("targets")
            texts = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
            patterns = [target.removeprefix("re:") for target in texts if target.startswith("re:")]
            self._groups.append((group, set(texts), patterns, any(target[:1].isupper() for target in texts)))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The groups that may be a module's: the one whose name or pattern fits, else all that name a class."""
        named, matched, classes = [], [], []
        for group, texts, patterns, has_class in self._groups:
            self._patterns.spend(20 if has_class else 1)  # the tensors will be compared with it
            if name in texts:
                named.append(group)
            elif any(self._patterns.fits(pattern, name) for pattern in patterns):
                matched.append(group)
            elif has_class:
                classes.append(group)
        chosen = named[:1] or matched[:1] or classes
        if not chosen:
            found = "quantized tensors, and no group of the configuration that means them"
            raise error("BCQ-E602", self._place, name, found, "a target in config_groups")
        return chosen


def read_scheme(source: SourceCheckpoint, name: str, group: Mapping[str, Any]) -> CtScheme:
    """A group's weights; BCQ-E608 for what the layouts here cannot be."""
    weights, activations = group["weights"], group.get("input_activations")
    bits = weights.get("num_bits", 8)
    kind = str(weights.get("type", "int")).lower()
    if kind != "int" or isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        found = f"num_bits {escape(repr(bits), 40)} of type {escape(kind, 40)}"
        raise error("BCQ-E608", source.folder.name, name, found, "integers of 1 to 8 bits")
    size = weights.get("group_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise error("BCQ-E602", source.folder.name, name, f"group_size {escape(repr(size), 40)}", "an integer")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    if strategy not in _STRATEGIES:
        found = f"strategy {escape(str(strategy), 40)}"
        raise error("BCQ-E608", source.folder.name, name, found, ", ".join(_STRATEGIES))
    if strategy == "group" and (size is None or size < 1):
        raise error("BCQ-E602", source.folder.name, name, f"strategy group, group_size {size}", "a positive group_size")
    order = weights.get("actorder")
    return CtScheme(
        bits=bits,
        strategy=strategy,
        group_size=size if strategy == "group" and size is not None else -1,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=order is True or order in ("group", "dynamic"),
        activations=activations if isinstance(activations, dict) else None,
    )


def _groups(settings: Settings) -> dict[str, dict[str, Any]]:
    """Groups that quantize weights."""
    groups = settings.raw.get("config_groups")
    found = groups if isinstance(groups, dict) else {}
    return {k: v for k, v in found.items() if isinstance(v, dict) and isinstance(v.get("weights"), dict)}
