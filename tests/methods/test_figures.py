"""Error figures against sums of exact fractions, and a weight joined from several."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from bcqfmt import BcqWeight
from bcqfmt.converters.methods import figures as module
from bcqfmt.converters.methods.figures import figures, square_sums
from method_samples import DTYPES, matrix


def weight_of(rows: int = 5, columns: int = 40, dtype: str = "F16") -> BcqWeight:
    rng = np.random.default_rng(1)
    bits, groups = rng.integers(0, 2, (3, rows, columns)), -(-columns // 16)
    alpha = (np.abs(rng.normal(size=(3, rows, groups))) * 0.02).astype(np.float16)
    return BcqWeight.from_bcq(bits, alpha, alpha[0], group_size=16, dtype=DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("planes", [None, 2])
def test_sums_are_those_of_the_decoded_values(dtype: str, planes: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_BLOCK", 80)  # two rows at a time
    weight, quantized = matrix(5, 40), weight_of(dtype=dtype)
    decoded = quantized.dequantize(planes=planes)
    power = sum(Fraction(float(w)) ** 2 for w in weight.flat)
    noise = sum((Fraction(float(w)) - Fraction(float(d))) ** 2 for w, d in zip(weight.flat, decoded.flat, strict=True))
    found = square_sums(weight, quantized, planes)
    assert found == pytest.approx((float(power), float(noise)), rel=1e-14)
    numbers = figures(weight, quantized, planes)
    assert numbers["mse"] == pytest.approx(float(noise / 200), rel=1e-14)
    assert numbers["relative"] == pytest.approx(math.sqrt(noise / power), rel=1e-14)
    assert numbers["sqnr_db"] == pytest.approx(-20 * math.log10(numbers["relative"]), rel=1e-12)


def test_no_error_and_no_weight():
    quantized = weight_of()
    exact = quantized.dequantize().astype(np.float32)
    assert figures(exact, quantized) == {"mse": 0.0, "relative": 0.0, "sqnr_db": math.inf}
    zeros = figures(np.zeros((5, 40), np.float32), quantized)
    assert zeros["mse"] > 0
    assert (zeros["relative"], zeros["sqnr_db"]) == (math.inf, -math.inf)
    nothing = BcqWeight.from_bcq(np.zeros((1, 2, 8)), np.zeros((1, 2, 1), np.float16), group_size=8)
    assert figures(np.zeros((2, 8), np.float32), nothing) == {"mse": 0.0, "relative": 0.0, "sqnr_db": math.inf}


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[4, 40\] beside one of \[5, 40\]"):
        figures(matrix(4, 40), weight_of())
