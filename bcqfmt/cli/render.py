"""Text and JSON for people and scripts: the only place that writes to stdout and stderr.

Every line passes :func:`safe`, so nothing that a file says can move a cursor, colour a terminal or forge a line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from bcqfmt.errors import Finding, escape

_LONGEST = 1 << 20  # of a line; names are cut long before
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")
_NARROWEST = 24  # a first column is never cut below this


def safe(line: str) -> str:
    """One line without anything that a terminal could act upon."""
    return line if line.isprintable() else escape(line, _LONGEST)


def echo(lines: str | Iterable[str] = "") -> None:
    """Write to stdout. When the reader has gone the rest is dropped, and the verb keeps its exit code."""
    _write(sys.stdout, lines)


def stream(text: str) -> None:
    """Write a piece of text to stdout at once, without a line's end of its own."""
    _put(sys.stdout, "\n".join(safe(line) for line in text.split("\n")), flush=True)


def say(lines: str | Iterable[str]) -> None:
    """Write to stderr. Where that cannot be, on a full disk or a terminal that is gone, the work goes on without it."""
    try:
        _write(sys.stderr, lines)
    except OSError:
        _silence(sys.stderr)


def emit_json(value: Any) -> None:
    """One JSON text on stdout, pure ASCII; DEL, which JSON lets through, is escaped too."""
    text = json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")
    _put(sys.stdout, text + "\n")


def json_numbers(value: Any) -> Any:
    """The value with null in place of infinity and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: json_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(as_json: bool, data: Any, lines: str | Iterable[str]) -> None:
    """The result of a verb: as JSON, or as text."""
    emit_json(data) if as_json else echo(lines)


def flush() -> None:
    """Bring out what is still buffered, before the exit code is settled."""
    _put(sys.stdout, "", flush=True)


def discard() -> None:
    """Give up on stdout: it cannot take what is buffered, and must not fail a second time at exit."""
    if sys.stdout is not None:
        _silence(sys.stdout)


def size(nbytes: int) -> str:
    """Bytes for people: ``1.23 GB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    number, power = nbytes / 1000, 0
    while number >= 999.995 and power < len(_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.2f} {_UNITS[power]}"


def percent(value: float) -> str:
    """A share for people, rounded down: only what is complete is called 100 %."""
    return f"{math.floor(value * 100) / 100:.2f} %"


def count(number: int, one: str = "", many: str = "") -> str:
    """A number with separators and, if wanted, its noun: ``1,500 files``."""
    if not one:
        return f"{number:,}"
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def fields(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Label and value, one pair a line, values aligned; pairs without a value are left out."""
    kept = [(label, value) for label, value in pairs if value]
    width = max((len(label) for label, _ in kept), default=0)
    return [f"  {label:<{width}}  {value}" for label, value in kept]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns; those in ``left`` start left, the others end right.

    On a terminal that is too narrow the first column loses its beginning, which names of weights have in common; a file
    or a pipe gets all of it.
    """
    cells = [[safe(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    space = _terminal_width()
    if space is not None and sum(widths) + 2 * len(widths) > space:
        widths[0] = max(_NARROWEST, space - sum(widths[1:]) - 2 * len(widths))
        for row in cells:
            row[0] = _shorten(row[0], widths[0])
    lines = []
    for row in cells:
        padded = [
            cell + " " * (width - _width(cell)) if i in left else " " * (width - _width(cell)) + cell
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def findings(found: Iterable[Finding]) -> list[str]:
    """One line per finding; the hint of a code comes once, after the last finding of that code in a row."""
    from bcqfmt.codes import CODES

    lines: list[str] = []
    hinted: set[str] = set()
    listed = list(found)
    for i, finding in enumerate(listed):
        mark = "" if finding.severity == "error" else f"{finding.severity}: "
        lines.append(mark + finding.text())
        hint = CODES[finding.code].hint
        last = i + 1 == len(listed) or listed[i + 1].code != finding.code
        if hint and last and finding.code not in hinted:
            hinted.add(finding.code)
            lines.append(f"  hint: {hint}")
    return lines


def _write(stream: TextIO | None, lines: str | Iterable[str]) -> None:
    listed = lines.split("\n") if isinstance(lines, str) else lines
    _put(stream, "".join(safe(line) + "\n" for line in listed))


def _put(stream: TextIO | None, text: str, *, flush: bool = False) -> None:
    if stream is None:  # closed before we started
        return
    try:
        stream.write(text)
        if flush:
            stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Point a stream that takes nothing more at the null device; later writes and the flush at exit then succeed."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _terminal_width() -> int | None:
    """Columns of the terminal; None when the output is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((100, 24)).columns


def _width(text: str) -> int:
    """Columns that a text takes up: wide letters two, combining marks none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def _shorten(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    keep = max(2, width - 3)
    while True:
        shown = f"...{text[-keep:]}"
        if _width(shown) <= width or keep <= 2:
            return shown
        keep -= 1
