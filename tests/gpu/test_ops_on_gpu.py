"""Every torch operator on the device: known to torch, on the current stream, in a CUDA graph, never waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from products import op_samples
from products.op_samples import Results

Forbidden = Callable[[], AbstractContextManager[None]]


def _marked(name: str, *more: str) -> Any:
    return pytest.param(name, *more, marks=[pytest.mark.sm_90] if name.startswith("mixed_gemv") else [])


EACH = pytest.mark.parametrize("name", [_marked(name) for name in op_samples.ALL])


def same_bits(found: Results, expected: Results) -> bool:
    return len(found) == len(expected) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


@EACH
def test_operator_and_direct_call(name: str) -> None:
    """`make test-gpu-sanitizer` runs this under compute-sanitizer too."""
    sample = op_samples.ALL[name]("cuda", True)
    found, expected = sample.operator(sample.x), sample.direct(sample.x)
    assert all(part.is_cuda and bool(part.any()) for part in found)
    assert same_bits(found, expected)
    assert same_bits(sample.operator(sample.x), expected)


@EACH
def test_torch_finds_nothing_to_complain_about(name: str) -> None:
    function, arguments = op_samples.called(op_samples.ALL[name]("cuda", True))
    said = torch.library.opcheck(function, (), arguments)
    assert set(said.values()) == {"SUCCESS"}
    assert len(said) >= 4


@EACH
def test_in_a_cuda_graph_without_waiting(name: str, without_waiting: Forbidden) -> None:
    sample = op_samples.ALL[name]("cuda", True)
    x, silence = sample.x.clone(), torch.zeros_like(sample.x)
    expected, of_silence = sample.operator(x), sample.operator(silence)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), without_waiting():
        sample.operator(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), without_waiting():
        found = sample.operator(x)
    for _ in range(3):
        for part in found:
            part.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(found, expected)
    x.copy_(silence)  # a replay reads what is there then
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(found, of_silence)
    assert not same_bits(expected, of_silence)


@EACH
def test_on_the_current_stream(name: str) -> None:
    sample = op_samples.ALL[name]("cuda", True)
    expected = sample.operator(sample.x)
    late = torch.zeros_like(sample.x)
    assert not same_bits(sample.operator(late), expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on any other stream the operator would come before the copy
        late.copy_(sample.x)
        found = sample.operator(late)
    stream.synchronize()
    assert same_bits(found, expected)


@pytest.mark.parametrize(("name", "which"), [_marked(*place) for place in op_samples.PLACES])
def test_wrong_indices_are_never_followed(name: str, which: str) -> None:
    """`make test-gpu-sanitizer` runs this under compute-sanitizer too."""
    function, arguments = op_samples.called(op_samples.ALL[name]("cuda", True))
    op_samples.wrong_places(function, arguments, which)
    torch.cuda.synchronize()  # an access that the device refused would be reported here
