"""What benchmarks of single kernels need beyond `bcqfmt.bench`: early launches, energy, one row for each figure."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bcqfmt.bench import replayed


class Row(NamedTuple):
    """One measurement: microseconds, and what the floor and the peers need.

    ``alone``: microseconds where every product is launched when the one before has ended, without fetching its weight
    while that one still runs (`cubins`). ``error``: relative, in L2, against the float64 product with the exact matrix;
    ``errors``: the same of those peers that had the same matrix.
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
    errors: dict[str, float] | None = None


def early_and_alone(product: Callable[[Any], object], weights: Sequence[Any]) -> tuple[float, float]:
    """Median microseconds of a product, as `Row` tells them apart: with these settled weights, and if they were not."""
    torch.cuda.synchronize()  # which settles them
    count = len(weights)
    early = replayed(lambda i: product(weights[i % count]), 2 * count)
    plain = [replace(weight, settled=False) for weight in weights]
    return early, replayed(lambda i: product(plain[i % count]), 2 * count)


def steadily(call: Callable[[int], object], count: int, seconds: float) -> float:
    """`replayed` for so many seconds; at least its usual rounds."""
    taken = replayed(call, count)
    rounds = int(seconds * 1e6 / (2 * count * taken))
    return taken if rounds == 0 else replayed(call, count, rounds)


def energy(call: Callable[[int], object], microseconds: float) -> float | None:
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
