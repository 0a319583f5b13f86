"""Times of products on this machine's GPU, as `matmul` carries them out: what `bcqfmt bench kernels` measures.

Every product is captured in a CUDA graph many times, with weights that together exceed the L2 cache; the result is the
median of several replays. It is compared with the time that its bytes take at the bandwidth measured in the same run
(the floor), and with torch's float16 product of the same matrix.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bcqfmt.integrations.torch.gpu_weight import GpuWeight, gpu_weight
from bcqfmt.kernels.matmul import matmul, path_of
from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec

CYCLED = 260_000_000  # bytes of weights that are used in turn: more than the L2 cache holds
KINDS = (("affine", 4), ("bcq", 2), ("bcq", 3), ("bcq", 4))  # encoding, bits
SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))
VECTORS = (1, 4, 16, 64)
GROUP = 128


class Row(NamedTuple):
    """One measurement, times in microseconds.

    ``kernel``: that of `path_of`, and the encoding. ``float16``: torch's product. ``error``: relative, in L2, against
    the float64 product with the float16 matrix.
    """

    kernel: str
    rows: int
    columns: int
    bits: int
    vectors: int
    microseconds: float
    floor: float
    float16: float
    error: float


def measured(
    speed: float, shapes: Sequence[tuple[int, int]] = SHAPES, vectors: Sequence[int] = VECTORS
) -> Iterator[Row]:
    """Random weights of these shapes (rows, columns) in groups of 128 columns; ``speed``: of :func:`bandwidth`."""
    for rows, columns in shapes:
        for encoding, bits in KINDS:
            count = max(2, min(32, CYCLED * 8 // (rows * columns * bits) + 1))
            made = [_random_weight(encoding, bits, rows, columns) for _ in range(count)]
            weights = [weight for weight, _ in made]
            dense = weights[0].values("F16")
            nbytes = sum(part.nbytes for part in made[0][1].values())
            for batch in vectors:
                x = torch.randn(batch, columns, device="cuda", dtype=torch.float16)
                moved = nbytes + 2 * batch * (rows + columns)
                yield _product(
                    f"{path_of(weights[0], batch).kernel}, {encoding}", bits, weights, dense, x, moved / speed
                )


def figures(speed: float, rows: Sequence[Any]) -> dict[str, Any]:
    """What is written of a run: the machine, its bandwidth in bytes per second, and rows, which are named tuples."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bandwidth": round(speed),
        "rows": [row._asdict() for row in rows],
    }


def _product(kernel: str, bits: int, weights: Sequence[GpuWeight], dense: Tensor, x: Tensor, floor: float) -> Row:
    (rows, columns), count = dense.shape, len(weights)
    copies = max(2, min(16, CYCLED // dense.nbytes + 1))
    matrices = [dense, *(dense.clone() for _ in range(copies - 1))]
    results = [matmul(weight, x) for weight in weights]  # of all: the first product of a weight prepares it
    taken = replayed(lambda i: matmul(weights[i % count], x), 2 * count)
    float16 = replayed(lambda i: x @ matrices[i % copies].T, 2 * copies)
    error = relative_error(results[0], x.double() @ dense.double().T)
    return Row(kernel, rows, columns, bits, len(x), taken, floor * 1e6, float16, error)


def _random_weight(encoding: str, bits: int, rows: int, columns: int) -> tuple[GpuWeight, dict[str, Tensor]]:
    """The weight, and its parts, which have to be kept while it is used."""
    planes = torch.randint(-(2**31), 2**31 - 1, (bits, rows, columns // 32), device="cuda", dtype=torch.int32)
    each = torch.rand(bits + 1, rows, columns // GROUP, device="cuda")  # numbers of a group
    if encoding == "bcq":
        segment = Segment(encoding="bcq", bits=bits, group_size=GROUP, alpha="F16", bias="F16")
        numbers = {"alpha": each[1:], "bias": each[0]}
    else:
        segment = Segment(encoding="affine", bits=bits, group_size=GROUP, scale="F16", zero=2 ** (bits - 1))
        numbers = {"scale": each[0]}
    parts = {"s0_planes": planes, **{f"s0_{name}": (0.01 * part).half() for name, part in numbers.items()}}
    spec = WeightSpec(scheme=Scheme(segments=(segment,)), shape=(rows, columns), dtype="F16", widths=(columns,))
    made = gpu_weight(spec, parts)
    assert made is not None
    return made, parts


def replayed(call: Callable[[int], object], count: int, rounds: int = 7) -> float:
    """Median microseconds of one call among ``count`` in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # for what the calls read
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
        graph.replay()  # the device is busy while the host launches the one that is timed
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second that a sum over 4 GB reads."""
    values = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return 4 * values.numel() / (replayed(lambda _: values.sum(), 4) * 1e-6)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``|found - exact| / |exact|`` in L2, of tensors of one shape."""
    return float((found.double() - exact).norm() / exact.norm())
