"""Indices that would lead a kernel astray are refused before anything is launched, with the code of the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcqfmt import BcqWeight, StoredTensor
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch import BcqLinear
from bcqfmt.kernels import matmul
from bcqfmt.kernels.mixed import mixed_operand
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime import launch
from products import kernel_samples as ks
from simulated import sim_mixed

COLUMNS = 64
WEIGHTS = {
    "affine": ks.weight("affine", 3, 8, COLUMNS, 32, perm=True, outliers="add", share=0.1),
    "mixed": sim_mixed.weight(8, 48, 16, outliers="add", share=0.1),
}


def _descending(indices: Any) -> None:
    indices[0], indices[1] = indices[1], indices[0]


HOSTILE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "perm beyond the columns": ("perm", lambda a: a.__setitem__(0, COLUMNS), "BCQ-V406"),
    "perm below zero": ("perm", lambda a: a.__setitem__(0, -1), "BCQ-V406"),
    "perm with a column twice": ("perm", lambda a: a.__setitem__(0, a[1]), "BCQ-V406"),
    "rows far away": ("outlier_indptr", lambda a: a.__setitem__(1, 2**31 - 1), "BCQ-V407"),
    "rows before the first": ("outlier_indptr", lambda a: a.__setitem__(0, -5), "BCQ-V407"),
    "outliers beyond the columns": ("outlier_indices", lambda a: a.__setitem__(-1, COLUMNS), "BCQ-V408"),
    "outliers far away": ("outlier_indices", lambda a: a.__setitem__(0, 65535), "BCQ-V408"),
    "outliers that descend": ("outlier_indices", _descending, "BCQ-V408"),
}
CASES = pytest.mark.parametrize("case", HOSTILE)
BOTH = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched."""
    names: list[str] = []
    real = launch.Kernel.launch

    def noted(kernel: launch.Kernel, *arguments: Any, **options: Any) -> None:
        names.append(kernel.name)
        real(kernel, *arguments, **options)

    monkeypatch.setattr(launch.Kernel, "launch", noted)
    return names


def spoiled(weight: BcqWeight, case: str) -> BcqWeight:
    suffix, change, _ = HOSTILE[case]
    parts = weight.parts()
    array = parts[suffix].array().copy()
    change(array)
    parts[suffix] = StoredTensor.from_array(suffix, array, parts[suffix].dtype)
    return BcqWeight("w", weight.spec, parts)


@CASES
@BOTH
def test_weights(weight: BcqWeight, case: str, launched: list[str]) -> None:
    bad, code = spoiled(weight, case), HOSTILE[case][2]
    x = torch.ones(1, COLUMNS, dtype=torch.float16, device="cuda")
    with pytest.raises(BcqError, match=code):
        matmul.matmul(matmul.MatmulWeight(operand(bad), "cuda", bad), x)
    with pytest.raises(BcqError, match=code):
        mixed_operand(bad, "cuda")
    with pytest.raises(BcqError, match=code):
        BcqLinear.from_weight(bad)
    assert not launched


@pytest.mark.parametrize("vectors", [1, 40])
@CASES
@BOTH
def test_layers_that_were_loaded_on_the_gpu(weight: BcqWeight, case: str, vectors: int, launched: list[str]) -> None:
    """Nothing has looked at the content before the first product; one that was made before is not used again."""
    layer = BcqLinear.from_weight(weight).to("cuda")
    good = {name: part.clone() for name, part in layer.state_dict().items()}
    x = torch.ones(vectors, COLUMNS, dtype=torch.float16, device="cuda")
    expected = layer(x)
    assert launched
    suffix, change, code = HOSTILE[case]
    name = next(name for name in good if name.endswith(suffix))
    array = good[name].cpu().numpy().copy()
    change(array)
    layer.load_state_dict({**good, name: torch.from_numpy(array)})
    launched.clear()
    for call in (lambda: layer(x), layer.values):
        with pytest.raises(BcqError, match=code):
            call()
    assert not launched
    layer.load_state_dict(good)
    assert torch.equal(layer(x), expected)
