"""GGUF files to BCQ and back, compared with a plain copy; decoding, compared with gguf-py."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from measure import MIB, Result, interleave, rounded, run_child, spread

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
import bcqfmt
from bcqfmt.container.files import SourceFile, hash_file
from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.kernels import cpu
from sources.gguf_files import Writer

SIDE = 4096
WHOLE = ("Q4_0", "Q8_0", "Q4_K")  # types of the large files
GOAL, GOAL_DECODE = 0.4, 3.0
NUMBER = {kind.name: number for number, kind in TYPES.items()}


def random_blocks(kind: str, rows: int) -> Any:
    """uint8 [rows, row bytes] of ``SIDE`` columns, scales finite."""
    rng = np.random.default_rng(0)
    size = TYPES[NUMBER[kind]]
    raw = rng.integers(0, 256, (rows, SIDE // size.elements * size.nbytes), dtype=np.uint8)
    blocks = raw.view(KINDS[kind].block())
    names = blocks.dtype.names or ()
    if kind == "TQ1_0":  # as its quantizer writes them
        blocks["qs"] = (rng.integers(0, 243, blocks["qs"].shape) * 256 + 242) // 243
        blocks["qh"] = (rng.integers(0, 81, blocks["qh"].shape) * 3 * 256 + 242) // 243
    if kind == "NVFP4":
        blocks["e"] &= 0x3F
    for field in {"d", "m", "dd", "dmin"} & set(names):
        blocks[field] = rng.uniform(0.001, 0.01, blocks[field].shape)
    return raw


def gguf_file(path: Path, tensors: dict[str, tuple[str, Any]]) -> int:
    """A file with these tensors, name -> type and blocks; its bytes."""
    writer = Writer().pair("general.architecture", "str", "llama").pair("llama.attention.head_count", "u32", 32)
    for name, (kind, raw) in tensors.items():
        writer.tensor(name, [len(raw), SIDE], NUMBER[kind], raw.tobytes())
    with path.open("wb") as file:
        file.write(writer.padded(writer.header()))
        for *_, data in writer.tensors:
            file.write(writer.padded(data))
    return path.stat().st_size


def whole_files(quick: bool, work: Path) -> list[Result]:
    """Convert and restore, two workers, hashing and fsync included."""
    results = []
    for kind in WHOLE:
        results += _whole_file(kind, quick, work)
    return results


def _whole_file(kind: str, quick: bool, work: Path) -> list[Result]:
    raw = random_blocks(kind, SIDE)
    source, target, back, copy = (work / name for name in (f"{kind}.gguf", "bcq", "back", "copy"))
    layers = (1 << 27 if quick else 1_050_000_000) // raw.nbytes
    size = gguf_file(source, {f"blk.{i}.ffn_up.weight": (kind, raw) for i in range(layers)})
    shards = ConvertOptions(workers=2, max_shard_size=size // 4)

    def remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()  # the time that freeing the space takes is not measured

    def copied() -> None:
        copy.mkdir()
        subprocess.run(f"cp --reflink=never '{source}' '{copy}' && sync -f '{copy}'", shell=True, check=True)

    def restored() -> None:
        with bcqfmt.open(target) as checkpoint:
            restore(checkpoint, back)

    things: dict[str, Callable[[], object]] = {
        "remove copy": partial(remove, copy),
        "copy": copied,
        "sha256": lambda: hash_file(SourceFile(source)),
        "remove bcq": partial(remove, target),
        "convert": lambda: Conversion(open_source(source), shards).run(target),
        "remove back": partial(remove, back),
        "restore": restored,
    }
    times = interleave(things, 2 if quick else 5)
    results = []
    for name in ("convert", "restore"):
        ratios = [1 / ratio for ratio in times.ratios(name, "copy")]
        best = min(times.seconds["copy"]) / min(times.seconds[name])
        work_done = statistics.median(times.cpu[name]) * 1e9 / size
        results.append(
            Result(
                f"`{name}` of {size / 1e9:.2f} GB of {kind}, throughput relative to `cp` and `sync`",
                f"{spread(ratios)} x, shortest times {best:.2f} x; {work_done:.1f} ms of one core per MB; "
                f"copy {size / 1e6 / times.median('copy'):.0f} MB/s, "
                f"one SHA-256 {size / 1e6 / times.median('sha256'):.0f} MB/s",
                f"at least {GOAL} x",
                statistics.median(ratios) >= GOAL,
                {"ratios": rounded(ratios), "cores": round(times.cores(name), 2)},
            )
        )
    for folder in (copy, target, back):
        shutil.rmtree(folder)
    child = run_child(["-m", "bcqfmt", "convert", str(source), str(target), "--workers", "2"])
    limit = 2 * raw.nbytes + 300_000_000
    results.append(
        Result(
            f"`bcqfmt convert` of the same, peak memory of the process, weights of {raw.nbytes / MIB:.0f} MiB",
            f"{child.peak / MIB:.0f} MiB",
            f"at most twice the largest weight and 300 MB: {limit / MIB:.0f} MiB",
            child.peak <= limit,
        )
    )
    shutil.rmtree(target)
    source.unlink()
    return results


def decoding(quick: bool, work: Path) -> list[Result]:
    """Values of every type, one thread."""
    tensors = {f"{kind}.weight": (kind, random_blocks(kind, 256 if quick else 2048)) for kind in KINDS}
    gguf_file(work / "kinds.gguf", tensors)
    Conversion(open_source(work / "kinds.gguf"), ConvertOptions()).run(work / "kinds")
    results = []
    with bcqfmt.open(work / "kinds") as checkpoint:
        for name, (kind, raw) in tensors.items():
            results.append(_decoded(kind, raw, cpu.prepare(checkpoint.weight(name)), 2 if quick else 7))
    return results


def _decoded(kind: str, raw: Any, matrix: cpu.CpuMatrix, rounds: int) -> Result:
    what = f"{kind} to F32, {matrix.shape[0]} x {matrix.shape[1]}, one thread"
    values = matrix.dequantize("float32", threads=1)
    try:
        theirs = partial(gguf.quants.dequantize, raw, gguf.GGMLQuantizationType(NUMBER[kind]))
        assert np.array_equal(values.view(np.uint32), theirs().view(np.uint32)), kind
    except (ValueError, NotImplementedError):
        took = _processor(partial(matrix.dequantize, "float32", threads=1))
        return Result(what, f"{values.nbytes / 1e6 / took:.0f} MB of values/s; gguf-py has no decoder for it")
    ours: list[float] = []
    ratios: list[float] = []
    for _ in range(rounds):
        ours.append(_processor(partial(matrix.dequantize, "float32", threads=1)))
        ratios.append(_processor(theirs) / ours[-1])
    return Result(
        f"{what}, against gguf-py's dequantize",
        f"{spread(ratios, '.1f')} times as fast; {values.nbytes / 1e6 / min(ours):.0f} MB of values/s",
        f"at least {GOAL_DECODE:g} times as fast",
        statistics.median(ratios) >= GOAL_DECODE,
        {"ratios": rounded(ratios)},
    )


def _processor(work: Callable[[], object]) -> float:
    """Seconds of processor time of this thread: other processes do not lengthen it as they do wall time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gguf-py's overflows
        start = time.thread_time()
        work()
        return time.thread_time() - start
