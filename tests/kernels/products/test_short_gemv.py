"""Groups of 8 and 16 columns in the simulator, against the float64 product of the normative decoder.

What they have to do as all bytes do is in test_byte_gemv.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt import BcqWeight
from bcqfmt.kernels.bits.layout import BitLayout
from bcqfmt.kernels.bits.shape import BitShape, ShortShape, Wanted, at_once, product_shape, short_shape_for
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_bits
from simulated.cuda_sim import simulate

CASES = [
    (encoding, q, 1 + (i + q) % 2, *((17, 264), (16, 300), (33, 520))[q % 3], (8, 16)[(i + q // 2) % 2])
    for i, encoding in enumerate(ks.ENCODINGS)
    for q in ((1, 4), (2, 8), (3, 5), (7, 6), (4, 2))[i]
]
LIMIT = 6e-4  # x is cut at 2^-14 of the largest of 128, and some are 20 times larger


@pytest.mark.parametrize(("encoding", "q", "batch", "rows", "columns", "g"), CASES)
def test_every_encoding(encoding: str, q: int, batch: int, rows: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q)
    kind = ("F16", "BF16")[q % 2]
    x = ks.vectors(batch, columns, kind)
    found = simulate(sim_bits.whole_bytes, weight, x, kind)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize(("encoding", "g"), [("bcq", 8), ("bcq", 16), ("affine", 8), ("affine", 16)])
def test_every_column_meets_its_own_scale(encoding: str, g: int) -> None:
    """One column of x at a time: what comes out is that column of the weight."""
    weight = ks.weight(encoding, 3, 16, 264, g)
    places = [0, 7, 8, 31, 32, 127, 128, 263]
    x = np.zeros((len(places), 264), np.float16)
    x[range(len(places)), places] = 1
    step = g // 4  # vectors that a launch takes
    for begin in range(0, len(places), step):
        part = x[begin : begin + step]
        found = simulate(sim_bits.whole_bytes, weight, part, "F16").value
        assert np.allclose(found, reference.product(weight, part), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numbers", ["F32", "BF16"])
def test_numbers_of_other_types(numbers: str) -> None:
    weight = ks.weight("bcq", 2, 17, 264, 8, numbers=numbers, dtype=numbers)
    x = ks.vectors(2, 264, "BF16")
    found = simulate(sim_bits.whole_bytes, weight, x, "BF16")
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize("segments", [((304, 16), (133, 128)), ((300, 300), (37, 8))])
def test_beside_a_segment_of_longer_groups(segments: tuple[tuple[int, int], ...]) -> None:
    """Short groups first, or last from a column on that is no multiple of eight; perm and outliers."""
    pieces = [ks.weight("bcq", 2, 40, width, g) for width, g in segments]
    columns = sum(width for width, _ in segments)
    order = np.random.default_rng(1).permutation(columns)
    weight = ks.with_outliers(BcqWeight.from_segments(pieces, perm=order), "add", 0.02)
    x = ks.vectors(2, columns, "F16")
    found = simulate(sim_bits.whole_bytes, weight, x, "F16", slices=3, tiles=2)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize("g", [8, 16])
def test_three_tiles_side_by_side(g: int) -> None:
    weight = ks.weight("bcq", 3, 100, 520, g)
    x = ks.vectors(1, 520, "F16")
    found = simulate(sim_bits.whole_bytes, weight, x, "F16", slices=3, tiles=3, stages=3)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMIT


@pytest.mark.parametrize(("encoding", "q", "g", "scale"), [
    *((*case, scale) for case in (("affine", 8, 16), ("bcq", 4, 8), ("bcq", 1, 16), ("offset", 8, 8))
      for scale in (2.0**-24, 65120.0)),
    ("bcq", 4, 8, 0.0),
])  # fmt: skip
def test_vectors_of_any_size(encoding: str, q: int, g: int, scale: float) -> None:
    """The largest sums that there can be: all columns as large as the largest, of both signs and of one."""
    weight = ks.weight(encoding, q, 16, 256, g)
    x = (np.sign(ks.vectors(2, 256, "F32")) * np.float32(scale)).astype(np.float16)
    x[1] = np.abs(x[1])
    found = simulate(sim_bits.whole_bytes, weight, x, "F16").value
    expected = reference.product(weight, x)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_which_way_is_taken() -> None:
    def way(g: int, batch: int, kind: int = 1, width: int = 8192, q: int = 4) -> type | None:
        layout = BitLayout(q, width, g, "bcq", "F16")
        found = product_shape(Wanted(layout, batch, kind, kind, precise=kind == 0))
        return None if found is None else type(found)

    assert [way(8, 1), way(8, 2), way(16, 1), way(16, 4), way(8, 1, width=12288, q=8)] == [ShortShape] * 5
    assert [way(8, 1, 0), way(16, 2, 0)] == [BitShape] * 2
    assert [way(8, 3), way(16, 8), way(8, 2, 0)] == [None] * 3
    short, long = BitLayout(4, 4096, 16, "bcq", "F16"), BitLayout(4, 4096, 128, "bcq", "F16")
    assert [at_once((layout,), 1, 1) for layout in (short, long)] == [4, 8]
    assert short_shape_for(Wanted(long, 1, 1, 1)) is None
