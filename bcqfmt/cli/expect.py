"""What a verb takes, compared with what lies at a path: the thing is named, and the command that fits it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bcqfmt.codes import CODES
from bcqfmt.errors import BcqError, error
from bcqfmt.system import absolute_path

from .command import command_line, command_words

if TYPE_CHECKING:
    from bcqfmt.inspect.kinds import Found

_WORDS = {
    "bcq": "a BCQ folder",
    "bcq file": "a BCQ file",
    "quantized": "a quantized model's folder",
    "dense": "a dense model's folder",
    "gguf": "a GGUF file",
    "stats": "a file that bcqfmt calibrate wrote",
}
_CODES = {"pickle": "BCQ-E105", "lfs": "BCQ-E201", "page": "BCQ-E202", "text": "BCQ-E203", "archive": "BCQ-E203"}
_WRONG_KIND = ("BCQ-V1", "BCQ-V2", "BCQ-V5", "BCQ-V6", "BCQ-E1", "BCQ-E2", "BCQ-E6")  # what another kind leads to
_EXACT = ("BCQ-E103", "BCQ-E605", "BCQ-E610", "BCQ-E627")  # and what says it all already
_CODES |= {"empty": "BCQ-E104", "stopped": "BCQ-V601", "stats": "BCQ-E203"}


def expect(path: str | Path, *wanted: str, file: bool = False) -> Found:
    """What lies at ``path``; an error that names it and the fitting command unless its kind is one of ``wanted``.

    ``file``: the verb takes files as well as folders. What is missing, unclear or lacks a manifest passes: the verb's
    own reader says more about it.
    """
    found = _look(path)
    single = not Path(path).is_dir() and found.kind in ("dense", "quantized")
    if found.kind in ("missing", "unclear", "unfinished") or (found.kind in wanted and (file or not single)):
        return found
    *first, last = [_WORDS[kind] for kind in wanted]
    raise error(
        _code(found, wanted, single or not Path(path).is_dir()),
        str(path),
        found=found.words,
        expected=f"{', '.join(first)} or {last}" if first else last,
        hint=_advice(found, path, wanted),
    )


def fitting(path: str | Path) -> str | None:
    """The command that makes BCQ of what lies at ``path``; None where there is none."""
    return _advice(_look(path), path, ("bcq", "bcq file"))


@contextlib.contextmanager
def expected(path: str | Path, *wanted: str, file: bool = False) -> Iterator[None]:
    """Around reading ``path``: where that fails because it is something else, :func:`expect` says what.

    Nothing is looked at before something fails, so a file is not read twice.
    """
    try:
        yield
    except BcqError as fault:
        a_file = fault.code == "BCQ-E302" and not Path(path).is_dir()
        if a_file or (fault.code.startswith(_WRONG_KIND) and fault.code not in _EXACT):
            expect(path, *wanted, file=file)
        raise


def expected_bcq(path: str | Path, *, file: bool = False) -> contextlib.AbstractContextManager[None]:
    """The same for a verb that takes a BCQ folder, or with ``file`` a BCQ file."""
    return expected(path, *(("bcq", "bcq file") if file else ("bcq",)), file=file)


def another_folder(path: str | Path) -> str:
    """A name next to ``path`` for what is made of it: ``model-bcq`` for ``model``, ``model.gguf``, ``model-gptq/``."""
    place = absolute_path(path)
    plain = place.name.removesuffix(".gguf").removesuffix(".safetensors")
    for ending in ("-gptq", "-awq", "-GPTQ", "-AWQ", "-GGUF", "-gguf"):
        plain = plain.removesuffix(ending)
    made = f"{plain}-bcq"
    parent = os.path.dirname(os.fspath(path).rstrip("/"))  # noqa: PTH120 - "model" stays "model-bcq", not "./model-bcq"
    return os.path.join(parent, made)  # noqa: PTH118


def _code(found: Found, wanted: tuple[str, ...], single: bool) -> str:
    if (found.kind == "pickle" and single) or "stats" in wanted:
        return "BCQ-E203"
    if found.kind in _CODES:
        return _CODES[found.kind]
    if found.kind == "gguf":
        return "BCQ-E203" if "bcq" in wanted else "BCQ-E601"
    if found.kind in ("bcq", "bcq file"):
        return "BCQ-E612" if "bcq" not in wanted else "BCQ-E203"
    if single and found.kind in wanted:
        return "BCQ-E203"
    if "bcq" in wanted:
        return "BCQ-V201"
    return "BCQ-E610" if found.kind == "dense" else "BCQ-E627"


def _advice(found: Found, path: str | Path, wanted: tuple[str, ...]) -> str | None:
    """The command that fits what was found; None for the hint of the code."""
    words = command_words()
    if "stats" in wanted:
        model = str(_given("src") or _given("model") or "MODEL")
        return f"make them: {command_line('bcqfmt', 'calibrate', model, '--text', 'FILE')}"
    home = None if found.home is None or found.kind in ("lfs", "page") else _look(found.home)
    if home is not None and home.kind in wanted:
        named = [str(found.home) if word == str(path) else word for word in words]
        return f"it is part of {home.words}, name that: {command_line('bcqfmt', *named)}"
    if home is not None and found.home is not None and home.kind in ("quantized", "dense", "bcq"):
        return f"it is part of {home.words}; {_advice(home, found.home, wanted)}"
    if found.kind in ("quantized", "dense") and not Path(path).is_dir():
        return "a model is a folder: this file, its config.json and its tokenizer"
    if found.kind == "pickle":
        return CODES["BCQ-E105"].hint
    if found.kind == "gguf" and "dense" in wanted and "bcq" not in wanted:
        made = another_folder(path)
        dense = f"{made.removesuffix('-bcq')}-dense"
        first = command_line("bcqfmt", "convert", path, made)
        second = command_line("bcqfmt", "export", made, dense, "--to", "dense")
        return f"convert it, without loss: {first}; to quantize its values, name what this makes of it: {second}"
    if found.kind in ("quantized", "gguf"):
        return f"convert it, without loss: {command_line('bcqfmt', 'convert', path, _target(words, path))}"
    if found.kind == "dense":
        made = command_line("bcqfmt", "quantize", path, _target(words, path), "--method", "rtn", "--bits", "4")
        return f"quantize it: {made}"
    if found.kind == "bcq file":
        return f"look at it: {command_line('bcqfmt', 'inspect', path)}"
    if found.kind == "bcq":
        if words[:1] == ("verify",):
            other = str(_given("bcq") or "")
            swapped = _look(other).kind in ("quantized", "gguf")
            names = (other, str(path)) if swapped else ("SRC", "BCQ")
            return f"the source comes first: {command_line('bcqfmt', 'verify', *names)}"
        if "dense" in wanted:
            made = command_line("bcqfmt", "export", path, f"{str(path).rstrip('/')}-dense", "--to", "dense")
            return f"write its values as a dense model first: {made}"
        return f"look at it: {command_line('bcqfmt', 'inspect', path)}"
    if found.kind == "stats":
        return f"statistics are used by: {command_line('bcqfmt', 'quantize', 'MODEL', 'DST', '--stats', path)}"
    if found.kind == "stopped":
        return "go on with the command that makes it, and --resume"
    return None


def _given(name: str) -> object:
    """An argument or option of the command line that is being run, or None."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.params.get(name)


def _target(words: tuple[str, ...], path: str | Path) -> str:
    """Where the result would go: as on the command line, or next to the source."""
    target = _given("dst")
    if words[:1] in (("convert",), ("quantize",)) and target is not None and str(_given("src")) == str(path):
        return str(target)
    return another_folder(path)


def _look(path: str | Path) -> Found:
    from bcqfmt.inspect.kinds import look  # reads files by numpy, which help does without

    return look(path)
