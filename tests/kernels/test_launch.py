"""The launch itself, with a recorder in the driver's place: no GPU is needed to see what would be sent to one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from bcqfmt.errors import BcqError
from bcqfmt.kernels import device, launch


class Recorder:
    """What is loaded and launched, in order."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, tuple[int, int]]] = []
        self.shared: list[int] = []
        self.launched: list[Any] = []

    def __call__(self, kernel: launch.Kernel, capability: tuple[int, int]) -> Recorder:
        self.loaded.append((kernel.name, capability))
        return self

    def allow_shared(self, size: int) -> None:
        self.shared.append(size)

    def launch(self, grid: Sequence[int], threads: int, shared: int, stream: int, values: Sequence[Any]) -> None:
        self.launched.append((tuple(grid), threads, shared, stream, list(values)))


class Tensor:
    """A torch tensor as far as a launch looks at it."""

    def __init__(self, address: int, index: int = 0) -> None:
        self.address = address
        self.device = type("Device", (), {"index": index})()

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    streams = iter(range(100, 200))
    monkeypatch.setattr(launch, "Loaded", found)
    monkeypatch.setattr(device, "require_cuda", lambda: None)
    monkeypatch.setattr(device, "capability", lambda: (9, 0))
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(device, "stream_of", lambda array: next(streams))
    monkeypatch.setattr(launch, "_on", lambda array: contextlib.nullcontext())
    return found


def scale(x: Any, y: Any, n: Any) -> None:
    """Never run here."""


def test_addresses_numbers_and_the_stream_of_the_moment(recorder: Recorder) -> None:
    made = launch.kernel("u32* x, f32* y, u32 n", threads=128, blocks=2)(scale)
    made.launch((3, 4), 64, Tensor(0x1000), Tensor(0x2000), 7, shared=1024)
    made.launch((5,), 128, Tensor(0x3000), Tensor(0x2000), 8)
    assert recorder.launched == [
        ((3, 4), 64, 1024, 100, [0x1000, 0x2000, 7]),
        ((5,), 128, 0, 101, [0x3000, 0x2000, 8]),
    ]
    assert recorder.loaded == [("scale", (9, 0))]  # once for a device
    assert recorder.shared == [1024, 0]
    assert str(made.signature()) == "(uint32*, float32*, uint32) -> none"
    assert made.options == {"launch_bounds": (128, 2)}


def test_one_compilation_per_device(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    for index in (0, 1, 0, 1):
        made.launch((1,), 32, Tensor(0, index))
    assert len(recorder.loaded) == 2


def test_preparing_launches_nothing(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    made.prepare(Tensor(0), shared=100_000)
    assert (len(recorder.loaded), recorder.shared, recorder.launched) == (1, [100_000], [])


def test_nothing_is_launched_for_nothing(recorder: Recorder) -> None:
    made = launch.kernel("u32* x", threads=32)(scale)
    made.launch((0, 4), 32, Tensor(0))
    assert not recorder.launched


def test_mistakes_of_a_caller(recorder: Recorder) -> None:
    made = launch.kernel("u32* x, u32 n", threads=32)(scale)
    with pytest.raises(TypeError, match="takes 2 arguments, not 1"):
        made.launch((1,), 32, Tensor(0))
    with pytest.raises(BcqError, match="BCQ-E554"):
        made.launch((1, 70000), 32, Tensor(0), 1)
    assert not recorder.launched
