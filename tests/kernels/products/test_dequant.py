"""Dense matrices from the simulated device: bit by bit those of the normative decoder."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import float64_of, round_to
from products import kernel_samples as ks
from simulated import sim_kernels
from simulated.cuda_sim import simulate
from weights import strategies

DTYPES = ("F16", "BF16", "F32")


def check(weight: BcqWeight, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> None:
    for dtype, found in zip(dtypes, simulate(sim_kernels.dequantize, weight, dtypes, **options), strict=True):
        expected = weight.dequantize(dtype, planes=options.get("planes"))
        assert found.value.tobytes() == expected.tobytes(), dtype
        assert (found.same, found.intact) == (True, True), dtype


@pytest.mark.parametrize("encoding", ks.ENCODINGS)
@pytest.mark.parametrize("q", [1, 2, 3, 4])
def test_tables(encoding: str, q: int) -> None:
    shape = {1: (3, 1064, 32), 2: (9, 96, 64), 3: (1, 2048, 1024), 4: (2, 1160, 96)}[q]
    logical = DTYPES[(q + len(encoding)) % 3]
    weight = ks.weight(encoding, q, *shape, seed=q, numbers=DTYPES[q % 3], dtype=logical)
    assert simulate(sim_kernels.fast_segments, weight, "F16") == [True]
    check(weight)


WORDS = [
    (5, 3, 64, 32), (8, 2, 1064, 96), (6, 2, 104, 64), (3, 9, 72, 8), (4, 2, 1064, 16), (2, 1, 80, 40), (7, 3, 40, 24),
]  # fmt: skip


@pytest.mark.parametrize(  # half of the pairs: every encoding meets every second shape
    ("encoding", "q", "rows", "columns", "g"),
    [(encoding, *shape) for i, encoding in enumerate(ks.ENCODINGS) for k, shape in enumerate(WORDS) if (i + k) % 2],
)
def test_words(encoding: str, q: int, rows: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q, numbers=DTYPES[q % 3], dtype=DTYPES[(q + 1) % 3])
    assert simulate(sim_kernels.fast_segments, weight, "F16") == [True]
    check(weight)


@pytest.mark.parametrize("encoding", ks.ENCODINGS)
@pytest.mark.parametrize(("q", "columns", "g"), [(5, 64, 12), (8, 33, 9), (3, 76, 8), (4, 65, 32), (6, 100, 100)])
def test_elements(encoding: str, q: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, q, 3, columns, g, seed=q, numbers=DTYPES[q % 3])
    assert simulate(sim_kernels.fast_segments, weight, "F16") == [False]
    check(weight)


@pytest.mark.parametrize(
    ("q", "rows", "columns", "g"),
    [(4, 11, 1032, 32), (8, 3, 2056, 64), (2, 5, 168, 8), (3, 1, 8, 8), (1, 3, 9000, 8)],
)
def test_reordered_columns(q: int, rows: int, columns: int, g: int) -> None:
    weight = ks.weight("bcq", q, rows, columns, g, seed=q, numbers="F32", perm=True, outliers="add" if q == 8 else "")
    assert simulate(sim_kernels.fast_segments, weight, "F16") == [True]
    assert simulate(sim_kernels.fast_segments, weight, "F32") == [False]
    check(weight, DTYPES[:2])  # float32 goes by element


def test_reordered_columns_by_element() -> None:
    """An odd group size, and a row that is too long for shared memory."""
    odd, long = ks.weight("affine", 4, 2, 60, 12, perm=True), ks.weight("affine", 1, 1, 49160, 8, perm=True)
    for weight in (odd, long):
        assert simulate(sim_kernels.fast_segments, weight, "F16") == [False]
    check(odd)


@pytest.mark.parametrize("outliers", ["add", "replace"])
@pytest.mark.parametrize("perm", [False, True])
def test_segments_reordering_and_outliers(outliers: str, perm: bool) -> None:
    check(ks.mixed(7, 48, 96, outliers=outliers, perm=perm))


@pytest.mark.parametrize("logical", DTYPES)
@pytest.mark.parametrize("which", ["tables", "words", "elements", "everything"])
def test_as_a_dense_copy_is_loaded(which: str, logical: str) -> None:
    """Rounded to the logical dtype and then to another: not what one rounding gives."""
    numbers = {"numbers": "F32", "dtype": logical}
    weight = {
        "tables": ks.weight("affine", 4, 5, 96, 32, **numbers),
        "words": ks.weight("bcq", 6, 3, 64, 32, **numbers),
        "elements": ks.weight("offset", 4, 4, 65, 13, **numbers),
        "everything": ks.weight("bcq", 3, 9, 90, 12, perm=True, outliers="add", **numbers),
    }[which]
    found = simulate(sim_kernels.dequantize, weight, DTYPES, by_way_of_the_logical=True)
    values = float64_of(weight.dequantize(logical))
    for dtype, one in zip(DTYPES, found, strict=True):
        assert one.value.tobytes() == round_to(values, dtype).tobytes(), dtype
        assert (one.same, one.intact) == (True, True), dtype
    short = {"F16": "BF16", "BF16": "F16", "F32": "F16"}[logical]
    if logical != "F32":
        assert round_to(values, short).tobytes() != weight.dequantize(short).tobytes()


@pytest.mark.parametrize(("encoding", "planes"), [("affine", 2), ("bcq", 3), ("second-order", 1)])
def test_the_first_planes_only(encoding: str, planes: int) -> None:
    check(ks.weight(encoding, 4, 4, 64, 32, numbers="F32"), planes=planes)


@hypothesis.given(strategies.weights(stack=False, nonfinite=None), st.sampled_from([32, 64]))
@hypothesis.settings(strategies.examples(15), deadline=None)
def test_any_weight_with_any_numbers(pair: tuple[BcqWeight, Any], threads: int) -> None:
    check(pair[0], threads=threads)


@hypothesis.given(st.data())
@hypothesis.settings(strategies.examples(10), deadline=None)
def test_whole_words_with_any_numbers(data: st.DataObject) -> None:
    """Random patterns among the scales, in shapes that the fast kernels take: subnormals, zeros, infinities, NaNs."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    q = data.draw(st.integers(1, 8))
    kind = data.draw(st.sampled_from(DTYPES))
    logical = data.draw(st.sampled_from(DTYPES))
    encoding = data.draw(st.sampled_from(("affine", "float-zero", "offset", "bcq")))
    source = strategies.Source(seed, data.draw(st.sampled_from(("any", "special"))), data.draw(st.booleans()))
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Any:
        raw = np.array(source.floats(kind, *shape)[2], {"F32": np.uint32}.get(kind, np.uint16))
        return raw.view(ks.numpy_dtype(kind)).reshape(shape)

    codes = rng.integers(0, 2**q, (2, 96))
    g = data.draw(st.sampled_from((32, 8)))
    groups = 96 // g
    options: dict[str, Any] = {"group_size": g, "dtype": ks.numpy_dtype(logical)}
    if encoding == "affine":
        weight = BcqWeight.from_affine(
            codes, numbers(2, groups), rng.integers(0, 2**q + 1, (2, groups)), bits=q, **options
        )
    elif encoding == "bcq":
        weight = BcqWeight.from_bcq(
            rng.integers(0, 2, (q, 2, 96)), numbers(q, 2, groups), numbers(2, groups), **options
        )
    elif encoding == "offset":
        weight = BcqWeight.from_offset(codes, numbers(2, groups), numbers(2, groups), bits=q, **options)
    else:
        weight = BcqWeight.from_float_zero(codes, numbers(2, groups), numbers(2, groups), bits=q, **options)
    check((weight.with_perm(rng.permutation(96)) if data.draw(st.booleans()) else weight).allow_nonfinite())
