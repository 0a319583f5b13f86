"""One W4A4 weight on several streams and in several CUDA graphs: who may run at the same time shares no tickets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.atom.shape import Tile
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime import tickets as ticket_counts
from bcqfmt.kernels.runtime.tickets import TICKETS
from products.pretended_gpu import Recorder, pretend_products
from simulated import sim_atom

TILE = Tile(32, 8, 1, 1, 2)
SPLIT, WHOLE = w4.Plan(TILE, 2), w4.Plan(TILE, 1)
OUT, TOKENS = 160, 10
TILES = 2 * 5  # of tokens and of rows
_AT = 6  # the tickets among the arguments of the kernel


class Gpu:
    """A GPU that is not there, with a current stream, which may be capturing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorder: Recorder = pretend_products(monkeypatch)
        self.stream, self.place, self.captures = 1, 0, False
        monkeypatch.setattr(device, "stream_of", lambda array: self.stream)
        monkeypatch.setattr(device, "place_of", lambda array: self.place)
        monkeypatch.setattr(device, "capturing", lambda array: self.captures)
        for kept in ("_of_stream", "_captured"):
            monkeypatch.setattr(ticket_counts, kept, {})

    def tickets(self, weight: w4.AtomDevice, plan: w4.Plan = SPLIT) -> int:
        """The address of the tickets that a product is launched with."""
        x = w4.Activations(
            codes=torch.zeros(2, 2, 256, dtype=torch.int32), scale=torch.zeros(2, 16), tokens=TOKENS, columns=256
        )
        w4.w4a4(x, weight, plan=plan)
        launched = self.recorder.launched[-1]
        assert launched.grid == (2, 5, plan.slices)
        assert launched.stream == self.stream
        address: int = launched.values[_AT]
        return address


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def placed() -> w4.AtomDevice:
    return w4.atom_to_device(ao.pack_w4(sim_atom.atom_weight(OUT, 2)), "cpu")


def test_every_stream_has_its_own(gpu: Gpu) -> None:
    one, other = placed(), placed()
    seen = {}
    for gpu.place, gpu.stream in ((0, 1), (0, 2), (1, 1), (0, 1), (0, 2), (1, 1)):
        address = gpu.tickets(one)
        assert seen.setdefault((gpu.place, gpu.stream), address) == address
        assert gpu.tickets(other) == address  # one after the other
        assert not {address} & {one.tickets.data_ptr(), other.tickets.data_ptr()}
    assert len(set(seen.values())) == len(seen) == 3
    assert all(found.shape == (TICKETS,) and found.dtype == torch.int32 for found in ticket_counts._of_stream.values())
    assert not any(found.any() for found in ticket_counts._of_stream.values())


def test_every_captured_product_has_its_own(gpu: Gpu) -> None:
    """A graph may be replayed beside the stream that it was captured on, and beside other graphs."""
    weight = placed()
    first = weight.tickets.data_ptr()
    aside = gpu.tickets(weight)
    gpu.captures = True
    found = [gpu.tickets(weight) for _ in range(TICKETS // TILES)]
    assert found == [first + 4 * TILES * k for k in range(TICKETS // TILES)]
    last = first + 4 * TICKETS
    for _ in range(2):  # they are used up: memory of the graph's own
        assert not first <= gpu.tickets(weight) < last
        assert gpu.tickets(weight) != aside
    assert first <= 4 * TILES + found[-1] <= last
    other = placed()
    assert gpu.tickets(other) == other.tickets.data_ptr()
    gpu.captures = False
    assert gpu.tickets(weight) == aside


def test_what_a_graph_makes_for_itself_is_cleared(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gpu.captures = placed(), True
    monkeypatch.setattr(ticket_counts, "_captured", {weight.tickets.data_ptr(): TICKETS})
    made = ticket_counts.tickets(weight.tickets, 7)
    assert made.shape == (7,)
    assert not made.any()


def test_a_sum_that_is_not_split_needs_none(gpu: Gpu) -> None:
    gpu.captures = True
    gpu.tickets(placed(), WHOLE)
    gpu.captures = False
    gpu.tickets(placed(), WHOLE)
    assert not ticket_counts._of_stream
    assert not ticket_counts._captured


def test_whether_a_graph_is_captured_is_asked_of_the_right_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    @contextlib.contextmanager
    def on(place: Any) -> Any:
        now.append(place.index)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1] == 1)
    monkeypatch.setattr(torch.cuda, "device", on)
    answers = [device.capturing(SimpleNamespace(device=torch.device("cuda", index))) for index in (0, 1, 0)]
    assert answers == [False, True, False]
    assert now == [0]
