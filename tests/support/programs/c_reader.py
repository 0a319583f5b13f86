"""The C reader of spec/c: how it is compiled, how its runner is spoken to, vectors where it can read them."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weights import samples

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "spec" / "c"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NEEDED = (
    "the C reader's tests need a C compiler with the address and undefined-behaviour sanitizers "
    "(Debian and Ubuntu: apt install build-essential; Fedora: dnf install gcc gcc-c++ libasan libubsan); "
    "CC and CXX name others"
)


class NoCompilerError(Exception):
    """The compiler is not there, or refuses what it should take."""


def compiler(language: str = "c") -> str:
    """The compiler to call: $CC or cc, for C++ $CXX or c++."""
    return os.environ.get("CXX", "c++") if language == "c++" else os.environ.get("CC", "cc")


def compile_c(source: str, target: Path, *flags: str, command: str | None = None) -> Path:
    """``spec/c/<source>`` as a program; warnings are errors."""
    words = [command or compiler(), *WARNINGS, *flags, "-I", str(SOURCES), str(SOURCES / source), "-o", str(target)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    except OSError as fault:
        raise NoCompilerError(f"{words[0]}: {fault}. {NEEDED}") from None
    if done.returncode:
        raise NoCompilerError(f"{' '.join(words)}\n{done.stderr}\n{NEEDED}")
    return target


@dataclass
class Opened:
    """What the runner said about a file or folder: a refusal's code, or what is inside."""

    code: int = 0
    message: str = ""
    version: str = ""
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    dense: dict[str, dict[str, Any]] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)


class Runner:
    """A compiled runner.c. Commands are collected and answered by one process."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def ask(self, commands: list[str]) -> list[list[str]]:
        """One answer, a list of lines, for every command."""
        text = "".join(command + "\n" for command in commands)
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        done = subprocess.run(
            [self.program], input=text, capture_output=True, text=True, check=False, env=environment, timeout=900
        )
        assert done.returncode == 0, f"the runner ended with {done.returncode}\n{done.stderr[-4000:]}"
        lines = done.stdout.splitlines()
        answers: list[list[str]] = []
        at = 0
        for command in commands:
            end = at + 1
            if command.startswith(("file\t", "folder\t")) and lines[at].startswith("ok"):
                end = lines.index("end", at) + 1
            answers.append(lines[at:end])
            at = end
        assert at == len(lines), f"answers to nothing: {lines[at:][:3]}"
        return answers


def opened(answer: list[str]) -> Opened:
    """The answer to ``file``, ``folder`` or ``memory``."""
    first, *rest = answer
    kind, *fields = first.split("\t")
    if kind == "refused":
        return Opened(int(fields[0]), fields[1])
    assert kind == "ok", first
    found = Opened(version=fields[0] if fields else "")
    for line in rest:
        if line == "end":
            continue
        what, name, *about = line.split("\t")
        if what == "uncovered":
            found.uncovered.append(bytes.fromhex(name).decode())
            continue
        dtype, shape, digest = about
        entry = {"dtype": dtype, "shape": [int(size) for size in shape.split(",") if size], "digest": digest}
        (found.weights if what == "weight" else found.dense)[bytes.fromhex(name).decode()] = entry
    return found


def values(name: str, rows: tuple[int, int], planes: int = 0, dtype: str = "-") -> str:
    """The command for rows of a weight of what was opened last; ``dtype`` "-" is the logical one."""
    return "\t".join(("values", name.encode().hex(), str(planes), dtype, str(rows[0]), str(rows[1])))


def prepared(entry: dict[str, Any], scratch: Path) -> Path:
    """A vector where it can be read: expanded, or copied with its setup applied."""
    source = samples.VECTORS / entry["path"]
    if entry["kind"] == "file":
        if not entry.get("gzip"):
            return source
        data = source.read_bytes()
        for _ in range(int(entry["gzip"])):
            data = gzip.decompress(data)
        target = scratch / f"{entry['id']}.safetensors"
        target.write_bytes(data)
        return target
    if not entry.get("setup") and not entry.get("place"):
        return source
    folder = scratch / entry["id"] / (entry.get("place") or "folder/model")
    folder.parent.mkdir(parents=True)
    shutil.copytree(source, folder)
    for step in entry.get("setup", []):
        ((action, what),) = step.items()
        _apply(folder, action, what)
    return folder


def _apply(folder: Path, action: str, what: Any) -> None:
    if action == "remove":
        (folder / what).unlink()
    elif action == "move":
        target = folder / what["to"]
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / what["path"]).rename(target)
    elif action == "symlink":
        (folder / what["path"]).symlink_to(what["target"])
    elif action == "fifo":
        os.mkfifo(folder / what)
    elif action == "mkdir":
        (folder / what).mkdir()
    elif action == "repeat":
        path, piece = folder / what["path"], what["text"].encode()
        path.write_bytes(path.read_bytes().replace(piece, piece * what["count"]))
    elif action == "append_spaces":
        with (folder / what["path"]).open("ab") as file:
            file.write(b" " * what["count"])
    else:
        raise AssertionError(f"a step that this helper does not know: {action}")
