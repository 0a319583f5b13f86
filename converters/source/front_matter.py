"""The front matter of a model card: what a hub reads of it, taken from a stranger's card and written anew.

Only keys and kinds of values that are listed here are taken, and they are written by :func:`front_lines`, so that
nothing in a card can add a key, end the front matter or become markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bcqfmt.errors import escape

__all__ = ["CARD", "front_fault", "front_lines", "front_matter", "is_repo_id"]

CARD = "README.md"
KEPT = (
    *("license", "license_name", "license_link", "language", "pipeline_tag", "datasets"),
    *("base_model", "base_model_relation", "library_name", "tags"),
)
_BYTES = 100_000  # of front matter; a hub refuses longer ones
_ITEMS = 256
_LENGTH = 300
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # YAML 1.1 reads "no" as false
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}")
Front = dict[str, str | list[str]]


def is_repo_id(text: str) -> bool:
    """Whether ``text`` is ``owner/name`` as hubs have it."""
    odd = "--" in text or ".." in text or text.endswith(".git")
    return len(text) <= 96 and _ID.fullmatch(text) is not None and not odd


def front_fault(card: bytes) -> str:
    """What is wrong with a card's front matter; empty when it has none, or a YAML mapping."""
    try:
        _parsed(card)
    except ValueError as fault:
        return str(fault)
    return ""


def front_matter(card: bytes | None) -> Front:
    """The values that are kept: key -> a text or a list of texts, each on one line. Empty without a readable one."""
    try:
        found = _parsed(card or b"") or {}
    except ValueError:
        return {}
    kept: Front = {}
    for key in KEPT:
        value = found.get(key)
        if isinstance(value, str) and value.strip():
            kept[key] = escape(value.strip(), _LENGTH)
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            kept[key] = [escape(item.strip(), _LENGTH) for item in value[:_ITEMS]]
    return kept


def front_lines(values: Mapping[str, str | list[str]]) -> list[str]:
    """YAML: one line per text, one per item of a list; keys are the caller's own."""
    lines = []
    for key, value in values.items():
        if isinstance(value, str):
            lines.append(f"{key}: {_scalar(value)}")
        else:
            lines += [f"{key}:", *(f"- {_scalar(item)}" for item in value)]
    return lines


def _parsed(card: bytes) -> dict[str, Any] | None:
    """The mapping, all of its scalars as texts; None without front matter."""
    import yaml  # type: ignore[import-untyped]

    match = re.match(rb"---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*\r?$", card[:_BYTES], re.DOTALL | re.MULTILINE)
    if match is None:
        return None
    try:
        value = yaml.load(match[1].decode("utf-8"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as fault:
        raise ValueError(f"no YAML ({type(fault).__name__})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a YAML {type(value).__name__}, no mapping") from None
    return value


def _scalar(text: str) -> str:
    """Plain where YAML takes it for a text, else in double quotes; a text here is printable and on one line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + escape(text, _LENGTH).replace("\\", "\\\\").replace('"', '\\"') + '"'
