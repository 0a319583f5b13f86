"""Arguments of layers that cannot be meant are refused when a layer is made, not when it computes."""

from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqError
from bcqfmt.integrations.torch import BcqEmbedding, BcqLinear
from products import kernel_samples as ks

WEIGHT = ks.weight("affine", 4, 6, 64, 32)


def refused(code: str, *arguments: Any, **options: Any) -> str:
    with pytest.raises(BcqError) as caught:
        BcqLinear.from_weight(WEIGHT, *arguments, **options)
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "bias", [torch.zeros(5), torch.zeros(1), torch.zeros(6, 1), torch.zeros(()), torch.zeros(6, dtype=torch.int32)]
)
def test_a_bias_that_is_not_one_number_for_each_row(bias: torch.Tensor, trainable: bool) -> None:
    assert "expected [6], floating point" in refused("BCQ-E552", bias, trainable_scales=trainable)


@pytest.mark.parametrize("planes", [9, 64, 0, -1])
def test_planes_that_no_weight_has(planes: int) -> None:
    assert f"{planes} planes" in refused("BCQ-E302", planes=planes)


@pytest.mark.parametrize("planes", ["2", 2.5])
def test_planes_that_are_no_number(planes: Any) -> None:
    assert repr(planes) in refused("BCQ-E302", planes=planes)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"trainable_scales": True}], ids=str)
def test_inputs_that_are_no_tensor(options: dict[str, Any]) -> None:
    layer = BcqLinear.from_weight(WEIGHT, **options)
    x = np.ones((1, 64), np.float32)
    with pytest.raises(BcqError) as caught:
        layer(x)
    assert caught.value.code == "BCQ-E552"
    assert "'x'" in str(caught.value)
    assert "torch.as_tensor(x)" in caught.value.hint
    assert layer(torch.as_tensor(x)).shape == (1, 6)
    assert "'bias'" in refused("BCQ-E552", np.ones(6, np.float32), **options)
    with pytest.raises(BcqError, match="'ids'"):
        BcqEmbedding.from_weight(WEIGHT)(np.zeros(1, np.int64))


def test_modes_that_a_layer_in_training_has_not() -> None:
    assert "exact with trainable_scales" in refused("BCQ-E302", exact=True, trainable_scales=True)
    assert "planes with trainable_scales" in refused("BCQ-E302", planes=2, trainable_scales=True)
    layer = BcqLinear.from_weight(WEIGHT, exact=False, planes=None, trainable_scales=True)  # what all layers have
    assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
