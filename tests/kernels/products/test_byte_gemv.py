"""Bit planes against bytes of x in the simulator, against the float64 product of the normative decoder."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt.kernels.bits.layout import BitLayout
from bcqfmt.kernels.bits.shape import BitShape, ByteShape, Wanted, at_once, byte_shape_for, product_shape
from bcqfmt.kernels.operands.outliers import NO_OUTLIERS, OutlierNeeds
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_bits
from simulated.cuda_sim import simulate

GROUPS = (32, 64, 128, 256, 384, 1000)
CASES = [
    (encoding, q, (1, 2, 5, 8)[(i + q) % 4], *((17, 264), (16, 300), (33, 520))[q % 3], GROUPS[(2 * i + q) % 6])
    for i, encoding in enumerate(ks.ENCODINGS)
    for q in ((1, 4), (2, 8), (3,), (7,), (4,))[i]
]
LIMIT = 6e-4  # x is cut at 2^-14 of the largest of 128, and some are 20 times larger


@pytest.mark.parametrize(("encoding", "q", "batch", "rows", "columns", "g"), CASES)
def test_every_encoding(encoding: str, q: int, batch: int, rows: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, q, rows, columns, min(g, columns), seed=q)
    kind = ("F16", "BF16")[q % 2]
    x = ks.vectors(batch, columns, kind)
    found = simulate(sim_bits.whole_bytes, weight, x, kind)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize(("batch", "g"), [(1, 32), (3, 64), (8, 128), (2, 8), (4, 16)])
def test_several_vectors_tiles_and_slices(batch: int, g: int) -> None:
    weight = ks.weight("affine", 3, 40, 600, g, perm=True)
    x = ks.vectors(batch, 600, "F16")
    found = simulate(sim_bits.whole_bytes, weight, x, "F16", slices=3, tiles=2, result="BF16")
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value.astype(np.float64), reference.product(weight, x)) < 4e-3


@pytest.mark.parametrize(("batch", "g"), [(6, 128), (4, 16)])
def test_a_vector_does_not_depend_on_its_neighbours(batch: int, g: int) -> None:
    weight, x = ks.weight("bcq", 2, 19, 256, g), ks.vectors(batch, 256, "F16")
    together = simulate(sim_bits.whole_bytes, weight, x, "F16").value
    alone = simulate(sim_bits.whole_bytes, weight, x[-2:-1], "F16").value
    assert np.array_equal(together[-2:-1], alone)


@pytest.mark.parametrize("g", [8, 32])
def test_an_addend_is_added(g: int) -> None:
    weight = ks.weight("bcq", 3, 19, 160, g)
    x = ks.vectors(2, 160, "BF16")
    plus = np.random.default_rng(3).normal(size=(2, 19)).astype(np.float32)
    found = simulate(sim_bits.whole_bytes, weight, x, "BF16", addend=plus)
    assert reference.relative_error(found.value - plus, reference.product(weight, x)) < LIMIT


SOAK = pytest.mark.soak
OUTLIERS = [(3, 32, "add"), (8, 128, "replace"), (1, 64, "add"), (2, 8, "add"), (3, 16, "replace")]


# 200: more tiles for a warp than places for their sums
@pytest.mark.parametrize(("batch", "g", "mode", "rows"), [
    *((*case, 40) for case in OUTLIERS), (1, 64, "add", 200),
    *(pytest.param(*case, 200, marks=SOAK) for case in OUTLIERS if case[1] != 64),
])  # fmt: skip
def test_outliers_in_the_same_launch(batch: int, g: int, mode: str, rows: int) -> None:
    weight = ks.weight("bcq", 2, rows, 520, g, perm=True, outliers=mode, share=0.02)
    x = ks.vectors(batch, 520, "BF16")
    found = simulate(sim_bits.whole_bytes, weight, x, "BF16", slices=2, tiles=1 if rows == 200 else 2, stages=3)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize("g", [8, 128])
@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_makes_its_vector_nan(value: float, g: int) -> None:
    weight, x = ks.weight("bcq", 2, 16, 256, g), ks.vectors(2 if g == 8 else 3, 256, "F16")
    x[1, 200] = value
    found = simulate(sim_bits.whole_bytes, weight, x, "F16").value
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[::2]).all()


@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 60000.0])
def test_vectors_of_any_size(scale: float) -> None:
    weight = ks.weight("affine", 4, 16, 256, 64)
    x = (np.sign(ks.vectors(2, 256, "F32")) * np.float32(scale)).astype(np.float16)
    found = simulate(sim_bits.whole_bytes, weight, x, "F16").value
    expected = reference.product(weight, x)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_which_way_is_taken() -> None:
    def way(g: int, batch: int, kind: int = 1, width: int = 8192) -> type | None:
        layout = BitLayout(4, width, g, "bcq", "F16")
        found = product_shape(Wanted(layout, batch, kind, kind, precise=kind == 0))
        return None if found is None else type(found)

    assert [way(128, 1), way(128, 2), way(128, 4, 0)] == [BitShape] * 3
    assert [way(128, 3), way(128, 8), way(32, 1), way(32, 2)] == [ByteShape] * 4
    assert way(16, 8) is None
    assert way(128, 8, width=16384) is None
    wide, narrow = (BitLayout(4, width, 128, "bcq", "F16") for width in (16384, 4096))
    assert at_once((narrow,), 1, 1) == 8
    assert at_once((narrow, wide), 1, 1) == 4
    assert at_once((narrow,), 0, 0) == 4
    assert byte_shape_for(Wanted(narrow, 9, 1, 1)) is None
    # outliers need the vectors a second time
    needs = OutlierNeeds(4, 8192, 4000)
    eight = BitLayout(4, 8192, 128, "bcq", "F16")
    assert [at_once((eight,), 1, 1, needs=b) for b in (NO_OUTLIERS, needs)] == [8, 4]
    assert at_once((eight, narrow), 1, 1, needs=needs) == 8
