"""What every fuzzer drives: one input through its readers, and what must be true of the outcome."""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bcqfmt
from bcqfmt.codes import CODES
from bcqfmt.errors import BcqError

MEMORY_LIMIT = 512 * 10**6
TIME_LIMIT = 1.0
_EXAMPLES = 20  # findings of which the input is kept

# A segment with float zeros or offsets has no meaning at fewer planes: the one refusal of something valid.
_FEWER_PLANES = "BCQ-E304"


def look(path: Path) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Validate deeply and read everything: the distinct codes found, and values by name if nothing was wrong.

    AssertionError when the two disagree.
    """
    report = bcqfmt.validate(path, deep=True)
    codes = {finding.code for finding in report.findings}
    assert codes <= CODES.keys(), codes
    assert "BCQ-E999" not in codes
    json.dumps(report.as_dict())
    values: dict[str, bytes] = {}
    try:
        with bcqfmt.open(path) as checkpoint:
            for name, weight in checkpoint.weights():
                if _allows(weight.planes):
                    values[name] = weight.dequantize().tobytes()
            for _, dense in checkpoint.dense():
                dense.array()
    except BcqError as fault:
        if not report.errors:
            raise AssertionError(f"the reader refuses what the validator accepts: {fault}") from fault
    return tuple(sorted(codes)), {} if report.errors else values


def _allows(planes: Callable[[int], object]) -> bool:
    """Read the first plane where that has a meaning; True, so that reading goes on, or the error."""
    try:
        planes(1)
    except BcqError as fault:
        if fault.code != _FEWER_PLANES:
            raise
    return True


def accepted(codes: tuple[str, ...]) -> bool:
    """Whether none of the codes is an error."""
    return not any(CODES[code].severity == "error" for code in codes)


class Executions:
    """Runs a target over and over and remembers what matters: how often, how slow, how large, what was found.

    ``run`` takes an input and returns the codes that it was refused by; whatever it raises is a finding. ``last`` is a
    file that has the input under work: what is left of a process that was killed.
    """

    def __init__(self, run: Callable[[bytes], tuple[str, ...]], last: Path | None = None) -> None:
        self._run = run
        self._last = last
        self._allowed = max(MEMORY_LIMIT, 2 * peak_memory())  # where something else has been at work before
        self.runs = 0
        self.accepted = 0
        self.slowest = 0.0
        self.found: Counter[str] = Counter()
        self.inputs: dict[str, bytes] = {}  # of each finding the first
        self.codes: Counter[str] = Counter()

    def __call__(self, data: bytes) -> tuple[str, ...]:
        """One execution."""
        self.runs += 1
        if self._last:
            self._last.write_bytes(data)
        start = time.process_time()  # of this process: other programs do not make an input slow
        try:
            codes = self._run(data)
        except Exception as fault:  # noqa: BLE001 - whatever escapes is what the fuzzer is looking for
            codes = (type(fault).__name__,)
            self._note(f"{type(fault).__name__}: {str(fault)[:200]}", data)
        else:
            self.codes.update(codes)
            self.accepted += accepted(codes)
        spent = time.process_time() - start
        if spent > TIME_LIMIT:  # once more: the first time something may have been loaded or compiled
            start = time.process_time()
            with contextlib.suppress(Exception):
                self._run(data)
            spent = time.process_time() - start
        self.slowest = max(self.slowest, spent)
        if spent > TIME_LIMIT:
            self._note("slower than 1 s", data)
        if peak_memory() > self._allowed:
            self._note(f"more than {self._allowed // 10**6} MB", data)
            self._allowed = sys.maxsize  # the most that it had is never less again: said once
        return codes

    def figures(self) -> dict[str, Any]:
        """For the table in docs/reliability.md."""
        return {
            "executions": self.runs,
            "accepted": self.accepted,
            "findings": dict(self.found),
            "slowest_s": round(self.slowest, 3),
            "peak_memory_mb": round(peak_memory() / 10**6),
            "codes_seen": sorted(self.codes),
            "inputs": {what: as_text(data) for what, data in self.inputs.items()},
        }

    def _note(self, what: str, data: bytes) -> None:
        self.found[what] += 1
        if len(self.inputs) < _EXAMPLES:
            self.inputs.setdefault(what, data)


def as_text(data: bytes) -> str:
    """An input as it is written into the figures."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def from_text(text: str) -> bytes:
    """An input out of the figures."""
    return zlib.decompress(base64.b64decode(text))


def limit_memory() -> None:
    """Let this process grow by four times the limit and no more: an error with its input, not a killed process."""
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the limit has no effect
        size = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 4 * MEMORY_LIMIT,) * 2)


def peak_memory() -> int:
    """The most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
