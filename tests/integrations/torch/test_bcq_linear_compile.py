"""BcqLinear in graphs: torch's own checks of the operators, torch.compile without a break, torch.export."""

from __future__ import annotations

import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch import BcqLinear
from bcqfmt.integrations.torch import linear_op as ops
from products import kernel_samples as ks

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # torch about itself
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


class Net(torch.nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.first = BcqLinear.from_weight(ks.weight("affine", 4, 96, 96, 32), torch.ones(96), **options)
        self.second = BcqLinear.from_weight(ks.mixed(9, 48, 48), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) + x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("weight", [ks.weight("bcq", 4, 5, 64, 32), ks.mixed(9, 48, 96)], ids=["plain", "mixed"])
@pytest.mark.parametrize("gradient", [False, True])
def test_torch_finds_nothing_to_complain_about(weight: BcqWeight, gradient: bool) -> None:
    layer = BcqLinear.from_weight(weight)
    x = torch.randn(2, 3, weight.spec.columns, requires_grad=gradient)
    said = torch.library.opcheck(torch.ops.bcqfmt.linear.default, (x, layer.parts(), layer.text, 0, 0))
    bias = torch.randn(weight.spec.out, requires_grad=gradient)
    said |= torch.library.opcheck(torch.ops.bcqfmt.linear.default, (x, layer.parts(), layer.text, 0, 0, bias))
    said |= torch.library.opcheck(ops.values, (layer.parts(), layer.text, 0, 0, torch.bfloat16))
    assert set(said.values()) == {"SUCCESS"}
    assert len(said) >= 4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_holds_the_whole_model(exact: bool, dynamic: bool) -> None:
    net = Net(exact=exact)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((1, 96), (4, 7, 96), (60, 96)):
        x = torch.randn(*shape)
        assert torch.allclose(compiled(x), net(x), rtol=1e-5, atol=1e-4)


def test_a_compiled_model_sees_that_a_buffer_changed() -> None:
    net, x = Net(), torch.randn(2, 96)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    before = compiled(x)
    net.first.bcq_s0_scale.zero_()
    assert not torch.equal(compiled(x), before)
    assert torch.equal(compiled(x), net(x))


def test_gradients_and_autocast_in_a_graph() -> None:
    net = Net()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found = []
    for model in (net, compiled):
        x = torch.ones(3, 96, requires_grad=True)
        model(x).sum().backward()
        found.append(x.grad)
    assert torch.allclose(*found)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(x), net(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def test_trainable_layers_make_one_graph_too() -> None:
    layer = BcqLinear.from_weight(ks.mixed(9, 48, 48), trainable_scales=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for model in (layer, compiled):
        layer.zero_grad()
        model(torch.ones(3, 96)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_an_exported_program_holds_the_operator() -> None:
    net, x = Net(), torch.randn(2, 96)
    program = torch.export.export(net, (x,))
    assert sum("bcqfmt.linear" in str(node.target) for node in program.graph.nodes) == 2
    assert torch.equal(program.module()(x), net(x))
