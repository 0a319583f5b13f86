"""A GPU that is not there: host tensors count as its own, and what would be sent to the driver is recorded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from bcqfmt.kernels.runtime import device, launch, tensor_map


class Launched(NamedTuple):
    """One launch as `cubins.Loaded` gets it."""

    grid: tuple[int, ...]
    threads: int
    shared: int
    stream: int
    values: list[Any]
    early: bool


class Recorder:
    """What is loaded and launched, in order; in the place of `cubins.Loaded`."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, tuple[int, int]]] = []
        self.texts: list[bool] = []
        self.shared: list[int] = []
        self.launched: list[Launched] = []

    def __call__(self, kernel: launch.Kernel, capability: tuple[int, int], *, ptx: bool) -> Recorder:
        self.texts.append(ptx)
        self.loaded.append((kernel.name, capability))
        return self

    def allow_shared(self, size: int) -> None:
        self.shared.append(size)

    def launch(
        self, grid: Sequence[int], threads: int, shared: int, stream: int, values: Sequence[Any], early: bool = False
    ) -> None:
        self.launched.append(Launched(tuple(grid), threads, shared, stream, list(values), early))


def pretend(patch: pytest.MonkeyPatch) -> Recorder:
    """GPU 0, of capability 9.0 with 132 processors; streams are numbered 100, 101, ... as they are asked for."""
    found, streams = Recorder(), itertools.count(100)
    patch.setattr(launch, "Loaded", found)
    patch.setattr(launch, "_is_on", lambda array: (array.device.index or 0) == 0)
    patch.setattr(launch, "_on", lambda array: contextlib.nullcontext())
    patch.setattr(device, "require_cuda", lambda: None)
    patch.setattr(device, "_current", lambda: 0)
    patch.setattr(device, "_asked", lambda index: device.Gpu((9, 0), 132, (9, 0)))
    patch.setattr(device, "simulated", lambda: False)
    patch.setattr(device, "stream_of", lambda array: next(streams))
    patch.setattr(device, "place_of", lambda array: 0)
    patch.setattr(tensor_map, "_encoded", lambda *_: bytes(tensor_map.MAP_BYTES))
    return found


def pretend_products(patch: pytest.MonkeyPatch) -> Recorder:
    """The same for kernels of the package, which outlive a test and must not keep the recorder."""
    found = pretend(patch)
    patch.setattr(launch.Kernel, "_compiled", lambda kernel, array, shared: found)
    return found
