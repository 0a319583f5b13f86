"""The float64 product that kernels are measured against, itself against sums of fractions."""

from __future__ import annotations

from fractions import Fraction

import hypothesis
import numpy as np
import pytest

from bcqfmt import BcqWeight
from bcqfmt.errors import BcqError
from products import kernel_samples as ks
from products import product_reference as reference
from weights import oracle, strategies


@hypothesis.settings(strategies.examples(40), deadline=None)
@hypothesis.given(strategies.weights(styles=("plain",), max_rows=3))
def test_products_of_any_weight(pair: tuple[BcqWeight, oracle.Plain]) -> None:
    weight, plain = pair
    columns, rows = weight.spec.columns, weight.spec.out
    x = ks.vectors(2, columns, "F16")
    exact = [Fraction(e) for e in oracle.exact_values(plain)]
    for index in range(weight.spec.stack) if len(weight.shape) == 3 else [None]:
        found = reference.product(weight, x, index=index)
        assert found.shape == (2, rows)
        for b in range(2):
            for r in range(rows):
                start = ((index or 0) * rows + r) * columns
                terms = [exact[start + c] * Fraction(float(x[b, c])) for c in range(columns)]
                size = float(sum(map(abs, terms)))
                assert abs(found[b, r] - float(sum(terms))) <= 1e-13 * size


def test_rounded_is_the_product_with_the_dequantized_matrix() -> None:
    weight = ks.weight("bcq", 3, 4, 64, 32)
    x = ks.vectors(1, 64)
    rounded = x.astype(np.float64) @ weight.dequantize("float16").astype(np.float64).T
    assert np.allclose(reference.product(weight, x, rounded=True), rounded, rtol=1e-12)
    assert not np.allclose(reference.product(weight, x), rounded, rtol=1e-9)


def test_vectors_batches_and_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = ks.weight("affine", 4, 7, 64, 32)
    x = ks.vectors(1, 64)[0]
    whole = reference.product(weight, x, planes=2)
    assert whole.shape == (7,)
    assert np.allclose(whole, weight.dequantize("float64", planes=2) @ x)
    monkeypatch.setattr(reference, "_ELEMENTS", 64 * 2)
    assert np.array_equal(reference.product(weight, x, planes=2), whole)


def test_wrong_shapes_are_refused() -> None:
    weight = ks.weight("affine", 2, 3, 64, 32)
    for x in (np.ones(63), np.ones((1, 1, 64)), np.ones(())):
        with pytest.raises(BcqError, match="BCQ-E552"):
            reference.product(weight, x)
    with pytest.raises(BcqError, match="BCQ-E552"):
        reference.product(weight, np.ones(64), index=0)


def test_relative_error() -> None:
    assert reference.relative_error(np.array([3.0, 4.0]), np.array([3.0, 4.0])) == 0
    assert reference.relative_error(np.array([0.0, 0.0]), np.array([3.0, 4.0])) == 1
    assert reference.relative_error(np.array([0.5]), np.array([0.0])) == 0.5
