"""The benchmarks: each takes options and a temporary folder and returns rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders
import numpy as np
from measure import HERE, MIB, Result, interleave, rounded, run_child, run_worker, spread
from sparse_folder import sparse_folder

import bcqfmt
from bcqfmt import limits

_CHUNK = 4 << 20


@dataclass(slots=True)
class Options:
    """``quick``: small inputs and few rounds, to see whether everything runs."""

    quick: bool = False

    @property
    def rounds(self) -> int:
        """Interleaved rounds."""
        return 3 if self.quick else 7


def imports(options: Options, work: Path) -> list[Result]:
    """``import bcqfmt`` on top of ``import numpy``."""
    del work
    rounds = 3 if options.quick else 9
    run_worker("import_bcqfmt")  # compiles the byte code
    found, totals, bases = [], [], []
    for _ in range(rounds):
        child, times = run_worker("import_bcqfmt")
        base, _ = run_worker("nothing")
        if times["heavy"]:
            raise AssertionError(f"import bcqfmt has loaded {', '.join(times['heavy'])}")
        found.append(times)
        totals.append(child.seconds * 1000)
        bases.append(base.seconds * 1000)
    results = []
    for key, text in (("all", "with every public name loaded"), ("bare", "alone; names are loaded on first use")):
        took = [times[key] * 1000 for times in found]
        results.append(
            Result(
                f"`import bcqfmt` after `import numpy`, {text}; median of {rounds} fresh processes",
                f"{spread(took, '.1f')} ms",
                "at most 50 ms",
                statistics.median(took) <= 50,
                {"ms": rounded(took, 2)},
            )
        )
    both, numpy_alone = statistics.median(totals), statistics.median(bases)
    results.append(
        Result(
            "the same as whole processes: numpy and all of bcqfmt, numpy alone, difference",
            f"{both:.0f} ms, {numpy_alone:.0f} ms, {both - numpy_alone:.0f} ms",
            values={"both_ms": rounded(totals, 2), "numpy_ms": rounded(bases, 2)},
        )
    )
    return results


def deep(options: Options, work: Path) -> list[Result]:
    """``validate --deep`` against one SHA-256 over the same bytes."""
    path = work / "deep"
    total, shard = (64 * MIB, 24 * MIB) if options.quick else (1100 * MIB, 400 * MIB)
    size = folders.model_folder(path, total, shard)
    files = folders.folder_files(path)

    def validated() -> None:
        report = bcqfmt.validate(path, deep=True)
        assert report.valid, report.findings

    hashed = _sha256_of(files)
    times = interleave({"sha256": hashed, "deep": validated}, options.rounds)
    speeds = [1 / ratio for ratio in times.ratios("deep", "sha256")]
    middle = statistics.median(speeds)
    shown = f"{size / 1e9:.2f} GB in {len(files)} files"
    results = [
        Result(
            f"`validate --deep`, speed relative to `hashlib.sha256` over the same bytes, {shown}",
            f"{spread(speeds)} x; {_speed(size, times.median('deep'))} against {_speed(size, times.median('sha256'))}, "
            f"{times.cores('deep'):.1f} cores busy against {times.cores('sha256'):.1f}",
            "at least 0.9 x",
            middle >= 0.9,
            {"ratios": rounded(speeds), "bytes": size, "cores": round(times.cores("deep"), 2)},
        )
    ]
    with _one_core():
        times = interleave({"sha256": hashed, "deep": validated}, min(3, options.rounds))
    speeds = [1 / ratio for ratio in times.ratios("deep", "sha256")]
    text = "the same, the process held on one core"
    results.append(Result(text, f"{spread(speeds)} x", values={"ratios": rounded(speeds)}))
    return results


def dequantize(options: Options, work: Path) -> list[Result]:
    """Decoding a 4096 x 4096 weight against the formula on unpacked codes."""
    side, rounds = folders.SIDE, options.rounds
    codes, scale, zero = folders.random_affine(4)
    weight = bcqfmt.BcqWeight.from_affine(codes, scale, zero, group_size=folders.GROUP, bits=4)
    bcqfmt.save(work / "dequantize.safetensors", {"w.weight": weight})
    stored = bcqfmt.open(work / "dequantize.safetensors").weight("w.weight")
    grouped = codes.reshape(side, -1, folders.GROUP)
    zp = zero[..., None].astype(np.float64)

    def formula() -> Any:
        return (scale[..., None].astype("f8") * (grouped.astype("f8") - zp)).astype("f2")

    want = formula().reshape(side, side).view(np.uint16)
    for source in (weight, stored):
        assert np.array_equal(source.dequantize("float16").view(np.uint16), want), "values differ from the formula"
    times = interleave({"formula": formula, "memory": _decoder(weight), "file": _decoder(stored)}, rounds)
    base = times.median("formula")
    results = []
    for name, text in (("memory", "planes in memory"), ("file", "planes read from the file (page cache)")):
        ratios = times.ratios(name, "formula")
        results.append(
            Result(
                f"dequantize 4096 x 4096, affine, 4 bits, groups of 128, to F16; {text}",
                f"{spread(ratios)} x; {times.median(name) * 1000:.0f} ms against {base * 1000:.0f} ms, "
                f"{times.cores(name):.1f} cores busy",
                "at most 3 x the formula on unpacked codes",
                statistics.median(ratios) <= 3,
                {"ratios": rounded(ratios), "ms": rounded([s * 1000 for s in times.seconds[name]], 1)},
            )
        )
    results += _other_encodings(formula, 1 if options.quick else 3)
    return results


def _other_encodings(formula: Callable[[], Any], rounds: int) -> list[Result]:
    kinds: dict[str, Callable[[], bcqfmt.BcqWeight]] = {
        "affine, 2 bits, groups of 128": lambda: folders.affine_weight(2),
        "affine, 3 bits, groups of 128": lambda: folders.affine_weight(3),
        "affine, 8 bits, groups of 128": lambda: folders.affine_weight(8),
        "bcq, 3 planes, F16 alpha and bias": lambda: folders.bcq_weight(3),
        "aligned64, 2 and 4 bits, second-order scales": folders.aligned64_weight,
        "the same in the canonical layout": lambda: folders.aligned64_weight().to_canonical(),
    }
    results = []
    for text, make in kinds.items():
        weight = make()
        times = interleave({"formula": formula, "weight": _decoder(weight)}, rounds)
        ratios = times.ratios("weight", "formula")
        results.append(
            Result(
                f"dequantize 4096 x 4096 to F16: {text}",
                f"{spread(ratios)} x; {times.median('weight') * 1000:.0f} ms, {weight.bits_per_weight:.2f} bits each",
                values={"ratios": rounded(ratios)},
            )
        )
    return results


def _decoder(weight: bcqfmt.BcqWeight) -> Callable[[], Any]:
    return lambda: weight.dequantize("float16")


def inspect(options: Options, work: Path) -> list[Result]:
    """``bcqfmt inspect`` of a folder with very many shards."""
    path = work / "sparse"
    path.mkdir()
    shards = 150 if options.quick else 1500
    start = time.perf_counter()
    tensors = sparse_folder(path, shards, 40)
    made = time.perf_counter() - start
    read = sum(_head_bytes(file) for file in folders.folder_files(path))
    rounds = 1 if options.quick else 3
    children = [run_child(["-m", "bcqfmt", "inspect", str(path)]) for _ in range(rounds)]
    for child in children:
        assert child.code == 0, child.output[-2000:]
    seconds = [child.seconds for child in children]
    peak = max(child.peak for child in children)
    return [
        Result(
            f"`bcqfmt inspect` of {tensors:,} tensors in {shards:,} shards: wall time of the process",
            f"{spread(seconds)} s for {read / 1e6:.0f} MB of headers, index and manifest",
            "at most 10 s",
            statistics.median(seconds) <= 10,
            {"seconds": rounded(seconds), "header_bytes": read, "made_in_seconds": round(made, 1)},
        ),
        Result(
            "the same: peak memory", f"{peak / MIB:.0f} MiB", "at most 1 GiB", peak <= 1 << 30, {"peak_bytes": peak}
        ),
    ]


def _head_bytes(path: Path) -> int:
    if path.suffix != ".safetensors":
        return path.stat().st_size
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def writer(options: Options, work: Path) -> list[Result]:
    """Saving a folder again from its files."""
    small, large = (32 * MIB, 128 * MIB) if options.quick else (256 * MIB, 1024 * MIB)
    path = work / "source"
    size = folders.model_folder(path, large, 1 << 50)
    files = folders.folder_files(path)
    target = work / "again"

    def saved() -> None:
        with bcqfmt.open(path) as checkpoint:
            bcqfmt.save(target, {name: checkpoint[name] for name in checkpoint}, overwrite=True)

    def copied() -> None:
        folder = work / "copy"
        folder.mkdir(exist_ok=True)
        for file in files:
            shutil.copyfile(file, folder / file.name)
            with (folder / file.name).open("rb+") as written:
                os.fsync(written.fileno())

    times = interleave({"sha256": _sha256_of(files), "copy": copied, "save": saved}, 2 if options.quick else 5)
    shutil.rmtree(target)
    shutil.rmtree(work / "copy")
    ratios = times.ratios("save", "sha256"), times.ratios("save", "copy")
    results = [
        Result(
            f"`save` of {size / 1e9:.2f} GB from its files, time relative to one SHA-256 / to copy and fsync",
            f"{spread(ratios[0])} x / {spread(ratios[1])} x; {_speed(size, times.median('save'))}, "
            f"sha256 {_speed(size, times.median('sha256'))}, copy {_speed(size, times.median('copy'))}",
            values={"sha256_ratios": rounded(ratios[0]), "copy_ratios": rounded(ratios[1])},
        )
    ]
    little = work / "little"
    folders.model_folder(little, small, 1 << 50)
    grown = []
    for i, source in enumerate((little, path)):
        _, found = run_worker("save_again", str(source), str(work / f"out{i}"))
        shutil.rmtree(work / f"out{i}")
        grown.append(found["after"] - found["before"])
    results.append(
        Result(
            f"`save`, one shard: growth of peak memory for {small // MIB} MiB and for {large // MIB} MiB",
            f"{grown[0] / MIB:.0f} MiB and {grown[1] / MIB:.0f} MiB",
            "does not grow with the shard (at most 16 MiB apart)",
            abs(grown[1] - grown[0]) <= 16 * MIB,
            {"grown_bytes": grown},
        )
    )
    return results


def bad_inputs(options: Options, work: Path) -> list[Result]:
    """Every row of the bad-input table."""
    del options
    script, found = HERE / "bad_inputs.py", work / "bad_inputs.json"
    if not script.exists():
        return [Result("bad inputs", "tests/benchmarks/bad_inputs.py is not there")]
    child = run_child([str(script), "--json", str(found)])
    if child.code and not found.exists():
        raise RuntimeError(child.output[-2000:])
    record = json.loads(found.read_text())
    cases: list[dict[str, Any]] = record["cases"]
    sound: dict[str, float] = record["baseline"]
    slow = max(cases, key=lambda case: float(case["seconds"]))
    large = max(cases, key=lambda case: int(case["peak_bytes"]))
    wrong = [case["name"] for case in cases if not case["right"]]
    kept = ("name", "code", "exit", "seconds", "peak_bytes")
    return [
        Result(
            f"{len(cases)} bad inputs, `validate --deep`: longest time of a whole process",
            f"{slow['seconds']:.2f} s ({slow['name']}); {sound['seconds']:.2f} s for a small sound file",
            "below 1 s",
            slow["seconds"] < 1,
            {"cases": [{key: case[key] for key in kept} for case in cases]},
        ),
        Result(
            "the same: largest peak memory",
            f"{large['peak_bytes'] / 1e6:.0f} MB ({large['name']}); {sound['peak_bytes'] / 1e6:.0f} MB when sound",
            "below 200 MB",
            large["peak_bytes"] < 200e6,
        ),
        Result(
            "the same: refused with the code and exit code that the table asks for",
            f"{len(cases) - len(wrong)} of {len(cases)}" + (f"; not {', '.join(wrong)}" if wrong else ""),
            "all",
            not wrong,
        ),
    ]


def reads(options: Options, work: Path) -> list[Result]:
    """Bytes read for two of four planes; headers near the limit."""
    path = work / "planes.safetensors"
    bcqfmt.save(path, {"w.weight": folders.affine_weight(4)})
    checkpoint = bcqfmt.open(path)
    weight = checkpoint.weight("w.weight")
    floor = 2 * folders.SIDE * folders.SIDE // 8
    before, kernel = checkpoint.bytes_read, _kernel_reads()
    weight.planes(first=2)
    overhead = _kernel_reads() - kernel - (checkpoint.bytes_read - before)  # reading the counter itself
    counted = checkpoint.bytes_read - before
    results = [
        Result(
            "bytes read by `planes(first=2)` of a 4-bit 4096 x 4096 weight; floor: half of the planes",
            f"{counted:,} of {floor:,}; the kernel counts {overhead:,} more for the counting itself",
            "the floor",
            counted == floor and overhead < 4096,
            {"bytes": counted, "floor": floor},
        )
    ]
    return results + _headers(options, work)


def _headers(options: Options, work: Path) -> list[Result]:
    results = []
    path = work / "long.safetensors"
    for dense, text in ((True, "dense tensors"), (False, "parts of 48,000 weights")):
        tensors = folders.long_header(path, limits.MAX_HEADER_BYTES - 100_000, dense=dense)
        found = [run_worker("open_file", str(path))[1] for _ in range(1 if options.quick else 5)]
        assert not any(one["code"] for one in found), found
        seconds, grown = [one["seconds"] for one in found], max(one["grown"] for one in found)
        results.append(
            Result(
                f"opening a file with a header of 24.9 MB, {tensors:,} {text}: time, growth of peak memory",
                f"{spread(seconds)} s, {grown / 1e6:.0f} MB",
                "at most 1 s and 400 MB" if dense else "",
                statistics.median(seconds) <= 1 and grown <= 400e6 if dense else None,
                {"seconds": rounded(seconds), "grown_bytes": grown},
            )
        )
    folders.long_header(path, limits.MAX_HEADER_BYTES + 100_000, dense=True)
    found = [run_worker("open_file", str(path))[1] for _ in range(1 if options.quick else 5)]
    assert all(one["code"] == "BCQ-V102" for one in found), found
    took = [one["seconds"] * 1000 for one in found]
    text = "refusing a file with a header of 25.1 MB"
    results.append(Result(text, f"{spread(took)} ms", "at most 50 ms", statistics.median(took) <= 50))
    path.unlink()
    return results


def _kernel_reads() -> int:
    """Bytes that this process asked the kernel for so far."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _sha256_of(files: list[Path]) -> Callable[[], object]:
    buffer = bytearray(_CHUNK)

    def hashed() -> str:
        state = hashlib.sha256()
        for chunk in folders.read_chunks(files, buffer):
            state.update(chunk)
        return state.hexdigest()

    return hashed


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _speed(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


BENCHES: dict[str, Callable[[Options, Path], list[Result]]] = {
    function.__name__: function for function in (imports, dequantize, deep, inspect, writer, reads, bad_inputs)
}
