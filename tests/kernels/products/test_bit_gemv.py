"""The product on binary tensor cores in the simulator, against the float64 product of the normative decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.kernels.bits.layout import STEP_MASKS, in_steps, layout_of, pack_numbers, pack_planes
from bcqfmt.kernels.operands import operand
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_bits
from simulated.cuda_sim import SimulationError, simulate

GROUPS = (8, 16, 32, 64, 128, 256, 384, 1000)
SHAPES = ((17, 264), (16, 300), (33, 256))
CASES = [
    (encoding, q, *SHAPES[(i + q) % 3], GROUPS[(3 * i + q) % 8], ("F16", "BF16")[q % 2])
    for i, encoding in enumerate(ks.ENCODINGS)
    for q in ((1, 4, 6), (2, 3, 8), (3, 5), (2, 7), (2, 4))[i]
]


def _limit(parts: int) -> float:
    return 4e-4 if parts == 2 else 3e-6  # x is cut at 2^-15 (2^-22) of the largest of 128, and some are 20 times larger


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "kind"), CASES)
def test_every_encoding(encoding: str, q: int, rows: int, columns: int, g: int, kind: str) -> None:
    weight = ks.weight(encoding, q, rows, columns, min(g, columns), seed=q)
    x = ks.vectors(1, columns, kind)
    found = simulate(sim_bits.bits, weight, x, kind)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < _limit(2)


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "kind"), CASES[::2])
def test_copies_of_16_bytes_give_the_same_bits(
    encoding: str, q: int, rows: int, columns: int, g: int, kind: str
) -> None:
    """As on GPUs before sm_90; more columns than the stages hold at once."""
    weight = ks.weight(encoding, q, rows, 5 * columns, g if g < columns else 5 * columns, seed=q)
    x = ks.vectors(1, 5 * columns, kind)
    found = simulate(sim_bits.bits, weight, x, kind, tiles=2, bulk=False)
    assert (found.same, found.intact) == (True, True)
    assert (found.value == simulate(sim_bits.bits, weight, x, kind, tiles=2).value).all()


@pytest.mark.parametrize("g", [8, 32, 64, 128, 512])
def test_three_parts_are_as_good_as_float32(g: int) -> None:
    weight = ks.weight("bcq", 2, 16, 512, g)
    x = ks.vectors(1, 512, "F32")
    found = simulate(sim_bits.bits, weight, x, "F32", parts=3)
    assert reference.relative_error(found.value, reference.product(weight, x)) < _limit(3)


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_several_vectors_tiles_and_slices(batch: int) -> None:
    weight = ks.weight("affine", 3, 70, 600, 128, perm=True)
    x = ks.vectors(batch, 600, "F16")
    found = simulate(sim_bits.bits, weight, x, "F16", slices=3, tiles=2, result="BF16")
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value.astype(np.float64), reference.product(weight, x)) < 4e-3


def test_segments_are_added_and_so_is_an_addend() -> None:
    weight = ks.mixed(19, 48, 96, outliers="")
    x = ks.vectors(1, 144, "BF16")
    plus = np.random.default_rng(3).normal(size=(1, 19)).astype(np.float32)
    found = simulate(sim_bits.bits, weight, x, "BF16", addend=plus)
    assert reference.relative_error(found.value - plus, reference.product(weight, x)) < _limit(2)


def test_the_first_planes_of_a_weight() -> None:
    weight = ks.weight("bcq", 4, 20, 256, 64)
    x = ks.vectors(1, 256, "F16")
    found = simulate(sim_bits.bits, weight, x, "F16", planes=2)
    expected = x.astype(np.float64) @ weight.dequantize("float64", planes=2).T
    assert reference.relative_error(found.value, expected) < _limit(2)


@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_makes_everything_nan(value: float) -> None:
    weight = ks.weight("bcq", 2, 16, 256, 128)
    x = ks.vectors(1, 256, "F32")
    x[0, 200] = value
    found = simulate(sim_bits.bits, weight, x, "F32", parts=3)
    assert np.isnan(found.value).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_vectors_of_any_size(scale: float) -> None:
    weight = ks.weight("bcq", 2, 16, 256, 128)
    x = (ks.vectors(1, 256, "F32").astype(np.float64) * scale).astype(np.float32)
    found = simulate(sim_bits.bits, weight, x, "F32", parts=3)
    expected = reference.product(weight, x)
    assert np.abs(found.value - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize(  # the mode changes the entries, not the kernel: each shape has one of the two
    ("encoding", "rows", "columns", "g", "share", "kind", "shape", "mode"),
    [
        ("bcq", 40, 300, 64, 0.05, "F16", {"slices": 1, "stages": 2}, "add"),  # a block a tile or two
        ("affine", 70, 520, 128, 0.02, "BF16", {"slices": 3, "tiles": 2, "stages": 3}, "replace"),  # in one buffer
        ("affine", 33, 264, 8, 0.1, "F16", {"slices": 2, "stages": 2}, "add"),
        ("second-order", 100, 256, 16, 0.01, "F32", {"slices": 1, "parts": 3, "stages": 4}, "replace"),
        # seven tiles for a warp and fewer places for their sums: it has to wait until they are free
        ("affine", 200, 256, 128, 0.02, "F16", {"slices": 1, "stages": 2}, "add"),
        ("bcq", 200, 520, 64, 0.02, "F16", {"slices": 2, "stages": 2}, "replace"),
    ],
)
def test_outliers_in_the_same_launch(
    encoding: str, rows: int, columns: int, g: int, share: float, kind: str, shape: dict[str, int], mode: str
) -> None:
    weight = ks.weight(encoding, 3, rows, columns, g, perm=True, outliers=mode, share=share)
    x = ks.vectors(1 if rows in (33, 200) else 2, columns, kind)
    found = simulate(sim_bits.bits, weight, x, kind, **shape)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < _limit(shape.get("parts", 2))


def test_outliers_of_several_segments_and_an_addend() -> None:
    weight = ks.mixed(19, 48, 96)
    x = ks.vectors(1, 144, "BF16")
    plus = np.random.default_rng(3).normal(size=(1, 19)).astype(np.float32)
    found = simulate(sim_bits.bits, weight, x, "BF16", addend=plus)
    assert reference.relative_error(found.value - plus, reference.product(weight, x)) < _limit(2)


def test_outliers_that_float16_does_not_hold_and_more_than_are_kept() -> None:
    """Entries of 8 bytes, in the first tile more than 8 KB of them, in others none."""
    rng = np.random.default_rng(5)
    chosen = rng.random((37, 600)) < 0.15
    chosen[16:] = False
    plain = ks.weight("affine", 2, 37, 600, 64)
    values = rng.normal(0, 3, int(chosen.sum())).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    weight = plain.with_outliers(indptr, np.nonzero(chosen)[1], values, mode="add")
    x = ks.vectors(1, 600, "F16")
    found = simulate(sim_bits.bits, weight, x, "F16")
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < _limit(2)


@pytest.mark.parametrize(
    ("full", "values", "batch"),
    [
        ((5,), np.float16, 1),
        ((0, 15, 16, 31), np.float16, 2),
        (tuple(range(16, 22)), np.float32, 1),
        ((69,), np.float32, 1),
    ],
)
def test_outliers_most_of_which_are_in_few_rows(full: tuple[int, ...], values: Any, batch: int) -> None:
    """What a row has beyond the others' is added up by all lanes: of what is kept, and of what does not fit there."""
    weight = ks.in_few_rows(ks.weight("affine", 2, 70, 600, 64), full, values=values)
    x = ks.vectors(batch, 600, "F16")
    found = simulate(sim_bits.bits, weight, x, "F16")
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < _limit(2)


@pytest.mark.parametrize(("kind", "g", "columns"), [("F32", 128, 258), ("F16", 16, 130)])
def test_more_vectors_than_a_launch_takes(kind: str, g: int, columns: int) -> None:
    """Five: four and one of float32, two, two and one in groups of 16; each with its part of the addend."""
    weight = ks.weight("affine", 2, 17, columns, g, outliers="add")
    x, plus = ks.vectors(5, columns, kind), np.random.default_rng(1).normal(size=(5, 17)).astype(np.float32)
    found = simulate(sim_bits.by_itself, weight, x, addend=plus)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value - plus, reference.product(weight, x)) < _limit(3)


@pytest.mark.parametrize("weight", [ks.weight("bcq", 2, 16, 96, 12)], ids=["group"])
def test_what_has_no_layout_is_refused(weight: BcqWeight) -> None:
    with pytest.raises(SimulationError, match="BCQ-E553"):
        simulate(sim_bits.bits, weight, ks.vectors(1, weight.shape[1], "F16"), "F16")


def test_where_columns_of_short_groups_go() -> None:
    """Bit by bit; every pass has the columns of its groups."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    places = [(8 * (c % 4) + 4 * (c // 4 % 2) + c // 8 + 1) % 32 for c in range(32)]
    assert in_steps(columns).tolist() == [1 << place for place in places]
    words = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
    moved = np.zeros_like(bits)
    moved[:, places] = bits
    assert np.array_equal(in_steps(words), (moved << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32))
    for passes, g in ((2, 16), (4, 8)):
        found = [sum(1 << places[c] for c in range(p * g, p * g + g)) for p in range(passes)]
        assert tuple(found) == STEP_MASKS[passes]


@pytest.mark.parametrize("g", [8, 16, 32, 64, 128, 256, 300])
def test_packing_is_a_permutation(g: int) -> None:
    segment = operand(ks.weight("bcq", 3, 21, 300, g)).segments[0]
    layout = layout_of(segment)
    assert layout is not None
    stored, *pair = (
        torch.from_numpy(np.array(a)) for a in (segment.planes.view(np.int32), segment.first, segment.second)
    )
    planes, numbers = (
        made.numpy().view(np.uint32) for made in (pack_planes(layout, stored), pack_numbers(layout, *pair))
    )
    assert planes.size * 4 == 2 * layout.chunks * layout.bits * 512
    assert numbers.size * 4 == 2 * layout.sets * layout.set_bytes
    words = in_steps(segment.planes) if g in (8, 16) else segment.planes
    assert np.array_equal(np.sort(planes[planes != 0]), np.sort(words[words != 0]))
    stored = np.sort(numbers.view(np.float16)[numbers.view(np.float16) != 0]).astype(np.float32)
    given = np.concatenate([segment.first.reshape(-1), segment.second.reshape(-1)])
    assert np.array_equal(stored, np.sort(given[given != 0]))
