"""Plane scales that learn: right gradients, planes that stay, a valid checkpoint afterwards."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import bcqfmt
from bcqfmt import BcqError, BcqWeight
from bcqfmt.integrations.torch import BcqLinear
from bcqfmt.weight.packing import unpack_bits
from products import kernel_samples as ks
from products import product_reference as reference

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "finetune_scales.py"

WEIGHTS = {
    **{encoding: ks.weight(encoding, 3, 6, 72, 16) for encoding in ks.ENCODINGS},
    "adding": ks.weight("affine", 2, 6, 72, 32, perm=True, outliers="add"),
    "replacing": ks.mixed(6, 48, 40, outliers="replace"),
    "tiles": ks.mixed(6, 96, 32, outliers="", perm=False),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_a_trainable_layer_starts_at_the_weight(weight: BcqWeight) -> None:
    layer = BcqLinear.from_weight(weight, torch.ones(6), trainable_scales=True)
    x = torch.randn(2, 3, weight.spec.columns)
    expected = reference.product(weight, x.reshape(6, -1).numpy()) + 1
    assert reference.relative_error(layer(x).detach().reshape(6, -1).numpy(), expected) < 2e-6
    assert np.allclose(layer.values(torch.float32).numpy(), weight.dequantize("float32"), rtol=1e-6, atol=1e-5)


def test_an_affine_weight_with_short_scales_stays_exactly_what_it_was() -> None:
    weight = ks.weight("affine", 4, 6, 96, 32)
    again = BcqLinear.from_weight(weight, trainable_scales=True).to_weight()
    assert again.scheme.segments[0].encoding == "bcq"
    assert np.array_equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_gradients_are_those_of_the_dense_matrix(weight: BcqWeight) -> None:
    """alpha_i gets the sum of dW over its group, each with the sign of its bit; z gets the sum."""
    layer = BcqLinear.from_weight(weight, trainable_scales=True)
    x = torch.randn(5, weight.spec.columns, requires_grad=True)
    upstream = torch.randn(5, 6)
    layer(x).backward(upstream)
    inner = (upstream.T @ x.detach()).double().numpy()  # of every element, original column order
    parts = layer.to_weight().parts()
    if weight.scheme.outliers is not None and weight.scheme.outliers.mode == "replace":
        indptr, indices = parts["outlier_indptr"].array(), parts["outlier_indices"].array()
        for row in range(6):
            inner[row, indices[indptr[row] : indptr[row + 1]]] = 0
    if weight.scheme.perm:
        inner = inner[:, parts["perm"].array()]
    start = 0
    for k, (segment, width) in enumerate(weight.segments):
        bits = unpack_bits(parts[f"s{k}_planes"].array(), width)
        for group in range(-(-width // segment.group_size)):
            columns = slice(group * segment.group_size, min((group + 1) * segment.group_size, width))
            piece = inner[:, start : start + width][:, columns]
            gradient = getattr(layer, f"bcq_s{k}_bias").grad
            assert np.allclose(gradient[:, group], piece.sum(1), rtol=1e-4, atol=1e-3)
            gradient = getattr(layer, f"bcq_s{k}_alpha").grad
            for i in range(segment.bits):
                signs = 2.0 * bits[i][:, columns] - 1
                assert np.allclose(gradient[i, :, group], (piece * signs).sum(1), rtol=1e-4, atol=1e-3)
        start += width
    dense = torch.from_numpy(weight.dequantize("float64"))
    assert x.grad is not None
    assert reference.relative_error(x.grad.numpy(), (upstream.double() @ dense).numpy()) < 2e-6


def test_only_alpha_and_z_learn_and_the_result_is_a_valid_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = ks.mixed(16, 48, 96, outliers="add")
    layer = BcqLinear.from_weight(weight, torch.zeros(16), trainable_scales=True)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {f"bcq_s{k}_{kind}" for k in (0, 1) for kind in ("alpha", "bias")}
    frozen = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x, wanted = torch.randn(64, 144), torch.randn(64, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.3, weight_decay=0.0)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.mse_loss(layer(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(buffer, frozen[name]) for name, buffer in layer.named_buffers())
    bcqfmt.save(tmp_path / "tuned", {"a.weight": layer.to_weight("a.weight")})
    assert bcqfmt.validate(tmp_path / "tuned").valid
    tuned = bcqfmt.open(tmp_path / "tuned").weight("a.weight")
    again = BcqLinear.from_weight(tuned, torch.zeros(16))
    assert reference.relative_error(again(x).numpy(), layer(x).detach().double().numpy()) < 2e-6
    for k in (0, 1):
        assert tuned.parts()[f"s{k}_planes"].tobytes() == weight.parts()[f"s{k}_planes"].tobytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_numbers_are_saved_in_the_type_that_is_asked_for(dtype: str) -> None:
    layer = BcqLinear.from_weight(ks.weight("bcq", 2, 4, 64, 32), trainable_scales=True)
    with torch.no_grad():
        layer.bcq_s0_alpha.add_(0.001)
    found = layer.to_weight(dtype=dtype)
    found.check()
    assert (found.scheme.segments[0].alpha, found.scheme.segments[0].bias) == (dtype, dtype)
    alpha = found.parts()["s0_alpha"].array().astype(np.float32)
    bound = {"F16": 1e-3, "BF16": 1e-2, "F32": 0}[dtype]
    assert np.allclose(alpha, layer.bcq_s0_alpha.detach().numpy(), rtol=bound, atol=0)
    with pytest.raises(BcqError, match="dtype F64"):
        layer.to_weight(dtype="float64")


def test_under_autocast_the_product_is_short_and_the_gradients_are_not() -> None:
    layer = BcqLinear.from_weight(ks.weight("bcq", 2, 4, 64, 32), trainable_scales=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(3, 64))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_the_state_of_a_trained_layer_comes_back() -> None:
    weight = ks.mixed(6, 48, 40, outliers="add")
    layer = BcqLinear.from_weight(weight, trainable_scales=True)
    with torch.no_grad():
        layer.bcq_s1_bias.add_(1)
    other = BcqLinear.from_weight(weight, trainable_scales=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 88)
    assert torch.equal(other(x), layer(x))


def test_stacks_are_refused() -> None:
    stack = BcqWeight.from_affine(np.ones((2, 3, 32), np.uint8), np.ones((2, 3, 1), np.float16), 0, group_size=32)
    with pytest.raises(BcqError, match="one matrix"):
        BcqLinear.from_weight(stack, trainable_scales=True)


def test_the_example_lowers_the_loss_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    found = runpy.run_path(str(EXAMPLE))["main"](tmp_path / "tuned", steps=30)
    assert found["after"] < 0.6 * found["before"]
    assert abs(found["reloaded"] - found["after"]) < 0.01 * found["before"]
    assert bcqfmt.validate(tmp_path / "tuned").valid
