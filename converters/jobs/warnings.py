"""What a user should know about a source although it converts: contradictions, private text, files left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import escape

_SHOWN = 3  # paths in a message
_LONG = 40  # characters; the names of data sets are shorter, sentences are longer


def add_warnings(source: SourceCheckpoint, modules: Iterable[Module], *, data: bool = True) -> None:
    """Add warnings to ``source.warnings``; ``data``: also those that need tensors to be read."""
    if source.left_out:
        source.warn("BCQ-E653", in_words(source.left_out))
    for name, value in source.quant.items():
        texts = [text for text in _texts(value.get("dataset")) if len(text) > _LONG or " " in text]
        if texts:
            source.warn("BCQ-E652", f"{len(texts)} texts under `dataset` in {name}")
    if data:
        for module in modules:
            if module.settings.get("desc_act") is False and _scattered(module):
                source.warn("BCQ-E651", "g_idx is scattered, desc_act is false", tensor=f"{module.name}.g_idx")


def in_words(left_out: Mapping[str, str]) -> str:
    """What is not carried: ``2 left out: evil.pt (pickle), docs/old (empty folder)``."""
    shown = [f"{escape(path)} ({escape(left_out[path])})" for path in sorted(left_out)[:_SHOWN]]
    return f"{len(left_out)} left out: {', '.join(shown)}" + (" ..." if len(left_out) > _SHOWN else "")


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
