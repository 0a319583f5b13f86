"""Rule files: which weights get which method and settings, in TOML.

    [default]                          # optional; what the command line says wins
    method = "bcq"
    bits = 4

    [[rule]]
    match = 'self_attn\\..*_proj'       # a regular expression, searched for in the tensor's name
    bits = 3                           # the default method, with this setting on top
    group_size = 128

    [[rule]]
    match = 'layers\\.0\\.'
    dense = true                       # leave alone

The first rule that matches a weight wins. Keys that are no settings: ``match``, ``method``, ``dense``, ``include``
(take tensors that are left dense by default, a head for example) and ``optional`` (may match nothing).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt.container.files import read_small
from bcqfmt.errors import BcqError, error, escape

MAX_BYTES = 1_000_000
_FLAGS = ("dense", "include", "optional")
_TABLE = re.compile(r"^\s*\[\[?\s*(?P<name>[^\[\]]*?)\s*\]\]?\s*(#.*)?$")
_AT = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``method``: None for the default one; ``place``: file, number and line, for messages."""

    pattern: re.Pattern[str]
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    dense: bool = False
    include: bool = False
    optional: bool = False
    place: str = ""


@dataclass(frozen=True, slots=True)
class RuleFile:
    """The rules in order, and the method and settings that the file proposes for everything else.

    ``place``: its name, for messages.
    """

    rules: tuple[Rule, ...] = ()
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    place: str = ""


def read_rules(path: Path) -> RuleFile:
    """Parse a rule file; BCQ-E626 with the line for what cannot be understood."""
    if not path.exists():
        raise error("BCQ-E101", str(path), found="no such file", expected="a rule file")
    raw = read_small(path, MAX_BYTES, path.name, "BCQ-E626")
    try:
        text = raw.decode("utf-8")
        value = tomllib.loads(text)
    except UnicodeDecodeError as fault:
        raise _malformed(path, raw[: fault.start].count(b"\n") + 1, "bytes that are no UTF-8 text") from None
    except tomllib.TOMLDecodeError as fault:
        found = _AT.search(str(fault))
        line = int(found[1]) if found else text.count("\n") + 1
        raise _malformed(path, line, _AT.sub("", str(fault)).strip()) from None
    return _Reader(path, text, value).read()


def pattern_of(pattern: Any, place: str) -> re.Pattern[str]:
    """The regular expression; BCQ-E626 when it is none."""
    if not isinstance(pattern, str) or not pattern:
        raise error("BCQ-E626", place, found=f"match = {escape(repr(pattern), 60)}", expected="a regular expression")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as fault:
        raise error("BCQ-E626", place, found=f"'{escape(pattern)}': {fault}", expected="a regular expression") from None


class _Reader:
    """From the parsed file to rules; knows where tables begin, so that messages can name a line."""

    def __init__(self, path: Path, text: str, value: dict[str, Any]) -> None:
        self.path, self.value, self.lines = path, value, text.splitlines()
        self.starts: dict[str, list[int]] = {"rule": [], "default": []}
        for number, line in enumerate(self.lines, 1):
            found = _TABLE.match(line)
            if found and found["name"] in self.starts:
                self.starts[found["name"]].append(number)

    def read(self) -> RuleFile:
        for key in self.value:
            if key not in ("rule", "default"):
                raise self.fault(self.line_of(key, 1), f"`{escape(key)}`", "[default] and [[rule]] tables")
        default, rules = self.value.get("default", {}), self.value.get("rule", [])
        if not isinstance(default, dict):
            raise self.fault(self.line_of("default", 1), "`default` is no table", "[default]")
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise self.fault(self.line_of("rule", 1), "`rule` is no array of tables", "[[rule]]")
        start = self.start("default", 0)
        self.check_settings(default, start)
        return RuleFile(
            tuple(self.rule(rule, i) for i, rule in enumerate(rules)),
            self.method(default, start),
            {key: value for key, value in default.items() if key != "method"},
            self.path.name,
        )

    def rule(self, table: dict[str, Any], index: int) -> Rule:
        start = self.start("rule", index)
        place = f"{escape(self.path.name)}, rule {index + 1}" + (f", line {start}" if start else "")
        if "match" not in table:
            raise self.fault(start, "a rule without `match`", 'match = "regular expression"')
        try:
            pattern = pattern_of(table["match"], "")
        except BcqError as fault:
            raise self.fault(self.line_of("match", start), fault.finding.found, fault.finding.expected) from None
        flags: dict[str, bool] = {}
        for name in _FLAGS:
            flags[name] = table.get(name, False)
            if not isinstance(flags[name], bool):
                raise self.fault(self.line_of(name, start), f"`{name}` is no truth value", "true or false")
        settings = {key: value for key, value in table.items() if key not in ("match", "method", *_FLAGS)}
        self.check_settings(settings, start)
        method = self.method(table, start)
        if flags["dense"] and (settings or method or flags["include"]):
            raise self.fault(start, "`dense` with a method or settings", "one of the two")
        return Rule(pattern, method, settings, place=place, **flags)

    def method(self, table: dict[str, Any], start: int) -> str | None:
        name = table.get("method")
        if name is not None and not isinstance(name, str):
            raise self.fault(self.line_of("method", start), "`method` is no text", "the name of a method")
        return name

    def check_settings(self, settings: dict[str, Any], start: int) -> None:
        for key, value in settings.items():
            if not isinstance(value, bool | int | float | str):
                found = f"`{escape(key)}` is no number, text or truth value"
                raise self.fault(self.line_of(key, start), found, "a setting of the method")

    def start(self, table: str, index: int) -> int:
        """The line on which a table begins; 0 where the text gives no certain answer."""
        expected = len(self.value.get(table, [])) if table == "rule" else 1
        return self.starts[table][index] if len(self.starts[table]) == expected else 0

    def line_of(self, key: str, start: int) -> int:
        """The line of a key from a table's first line on."""
        for number in range(max(start, 1), len(self.lines) + 1):
            if re.match(rf"\s*[\[\"']*{re.escape(key)}\b", self.lines[number - 1]):
                return number
        return start

    def fault(self, line: int, found: str, expected: str = "") -> BcqError:
        return _malformed(self.path, line, found, expected)


def _malformed(path: Path, line: int, found: str, expected: str = "") -> BcqError:
    where = f"line {line}: " if line else ""
    return error("BCQ-E626", escape(path.name), found=f"{where}{escape(found)}", expected=expected)
