"""Times of the CUDA kernels beside those of torch, on the GPU at hand: what `bcqfmt bench kernels` measures.

Every product is captured in a CUDA graph many times over, with weights that follow one another through more memory than
the L2 cache holds; the median of several replays counts. Beside each time stand the bytes that have to move at the
bandwidth measured in the same run (the floor), and torch's float16 product (cuBLAS). Weights are random bits: a
product's time does not depend on them.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bcqfmt.kernels import bit_gemv
from bcqfmt.kernels.bit_layout import BitLayout
from bcqfmt.kernels.bit_shape import BitShape
from bcqfmt.kernels.byte_shape import product_shape

__all__ = [
    "AROUND",
    "Row",
    "bandwidth",
    "cublas",
    "early_and_alone",
    "products",
    "replayed",
    "shapes_to_compile",
    "sweep",
]

AROUND = 260_000_000  # bytes of weights that follow one another
LARGE, SMALL = ((28672, 8192), (49152, 12288)), ((4096, 4096), (11008, 4096))
SWEEP = [(q, g) for q in range(1, 9) for g in (8, 16, 32, 64, 128, 512, 12288)]


class Row(NamedTuple):
    """One measurement: microseconds, and what the floor and the peers need.

    ``alone``: microseconds where every product is launched when the one before has ended, without fetching its weight
    while that one still runs (`cubins`).
    """

    kernel: str
    rows: int
    columns: int
    bits: float
    group_size: int
    batch: int
    microseconds: float
    floor: float
    peers: dict[str, float]
    bytes: int
    error: float | None = None
    joules: float | None = None
    alone: float | None = None


def replayed(call: Callable[[int], object], count: int, rounds: int = 7) -> float:
    """Median microseconds of one call among ``count`` in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            call(i)
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def early_and_alone(product: Callable[[Any], object], weights: Sequence[Any]) -> tuple[float, float]:
    """Median microseconds of a product, as `Row` tells them apart: with these settled weights, and if they were not."""
    torch.cuda.synchronize()  # which settles them
    count = len(weights)
    early = replayed(lambda i: product(weights[i % count]), 2 * count)
    plain = [replace(weight, settled=False) for weight in weights]
    return early, replayed(lambda i: product(plain[i % count]), 2 * count)


def bandwidth() -> float:
    """Bytes per second that a sum over 4 GB reads."""
    values = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return 4 * values.numel() / (replayed(lambda _: values.sum(), 4) * 1e-6)


def shapes_to_compile() -> list[Any]:
    """Every kernel that :func:`products` and :func:`sweep` launch, to be compiled beforehand."""
    found = []
    for formula, q, _, columns, g, batch in [*_cases(), *(("bcq", q, 12288, 12288, g, 1) for q, g in SWEEP)]:
        shape = product_shape(_layout(q, columns, g, formula), batch, 1, 1, reordered=False, added=False)
        if shape is not None and shape not in found:
            found.append(shape)
    return found


def products(speed: float, lut_gemm: str | None = None) -> Iterator[Row]:
    """Products of one to eight vectors; ``lut_gemm``: a library with the published kernel (docs/benchmarks/kernels)."""
    dense: dict[tuple[int, int, int], float] = {}
    for formula, q, rows, columns, g, batch in _cases():
        key = (rows, columns, batch)
        if key not in dense:
            dense[key] = cublas(rows, columns, batch)
        peers = {"cuBLAS fp16": dense[key]}
        if q == 4 and g == 128 and batch == 1:
            peers["tinygemm int4"] = _tinygemm(rows, columns)
        if lut_gemm is not None and formula == "bcq" and g == 128 and batch == 1 and q <= 4:
            peers["LUT-GEMM"] = _published(lut_gemm, q, rows, columns, g)
        yield _product(formula, q, rows, columns, g, batch, speed, peers)


def sweep(speed: float) -> Iterator[Row]:
    """Planes times group sizes at 12288 x 12288: time against bytes, and the energy of a product."""
    for q, g in SWEEP:  # 7 and 8 planes in groups of 8 have no fast product
        if product_shape(_layout(q, 12288, g, "bcq"), 1, 1, 1, reordered=False, added=False) is None:
            continue
        yield _product("bcq", q, 12288, 12288, g, 1, speed, {}, energy=True)


def _cases() -> list[tuple[str, int, int, int, int, int]]:
    cases = [("bcq", q, *shape, 128, 1) for shape in (*LARGE, *SMALL) for q in (2, 3, 4)]
    cases += [("affine", 4, *shape, 128, 1) for shape in (*LARGE, *SMALL)]
    cases += [("bcq", 4, 28672, 8192, g, 1) for g in (32, 64, 8192)]
    cases += [("bcq", 8, 49152, 12288, 128, 1)]
    cases += [("affine", 4, 28672, 8192, 32, 1)]
    cases += [(formula, 4, 28672, 8192, 128, batch) for formula in ("bcq", "affine") for batch in (2, 4, 8)]
    return cases


def _layout(q: int, columns: int, g: int, formula: str) -> BitLayout:
    return BitLayout(q, columns, g if g < columns else -(-columns // 256) * 256, formula, "F16")


def _product(
    formula: str, q: int, rows: int, columns: int, g: int, batch: int, speed: float, peers: dict[str, float],
    *, energy: bool = False,
) -> Row:  # fmt: skip
    layout = _layout(q, columns, g, formula)
    shape = product_shape(layout, batch, 1, 1, reordered=False, added=False)
    assert shape is not None
    groups = -(-columns // g)
    numbers = 2 * (q + 1) if formula == "bcq" else 2 + q / 8
    nbytes = int(rows * columns * q / 8 + rows * groups * numbers + 2 * batch * (rows + columns))
    count = max(2, min(60, AROUND * 8 // (rows * columns * q) + 1))
    weights = [random_operand(layout, rows, columns) for _ in range(count)]
    x = torch.randn(batch, columns, device="cuda", dtype=torch.float16)
    y = torch.empty(batch, rows, device="cuda", dtype=torch.float16)

    def product(weight: bit_gemv.BitOperand) -> None:
        bit_gemv.bit_gemv(weight, x, out=y, shapes=(shape,))

    taken, alone = early_and_alone(product, weights)
    joules = _energy(lambda i: product(weights[i % count]), taken) if energy else None
    way = "bits" if isinstance(shape, BitShape) else "bytes"
    return Row(
        f"{way}, {formula}",
        rows,
        columns,
        q,
        g,
        batch,
        taken,
        nbytes / speed * 1e6,
        peers,
        nbytes,
        None,
        joules,
        alone,
    )


def random_operand(layout: BitLayout, rows: int, columns: int) -> bit_gemv.BitOperand:
    """A weight of one segment on the GPU: random planes, small positive float16 numbers."""
    tiles = -(-rows // 16)
    words = tiles * layout.chunks * layout.bits * 128
    planes = torch.randint(-(2**31), 2**31 - 1, (words,), device="cuda", dtype=torch.int32)
    scales = (torch.rand(tiles * layout.sets * layout.set_bytes // 2, device="cuda") * 0.1).half().view(torch.int32)
    segment = bit_gemv.BitSegment(layout=layout, planes=planes, numbers=scales, start=0)
    return bit_gemv.BitOperand(shape=(rows, columns), segments=(segment,), perm=None, settled=True)


def cublas(rows: int, columns: int, batch: int) -> float:
    """Microseconds of torch's float16 product."""
    count = max(2, min(16, AROUND // (rows * columns * 2) + 1))
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.float16) for _ in range(count)]
    x = torch.randn(columns, batch, device="cuda", dtype=torch.float16)
    x = x[:, 0].contiguous() if batch == 1 else x
    return replayed(lambda i: torch.matmul(weights[i % count], x), 2 * count)


def _tinygemm(rows: int, columns: int) -> float:
    count = max(2, min(32, AROUND * 2 // (rows * columns) + 1))
    packed = []
    for _ in range(count):
        codes = torch.randint(0, 255, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        packed.append(torch.ops.aten._convert_weight_to_int4pack(codes, 8))
    scales = torch.randn(columns // 128, rows, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)
    return replayed(lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i % count], 128, scales), 2 * count)


def _published(library: str, q: int, rows: int, columns: int, g: int) -> float:
    """The published kernel with its own defaults: tiles of 32 columns, results cleared before."""
    function = ctypes.CDLL(library).lutgemm_bias
    count = max(2, min(40, AROUND * 8 // (rows * columns * q) + 1))
    shape = (columns // 32, q, rows)
    planes = [torch.randint(-(2**31), 2**31 - 1, shape, device="cuda", dtype=torch.int32) for _ in range(count)]
    alpha = torch.randn(columns // g, q, rows, device="cuda", dtype=torch.float16)
    bias = torch.randn(columns // g, rows, device="cuda", dtype=torch.float16)
    x = torch.randn(columns, device="cuda", dtype=torch.float16)
    y = torch.empty(rows, device="cuda", dtype=torch.float16)

    def call(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (y, planes[i % count], alpha, bias, x)]
        function(*places, rows, columns, q, g, 32, ctypes.c_void_p(stream))

    return replayed(call, 2 * count)


def _energy(call: Callable[[int], object], microseconds: float) -> float | None:
    """Joules of one product, from the GPU's own counter over about 0.3 s; None where it has none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, before, after = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    times = max(1, int(0.3e6 / microseconds))
    torch.cuda.synchronize()
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(before)):
        return None
    for i in range(times):
        call(i)
    torch.cuda.synchronize()
    library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(after))
    return (after.value - before.value) * 1e-3 / times
