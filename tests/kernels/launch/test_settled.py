"""Which products may begin before the kernel in front of them has finished: those of weights that nothing writes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.integrations.torch.ops import fast
from bcqfmt.kernels import bits, mixed
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime import device
from products import kernel_samples as ks
from products.pretended_gpu import Recorder, pretend_products
from simulated import sim_mixed

WEIGHT = ks.weight("affine", 4, 33, 300, 64)
SEVERAL = BcqWeight.from_segments([ks.weight("affine", 2, 12, 96, 16), ks.weight("affine", 4, 12, 64, 32)])
MIXED = sim_mixed.weight(5, 32, 16, outliers="add")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return pretend_products(monkeypatch)


def vectors(weight: BcqWeight) -> Any:
    return device.upload(ks.vectors(1, weight.spec.columns, "F16"), "cpu")


def placed(weight: BcqWeight) -> Any:
    return mixed.mixed_operand(weight, "cpu") if weight is MIXED else bits.bit_operand(operand(weight), "cpu")


@pytest.mark.parametrize("through", ["function", "operator"])
@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("weight", [WEIGHT, SEVERAL, MIXED], ids=["one segment", "two segments", "mixed"])
def test_products_are_early_where_the_weight_is_settled(
    weight: BcqWeight, settled: bool, through: str, recorder: Recorder
) -> None:
    found = placed(weight)
    assert found.settled
    found, x = replace(found, settled=settled), vectors(weight)
    if through == "operator":
        (fast.mixed_gemv if weight is MIXED else fast.bit_gemv)(x, found)
    else:
        (mixed.mixed_gemv if weight is MIXED else bits.bit_gemv)(found, x)
    assert [one.early for one in recorder.launched] == [settled] * (2 if weight is SEVERAL else 1)


def test_an_operand_is_not_settled_by_default() -> None:
    assert not bits.BitOperand(shape=(1, 1), segments=(), perm=None).settled
    assert not mixed.MixedOperand(shape=(1, 1), twos=0, fours=1, units=None, perm=None).settled


def test_each_way_to_a_weight_waits_once_and_products_never(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(device, "settle", waited.append)
    parts = WEIGHT.to_torch()
    prepared = gpu_weight(WEIGHT.spec, parts)
    assert prepared is not None
    for prepare in (lambda: placed(WEIGHT), lambda: placed(MIXED), lambda: prepared.bits):
        assert prepare().settled
        assert len(waited) == 1
        waited.clear()
    bits.bit_gemv(placed(WEIGHT), vectors(WEIGHT))
    assert len(waited) == 1  # for the preparation
    assert recorder.launched[-1].early


def test_waiting_is_for_the_current_stream_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: asked.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: asked.append(place) or stream)
    device.settle(torch.ones(1))  # on the host there is nothing to wait for
    device.settle(ks.vectors(1, 4))
    assert not asked
    monkeypatch.setattr(device, "is_torch", lambda array: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    place = torch.device("cuda", 1)
    device.settle(SimpleNamespace(device=place))
    assert asked == [place, "waited"]
