"""JSON under the limits of the format, and its canonical text (spec section 4).

Python's parser takes duplicate keys, NaN, lone surrogates and any depth; none of that may pass.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from bcqfmt import limits
from bcqfmt.errors import escape


class JsonFault(Exception):
    """A text that is refused; ``kind`` is ``utf8``, ``json`` or ``duplicate``."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def canonical(value: Any) -> str:
    """The one text of a JSON value; pure ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse(
    raw: bytes, *, integers_only: bool = True, constants: bool = True, deepest: int = limits.MAX_JSON_DEPTH
) -> Any:
    """The value of a JSON text; :class:`JsonFault` when it is not one, has a key twice or goes beyond the limits.

    ``integers_only``: else numbers of any kind, and with ``constants`` NaN and infinities as Python writes them.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise JsonFault("utf8", f"byte {fault.start} is not UTF-8") from None
    hooks: dict[str, Any] = {"parse_float": _no_float} if integers_only else {}
    if integers_only or not constants:
        hooks["parse_constant"] = _no_constant
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, **hooks)
    except RecursionError:
        raise JsonFault("json", "nested too deeply") from None
    except json.JSONDecodeError as fault:
        raise JsonFault("json", f"not JSON at character {fault.pos}" if text.strip() else "no text at all") from None
    except ValueError:
        raise JsonFault("json", "an integer of thousands of digits") from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(value)
    check_limits(value, deepest, integers=integers_only)
    return value


def check_limits(value: Any, deepest: int = limits.MAX_JSON_DEPTH, *, integers: bool = True) -> None:
    """Depth and integer range of a parsed value; :class:`JsonFault` when it goes beyond."""
    level, depth = [value], 1
    low, high = -limits.MAX_JSON_INTEGER, limits.MAX_JSON_INTEGER
    while level:
        inner: list[Any] = []
        for item in level:
            kind = type(item)  # a JSON value is of these types exactly, and there may be millions
            if kind is dict or kind is list:
                if depth > deepest:
                    raise JsonFault("json", "nested too deeply")
                inner.extend(item.values() if kind is dict else item)
            elif kind is int and integers and not low <= item <= high:
                raise JsonFault("json", "an integer beyond 2^53-1")
        level, depth = inner, depth + 1


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its members, each key once."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault("duplicate", f"the key '{escape(key, 80)}' stands twice")
            seen.add(key)
    return result


def _no_float(text: str) -> NoReturn:
    raise JsonFault("json", f"{text[:40]} is not an integer")


def _no_constant(text: str) -> NoReturn:
    raise JsonFault("json", f"{text} is no JSON")


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise JsonFault("utf8", "a lone surrogate in a string") from None
    except RecursionError:
        raise JsonFault("json", "nested too deeply") from None
