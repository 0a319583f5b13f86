"""Products on the CPU: BCQ against torch's own, same machine, same run.

    python tests/benchmarks/cpu_kernels.py [--quick] [--threads N] [--cpu-time] [--only products] [--json FILE]

y = W x for one vector, W 4096 x 4096 and 11008 x 4096, BCQ at 2 and 4 bit (affine, groups of 128): against torch's fp32
and bf16 `mv`, bf16 `linear`, and its int4 kernel (`_weight_int4pack_mm_for_cpu`, bf16, groups of 128); against fp32
alone where the processor has no bf16, because those take up to 300 times as long there. Then batches.
Every call takes the next of several copies of a weight, 256 MB of them, so that no cache holds it from the call before;
a second table repeats one copy. Contenders take turns, some calls each; ratios are taken turn by turn.
``--cpu-time`` counts the processor time of one thread instead of wall time: what other processes do hardly shows in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import torch
from measure import Result, machine, rounded, spread

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.processor import multiplies
from bcqfmt.kernels import cpu
from bcqfmt.system import cores
from products import product_reference as reference

SHAPES = ((4096, 4096), (11008, 4096))
GROUP = 128
SPREAD = 256 << 20  # bytes of copies
GOAL = 2.0  # times as fast as fp32 mv
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # of GGUF's IQ4_NL

Call = Callable[[], object]
Clock = Callable[[], float]


def weight_of(rows: int, columns: int, bits: int, rng: np.random.Generator, kind: str = "affine") -> BcqWeight:
    """Random codes, scales as quantizers make them; ``kind``: affine, bcq or table."""
    scale = (rng.random((rows, columns // GROUP)) * 0.01 + 0.001).astype(np.float16)
    if kind == "table":
        codes = rng.integers(0, 16, (rows, columns), np.uint8)
        return BcqWeight.from_table(codes, scale, LEVELS, group_size=GROUP)
    if kind == "bcq":
        signs = rng.integers(0, 2, (bits, rows, columns), np.uint8)
        alpha = np.stack([scale * np.float16(2.0**-i) for i in range(bits)])
        return BcqWeight.from_bcq(signs, alpha, scale, group_size=GROUP)
    codes = rng.integers(0, 2**bits, (rows, columns), np.uint8)
    zero = rng.integers(0, 2**bits, scale.shape)
    return BcqWeight.from_affine(codes, scale, zero, group_size=GROUP, bits=bits)


def copies(weight: BcqWeight, count: int) -> list[cpu.CpuMatrix]:
    """The same weight prepared several times, each with planes of its own."""
    made = []
    for _ in range(count):
        parts = {suffix: part.array().copy() for suffix, part in weight.parts().items()}
        stored = {s: type(p).from_array(s, parts[s], p.dtype) for s, p in weight.parts().items()}
        made.append(cpu.prepare(BcqWeight("", weight.spec, stored)))
    return made


def contenders(rows: int, columns: int, batch: int, threads: int, spread_: int) -> dict[str, Call]:
    """Name -> a call that multiplies with the next copy."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((batch, columns)).astype(np.float32))
    short, one = x.bfloat16(), batch == 1
    found: dict[str, Call] = {}

    def add(name: str, size: int, make: Callable[[int], list[Any]], call: Callable[[Any], object]) -> None:
        cycle = itertools.cycle(make(max(1, -(-spread_ // size))))
        found[name] = lambda: call(next(cycle))

    dense = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    linear = torch.nn.functional.linear
    add(
        "torch fp32", 4 * rows * columns, lambda n: [dense.clone() for _ in range(n)],
        (lambda w: torch.mv(w, x[0])) if one else (lambda w: linear(x, w)),
    )  # fmt: skip
    bf16 = multiplies(torch.bfloat16)
    if one and bf16:
        add(
            "torch bf16 mv", 2 * rows * columns, lambda n: [dense.bfloat16() for _ in range(n)],
            lambda w: torch.mv(w, short[0]),
        )  # fmt: skip
    if bf16:
        add(
            "torch bf16 linear", 2 * rows * columns, lambda n: [dense.bfloat16() for _ in range(n)],
            lambda w: linear(short, w),
        )  # fmt: skip
        codes = torch.from_numpy(rng.integers(0, 16, (rows, columns), np.int32))
        numbers = torch.ones(columns // GROUP, rows, 2, dtype=torch.bfloat16)
        add(
            "torch int4", rows * columns // 2,
            lambda n: [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(n)],
            lambda w: torch.ops.aten._weight_int4pack_mm_for_cpu(short, w, GROUP, numbers),
        )  # fmt: skip
    vectors = x.numpy()
    kinds = [(2, "affine"), (4, "affine"), (4, "bcq")]
    for bits, kind in kinds if spread_ or (rows, columns) != SHAPES[0] else [*kinds, (4, "table")]:
        weight = weight_of(rows, columns, bits, rng, kind)
        error = reference.relative_error(cpu.prepare(weight).matmul(vectors), reference.product(weight, vectors))
        assert error < 1e-5, error
        add(
            f"BCQ {'' if kind == 'affine' else kind + ' '}{bits} bit", weight.nbytes, lambda n, w=weight: copies(w, n),
            lambda m: m.matmul(vectors, threads=threads),
        )  # fmt: skip
    return found


def take_turns(calls: dict[str, Call], turns: int, clock: Clock, each: int = 8) -> dict[str, list[float]]:
    """The fastest of ``each`` calls in milliseconds, turn by turn: what other processes do to a call is left out."""
    for call in calls.values():
        call()
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()  # lets the threads of the one before go to sleep
            times = []
            for _ in range(each):
                begun = clock()
                call()
                times.append(clock() - begun)
            found[name].append(min(times) * 1000)
    return found


def products(quick: bool = False, threads: int = 2, clock: Clock = time.perf_counter) -> Iterator[Result]:
    """One vector: every shape, copies and a single weight."""
    torch.set_num_threads(threads)
    turns = 3 if quick else 15
    for rows, columns in SHAPES[: 1 if quick else 2]:
        for spread_ in (0,) if quick else (SPREAD, 0):
            times = take_turns(contenders(rows, columns, 1, threads, spread_), turns, clock)
            how = "copies in turn" if spread_ else "one weight again and again"
            for name, took in times.items():
                goals = []
                if name in ("BCQ 2 bit", "BCQ 4 bit"):
                    goals = [("torch fp32", GOAL), ("torch bf16 mv", 1.0), ("torch int4", 1.0)]
                    goals = [goal for goal in goals if goal[0] in times]
                ratios = {
                    base: [a / b for a, b in zip(times[base], took, strict=True)] for base in times if base != name
                }
                met = all(statistics.median(ratios[base]) >= least for base, least in goals) if goals else None
                shown = ", ".join(
                    f"{statistics.median(r):.2f}x {base}" for base, r in ratios.items() if "torch" in base
                )
                yield Result(
                    f"{name}, {rows} x {columns}, one vector, {threads} threads, {how}",
                    f"{spread(took, '.3f')} ms; {shown}",
                    "; ".join(f"at least {least:g}x {base}" for base, least in goals),
                    met,
                    {"ms": rounded(took)},
                )


def batches(quick: bool = False, threads: int = 2, clock: Clock = time.perf_counter) -> Iterator[Result]:
    """Several vectors at once."""
    torch.set_num_threads(threads)
    for batch in (2, 8) if quick else (2, 4, 8, 16, 32, 64):
        times = take_turns(contenders(*SHAPES[0], batch, threads, 0), 3 if quick else 7, clock, 4)
        shown = ", ".join(f"{name} {statistics.median(took):.2f}" for name, took in times.items())
        values = {name: rounded(took) for name, took in times.items()}
        yield Result(f"4096 x 4096, {batch} vectors, {threads} threads, ms", shown, values=values)


def both(quick: bool = False) -> Iterator[Result]:
    """One vector, then several, with every core."""
    yield from products(quick, cores())
    yield from batches(quick, cores())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, few turns")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--only", choices=("products", "batches"))
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    threads, clock = (1, time.thread_time) if options.cpu_time else (options.threads, time.perf_counter)
    print(f"instructions: {cpu.target()}, threads: {threads}, {clock.__name__}, torch {torch.__version__}")
    results = []
    for bench in [bench for bench in (products, batches) if options.only in (None, bench.__name__)]:
        for result in bench(options.quick, threads, clock):
            results.append(result)
            print(f"{result.verdict:12}{result.what}\n{'':12}{result.measured}", flush=True)
    if options.json is not None:
        record = {
            "machine": machine(),
            "threads": threads,
            "clock": clock.__name__,
            "results": [result.as_dict() for result in results],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    missed = sum(result.met is False for result in results)
    print(f"{len(results)} figures, {missed} goals missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
