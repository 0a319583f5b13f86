"""The front matter of a model card: what a hub reads of it, taken from a stranger's card and written anew.

A key with a text or a list of texts is kept. What is taken is written by :func:`front_lines`, each text on one line, so
that nothing in a card can add a key, end the front matter or become markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bcqfmt.errors import escape

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


def front_matter(card: bytes | None) -> Front:
    """The values that are kept: key -> a text or a list of texts, each on one line. Empty without front matter."""
    text = (card or b"")[:_BYTES].decode("utf-8", "replace")
    match = re.match(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", text, re.DOTALL | re.MULTILINE)
    if match is None:
        return {}
    import yaml

    try:  # texts only, and no merging of keys, with which a small file can grow without end
        found = yaml.load(match[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    kept: Front = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        texts = value[:_ITEMS] if isinstance(value, list) else [value]
        if key in KEPT and any(texts) and all(isinstance(text, str) for text in texts):
            texts = [escape(text.strip(), _LENGTH) for text in texts]
            kept[key] = texts if isinstance(value, list) else texts[0]
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


def _scalar(text: str) -> str:
    """Plain where YAML takes it for a text, else in double quotes; a text here is printable and on one line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + escape(text, _LENGTH).replace("\\", "\\\\").replace('"', '\\"') + '"'
