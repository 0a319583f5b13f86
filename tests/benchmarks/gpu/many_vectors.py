"""Products of 1 to 4096 vectors with a 4-bit weight, as `matmul` chooses the kernel, compared with cuBLAS and others.

    python tests/benchmarks/gpu/many_vectors.py --out docs/benchmarks/gemm.json [--marlin libmarlin.so]
        [--lut-gemm liblutgemm.so]

Needs a GPU. Weights are rotated past the cache, products replayed from a CUDA graph; medians in microseconds, of one
run. "sm_80" is the kernel for GPUs that are not sm_90, compiled for this GPU. docs/benchmarks/gemm.md tells how the
libraries are built.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))
from bcqfmt.bench import bandwidth, relative_error, replayed
from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels.gemm import gemm, parts_of
from bcqfmt.kernels.gemm.kernel import gemm_kernel
from bcqfmt.kernels.gemm.layout import GemmLayout
from bcqfmt.kernels.gemm.shape import GemmShape, gemm_shape
from bcqfmt.kernels.matmul import MatmulWeight, matmul, path_of
from bcqfmt.kernels.operands import Operand, OperandSegment
from bcqfmt.kernels.runtime.cubins import code_of
from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec
from kernel_bench.peers import marlin, published, tinygemm
from kernel_bench.weights import Weight, random_vectors, random_weight

SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
MANY = (256, 512, 1024, 2048, 4096)  # timed last: what follows them is slower while the GPU is hot
BETWEEN = (80, 96, 112, 144, 160, 192, 224, 288, 320, 384, 448, 576, 640, 768, 896, 1100, 1200, 1400, 1600, 1800)
LEAST = 3  # vectors from which on `gemm` is compiled for every weight; it takes fewer of some
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLES = {
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), "MXFP4": _FP4, "NVFP4": _FP4,
}  # fmt: skip
# formula or table, bits, group size
OTHERS = (
    ("affine", 3, 128), ("affine", 2, 128), ("bcq", 4, 128), ("bcq", 3, 128), ("bcq", 2, 128), ("IQ4_NL", 4, 32),
    ("MXFP4", 4, 32), ("NVFP4", 4, 16),
)  # fmt: skip
FEW, SMALL_FEW = (1, 16, 64), (8, 16)  # vectors with these, by the largest and the smallest matrix
OLD_MOST = 64  # vectors
ROTATED = 300e6  # bytes of weights that are used in turn
ZERO = 8
PEERS, PEERS_MOST = ("tinygemm", "lut_gemm", "marlin"), 60  # seconds
TURNS = 3  # of both products, one after the other
STEADY = 0.4, 0.15  # seconds of a turn with MANY and BETWEEN: power limits the clock, and the first rounds are faster
# planes and vectors of bcq weights that are multiplied by look-up too, as float32 and short groups are
LOOKED_UP = ((4, 1), (3, 1), (2, 1), (4, 3))


def made(formula: str, q: int, rows: int, columns: int, g: int) -> tuple[Weight, MatmulWeight]:
    """A random weight, which has to be kept, and the same for `matmul`; zero points are 8 everywhere."""
    weight = random_weight("bcq" if formula == "bcq" else "affine", q, rows, columns, g)
    if formula == "bcq":
        return weight, weight.placed()
    if formula in TABLES:
        weight = replace(weight, formula="table", second=torch.tensor(TABLES[formula], device="cuda"))
        part: Any = OperandSegment(
            planes=weight.planes, start=0, width=columns, group_size=g, formula="table",
            first=weight.first.cpu().numpy(), second=weight.second.cpu().numpy(),
        )  # fmt: skip
        operand = Operand(name=formula, shape=(rows, columns), dtype="F16", segments=(part,), perm=None, outliers=None)
        return weight, MatmulWeight(operand)
    weight.second.fill_(ZERO)
    segment = Segment(encoding="affine", bits=q, group_size=g, scale="F16", zero=ZERO)
    spec = WeightSpec(scheme=Scheme(segments=(segment,)), shape=(rows, columns), dtype="F16", widths=(columns,))
    found = gpu_weight(spec, {"s0_planes": weight.planes, "s0_scale": weight.first})
    assert found is not None
    return weight, found


Figures = dict[str, float | int | str]
Jobs = dict[GemmShape | tuple[Any, ...], None]


def measured(
    formula: str, q: int, rows: int, columns: int, g: int, counts: tuple[int, ...], *, peers: dict[str, float],
    old: bool = False, steady: float = 0.0,
) -> Iterator[Figures]:  # fmt: skip
    """A row for every number of vectors; ``peers``: what :func:`peer_times` found."""
    size = rows * columns * q // 8
    weights = [made(formula, q, rows, columns, g) for _ in range(max(2, min(8, int(ROTATED / size) + 1)))]
    first, ready = weights[0][0], [placed for _, placed in weights]
    several, plain = len(weights), (formula, q) == ("affine", 4)
    dense = [weight.dense(random_vectors(1, columns))[0] for weight, _ in weights[:3] if plain]
    for count in counts:
        x = random_vectors(count, columns)
        for weight in ready:
            matmul(weight, x)  # prepares it
        exact = x.double() @ first.values(0, 256).T
        row: Figures = {
            "formula": formula, "bits": q, "rows": rows, "columns": columns, "vectors": count,
            "path": path_of(ready[0], count).kernel,
            "error": relative_error(matmul(ready[0], x)[:, :256].double(), exact),
        }  # fmt: skip
        calls: dict[str, tuple[Callable[[int], object], int]] = {
            "microseconds": (lambda i, x=x: matmul(ready[i % several], x), several)
        }
        if plain:
            calls["cublas"] = (lambda i, x=x: x @ dense[i % len(dense)].T, len(dense))
        if plain and count in MANY:  # what `matmul` does where the GPU is not sm_90
            calls["dequantize"] = (lambda i, x=x: matmul(ready[i % several], x, path="dequantize"), several)
        times = [{name: _timed(call, 2 * of, steady) for name, (call, of) in calls.items()} for _ in range(TURNS)]
        row |= {name: statistics.median(turn[name] for turn in times) for name in calls}
        if old and count <= OLD_MOST:
            row["sm_80"] = replayed(_older(ready, x), 2 * several)
        for name in PEERS:
            if (key := _key(name, formula, q, rows, count)) in peers:
                row[name] = peers[key]
        print({k: round(v, 2) if isinstance(v, float) and k != "error" else v for k, v in row.items()}, flush=True)
        yield row


def looked_up(rows: int, columns: int) -> list[Figures]:
    """Products with bcq weights of one shape by look-up, and with a decoded matrix."""
    found = list[Figures]()
    for q, count in LOOKED_UP:
        several = max(2, min(8, int(ROTATED / (rows * columns * q // 8)) + 1))
        weights, x = [made("bcq", q, rows, columns, 128) for _ in range(several)], random_vectors(count, columns)
        row: Figures = {"bits": q, "rows": rows, "columns": columns, "vectors": count}
        for path in ("look-up", "dequantize"):
            calls = [partial(matmul, weight, x, path=path) for _, weight in weights]
            for call in calls:
                call()  # prepares the weight
            row[path] = replayed(lambda i, calls=calls: calls[i % len(calls)](), 2 * several)
        found.append(row)
        print(row, flush=True)
    return found


def _timed(call: Callable[[int], object], count: int, seconds: float) -> float:
    """`replayed` for so many seconds; at least its usual rounds."""
    taken = replayed(call, count)
    rounds = int(seconds * 1e6 / (2 * count * taken))
    return taken if rounds == 0 else replayed(call, count, rounds)


def _key(name: str, formula: str, q: int, rows: int, count: int) -> str:
    return f"{name} {formula} {q} {rows} {count}"


def peer_times(marlin_library: str | None, lut_gemm_library: str | None, place: Path) -> None:
    """Times of tinygemm, LUT-GEMM and Marlin, written to a file after each; in a process that can be ended."""
    found: dict[str, float] = {}
    for rows, columns in SHAPES:
        weight = random_weight("affine", 4, rows, columns, 128)
        found[_key("tinygemm", "affine", 4, rows, 1)] = tinygemm(weight, random_vectors(1, columns)).microseconds
        place.write_text(json.dumps(found))
    rows, columns = SHAPES[-1]
    for formula, q, g in OTHERS if lut_gemm_library else ():
        if formula == "bcq":
            weight = random_weight(formula, q, rows, columns, g)
            taken = published(str(lut_gemm_library), weight, random_vectors(1, columns)).microseconds
            found[_key("lut_gemm", formula, q, rows, 1)] = taken
            place.write_text(json.dumps(found))
    for rows, columns in SHAPES if marlin_library else ():
        for count in COUNTS:
            taken = marlin(str(marlin_library), rows, columns, random_vectors(count, columns)).microseconds
            found[_key("marlin", "affine", 4, rows, count)] = taken
            place.write_text(json.dumps(found))


def peers_of(marlin_library: str | None, lut_gemm_library: str | None, place: Path) -> dict[str, float]:
    """What :func:`peer_times` found within ``PEERS_MOST`` seconds."""
    place.write_text("{}")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=peer_times, args=(marlin_library, lut_gemm_library, place))
    process.start()
    process.join(PEERS_MOST)
    if process.exitcode != 0:
        print("a peer did not answer or failed: it is left out from there on", flush=True)
        process.kill()
        process.join()
    found: dict[str, float] = json.loads(place.read_text())
    place.unlink()
    return found


def _older(ready: list[MatmulWeight], x: torch.Tensor) -> Callable[[int], object]:
    """The product with the instructions of sm_80."""
    ours = [weight.gemm("F16") for weight in ready]
    assert ours[0] is not None
    shapes = [gemm_shape(ours[0].segments[0].layout, len(x), ours[0].shape[0], 1, 1, "mma")]

    def product(i: int) -> object:
        operand = ours[i % len(ours)]
        assert operand is not None
        return gemm(operand, x, shapes=shapes)

    return product


def shapes_of(formula: str, q: int, rows: int, columns: int, g: int, counts: Iterable[int], engine: str) -> Jobs:
    """What `gemm` is compiled for."""
    table = tuple(map(float, TABLES.get(formula, ())))
    layout = GemmLayout(q, columns, g, "table" if table else formula, "F16", table=table)
    return {gemm_shape(layout, count, rows, 1, 1, engine): None for count in counts if count >= LEAST or table}


def compiled(job: GemmShape | tuple[Any, ...], capability: tuple[int, int]) -> None:
    """The kernel of some rows is in the cache of compiled kernels."""
    if isinstance(job, GemmShape):
        code_of(gemm_kernel(job), capability)
        return
    formula, q, rows, columns, g, count = job
    _weight, ready = made(formula, q, rows, columns, g)
    matmul(ready, random_vectors(count, columns))


def kernels_of_all() -> Jobs:
    """What all rows are compiled for."""
    counts = {end - begin for count in (*MANY, *BETWEEN) for begin, end in parts_of(count)}
    jobs: Jobs = {}
    for shape in SHAPES:
        jobs |= shapes_of("affine", 4, *shape, 128, counts, "wgmma")
    for formula, q, g in OTHERS:
        jobs |= shapes_of(formula, q, *SHAPES[-1], g, FEW, "wgmma")
        jobs |= shapes_of(formula, q, *SHAPES[0], g, SMALL_FEW, "wgmma")
    for shape in SHAPES[::-1]:
        jobs |= shapes_of("affine", 4, *shape, 128, COUNTS, "wgmma")
        jobs |= shapes_of("affine", 4, *shape, 128, [n for n in COUNTS if n <= OLD_MOST], "mma")
        jobs |= {("affine", 4, *shape, 128, count): None for count in COUNTS if count < LEAST}
    return jobs | {(formula, q, *SHAPES[-1], g, FEW[0]): None for formula, q, g in OTHERS if formula not in TABLES}


def compile_all(jobs: Jobs) -> None:
    """All kernels, in processes of their own."""
    # what takes longest comes first: kernels for few vectors, then long stages and 3 bits
    ordered = sorted(
        jobs,
        key=lambda job: -job.depth * job.height * (1 + job.layout.bits % 2) if isinstance(job, GemmShape) else -1000,
    )
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        pool.map(partial(compiled, capability=torch.cuda.get_device_capability()), ordered, chunksize=1)


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--marlin", help="library with the function marlin")
    parser.add_argument("--lut-gemm", help="library with the function lutgemm_bias")
    options, begin = parser.parse_args(), time.perf_counter()
    compile_all(kernels_of_all())
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    peers = peers_of(options.marlin, options.lut_gemm, options.out.with_suffix(".peers"))
    print(f"peers: {time.perf_counter() - begin:.0f} s", flush=True)
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bandwidth": bandwidth(), "group_size": 128}
    parts = [partial(measured, "affine", 4, *shape, 128, COUNTS, old=True) for shape in SHAPES]
    parts += [partial(measured, formula, q, *SHAPES[-1], g, FEW) for formula, q, g in OTHERS]
    parts += [partial(measured, formula, q, *SHAPES[0], g, SMALL_FEW) for formula, q, g in OTHERS]
    parts += [partial(measured, "affine", 4, *shape, 128, BETWEEN, steady=STEADY[1]) for shape in SHAPES]
    parts += [partial(measured, "affine", 4, *shape, 128, MANY, steady=STEADY[0]) for shape in SHAPES]
    figures |= {"rows": [], "look_ups": [row for shape in SHAPES for row in looked_up(*shape)]}
    for part in parts:
        for row in part(peers=peers):
            figures["rows"].append(row)
            options.out.write_text(json.dumps(figures, indent=1) + "\n")  # what is timed is kept if the run is cut
        print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
