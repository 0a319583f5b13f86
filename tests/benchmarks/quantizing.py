"""Speed of rtn, bcq and multi on a 4096 x 4096 weight.

    python tests/benchmarks/quantizing.py [--quick] [--threads N]

bcq is compared with the published algorithm in torch (`published_bcq.py`), which gets all cores too; rtn is measured on
one core, with and without the way from F16 to float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

import numpy as np
import published_bcq
from measure import Result, interleave, rounded, spread

SIDE, GROUP = 4096, 128
RTN_GOAL = 300.0  # MB/s of F16 input on one core
BCQ_GOAL = 20.0  # times as fast as torch

_START = """
import sys, time
import numpy
begun = time.perf_counter()
from bcqfmt.converters.methods.{name} import {kind}
from bcqfmt.converters.methods.protocol import Job
{kind}.build({{}}).quantize(Job("w", numpy.ones((1, 64), numpy.float32), "F16"))
print(time.perf_counter() - begun)
"""


def quantizing(quick: bool = False, threads: int | None = None) -> list[Result]:
    """All rows."""
    count = threads or len(os.sched_getaffinity(0))
    rows = SIDE // 16 if quick else SIDE
    halves = np.random.default_rng(0).normal(scale=0.02, size=(rows, SIDE)).astype(np.float16)
    return [*_rtn(halves, quick), *_bcq(halves, count), *_multi(halves, count, quick), *_compilation()]


def _quantizer(name: str, weight: Any, threads: int = 1, **given: Any) -> Callable[[], Any]:
    from bcqfmt.converters.methods.bcq import Bcq
    from bcqfmt.converters.methods.multi import Multi
    from bcqfmt.converters.methods.protocol import Job
    from bcqfmt.converters.methods.rtn import Rtn

    methods: dict[str, Any] = {"rtn": Rtn, "bcq": Bcq, "multi": Multi}
    made = methods[name].build(given)
    made.quantize(Job("w", weight[:1], "F16"))  # compiled before the clock runs
    return lambda: made.quantize(Job("w", weight, "F16", threads=threads)).weight


def _rtn(halves: Any, quick: bool) -> list[Result]:
    weight = halves.astype(np.float32)
    plain = _quantizer("rtn", weight)
    things: dict[str, Callable[[], object]] = {
        "rtn, 4 bit, groups of 128": plain,
        "the same from F16: converted to float32 first": lambda: _quantizer("rtn", halves.astype(np.float32))(),
        "rtn, 4 bit, groups of 32": _quantizer("rtn", weight, group_size=32),
        "rtn, 4 bit, rows": _quantizer("rtn", weight, group_size="row"),
        "rtn, 3 bit, symmetric, groups of 128": _quantizer("rtn", weight, bits=3, symmetric=True),
        "rtn, 4 bit, groups of 128, clipping search": _quantizer("rtn", weight, clip="search"),
    }
    times = interleave(things, 5 if quick else 9)
    results = []
    for name in things:
        speeds = [halves.nbytes / seconds / 1e6 for seconds in times.cpu[name]]
        walls = [halves.nbytes / seconds / 1e6 for seconds in times.seconds[name]]
        result = Result(
            f"{name}, {len(halves)} x {SIDE}, one thread: F16 input per second of one core",
            f"{spread(speeds, '.0f')} MB/s; by the clock {spread(walls, '.0f')}",
            values={"MB/s of a core": rounded(speeds, 1), "MB/s": rounded(walls, 1)},
        )
        if name in list(things)[:2]:
            result.goal = f">= {RTN_GOAL:g} MB/s"
            result.met = statistics.median(speeds) >= RTN_GOAL
        results.append(result)
    return results


def _bcq(halves: Any, threads: int) -> list[Result]:
    import torch

    weight = halves.astype(np.float32)
    groups = torch.from_numpy(weight.reshape(-1, GROUP))
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {"bcq": [], "bcq without bias": [], "torch": []}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    own = {name: _quantizer("bcq", weight, threads, bias=name == "bcq") for name in ("bcq", "bcq without bias")}
    errors: dict[str, float] = {}
    for name in ("bcq", "bcq without bias", "torch", "bcq without bias", "bcq"):  # torch once, in between
        wall, core = time.perf_counter(), time.process_time()
        found = published_bcq.quantize(groups, 3, 15) if name == "torch" else own[name]()
        seconds[name].append(time.perf_counter() - wall)
        cpu[name].append(time.process_time() - core)
        error = published_bcq.error_of(groups, *found) / weight.size if name == "torch" else _mse(weight, found)
        errors[name] = error
        del found
    what = f"3 bit, groups of {GROUP}, 15 rounds, {len(weight)} x {SIDE}, {threads} threads"
    base, used = seconds["torch"][0], cpu["torch"][0]
    text = f"{base:.1f} s ({used:.1f} s of cores), error {errors['torch']:.4g}"
    results = [Result(f"published algorithm in torch, {what}", text)]
    for name in ("bcq", "bcq without bias"):
        ratios = [base / one for one in seconds[name]]
        cores = [used / one for one in cpu[name]]
        text = (
            f"{spread(seconds[name])} s ({statistics.median(cpu[name]):.2f} s of cores): {spread(ratios, '.0f')} times"
        )
        text += f" as fast, {statistics.median(cores):.0f} times by time of cores; error {errors[name]:.4g}"
        share = errors[name] / errors["torch"]
        result = Result(f"{name}, {what}", f"{text}, {share:.3f} of torch's")
        result.values = {"seconds": rounded(seconds[name]), "cpu": rounded(cpu[name]), "error": share}
        if name == "bcq without bias":  # what is published has none
            result.goal, result.met = f">= {BCQ_GOAL:g} times as fast", statistics.median(ratios) >= BCQ_GOAL
        results.append(result)
    return results


def _multi(halves: Any, threads: int, quick: bool) -> list[Result]:
    weight = halves[: len(halves) // 16 if quick else len(halves) // 8].astype(np.float32)
    begun = time.perf_counter()
    _quantizer("multi", weight, threads)()
    took = (time.perf_counter() - begun) * SIDE / len(weight)
    return [Result(f"multi, 2 to 4 bit, groups of {GROUP}, {SIDE} x {SIDE}, {threads} threads", f"{took:.1f} s")]


def _compilation() -> list[Result]:
    results = []
    for name, kind in (("rtn", "Rtn"), ("bcq", "Bcq"), ("multi", "Multi")):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
            command = [sys.executable, "-c", _START.format(name=name, kind=kind)]
            took = [float(subprocess.run(command, env=environment, check=True, stdout=-1).stdout) for _ in range(2)]
        text = f"{took[0]:.1f} s, cached {took[1]:.1f} s"
        results.append(Result(f"{name}, import and first call, nothing cached", text))
    return results


def _mse(weight: Any, made: Any) -> float:
    from bcqfmt.converters.methods.errors import decoded_square_sums

    return decoded_square_sums(weight, made)[1] / weight.size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, fewer rounds")
    parser.add_argument("--threads", type=int, help="for bcq, multi and torch; all cores by default")
    options = parser.parse_args()
    results = quantizing(options.quick, options.threads)
    for result in results:
        print(f"{result.verdict:12}{result.what}\n{'':12}{result.measured}", end="")
        print(f"   (goal: {result.goal})" if result.goal else "", flush=True)
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
