"""Weights that are prepared on a GPU: the same words and numbers as on the host; host tensors stand for a device's.

Products of such weights in the simulator are in test_bcq_linear.py.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.gpu_weight import (
    gpu_weight,
    layout_of,
    linear_numbers,
)
from bcqfmt.kernels import operands
from bcqfmt.kernels.bits import layout as bit_layout
from products import kernel_samples as ks

CASES = [
    ("affine", 4, 20, 96, 32), ("affine", 3, 33, 300, 64), ("affine", 8, 5, 512, 128), ("bcq", 2, 16, 576, 64),
    ("bcq", 4, 40, 700, 300), ("bcq", 1, 7, 256, 8), ("affine", 2, 17, 520, 16), ("bcq", 3, 16, 1024, 256),
    ("affine", 4, 9, 100, 100),
]  # fmt: skip


def prepared(weight: BcqWeight) -> tuple[Any, dict[str, torch.Tensor]]:
    """The weight, and its parts, which have to stay alive."""
    parts = weight.to_torch()
    return gpu_weight(weight.spec, parts), parts


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("numbers", ["F16", "BF16", "F32"])
def test_the_fast_layout_is_that_of_the_host(case: tuple[Any, ...], numbers: str) -> None:
    weight = ks.weight(*case, numbers=numbers, seed=2)
    made, _parts = prepared(weight)
    (piece,), (segment,) = made._pieces, operands.operand(weight).segments
    found, wanted = layout_of(piece), bit_layout.layout_of(segment)
    if wanted is None:
        assert found is None
        return
    assert found is not None
    same = bit_layout.BitLayout(wanted.bits, wanted.width, wanted.group_size, wanted.formula, numbers)
    assert found == same
    assert np.array_equal(piece.planes.numpy().view(np.uint32), segment.planes)
    words = bit_layout.pack_numbers(found, piece.first, piece.second)
    host = [torch.from_numpy(np.array(numbers)) for numbers in (segment.first, segment.second)]
    assert torch.equal(words, bit_layout.pack_numbers(same, *host))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_words_and_numbers_for_look_ups_are_those_of_the_host(case: tuple[Any, ...]) -> None:
    weight = ks.weight(*case, numbers="F32", seed=3)
    made, _parts = prepared(weight)
    alpha, z = linear_numbers(made._pieces[0])
    (segment,) = operands.operand(weight).segments
    assert np.array_equal(alpha.numpy(), segment.alpha)
    assert np.array_equal(z.numpy(), segment.z)
    assert made.linear
    assert np.array_equal(made._pieces[0].planes.numpy().view(np.uint32), segment.planes)


def test_segments_side_by_side() -> None:
    pieces = [ks.weight("affine", 2, 12, 96, 16), ks.weight("affine", 4, 12, 64, 32)]
    made, _parts = prepared(BcqWeight.from_segments(pieces))
    assert [(p.start, p.width, p.bits) for p in made._pieces] == [(0, 96, 2), (96, 64, 4)]


@pytest.mark.parametrize(
    "weight",
    [
        ks.weight("affine", 4, 9, 96, 32, perm=True),
        ks.weight("affine", 4, 9, 96, 32, outliers="add"),
        ks.weight("float-zero", 4, 9, 96, 32),
        ks.weight("offset", 4, 9, 96, 32),
        ks.weight("second-order", 2, 9, 96, 32),
        ks.weight("affine", 4, 9, 96, 32).allow_nonfinite(),
    ],
    ids=["perm", "outliers", "float-zero", "offset", "second-order", "nonfinite"],
)
def test_what_is_left_to_the_host(weight: BcqWeight) -> None:
    assert prepared(weight)[0] is None


@pytest.mark.parametrize("part", ["s0_planes", "s0_zero", "s0_scale"])
def test_content_that_breaks_a_rule_is_left_to_the_host(part: str) -> None:
    """It says what is wrong, with the code of the rule."""
    weight = ks.weight("affine", 4, 9, 100, 32)
    parts = weight.to_torch()
    assert gpu_weight(weight.spec, parts) is not None
    if part == "s0_scale":
        parts[part][3, 1] = float("nan")
    else:
        parts[part][..., -1] |= 1 << 30
    assert gpu_weight(weight.spec, parts) is None


def test_a_zero_point_out_of_range_is_left_to_the_host() -> None:
    weight = ks.weight("affine", 2, 9, 96, 32)
    assert weight.parts()["s0_zero"].shape == (9, 1)
    parts = weight.to_torch()
    parts["s0_zero"][0, 0] = 7
    assert gpu_weight(weight.spec, parts) is None


def test_planes_are_neither_copied_nor_kept() -> None:
    weight = ks.weight("affine", 4, 9, 96, 32)
    made, parts = prepared(weight)
    assert made._pieces[0].planes.data_ptr() == parts["s0_planes"].data_ptr()
    storage = torch.multiprocessing.reductions.StorageWeakRef(parts["s0_planes"].untyped_storage())
    del parts
    gc.collect()
    assert storage.expired()
