"""A layer run to one linear layer after the other: nothing is run twice. Sums of its inputs; attention in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bcqfmt.converters.quantize import attention, sequential
from bcqfmt.converters.quantize.layer_run import Budget, End, LayerRun, Seen, ends_of

ROWS, BATCHES, WIDTH = 2, 3, 8
LARGE = 1 << 20


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.o(self.q(x).tanh()), None


class Mlp(torch.nn.Module):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.in_place = torch.nn.Linear(WIDTH, 12), torch.nn.Linear(12, WIDTH), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x).relu())
        return made.mul_(2.0) if self.in_place else made


class Layer(torch.nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp(**given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)[0]
        made: torch.Tensor = x + self.mlp(x)
        return made


def apply(some: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    made: torch.Tensor = layer(some)
    return made


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def test_a_part_ends_with_a_linear_layer_that_nothing_changes() -> None:
    x, expected = torch.randn(ROWS, WIDTH), {"attention.o": End("attention", (None,)), "mlp.down": End("mlp", None)}
    for layer in (Layer(), Layer(in_place=True)):
        with ends_of(layer) as found:
            layer(x)
        assert found == {name: end for name, end in expected.items() if name != "mlp.down" or not layer.mlp.in_place}


@pytest.mark.parametrize("budget", [LARGE, 300, 0])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_kept_changes_nothing_and_is_not_run_again(budget: int, in_place: bool) -> None:
    layer = Layer(in_place=in_place)
    rows = list(torch.randn(BATCHES, ROWS, WIDTH))
    named = {name: one for name, one in layer.named_modules() if isinstance(one, torch.nn.Linear)}
    calls: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    for name, one in named.items():
        one.register_forward_hook(lambda module, given, made, name=name: calls[name].append(given[0].clone()))
    with ends_of(layer) as ends:
        expected = [layer(some) for some in rows]
    entered = {name: list(held) for name, held in calls.items()}
    room = Budget(budget)
    run = LayerRun(layer, room, ends)
    for held in calls.values():
        held.clear()
    for name, child in named.items():
        seen = list(run.inputs(child, rows, apply, last=False))
        assert all(torch.equal(one.entered, x) for one, x in zip(seen, entered[name], strict=True))
        run.settle([child])
    made = list(run.outputs(rows, apply))
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert budget < LARGE or in_place or all(len(held) == BATCHES for held in calls.values())
    run.forget()
    assert room.left == budget
    assert torch.equal(layer(rows[0]), expected[0])


@pytest.mark.parametrize(
    ("out", "bias", "known"), [(5, True, True), (5, False, True), (5, True, False), (16, True, True)]
)
def test_what_is_quantized_makes_of_the_inputs_what_the_dense_layer_made(out: int, bias: bool, known: bool) -> None:
    """Against least squares in float64; ``known``: what the dense layer gives was seen."""
    columns, tokens = 12, 40
    twin = torch.nn.Linear(columns, out, bias)
    sums = sequential._Sums(twin.weight, alone=True)
    x, moved, counts = torch.randn(tokens, columns), 0.1 * torch.randn(tokens, columns), torch.rand(tokens)
    for part in range(0, tokens, 10):
        run = slice(part, part + 10)
        dense = x[run] + moved[run]
        sums.add(x[run], counts[run], Seen(dense, twin(dense) if known else None), twin)
    assert sums.cross.shape[1] == min(out, columns)
    wide, other, weight = x.double(), (x + moved).double(), twin.weight.double()
    hessian = (wide * counts[:, None]).T @ wide
    assert torch.allclose(sums.hessian(), hessian, rtol=1e-5, atol=1e-5)
    damped = hessian + 0.05 * hessian.diagonal().mean() * torch.eye(columns)
    cross = (other - wide).T @ (wide * counts[:, None])
    expected = weight + weight @ cross @ torch.linalg.inv(damped)
    made = sequential._target(twin.weight, sums, sums.hessian())
    np.testing.assert_allclose(made, expected.numpy(), rtol=0, atol=2e-6)


def test_inputs_that_are_the_dense_ones_leave_a_weight_as_it_is() -> None:
    twin, x = torch.nn.Linear(12, 5), torch.randn(40, 12)
    sums = sequential._Sums(twin.weight, alone=True)
    sums.add(x, None, Seen(x.clone(), twin(x)), twin)
    sums.add(x, None, Seen(x[:3], None), twin)  # an expert that got other tokens
    assert np.array_equal(sequential._target(twin.weight, sums, sums.hessian()), twin.weight.numpy())


@pytest.mark.parametrize("tokens", [7, 64, 150])
def test_attention_in_blocks_is_attention(tokens: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(config).eval()
    given = torch.randint(64, (2, tokens))
    expected = model(given).logits
    attention.use_blocks(model)
    assert model.config._attn_implementation == attention._NAME
    assert torch.allclose(model(given).logits, expected, rtol=0, atol=1e-6)
    mask = torch.ones_like(given).index_fill(1, torch.tensor([0]), 0)
    left_out = model(given, attention_mask=mask).logits[:, 1:]
    model.set_attn_implementation("sdpa")
    assert torch.equal(left_out, model(given, attention_mask=mask).logits[:, 1:])
