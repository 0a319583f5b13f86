"""BcqEmbedding: the rows that are asked for, bit for bit, of every kind of weight; conversions, copies, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import bcqfmt
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch import BcqEmbedding, tensors_of
from bcqfmt.integrations.torch.embedding import TiedHead

RNG = np.random.default_rng(5)
CODES = RNG.integers(0, 16, (10, 64), dtype=np.uint8)
SCALE = RNG.uniform(0.1, 1, (10, 4)).astype(np.float16)
SECOND = bcqfmt.Coded(
    RNG.integers(0, 64, (10, 4), dtype=np.uint8),
    RNG.uniform(0.1, 1, (4, 2)).astype(np.float16),
    32,
    6,
    rows=3,
    groups=2,
)
ZERO = RNG.integers(0, 17, (10, 4), dtype=np.uint8)
PLAIN = bcqfmt.BcqWeight.from_affine(CODES, SCALE, ZERO, group_size=16, bits=4)
SIGNS = RNG.integers(0, 2, (2, 10, 64), dtype=np.uint8)
WEIGHTS = {
    "affine": PLAIN,
    "perm": PLAIN.with_perm(RNG.permutation(64)),
    "offset": bcqfmt.BcqWeight.from_offset(CODES, SCALE, SCALE, group_size=16, bits=4, dtype="F32"),
    "float-zero": bcqfmt.BcqWeight.from_float_zero(CODES, SCALE, SCALE, group_size=16, bits=4),
    "second order": bcqfmt.BcqWeight.from_offset(CODES, SECOND, SECOND, group_size=16, bits=4, dtype="F32"),
    "table": bcqfmt.BcqWeight.from_table(CODES, SECOND, range(-8, 8), group_size=16, exponent=-1, dtype="F32"),
    "bcq": bcqfmt.BcqWeight.from_bcq(SIGNS, RNG.uniform(0.1, 1, (2, 10, 4)).astype(np.float16), group_size=16),
    "segments": bcqfmt.BcqWeight.from_segments([PLAIN, PLAIN]),
}
IDS = torch.tensor([[3, 9, 0], [3, 3, 8]])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_are_those_of_the_decoded_weight(kind: str) -> None:
    layer = BcqEmbedding.from_weight(WEIGHTS[kind])
    found = layer(IDS)
    expected = torch.from_numpy(np.asarray(WEIGHTS[kind].dequantize()))[IDS]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(layer(IDS[0, 0]), expected[0, 0])
    assert layer(IDS[:0]).shape == (0, 3, expected.shape[-1])


def test_the_type_of_the_result_follows_the_module() -> None:
    layer = BcqEmbedding.from_weight(PLAIN)
    expected = layer(IDS)
    assert layer.to(torch.bfloat16)(IDS).dtype == torch.bfloat16
    assert torch.equal(layer.float()(IDS), expected.float())


def test_copies_pickles_and_saving() -> None:
    layer = torch.nn.Sequential(BcqEmbedding.from_weight(WEIGHTS["second order"]))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(IDS), layer(IDS))
    saved: Any = tensors_of(layer)["0.weight"]
    assert np.array_equal(saved.dequantize(), WEIGHTS["second order"].dequantize())


def test_a_tied_head_multiplies_with_the_same_weight() -> None:
    model = torch.nn.ModuleDict({"table": BcqEmbedding.from_weight(PLAIN)})
    model["head"] = TiedHead(model["table"])  # type: ignore[arg-type]
    assert not [name for name in model.state_dict() if name.startswith("head")]
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    values = torch.from_numpy(np.asarray(PLAIN.dequantize())).float()
    assert torch.allclose(model["head"](x), x @ values.T, rtol=1e-3, atol=0.05)
    other = copy.deepcopy(model)
    assert other["head"].__dict__["embedding"] is other["table"]


def test_rows_out_of_range_are_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        BcqEmbedding.from_weight(PLAIN)(torch.tensor([10]))


def test_stacks_and_outliers_are_refused() -> None:
    stack = bcqfmt.BcqWeight.from_affine(CODES[None], SCALE[None], 8, group_size=16, bits=4)
    indptr = np.array([0, *[1] * 10])
    outliers = PLAIN.with_outliers(indptr, np.array([1]), np.array([1], np.float16), mode="add")
    for weight in (stack, outliers):
        with pytest.raises(BcqError) as caught:
            BcqEmbedding.from_weight(weight)
        assert caught.value.code == "BCQ-E305"
