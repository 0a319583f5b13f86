"""The front matter of a model card: what a hub reads of it, taken from a stranger's card and written anew.

It is YAML, of which the part is read that cards use: a key with a text, or with a list of texts. A key with anything
else (a text over several lines, an anchor, a tag, a mapping) is left out. What is taken is written by
:func:`front_lines`, so that nothing in a card can add a key, end the front matter or become markup.
"""

from __future__ import annotations

import json
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
_EMPTY = re.compile(r"\s*(?:#.*)?")
_ITEM = re.compile(r"( *)- +(.*)")
_SIMPLE = re.compile(r"[^\s\[\]{},#&*!|>'\"%@`?:~=<-](?:[^:\[\]{},]|:(?=\S))*")  # means itself, without quotes
_DOUBLE, _SINGLE = r'"(?:[^"\\]|\\["\\/nt])*"', r"'(?:[^']|'')*'"
_FLOW_ITEM = re.compile(rf""" *(?:({_DOUBLE}|{_SINGLE}) *|([^\s,\[\]{{}}"'#][^,\[\]{{}}"'#]*))([,\]])""")
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
    if match is None or not match[1].replace("\n", "").replace("\r", "").replace("\t", "").isprintable():
        return {}
    kept: Front = {}
    for entry in re.split(r"^(?=[^\s#-])", match[1].replace("\r\n", "\n"), flags=re.MULTILINE):
        key, _, rest = entry.partition(":")
        value = _value(rest) if key in KEPT and key not in kept else None
        if isinstance(value, str) and value.strip():
            kept[key] = escape(value.strip(), _LENGTH)
        elif isinstance(value, list) and value:
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


def _value(text: str) -> str | list[str] | None:
    """What follows a key and its colon, up to the next key; None for what is neither a text nor a list of texts."""
    first, *more = text.split("\n")
    lines = [line for line in more if not _EMPTY.fullmatch(line)]
    if _EMPTY.fullmatch(first):
        items = [_ITEM.fullmatch(line) for line in lines]
        found = [_text(item[2]) for item in items if item is not None and item[1] == (items[0] or item)[1]]
        complete = len(found) == len(items)
    elif lines or not first.startswith((" ", "\t")):
        return None
    elif not first.strip().startswith("["):
        return _text(first.strip())
    else:
        found, complete = _flow(first.strip())
    return [item for item in found if item is not None] if complete and None not in found else None


def _flow(text: str) -> tuple[list[str | None], bool]:
    """The items of ``[a, "b"]``, and whether that is all of the text."""
    found, at, end = [], 1, ","
    while end == "," and (item := _FLOW_ITEM.match(text, at)) is not None:
        found.append(_text(item[1] or item[2].strip()))
        at, end = item.end(), item[3]
    return found, end == "]" and at == len(text)


def _text(written: str) -> str | None:
    """The text that a scalar on one line stands for."""
    if re.fullmatch(_DOUBLE, written):
        return str(json.loads(written))
    if re.fullmatch(_SINGLE, written):
        return written[1:-1].replace("''", "'")
    plain = re.split(r"[ \t]#", written, maxsplit=1)[0].strip()
    return plain if _SIMPLE.fullmatch(plain) else None


def _scalar(text: str) -> str:
    """Plain where YAML takes it for a text, else in double quotes; a text here is printable and on one line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + escape(text, _LENGTH).replace("\\", "\\\\").replace('"', '\\"') + '"'
