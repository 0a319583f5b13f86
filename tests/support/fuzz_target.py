"""What every fuzzer drives: any bytes through validator and reader, and what must be true of the outcome."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bcqfmt
from bcqfmt.codes import CODES
from bcqfmt.errors import BcqError

MEMORY_LIMIT = 512 * 10**6
TIME_LIMIT = 1.0

# A segment with float zeros or offsets has no meaning at fewer planes: the one refusal of something valid.
_FEWER_PLANES = "BCQ-E304"


def look(path: Path) -> tuple[str, ...]:
    """Validate deeply and read everything; the distinct codes found. AssertionError when the two disagree."""
    report = bcqfmt.validate(path, deep=True)
    codes = {finding.code for finding in report.findings}
    assert codes <= CODES.keys(), codes
    assert "BCQ-E999" not in codes
    json.dumps(report.as_dict())
    try:
        with bcqfmt.open(path) as checkpoint:
            for _, weight in checkpoint.weights():
                if _allows(weight.planes):
                    weight.dequantize()
            for _, dense in checkpoint.dense():
                dense.array()
    except BcqError as fault:
        if not report.errors:
            raise AssertionError(f"the reader refuses what the validator accepts: {fault}") from fault
    return tuple(sorted(codes))


def _allows(planes: Callable[[int], object]) -> bool:
    """Read the first plane where that has a meaning; True, so that reading goes on, or the error."""
    try:
        planes(1)
    except BcqError as fault:
        if fault.code != _FEWER_PLANES:
            raise
    return True


class Executions:
    """Runs the target over and over and remembers what matters: how often, how slow, how large, what escaped."""

    def __init__(self, path: Path, crashes: Path) -> None:
        """Inputs are written to ``path``; those that break a promise are kept in ``crashes``."""
        self.path, self.crashes = path, crashes
        self.runs = 0
        self.accepted = 0
        self.slowest = 0.0
        self.escaped: Counter[str] = Counter()
        self.slow = 0
        self.codes: Counter[str] = Counter()

    def file(self, data: bytes) -> tuple[str, ...]:
        """One execution on the bytes of a file."""
        self.path.write_bytes(data)
        return self.look(self.path, data)

    def look(self, path: Path, data: bytes = b"") -> tuple[str, ...]:
        """One execution on whatever lies at ``path``; ``data`` is kept if something is wrong with it."""
        self.runs += 1
        start = time.process_time()
        try:
            codes = look(path)
        except Exception as fault:  # noqa: BLE001 - whatever escapes is what the fuzzer is looking for
            codes = (type(fault).__name__,)
            self.escaped[f"{type(fault).__name__}: {str(fault)[:120]}"] += 1
            self._keep(path, data)
        else:
            self.codes.update(codes)
            self.accepted += not any(CODES[code].severity == "error" for code in codes)
        spent = time.process_time() - start  # of this process: other programs do not make an input slow
        self.slowest = max(self.slowest, spent)
        if spent > TIME_LIMIT:
            self.slow += 1
            self._keep(path, data)
        return codes

    def figures(self) -> dict[str, object]:
        """For the table in docs/reliability.md."""
        return {
            "runs": self.runs,
            "accepted": self.accepted,
            "escaped": dict(self.escaped),
            "slower_than_1_s": self.slow,
            "slowest_s": round(self.slowest, 3),
            "peak_memory_mb": round(peak_memory() / 10**6),
            "codes_seen": sorted(self.codes),
        }

    def _keep(self, path: Path, data: bytes) -> None:
        self.crashes.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(data).hexdigest()[:16]
        if path.is_dir():
            import shutil

            with contextlib.suppress(FileExistsError):
                shutil.copytree(path, self.crashes / f"folder-{self.runs}", symlinks=True)
        else:
            (self.crashes / f"{name}.safetensors").write_bytes(data)


def peak_memory() -> int:
    """The most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
