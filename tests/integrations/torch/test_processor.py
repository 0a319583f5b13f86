"""16-bit products on processors that have no instructions for them: torch's switch, and that it is put back."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from bcqfmt.integrations.torch import processor
from bcqfmt.integrations.torch.processor import dense_products, multiplies


@pytest.fixture
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies", lambda dtype: dtype != torch.bfloat16)


def test_float32_is_multiplied_everywhere() -> None:
    assert multiplies(torch.float32)
    assert {multiplies(dtype) for dtype in (torch.float16, torch.bfloat16)} <= {True, False}


def test_a_torch_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_SUPPORTED", {torch.float16: "_no_such_operator"})
    multiplies.cache_clear()
    assert not multiplies(torch.float16)
    multiplies.cache_clear()


@pytest.mark.usefixtures("without_bfloat16")
@pytest.mark.parametrize("before", [True, False])
def test_the_switch_is_put_back(before: bool) -> None:
    switch, usual = torch.backends.mkldnn, torch.backends.mkldnn.enabled
    switch.enabled = before
    try:
        with dense_products(torch.bfloat16):
            assert not switch.enabled
            with dense_products(torch.float16):
                assert not switch.enabled
            with pytest.raises(ZeroDivisionError), dense_products(torch.bfloat16):
                raise ZeroDivisionError
            assert not switch.enabled
        assert switch.enabled == before
        with dense_products(torch.float32):
            assert switch.enabled == before
    finally:
        switch.enabled = usual


@pytest.mark.usefixtures("without_bfloat16")
def test_the_last_of_two_threads_puts_it_back() -> None:
    usual, inside, leave = torch.backends.mkldnn.enabled, threading.Event(), threading.Event()

    def other() -> None:
        with dense_products(torch.bfloat16):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with dense_products(torch.bfloat16):
        thread.start()
        assert inside.wait(30)
    assert not torch.backends.mkldnn.enabled
    leave.set()
    thread.join(30)
    assert torch.backends.mkldnn.enabled == usual


def test_torch_does_not_warn() -> None:
    """On any machine; without the switch it does on ARM processors that have no bfloat16."""
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings(), dense_products(torch.bfloat16):
        warnings.simplefilter("error")
        assert torch.equal(torch.nn.functional.linear(x, x), torch.full((64, 64), 64, dtype=torch.bfloat16))
