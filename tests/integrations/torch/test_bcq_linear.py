"""BcqLinear: the product of its weight, whatever the shape and type of the input; what torch does to modules."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from bcqfmt import BcqError, BcqWeight
from bcqfmt.integrations.torch import BcqLinear, BcqStack
from bcqfmt.integrations.torch import linear_op as ops
from bcqfmt.integrations.torch.processor import dense_products
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_bcq_linear
from simulated.cuda_sim import simulate

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def plain(rows: int = 20, **options: Any) -> BcqWeight:
    return ks.weight("affine", 4, rows, 96, 32, **options)


def rich(**options: Any) -> BcqWeight:
    """Segments, reordering and outliers."""
    return ks.mixed(9, 48, 96, outliers="replace", **options)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (60,), (0,)])
@pytest.mark.parametrize("weight", [plain(), rich()], ids=["plain", "rich"])
def test_forward_takes_any_leading_dimensions(weight: BcqWeight, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = inputs(weight.spec.out)
    layer, x = BcqLinear.from_weight(weight, bias), inputs(*lead, weight.spec.columns, dtype=dtype)
    y = layer(x)
    assert (y.shape, y.dtype) == ((*lead, weight.spec.out), dtype)
    flat = x.reshape(-1, weight.spec.columns).float().numpy()
    expected = reference.product(weight, flat) + bias.numpy()
    assert reference.relative_error(y.float().numpy().reshape(expected.shape), expected) < BOUND[dtype]


def test_a_layer_says_its_kernel_and_why() -> None:
    layer, odd = BcqLinear.from_weight(plain()), BcqLinear.from_weight(ks.weight("bcq", 2, 4, 60, 12))
    assert layer.path(1, torch.float16) == ("planes", "")
    assert layer.path(500, torch.float16) == ("values", "many vectors: decoding is faster")
    assert odd.path(1, torch.float32).kernel == "values"
    assert "groups of 12 columns" in odd.path(1, torch.float32).why
    for kind, place in ((torch.float64, "cpu"), (torch.float16, "meta")):
        with pytest.raises(BcqError, match=r"BCQ-E552.*expected F32, F16, BF16 on cpu or cuda"):
            BcqLinear(plain().spec, device=place).path(1, kind)
    tuned = BcqLinear.from_weight(plain(), trainable_scales=True).path(1, torch.float16)
    assert tuned == ("dequantize", "trainable scales: the matrix is decoded and multiplied by torch")
    exact = BcqLinear.from_weight(plain(), exact=True).path(1, torch.float16)
    assert exact == ("dequantize", "exact=True: the matrix is decoded and multiplied by torch")


def test_an_input_of_any_strides() -> None:
    layer, x = BcqLinear.from_weight(plain()), inputs(96, 5)
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_exact_layers_equal_dense_ones_to_the_last_bit(dtype: torch.dtype, bias: bool, kind: str) -> None:
    weight = plain(dtype=kind, outliers="add", perm=True)
    shift = inputs(20, dtype=dtype) if bias else None
    layer = BcqLinear.from_weight(weight, shift, exact=True)
    values = weight.dequantize()
    dense = torch.from_numpy(values.astype(np.float32)).to(dtype)  # float32 holds them all; then as a model is loaded
    for lead in ((), (7,), (40,)):
        x = inputs(*lead, 96, dtype=dtype)
        y = layer(x)
        with dense_products(dtype):
            assert torch.equal(y, linear(x, dense, shift))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_vectors_of_16_bits_are_multiplied_with_the_values_of_the_dense_layer(
    dtype: torch.dtype, kind: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same operator of torch: in their dtype, or in float32 where the processor has no instructions for it."""
    monkeypatch.setattr(ops, "_BLOCK", 96 * 7)  # several pieces
    monkeypatch.setattr(ops, "multiplies", lambda dtype: native)
    weight = plain(dtype=kind, outliers="add", perm=True, numbers="F32")
    dense = torch.from_numpy(weight.dequantize().astype(np.float32)).to(dtype)
    x = inputs(60, 96, dtype=dtype)
    with dense_products(dtype):
        y = BcqLinear.from_weight(weight)(x)
        assert torch.equal(y, in_pieces(x, dense, None, dtype if native else torch.float32))
        found = linear(x, dense)  # all rows at once: another call, which may add in another order
    assert np.all(np.abs((y.double() - found.double()).numpy()) <= 2 * rounding(x, dense))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_before_the_sum_is_rounded(
    dtype: torch.dtype, kept: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_BLOCK", 96 * 7)  # several pieces
    monkeypatch.setattr(ops, "multiplies", lambda dtype: native)
    weight, bias = plain(), inputs(20, dtype=kept)
    layer, without = BcqLinear.from_weight(weight, bias), BcqLinear.from_weight(weight)
    few, many = inputs(3, 96, dtype=dtype), inputs(60, 96, dtype=dtype)
    assert torch.equal(layer(few), (without(few.float()) + bias.to(dtype).float()).to(dtype))
    dense = torch.from_numpy(weight.dequantize("float32" if dtype == torch.float32 else None)).to(dtype)
    with dense_products(dtype):
        assert torch.equal(layer(many), in_pieces(many, dense, bias.to(dtype), dtype if native else torch.float32))


def in_pieces(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None, kind: torch.dtype) -> torch.Tensor:
    """torch's product in ``kind``, seven rows of the matrix at a time; rounded to the dtype of x."""
    found = []
    for top in range(0, len(dense), 7):
        plus = None if bias is None else bias[top : top + 7].to(kind)
        found.append(linear(x.to(kind), dense[top : top + 7].clone().to(kind), plus))
    return torch.cat(found, 1).to(x.dtype)


def rounding(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> np.ndarray:
    """How far ``x W^T + bias`` may be off where every step is rounded to the dtype of x, in whatever order.

    Of k products and k additions each has a relative error of at most u, half a unit in the last place:
    |error| <= ((1 + u)^(k + 1) - 1) (|x| |W|^T + |bias|), k + 1 being the most that one term goes through.
    """
    u = torch.finfo(x.dtype).eps / 2
    total = x.double().abs() @ dense.double().abs().T + (0 if bias is None else bias.double().abs())
    return ((1 + u) ** (x.shape[-1] + 1) - 1) * total.numpy()


def test_a_bias_can_learn() -> None:
    layer, x = BcqLinear.from_weight(plain(), inputs(20)), inputs(2, 3, 96)
    assert layer.bias is not None
    layer.bias.requires_grad_()
    (layer(x) * inputs(2, 3, 20)).sum().backward()
    assert torch.allclose(layer.bias.grad, inputs(2, 3, 20).sum((0, 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_through_a_checkpoint(reentrant: bool) -> None:
    layer, found = BcqLinear.from_weight(plain(), inputs(20)), []
    for call in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)):
        x = inputs(3, 96).requires_grad_()
        call(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch about itself
@pytest.mark.parametrize("dtype", BOUND)
def test_forward_derivatives_and_transforms_are_those_of_a_dense_layer(dtype: torch.dtype) -> None:
    weight, bias = plain(), inputs(20, dtype=dtype)
    layer, dense = BcqLinear.from_weight(weight, bias), torch.from_numpy(weight.dequantize()).to(dtype)
    x, direction = inputs(3, 96, dtype=dtype), inputs(3, 96, dtype=dtype).flip(0)
    for call in (
        lambda f: torch.func.jvp(f, (x,), (direction,)),
        lambda f: (torch.func.vmap(f)(x), torch.func.grad(lambda v: f(v).sum())(x)),
        lambda f: (torch.func.jacfwd(f)(x[0]),),
    ):
        found = call(layer)
        with dense_products(dtype):
            assert all(map(torch.equal, found, call(lambda v: linear(v, dense, bias))))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.unpack_dual(layer(torch.autograd.forward_ad.make_dual(x, direction)))
    assert torch.equal(dual.tangent, linear(direction, dense))  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [torch.ones(19), torch.ones(1, 20), torch.ones(20, dtype=torch.int32)])
def test_a_bias_that_does_not_fit_is_refused(bias: torch.Tensor) -> None:
    with pytest.raises(BcqError, match="a bias of shape") as caught:
        BcqLinear.from_weight(plain()).product(inputs(1, 96), bias)
    assert caught.value.code == "BCQ-E552"


@pytest.mark.parametrize("exact", [False, True])
def test_under_autocast_the_result_has_its_dtype(exact: bool) -> None:
    weight = plain()
    layer, x = BcqLinear.from_weight(weight, inputs(20), exact=exact), inputs(3, 96)
    dense = torch.from_numpy(weight.dequantize()).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), linear(x, dense, layer.bias)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert reference.relative_error(y.float().numpy(), expected.double().numpy()) < 8e-3
    assert not exact or torch.equal(y, expected)


def test_the_first_planes_only() -> None:
    weight = plain()
    layer, x = BcqLinear.from_weight(weight, planes=3), inputs(1, 96)
    expected = reference.product(weight, x.numpy(), planes=3)
    assert reference.relative_error(layer(x).numpy(), expected) < 2e-6
    assert np.array_equal(layer.values().numpy(), weight.dequantize(planes=3))
    with pytest.raises(BcqError) as caught:
        BcqLinear.from_weight(ks.weight("offset", 4, 3, 64, 32), planes=2)
    assert caught.value.code == "BCQ-E304"


def test_every_matrix_of_a_stack() -> None:
    rng = np.random.default_rng(0)
    scale = rng.normal(size=(3, 5, 2)).astype(np.float16)
    weight = BcqWeight.from_affine(rng.integers(0, 16, (3, 5, 64)), scale, 1, group_size=32, bits=4)
    stack, x = BcqStack.from_weight(weight), inputs(2, 64)
    for index in range(3):
        expected = reference.product(weight, x.numpy(), index=index)
        assert reference.relative_error(stack(x, index).numpy(), expected) < 2e-6
        assert np.array_equal(stack.values(index=index).numpy(), weight.dequantize()[index])
    with pytest.raises(BcqError, match="matrix 3 of a weight"):
        stack(x, 3)


def test_gradients_reach_the_input_and_nothing_else() -> None:
    weight = rich()
    layer = BcqLinear.from_weight(weight, inputs(9))
    assert list(layer.parameters()) == []
    x = inputs(2, 3, 144).requires_grad_()
    upstream = inputs(2, 3, 9)
    layer(x).backward(upstream)
    expected = upstream.double() @ torch.from_numpy(weight.dequantize("float64"))
    assert x.grad is not None
    assert reference.relative_error(x.grad.numpy(), expected.numpy()) < 2e-6


@pytest.mark.parametrize(
    ("weight", "batch"), [(plain(5), 2), (plain(5), 14), (ks.weight("bcq", 3, 5, 70, 32), 1), (rich(), 1)]
)
def test_the_way_over_a_gpu_in_the_simulator(weight: BcqWeight, batch: int) -> None:
    x, y, dense = simulate(sim_bcq_linear.products, weight, batch)
    assert y.shape == (batch, 1, weight.spec.out)
    assert reference.relative_error(y[:, 0], reference.product(weight, x[:, 0])) < 2e-6
    assert np.array_equal(dense, weight.dequantize().astype(np.float32))


@pytest.mark.parametrize(("batch", "capability"), [(1, (8, 0)), (2, (9, 0)), (300, (9, 0))])
@pytest.mark.parametrize(
    "weight",
    [plain(40), ks.weight("bcq", 3, 40, 70, 32), ks.weight("bcq", 3, 40, 192, 96)],
    ids=["affine", "bcq", "look-up"],
)
def test_a_bias_on_a_gpu_in_the_simulator(weight: BcqWeight, batch: int, capability: tuple[int, int]) -> None:
    x, bias, y, same = simulate(sim_bcq_linear.with_bias, weight, batch, capability)
    assert (y.shape, y.dtype) == ((batch, weight.spec.out), np.float16)
    exact = reference.product(weight, x.astype(np.float64)) + bias
    if batch == 300:  # torch's product with the dense matrix
        assert np.array_equal(y, same)
        dense = torch.from_numpy(weight.dequantize()).half()
        exact = x.astype(np.float64) @ dense.double().numpy().T + bias
        assert np.all(np.abs(y - exact) <= rounding(torch.from_numpy(x), dense, torch.from_numpy(bias)))
    elif "s0_scale" in weight.parts():  # affine: on tensor cores, where values are float16
        assert reference.relative_error(y.astype(np.float64), exact) < 1e-3
    else:  # rounded once, all but a few are the nearest that there are; rounded twice, one in three is not
        assert np.mean(y != exact.astype(np.float16)) < 0.08


@pytest.mark.parametrize("batch", [1, 300])
def test_a_bias_of_segments_with_outliers_in_the_simulator(batch: int) -> None:
    weight = rich()
    x, bias, y, _ = simulate(sim_bcq_linear.with_bias, weight, batch, (9, 0))
    exact = reference.product(weight, x.astype(np.float64)) + bias
    assert reference.relative_error(y.astype(np.float64), exact) < 1e-3


# -- the module -------------------------------------------------------------------------------------------------


def test_the_state_is_the_parts_byte_for_byte() -> None:
    weight = BcqWeight("a.weight", rich().spec, rich().parts())
    model = torch.nn.ModuleDict({"a": BcqLinear.from_weight(weight)})
    state = model.state_dict()
    assert {name: tensor.numpy().tobytes() for name, tensor in state.items()} == {
        part.name: part.tobytes() for part in weight.parts().values()
    }
    assert model["a"].to_weight("a.weight").digest() == weight.digest()


@pytest.mark.parametrize("weight", [plain(), plain(numbers="BF16", dtype="BF16"), rich()], ids=["F16", "BF16", "rich"])
def test_an_empty_layer_is_filled_by_load_state_dict(weight: BcqWeight) -> None:
    full = BcqLinear.from_weight(weight, inputs(weight.spec.out))
    x = inputs(2, weight.spec.columns)
    empty = BcqLinear(weight.spec, bias=True, device="meta")  # knows nothing of outliers but that there are some
    assert all(part.is_meta for part in empty.parts())
    assert empty.load_state_dict(full.state_dict(), assign=True) == ([], [])
    assert torch.equal(empty(x), full(x))
    copied = BcqLinear(weight.spec, bias=True)
    copied.load_state_dict(full.state_dict())
    assert torch.equal(copied(x), full(x))
    moved = BcqLinear(weight.spec, bias=True, device="meta").to_empty(device="cpu")
    moved.load_state_dict(full.state_dict())
    assert moved.to_weight().digest() == weight.digest()


def test_conversions_leave_the_parts_as_they_are() -> None:
    weight = ks.weight("affine", 4, 20, 96, 32, numbers="F32", outliers="add")
    layer = BcqLinear.from_weight(weight, inputs(20))
    for change in (layer.half, layer.bfloat16, layer.double, layer.float, lambda: layer.to("cpu", torch.float16)):
        change()
        assert layer.to_weight().digest() == weight.digest()
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float16


def test_copies_and_pickles() -> None:
    layer, x = BcqLinear.from_weight(rich(), inputs(9)), inputs(2, 144)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
        assert other.to_weight().digest() == layer.to_weight().digest()
        other.bcq_s1_scale.zero_()
    assert torch.equal(layer(x), expected)


def test_what_was_prepared_is_dropped_when_a_buffer_changes_and_when_it_is_freed() -> None:
    layer, x = BcqLinear.from_weight(plain()), inputs(1, 96)
    gc.collect()  # what other tests have left
    before = ops._drop_freed()
    first = layer(x)
    assert ops._drop_freed() == before + 1
    layer.bcq_s0_scale.mul_(2)
    assert torch.equal(layer(x), 2 * first)
    other = plain(seed=5)
    layer.load_state_dict(BcqLinear.from_weight(other).state_dict())
    assert reference.relative_error(layer(x).numpy(), reference.product(other, x.numpy())) < 2e-6
    layer.load_state_dict(BcqLinear.from_weight(plain()).state_dict(), assign=True)
    assert torch.equal(layer(x), first)
    del layer
    gc.collect()
    assert ops._drop_freed() == before


def test_layers_that_share_memory_share_what_was_prepared() -> None:
    layer, x = BcqLinear.from_weight(plain()), inputs(1, 96)
    before = ops._drop_freed()
    with torch.inference_mode():
        expected = layer(x)
    twin = BcqLinear(layer.spec, device="meta")
    twin.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(twin(x), expected)
    assert ops._drop_freed() == before + 1


def test_the_text_of_a_layer_tells_planes_groups_and_bits() -> None:
    assert repr(BcqLinear.from_weight(plain())) == (
        "BcqLinear(in_features=96, out_features=20, affine q=4 g=32, 4.833 bit, bias=False)"
    )
    shown = repr(BcqLinear.from_weight(rich(), inputs(9), exact=True))
    assert "affine q=2 g=16 x48 + affine q=4 g=32 x96" in shown
    assert shown.endswith("exact, bias=True)")


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (inputs(2, 95), r"x of shape \[2, 95\]"),
        (inputs(96).double(), "torch.float64"),
        (torch.tensor(1.0), r"x of shape \[\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: torch.Tensor, found: str) -> None:
    with pytest.raises(BcqError, match=found) as caught:
        BcqLinear.from_weight(plain())(x)
    assert caught.value.code == "BCQ-E552"


def test_stacks_and_matrices_are_not_taken_for_one_another() -> None:
    stack = BcqWeight.from_affine(np.ones((2, 3, 32), np.uint8), np.ones((2, 3, 1), np.float16), 0, group_size=32)
    with pytest.raises(BcqError, match="BcqStack"):
        BcqLinear.from_weight(stack)
    with pytest.raises(BcqError, match=r"a stack \(E, out, in\)"):
        BcqStack.from_weight(plain())


def test_content_that_breaks_a_rule_is_refused_before_it_is_used() -> None:
    layer = BcqLinear.from_weight(rich())
    layer.bcq_perm.zero_()
    with pytest.raises(BcqError) as caught:
        layer(inputs(1, 144))
    assert caught.value.code == "BCQ-V406"
    layer = BcqLinear.from_weight(rich())
    layer.bcq_outlier_indices.view(torch.int16).fill_(-1)
    with pytest.raises(BcqError) as caught:
        layer(inputs(1, 144))
    assert caught.value.code == "BCQ-V408"


def test_parts_that_are_missing_or_of_another_type_are_refused() -> None:
    layer = BcqLinear.from_weight(plain())
    x, parts = inputs(1, 96), layer.parts()
    with pytest.raises(BcqError, match="2 parts"):
        ops.linear(x, parts[:2], layer.text, 0, 0)
    with pytest.raises(BcqError, match=r"contiguous F16"):
        ops.linear(x, [parts[0], parts[1].float(), *parts[2:]], layer.text, 0, 0)
    with pytest.raises(BcqError, match="contiguous I32"):
        ops.linear(x, [parts[0].transpose(1, 2).contiguous().transpose(1, 2), *parts[1:]], layer.text, 0, 0)
    with pytest.raises(BcqError) as caught:
        ops.linear(x, [parts[0][:3], *parts[1:]], layer.text, 0, 0)
    assert caught.value.code == "BCQ-V304"


@pytest.mark.parametrize("who", ["nobody", "x", "a part"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_short_way_is_only_for_products_without_a_gradient(who: str, mode: Any) -> None:
    """It gives what the operator gives, and requires a gradient where the operator does."""
    layer = BcqLinear.from_weight(ks.weight("affine", 4, 9, 96, 32))
    x = torch.randn(2, 96, requires_grad=who == "x")
    layer.bcq_s0_scale.requires_grad_(who == "a part")
    with mode():
        y = layer(x)
        expected = torch.ops.bcqfmt.linear(x, layer.parts(), layer.text, 0, 0)
    assert torch.equal(y, expected)
    assert (y.requires_grad, y.is_inference()) == (expected.requires_grad, expected.is_inference())


def test_the_short_way_keeps_what_runs_below_autograd() -> None:
    """Modes that watch or replace operators see the same one; fake tensors get a fake result."""
    layer = BcqLinear.from_weight(ks.weight("affine", 4, 9, 96, 32))
    x, seen = torch.ones(1, 96), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        layer(x)
    assert seen == ["bcqfmt.linear.default"]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        y = layer(fake.from_tensor(torch.ones(3, 96)))
    assert isinstance(y, FakeTensor)
    assert y.shape == (3, 9)


def test_a_product_that_nobody_watches_does_not_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = BcqLinear.from_weight(ks.weight("affine", 4, 8, 64, 32)), torch.ones(2, 64)
    expected = layer(x)
    monkeypatch.setattr(ops, "_linear", None)
    assert torch.equal(layer(x), expected)
    with torch.no_grad():
        assert torch.equal(layer(x.clone().requires_grad_()), expected)
    with pytest.raises(TypeError):  # gradients need the operator
        layer(x.clone().requires_grad_())
