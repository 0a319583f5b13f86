"""From a checkpoint into a model by weight names, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bcqfmt
from bcqfmt import BcqError
from bcqfmt.integrations.torch import BcqLinear, load_linears, tensors_of
from products import kernel_samples as ks
from products import product_reference as reference


class Block(torch.nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = torch.nn.Linear(96, 64, bias=bias)
        self.down = torch.nn.Linear(64, 96, bias=False)
        self.norm = torch.nn.LayerNorm(96, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"layer": Block()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors: dict[str, Any] = {
        "layer.up.weight": ks.weight("affine", 4, 64, 96, 32),
        "layer.down.weight": ks.weight("affine", 4, 96, 64, 32, outliers="add"),
        "layer.up.bias": np.arange(64, dtype=np.float32),
    }
    bcqfmt.save(tmp_path / "model", tensors)
    return tmp_path / "model"


def test_linears_are_replaced_by_name(folder: Path) -> None:
    net = model().eval()
    with bcqfmt.open(folder) as checkpoint:
        assert sorted(load_linears(net, checkpoint)) == ["layer.down.weight", "layer.up.weight"]
        up = net["layer"].up
        assert isinstance(up, BcqLinear)
        assert not up.training
        x = torch.randn(3, 96)
        expected = reference.product(checkpoint.weight("layer.up.weight"), x.numpy()) + up.bias.numpy()
        assert torch.equal(up.bias, model()["layer"].up.bias)
    assert reference.relative_error(up(x).numpy(), expected) < 2e-6
    assert net["layer"](x).shape == (3, 96)


def test_dense_tensors_are_copied_when_asked_for(folder: Path) -> None:
    net = model()
    load_linears(net, bcqfmt.open(folder), dense=True, exact=True)
    assert torch.equal(net["layer"].up.bias, torch.arange(64.0))
    assert net["layer"].up.exact


def test_a_model_goes_back_into_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    net = model()
    with bcqfmt.open(folder) as checkpoint:
        load_linears(net, checkpoint, dense=True)
        digests = {name: weight.digest() for name, weight in checkpoint.weights()}
    bcqfmt.save(tmp_path / "again", tensors_of(net))
    assert bcqfmt.validate(tmp_path / "again").valid
    with bcqfmt.open(tmp_path / "again") as again:
        assert {name: weight.digest() for name, weight in again.weights()} == digests
        assert {name: tensor.dtype for name, tensor in again.dense()} == {
            "layer.norm.bias": "BF16",
            "layer.norm.weight": "BF16",
            "layer.up.bias": "F32",
        }


@pytest.mark.parametrize(
    ("name", "found"),
    [("layer.gate", "no such module"), ("layer.norm", "LayerNorm"), ("layer.down", "Linear")],
)
def test_a_weight_without_its_linear_is_refused_and_the_model_is_left_alone(
    tmp_path: Path, name: str, found: str
) -> None:
    weights = {
        "layer.up.weight": ks.weight("affine", 4, 64, 96, 32),
        f"{name}.weight": ks.weight("affine", 4, 7, 96, 32),
    }
    bcqfmt.save(tmp_path / "odd", weights)
    net = model()
    with pytest.raises(BcqError, match=found) as caught, bcqfmt.open(tmp_path / "odd") as checkpoint:
        load_linears(net, checkpoint)
    assert caught.value.code == "BCQ-E552"
    assert type(net["layer"].up) is torch.nn.Linear


def test_a_dense_tensor_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "odd", {"layer.other": np.zeros(3, np.float32)})
    with pytest.raises(BcqError, match="no such tensor in the model"):
        load_linears(model(), bcqfmt.open(tmp_path / "odd"), dense=True)
