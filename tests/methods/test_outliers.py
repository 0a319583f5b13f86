"""Which elements are kept apart, and how they are stored."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.methods import mixed24_choice
from bcqfmt.converters.methods.mixed24_choice import csr_of, largest_scores
from weights.strategies import examples


@given(
    st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.integers(0, 90), st.integers(1, 6),
    st.sampled_from([1, 7, 1 << 22]),
)  # fmt: skip
@examples(80)
def test_the_largest_are_chosen_and_the_first_of_equals(
    seed: int, rows: int, columns: int, count: int, kinds: int, block: int
) -> None:
    scores = np.random.default_rng(seed).integers(0, kinds + 1, (rows, columns)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed24_choice, "_BLOCK", block)
        mask = largest_scores(scores, count)
    ranked = sorted(range(scores.size), key=lambda i: (-scores.flat[i], i))
    expected = {i for i in ranked[:count] if scores.flat[i] > 0}
    assert set(np.flatnonzero(mask).tolist()) == expected


def test_no_score_no_outlier() -> None:
    assert not largest_scores(np.zeros((3, 4), np.float32), 5).any()


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(8, 20), st.floats(0, 1))
@examples(40)
def test_csr_has_every_element_once_in_order(seed: int, rows: int, columns: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < share
    wanted, dense = rng.standard_normal((rows, columns)), rng.standard_normal((rows, columns))
    made = csr_of(mask, wanted[mask], dense[mask])
    found: dict[tuple[int, int], Any] = {}
    for r in range(rows):
        run = made.indices[made.indptr[r] : made.indptr[r + 1]]
        assert (np.diff(run) > 0).all()
        found |= {(r, int(c)): v for c, v in zip(run, made.values[made.indptr[r] : made.indptr[r + 1]], strict=True)}
    assert made.indptr[0] == 0
    assert made.indptr[-1] == made.values.size == mask.sum()
    assert found == {(int(r), int(c)): np.float16(wanted[r, c] - dense[r, c]) for r, c in np.argwhere(mask)}
