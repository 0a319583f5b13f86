"""How the benchmarks measure: interleaved rounds, child processes with their peak memory, results as data."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 1 << 20


@dataclass(slots=True)
class Result:
    """One row: what was measured, the goal (empty: for information) and whether it was met."""

    what: str
    measured: str
    goal: str = ""
    met: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The word in the table."""
        return "information" if self.met is None else "met" if self.met else "MISSED"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(slots=True)
class Times:
    """Seconds of several things, measured in turn; one list per thing."""

    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median wall time."""
        return statistics.median(self.seconds[name])

    def cores(self, name: str) -> float:
        """CPU time divided by wall time, median over the rounds."""
        return statistics.median(c / s for c, s in zip(self.cpu[name], self.seconds[name], strict=True))

    def ratios(self, name: str, base: str) -> list[float]:
        """Time of ``name`` over time of ``base``, round by round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]


def interleave(things: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Every thing once to warm up, then ``rounds`` times all of them, one after the other."""
    times = Times({name: [] for name in things}, {name: [] for name in things})
    for thing in things.values():
        thing()
    for _ in range(rounds):
        for name, thing in things.items():
            wall, cpu = time.perf_counter(), time.process_time()
            thing()
            times.seconds[name].append(time.perf_counter() - wall)
            times.cpu[name].append(time.process_time() - cpu)
    return times


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """``median (lowest to highest)``."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    """Samples for the JSON file."""
    return [round(value, digits) for value in values]


@dataclass(slots=True)
class Child:
    """A finished child process: wall time, peak resident memory in bytes, exit code and output."""

    seconds: float
    peak: int
    code: int
    output: str


def run_child(arguments: Sequence[str]) -> Child:
    """Run ``python ARGUMENTS`` and measure it.

    A small process starts it: the peak that the kernel reports for a child includes the memory of the process
    which started it, and this one may be large by now.
    """
    command = [sys.executable, str(HERE / "launch.py"), sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    head, _, output = done.stdout.partition("\n")
    return Child(**json.loads(head), output=output)


def run_worker(name: str, *arguments: str) -> tuple[Child, dict[str, Any]]:
    """Run a function of ``workers.py`` in a process of its own; what it returns comes as JSON."""
    child = run_child([str(HERE / "workers.py"), name, *arguments])
    if child.code:
        raise RuntimeError(f"{name} ended with {child.code}: {child.output[-2000:]}")
    return child, json.loads(child.output)


def machine() -> dict[str, str]:
    """The machine in words; nothing that identifies it."""
    import numpy as np

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "CPU": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}",
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "OpenSSL": _openssl(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _openssl() -> str:
    import ssl

    return ssl.OPENSSL_VERSION.split()[1]
