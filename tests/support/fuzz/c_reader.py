"""The C reader for fuzzers: a program that mutates and reads by itself, and a library for comparisons."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from programs import c_reader

_CODE = ("-std=c99", "-O1", "-g")
_FAST = ("-std=c99", "-O3", "-g", "-DBCQ_FAST")
_SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COVERAGE = ("-fsanitize-coverage=trace-pc", "-DBCQ_COVERAGE")
_ROOM = 1 << 20  # bytes of values that are compared
_END = re.compile(r"(\d+) runs of (\d+) files: (\d+) valid, (\d+) rules met, (\d+) kept")


def build(folder: Path, sanitized: bool = True) -> None:
    """``fuzz``, under sanitizers and guided by coverage, ``fuzz_fast``, without them, and ``libbcq.so`` in a folder."""
    if sanitized:
        instrumented = c_reader.compile_c("coverage.c", folder / "coverage.o", *_CODE, "-c")
        c_reader.compile_c("fuzz.c", folder / "fuzz", *_CODE, *_SANITIZED, *_COVERAGE, str(instrumented))
    c_reader.compile_c("fuzz.c", folder / "fuzz_fast", *_FAST)
    c_reader.compile_c("shared.c", folder / "libbcq.so", "-std=c99", "-O2", "-fPIC", "-shared")


class Library:
    """libbcq.so in this process."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        size = ctypes.c_size_t
        self._library.bcq_verdict.argtypes = [ctypes.c_char_p, size, ctypes.c_void_p, size, ctypes.POINTER(size)]
        self._library.bcq_folder_verdict.argtypes = [ctypes.c_char_p]
        self._values = ctypes.create_string_buffer(_ROOM)

    def file(self, data: bytes) -> tuple[int, bytes | None]:
        """The rule that the bytes of a file break, or 0 and the values of its weights; None where they are too many."""
        used = ctypes.c_size_t()
        code = self._library.bcq_verdict(data, len(data), self._values, _ROOM, ctypes.byref(used))
        return code, self._values.raw[: used.value] if used.value <= _ROOM else None

    def folder(self, path: Path) -> int:
        """The rule that a folder breaks, or 0."""
        return int(self._library.bcq_folder_verdict(os.fsencode(path)))


def run(program: Path, most: int, seconds: float, seed: int, folder: Path, seeds: list[Path]) -> dict[str, Any]:
    """The program until the first limit; its figures. What it was working on when it crashed is a finding's input."""
    words = [program, str(most), str(max(1, round(seconds))), str(seed), folder, *seeds]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds + 300)
    found = _END.search(done.stdout)
    if found is not None and done.returncode == 0:
        runs, _, valid, rules, kept = map(int, found.groups())
        figures = {"executions": runs, "accepted": valid, "rules": rules, "kept": kept}
        return {**figures, "findings": {}, "inputs": {}}
    current = (folder / "current").read_bytes()
    last = current[8 : 8 + int.from_bytes(current[:8], "little")]
    text = next((line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line), done.stderr[-200:])
    what = f"exit {done.returncode}, seed {seed}: {text[:300]}"
    return {"executions": 0, "accepted": 0, "findings": {what: 1}, "inputs": {what: last}}


def handed_on(folder: Path) -> Iterator[bytes]:
    """The inputs that the program leaves for other readers: all that it accepts, and 1 of 1000 others."""
    with (folder / "compare").open("rb") as file:
        while head := file.read(8):
            yield file.read(int.from_bytes(head, "little"))
