"""Pages that are run: every ```console block typed in, every ```pycon block too, and what comes out compared.

A page is one session: blocks run in the order in which they stand, in one folder that looks like a clone. ``...`` in
an expected line stands for anything in that line, alone for any number of lines. Shown is stdout, and of a command that
fails stderr as well; it carries its exit code in a comment (``# exit 5``). Mere illustrations are not ``console``.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from bcqfmt.cli.main import cli
from programs.verbs import ROOT, environment

FENCE = re.compile(r"^```(?P<kind>console|pycon)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"[|&;<>$`*?~]|^[A-Z_]+=")
EXIT = re.compile(r"# exit (\d+)$")


class Step(NamedTuple):
    """What is typed, what should come out, and where the page says so."""

    line: int
    kind: str
    typed: str
    expected: str


def steps(page: Path) -> list[Step]:
    """The commands of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in FENCE.finditer(text):
        first = text.count("\n", 0, block.start()) + 2
        if block["kind"] == "pycon":
            found.append(Step(first, "pycon", block["text"], ""))
            continue
        for number, line in enumerate(block["text"].splitlines(keepends=True)):
            if line.startswith("$ "):
                found.append(Step(first + number, "console", line[2:].strip(), ""))
            else:
                last = found.pop()
                found.append(last._replace(expected=last.expected + line))
    return found


def clone(folder: Path) -> Path:
    """A folder from which the paths of a clone lead where they should, and in which new files do no harm."""
    for name in ("bcqfmt", "docs", "spec", "tests"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".bin"
    programs.mkdir()
    start = f'#!/bin/sh\nexec "{sys.executable}" -P'
    for name, rest in {"bcqfmt": ' -c "from bcqfmt.cli.main import main; main()" "$@"', "python": ' "$@"'}.items():
        (programs / name).write_text(f"{start}{rest}\n")
        (programs / name).chmod(0o755)
    return folder


def play(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a page in ``folder``; how many commands and Python blocks there were."""
    monkeypatch.chdir(clone(folder))
    monkeypatch.setenv("PATH", f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, Any] = {}
    found = steps(page)
    for step in found:
        where = f"{page.name}:{step.line}"
        if step.kind == "pycon":
            _python(step, where, names)
        else:
            code, printed = _typed(step.typed)
            stated = EXIT.search(step.typed)
            story = f"{where}\n$ {step.typed}\n--- the page\n{step.expected}--- the program, exit {code}\n{printed}"
            assert code == (int(stated[1]) if stated else 0), story
            assert matches(step.expected, printed), story
    return len(found)


def matches(expected: str, printed: str) -> bool:
    """Equal but for ``...`` and spaces at the ends of lines."""
    pattern = ""
    for line in _lines(expected):
        anything = line == "..."
        pattern += r"(?:[^\n]*\n)*?" if anything else r"[^\n]*?".join(map(re.escape, line.split("..."))) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").split("\n")]


def _typed(line: str) -> tuple[int, str]:
    """Exit code and output of a command; simple calls of our own program run in this process, which is much faster."""
    line = "bcqfmt demo" if line == "make demo" else line  # which is what it runs, once it has set itself up
    words = shlex.split(line, comments=True)
    if words[0] == "bcqfmt" and not SHELL.search(line.partition(" #")[0]):
        result = CliRunner().invoke(cli, words[1:], prog_name="bcqfmt")
        assert isinstance(result.exception, SystemExit | None), result.exception
        return _shown(result.stdout, result.stderr, result.exit_code)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return _shown(done.stdout, done.stderr, done.returncode)


def _shown(stdout: str, stderr: str, code: int) -> tuple[int, str]:
    return code, stdout if code == 0 else stdout + stderr


def _python(step: Step, where: str, names: dict[str, Any]) -> None:
    examples = doctest.DocTestParser().get_doctest(step.typed, names, where, where, step.line)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runner.run(examples, out=said.write, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, said.getvalue()
    names.update(examples.globs)
