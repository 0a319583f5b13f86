"""What a user should know about a source although it converts: contradictions, private text, files left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import escape

__all__ = ["add_warnings"]

_LONG = 40  # characters; the names of data sets are shorter, sentences are longer


def add_warnings(source: SourceCheckpoint, modules: Iterable[Module], *, data: bool = True) -> None:
    """Add warnings to ``source.warnings``; ``data``: also those that need tensors to be read."""
    if source.foreign:
        shown = escape(", ".join(source.foreign[:3])) + (" ..." if len(source.foreign) > 3 else "")
        source.warn("BCQ-E653", f"{len(source.foreign)} not part of the model: {shown}")
    for name, value in source.quant.items():
        texts = [text for text in _texts(value.get("dataset")) if len(text) > _LONG or " " in text]
        if texts:
            source.warn("BCQ-E652", f"{len(texts)} texts under `dataset` in {name}")
    if data:
        for module in modules:
            if module.settings.get("desc_act") is False and _scattered(module):
                source.warn("BCQ-E651", "g_idx is scattered, desc_act is false", tensor=f"{module.name}.g_idx")


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    return [value] if isinstance(value, str) else []


def _scattered(module: Module) -> bool:
    """Whether the columns of a group are apart; negative groups count from the last one."""
    tensor = module.tensors.get("g_idx")
    if tensor is None:
        return False
    g_idx, groups = tensor.array(), -(-module.settings["k"] // module.settings["group_size"])
    if g_idx.min(initial=0) < 0 or g_idx.max(initial=0) >= groups:
        g_idx = g_idx.astype(np.int64) % groups
    return bool((g_idx[1:] < g_idx[:-1]).any())
