"""Word packers on a 4096 x 11008 layer, both ways: against memcpy of the same bytes and against a peer's packer.

    [BCQFMT_PEER_PYTHON=/path/to/python] python tests/benchmarks/packers.py [--quick] [--threads N]

Ratios are taken round by round in one run. The peers, compressed-tensors and GPTQModel, run in a Python of their own
(`peer_packing.py`): BCQFMT_PEER_PYTHON, or this one. Where one of them is not installed, its time on two Neoverse-N1
cores is used instead, and no goal is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

import numpy as np
from measure import Result, Times, interleave, rounded, spread

ROWS, COLUMNS = 4096, 11008
# peer -> what it does, the goal (times as fast as the peer), and its seconds on two Neoverse-N1 cores
PEERS = {
    "compressed-tensors": ("compressed-tensors' pack_to_int32", 10.0, 0.057),
    "gptqmodel": ("GPTQModel's pack", 35.0, 0.435),
}
LIMIT = 3.0  # seconds of compilation in a process that has no cache
_PAUSE = 0.5  # seconds: torch's threads keep spinning on the cores for a while after their work

_START = """
import time
import numpy
begun = time.perf_counter()
from bcqfmt.converters import words
codes = numpy.zeros((16, 512), numpy.uint8)
order = numpy.arange(512)
words.gptq_to_planes(words.planes_to_gptq(words.codes_to_planes(codes, 4, order)), 4)
words.planes_to_awq(words.awq_to_planes(words.codes_to_awq_gemm(codes)))
print(time.perf_counter() - begun)
"""


def packers(quick: bool = False, threads: int = 2) -> list[Result]:
    """Every layout to planes and back, codes, and reordered columns."""
    from bcqfmt.converters import words

    n, k = (ROWS // 8, COLUMNS // 8 // 64 * 64) if quick else (ROWS, COLUMNS)
    rng = np.random.default_rng(0)

    def any_words(*shape: int) -> Any:
        return rng.integers(0, 2**32, shape, np.uint32)

    perm = rng.permutation(k)
    planes = {bits: any_words(bits, n, k // 32) for bits in (2, 3, 4, 8)}
    codes = rng.integers(0, 16, (n, k), np.uint8)
    things: dict[str, tuple[int, Callable[[], object]]] = {}
    for bits in (4, 3, 2, 8):
        size = bits * n * k // 8
        rows, columns, stored = any_words(k * bits // 32, n), any_words(n, k * bits // 32), planes[bits]
        things |= {
            f"GPTQ {bits} bit to planes": (
                2 * size,
                lambda w=rows, b=bits: words.gptq_to_planes(w, b, threads=threads),
            ),
            f"planes to GPTQ {bits} bit": (2 * size, lambda p=stored: words.planes_to_gptq(p, threads=threads)),
        }
        if bits in (4, 8):
            things |= {
                f"compressed-tensors {bits} bit to planes": (
                    2 * size,
                    lambda w=columns, b=bits: words.columns_to_planes(w, b, threads=threads),
                ),
                f"planes to compressed-tensors {bits} bit": (
                    2 * size,
                    lambda p=stored: words.planes_to_columns(p, threads=threads),
                ),
            }
    size = n * k // 2
    rows, awq, fast = any_words(k // 8, n), any_words(k, n // 8), any_words(n // 4, k // 2).view(np.int16)
    stored = planes[4]
    things |= {
        "AWQ to planes": (2 * size, lambda: words.awq_to_planes(awq, threads)),
        "planes to AWQ": (2 * size, lambda: words.planes_to_awq(stored, threads=threads)),
        "GEMV-fast to planes": (2 * size, lambda: words.gemv_fast_to_planes(fast, threads)),
        "planes to GEMV-fast": (2 * size, lambda: words.planes_to_gemv_fast(stored, threads=threads)),
        "GPTQ 4 bit to planes, columns reordered": (
            2 * size,
            lambda: words.gptq_to_planes(rows, 4, threads=threads, perm=perm),
        ),
        "planes to GPTQ 4 bit, columns reordered": (
            2 * size,
            lambda: words.planes_to_gptq(stored, threads=threads, perm=perm),
        ),
        "GPTQ 4 bit to codes": (3 * size, lambda: words.stream_rows_to_codes(rows, 4, k, threads)),
        "codes to GPTQ 4 bit": (3 * size, lambda: words.codes_to_stream_rows(codes, 4, threads)),
        "codes to planes": (3 * size, lambda: words.codes_to_planes(codes, 4, threads=threads)),
    }
    copies = {total: _copy(total) for total, _ in things.values()}
    with Peers(n, k) as peers:
        timed = {name: thing for name, (_, thing) in things.items()}
        timed |= {f"copy {total}": copy for total, copy in copies.items()}
        timed |= {name: partial(peers.pack, name) for name in peers.names}
        timed |= {"pause": partial(time.sleep, _PAUSE)} if peers.names else {}
        times = interleave(timed, 5 if quick else 11)
    results = []
    for name, (total, _) in things.items():
        milliseconds = [1000 * seconds for seconds in times.seconds[name]]
        share = [1 / ratio for ratio in times.ratios(name, f"copy {total}")]
        result = Result(
            f"{name}, {n} x {k}, {threads} threads",
            f"{spread(milliseconds, '.1f')} ms; {statistics.median(share):.2f} of memcpy of input + output",
            values={"milliseconds": rounded(milliseconds), "of memcpy": rounded(share)},
        )
        results.append(result)
        if name == "GPTQ 4 bit to planes" and not quick:
            results += [_against(peers, peer, times, name) for peer in PEERS]
    return results


def _against(peers: Peers, peer: str, times: Times, name: str) -> Result:
    """The packer ``name`` compared with one peer."""
    what, goal, elsewhere = PEERS[peer]
    here = peer in peers.names
    faster = times.ratios(peer, name) if here else [elsewhere / seconds for seconds in times.seconds[name]]
    took = f"{1000 * times.median(peer):.1f} ms" if here else f"{1000 * elsewhere:.0f} ms on another machine"
    version = peers.versions.get(peer, "")
    return Result(
        f"{name}, against {what}" + (f" {version}" if here else ""),
        f"{spread(faster, '.1f')} times as fast; it takes {took}" + ("" if here else f" ({version})"),
        f"at least {goal:g} times as fast",
        statistics.median(faster) >= goal if here else None,
        {"times": rounded(faster), "seconds of the peer": rounded(times.seconds.get(peer, []))},
    )


class Peers:
    """The process that has the other packers."""

    def __init__(self, rows: int, columns: int) -> None:
        python = os.environ.get("BCQFMT_PEER_PYTHON", sys.executable)
        script = Path(__file__).with_name("peer_packing.py")
        self._process = subprocess.Popen(
            [python, str(script), str(rows), str(columns)], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        said = json.loads(first) if first else {"packers": [], "versions": {}}
        self.names: list[str] = said["packers"]
        self.versions: dict[str, str] = said["versions"]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def pack(self, name: str) -> float:
        """Pack once; the seconds, as the peer's process counts them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def compilation() -> list[Result]:
    """What a first conversion pays for compiling: a new process without numba's cache, minus the same with it.

    Import and first calls of the packers, three times each, medians. A process that is not counted comes first: it
    leaves Python's own bytecode, as an installer does.
    """
    with tempfile.TemporaryDirectory() as folder:
        _first_calls(folder)
    empty, cached = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            empty.append(_first_calls(folder))
            cached.append(_first_calls(folder))
    without, again = statistics.median(empty), statistics.median(cached)
    return [
        Result(
            "packers, compilation in a process without a cache",
            f"{without - again:.2f} s; import and first calls {without:.2f} ({min(empty):.2f} to {max(empty):.2f}) s",
            f"<= {LIMIT:g} s",
            without - again <= LIMIT,
        ),
        Result("the same, cached: import and first calls", f"{again:.2f} ({min(cached):.2f} to {max(cached):.2f}) s"),
    ]


def _first_calls(cache: str) -> float:
    """Seconds of a new process with that folder for numba's cache."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    return float(subprocess.run([sys.executable, "-c", _START], env=environment, check=True, stdout=-1).stdout)


def _copy(total: int) -> Callable[[], object]:
    source, target = np.ones(total // 4, np.uint32), np.ones(total // 4, np.uint32)
    return lambda: np.copyto(target, source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small layer, few rounds")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    results = compilation() + packers(options.quick, options.threads)
    for result in results:
        print(f"{result.verdict:12}{result.what}\n{'':12}{result.measured}", end="")
        print(f"   (goal: {result.goal})" if result.goal else "", flush=True)
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
