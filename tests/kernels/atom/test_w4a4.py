"""The W4A4 product: its layout, its oracle, and the kernel in the simulator against the oracle, bit by bit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.errors import BcqError
from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.atom.shape import Held, Tile
from bcqfmt.kernels.runtime.unroll import static, unrolled
from products import atom_reference
from simulated import sim_atom
from simulated.cuda_sim import SimulationError, simulate
from weights import strategies

# -- operands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "groups", "bits", "numbers"), [(32, 2, 4, "F16"), (1, 3, 3, "BF16"), (71, 5, 4, "F32")]
)
def test_the_packed_layout_is_a_permutation(out: int, groups: int, bits: int, numbers: str) -> None:
    weight = sim_atom.atom_weight(out, groups, bits=bits, numbers=numbers, seed=out)
    packed = ao.pack_w4(weight)
    codes, scale = atom_reference.unpack_w4(packed)
    dense = np.empty(weight.shape)
    dense[:, packed.perm] = codes * np.repeat(scale.astype(np.float64), 128, axis=1)
    assert (dense == weight.dequantize("float64")).all()
    assert packed.words.shape == (2 * -(-out // 32), groups + 1, 256)


def test_every_code_lies_where_the_layout_says() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (64, 384)).astype(np.int8)
    codes[:, 256:] = rng.integers(-128, 128, (64, 128))
    words = ao.pack_codes(codes, np.ones((64, 3), np.float32), np.arange(384, dtype=np.int32)).words.tolist()
    for row, column in zip(rng.integers(0, 64, 400).tolist(), rng.integers(0, 384, 400).tolist(), strict=True):
        tile, r, p = 2 * (row // 32) + row % 4 // 2, row % 32 // 4, row % 2
        g, h, q = column // 128, column % 128 // 64, column % 64 // 16
        j, s, b = column % 16 // 8, column % 8 // 4, column % 4
        if g < 2:
            field = words[tile][g][h * 128 + (4 * r + q) * 4 + 2 * j + p] >> (8 * b + 4 * s) & 15
            assert field == int(codes[row, column]) & 15
        else:
            at = (2 * h + j) * 128 + (4 * r + q) * 4 + 2 * s + p
            assert words[tile][2 + at // 256][at % 256] >> 8 * b & 255 == int(codes[row, column]) & 255


def _segment(bits: int, zero: Any, width: int, *, g: int = 128, rows: int = 4) -> BcqWeight:
    shape = (rows, -(-width // g))
    return BcqWeight.from_affine(
        np.zeros((rows, width), np.uint8), np.ones(shape, np.float16), zero, group_size=g, bits=bits
    )


def _other(case: str) -> BcqWeight:
    low, high = _segment(4, 8, 128), _segment(8, 128, 128)
    pair = BcqWeight.from_segments([low, high])
    both = np.array([[8], [8], [8], [7]])
    cases: dict[str, Any] = {
        "one segment": lambda: low,
        "256 outlier channels": lambda: BcqWeight.from_segments([low, _segment(8, 128, 256)]),
        "half a group": lambda: BcqWeight.from_segments([_segment(4, 8, 64, g=64), high]),
        "groups of 64": lambda: BcqWeight.from_segments([_segment(4, 8, 128, g=64), high]),
        "5 bits": lambda: BcqWeight.from_segments([_segment(5, 16, 128), high]),
        "codes up to 8": lambda: BcqWeight.from_segments([_segment(4, 7, 128), high]),
        "zero points of their own": lambda: BcqWeight.from_segments([_segment(4, both, 128), high]),
        "no affine segment": lambda: BcqWeight.from_segments(
            [BcqWeight.from_bcq(np.zeros((4, 4, 128), np.uint8), np.ones((4, 4, 1), np.float16), group_size=128), high]
        ),
        "outliers": lambda: pair.with_outliers(np.zeros(5, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float16)),
        "a stack": lambda: BcqWeight.from_affine(
            np.zeros((2, 4, 128), np.uint8), np.ones((2, 4, 1), np.float16), 8, group_size=128, bits=4
        ),
    }
    made: BcqWeight = cases[case]()
    return made


@pytest.mark.parametrize("case", [
    "one segment", "256 outlier channels", "half a group", "groups of 64", "5 bits", "codes up to 8",
    "zero points of their own", "no affine segment", "outliers", "a stack",
])  # fmt: skip
def test_weights_in_other_forms_are_refused(case: str) -> None:
    with pytest.raises(BcqError) as caught:
        ao.pack_w4(_other(case))
    assert caught.value.code == "BCQ-E553"


# -- oracle -------------------------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@hypothesis.given(FLOATS, FLOATS, FLOATS)
@hypothesis.settings(strategies.examples(300), deadline=None)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    found = atom_reference.fma32(np.float32([a]), np.float32([b]), np.float32([c]))[0]
    if not np.isfinite(found):
        assert abs(exact) >= Fraction(float(np.finfo(np.float32).max))
        return
    with np.errstate(over="ignore"):  # the largest number has no neighbour above
        below, above = np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))
    error = abs(Fraction(float(found)) - exact)
    for neighbour in (float(x) for x in (below, above) if np.isfinite(x)):
        other = abs(Fraction(neighbour) - exact)
        assert error < other or (error == other and not int(found.view(np.uint32)) & 1)


def test_activations_one_by_one() -> None:
    """The quantizer again, scalar by scalar."""
    x = sim_atom.activations(3, 3, "F32")
    perm = np.random.default_rng(1).permutation(384)
    factor = ao.step_factor(4, 0.9, "paper")
    codes, scale = atom_reference.quantize_activations(x, perm, factor=factor, outlier_factor=ao.step_factor(8))
    for token in range(3):
        for g in range(3):
            group = [np.float32(x[token, perm[128 * g + i]]) for i in range(128)]
            step = max(abs(v) for v in group) * (np.float32(1 / 127) if g == 2 else np.float32(2 * 0.9 / 15))
            step = np.float32(np.frombuffer((int(step.view(np.uint32)) & ~3).to_bytes(4, "little"), np.float32)[0])
            assert scale[token, g] == step
            for i, v in enumerate(group):
                code = round(float(v * (np.float32(1) / step))) if step else 0
                assert codes[token, 128 * g + i] == min(max(code, -128 if g == 2 else -8), 127 if g == 2 else 7)


def test_nothing_bad_passes_in_silence() -> None:
    x = np.ones((4, 256), np.float32)
    x[0, 3], x[1, 200], x[2] = np.nan, np.inf, 1e-42
    x[3, :128] = 1e37
    codes, scale = atom_reference.quantize_activations(x)
    assert np.isnan(scale[0, 0])
    assert np.isinf(scale[1, 1])
    assert (scale[2] == 0).all()
    assert np.isinf(scale[3, 0])
    y = atom_reference.group_gemm(codes, scale, np.ones((2, 256), np.int8), np.ones((2, 2), np.float32))
    assert np.isnan(y[[0, 1, 3]]).all()
    assert (y[2] == 0).all()


def test_the_oracle_is_the_product_of_what_the_codes_mean() -> None:
    weight = sim_atom.atom_weight(50, 6)
    codes, scale, perm = ao.atom_codes(weight)
    x = sim_atom.activations(5, 6, "F32")
    a, s = atom_reference.quantize_activations(x, perm)
    meant = (a * np.repeat(s.astype(np.float64), 128, axis=1)) @ weight.dequantize("float64")[:, perm].T
    for slices in (1, 2, 5):
        found = atom_reference.group_gemm(a, s, codes, scale, slices)
        assert np.linalg.norm(found - meant) < 1e-6 * np.linalg.norm(meant)
    step = np.repeat(s.astype(np.float64), 128, axis=1)
    assert (np.abs(x[:, perm] - a * step) <= step * (0.5 + 1e-5)).all()


# -- kernel -------------------------------------------------------------------------------------------------------


def expected(weight: BcqWeight, x: Any, slices: int) -> Any:
    codes, scale, perm = ao.atom_codes(weight)
    a, s = atom_reference.quantize_activations(np.asarray(x, np.float32), perm)
    return atom_reference.group_gemm(a, s, codes, scale, slices)


@pytest.mark.parametrize(("tokens", "out", "groups", "bits", "kind", "dtype", "tile", "slices"), [
    (1, 33, 2, 4, "F16", "F16", (32, 8, 1, 1, 2), 1),
    (3, 40, 3, 3, "F32", "F32", (32, 8, 2, 1, 3), 1),
    (17, 28, 3, 4, "BF16", "BF16", (32, 16, 1, 1, 4), 2),
    (3, 71, 4, 4, "F16", "F32", (64, 8, 1, 1, 3), 3),
    (10, 70, 2, 4, "F16", "F16", (32, 8, 2, 2, 2), 2),
    (11, 70, 5, 4, "F16", "F16", (8, 1, 2, 2), 2),
    (17, 33, 4, 3, "F32", "F32", (16, 2, 3, 2), 3),
    (9, 132, 3, 4, "BF16", "BF16", (32, 1, 1, 3), 1),
])  # fmt: skip
def test_products_to_the_bit(
    tokens: int, out: int, groups: int, bits: int, kind: str, dtype: str, tile: tuple[int, ...], slices: int
) -> None:
    weight = sim_atom.atom_weight(out, groups, bits=bits, seed=tokens)
    x = sim_atom.activations(tokens, groups, kind)
    found = simulate(sim_atom.product, weight, x, dtype, tile, slices)
    assert found.clean
    assert found.value.tobytes() == expected(weight, x, slices).astype(numpy_dtype(dtype)).tobytes()


def test_the_product_as_it_is_shared_out_by_itself() -> None:
    weight = sim_atom.atom_weight(32, 9)
    x = sim_atom.activations(2, 9, "F16")
    found, slices = simulate(sim_atom.chosen, weight, x)
    assert slices == 2
    assert found.tobytes() == expected(weight, x, slices).tobytes()


@hypothesis.given(st.integers(1, 5000), st.integers(1, 40000), st.integers(2, 300))
@hypothesis.settings(strategies.examples(200), deadline=None)
def test_plans(tokens: int, out: int, groups: int) -> None:
    tile, slices = w4.plan_for(tokens, out, groups)
    assert isinstance(tile, Tile)
    blocks = -(-tokens // tile.block_tokens) * -(-ao.padded(out, 32) // tile.block_rows)
    assert 1 <= slices <= max(1, groups // 4)
    assert slices == 1 or blocks * slices <= tile.blocks * 132
    assert tile.blocks * (tile.shared + 1024) <= 228 * 1024
    assert tile.threads <= 1024


@hypothesis.given(st.integers(1, 200), st.integers(1, 40000), st.integers(2, 300))
@hypothesis.settings(strategies.examples(200), deadline=None)
def test_plans_that_keep_the_activations(tokens: int, out: int, groups: int) -> None:
    shape, slices = w4.plan_for(tokens, out, groups, held=True)
    if isinstance(shape, Held):
        assert slices == shape.parts <= groups
        assert shape.ahead >= 2
        assert shape.shared(groups) <= 227 * 1024
        assert tokens <= 128
        assert shape.threads <= 1024
    else:
        assert (shape, slices) == w4.plan_for(tokens, out, groups)


@pytest.mark.parametrize(("tokens", "out", "groups", "held"), [
    (1, 4096, 32, True), (16, 11008, 86, True), (64, 4096, 32, True), (128, 4096, 32, True), (64, 11008, 32, False),
    (64, 4096, 86, False), (129, 512, 8, False), (1, 64, 7, False), (16, 4096, 200, False),
])  # fmt: skip
def test_when_activations_are_kept(tokens: int, out: int, groups: int, held: bool) -> None:
    assert isinstance(w4.plan_for(tokens, out, groups, held=True).tile, Held) == held


def test_no_tokens() -> None:
    weight = sim_atom.atom_weight(40, 2)
    assert simulate(sim_atom.chosen, weight, np.ones((0, 256), np.float16))[0].shape == (0, 40)


@pytest.mark.parametrize("case", list(sim_atom.BAD))
def test_wrong_calls(case: str) -> None:
    code, text = sim_atom.BAD[case]
    with pytest.raises(SimulationError) as caught:
        simulate(sim_atom.refused, case)
    assert caught.value.kind == code
    assert text in caught.value.text


# -- loops written out ----------------------------------------------------------------------------------------------


def test_static_loops_are_written_out() -> None:
    count = 3

    def add(found: list[Any]) -> None:
        for i in static(count):
            for j in static(1, count * 2, 2):
                found.append((i, j))  # noqa: PERF401 - the loop is what is tested
        for i in range(2):
            found.append(-i)  # noqa: PERF401

    plain: list[Any] = []
    written: list[Any] = []
    add(plain)
    unrolled(add)(written)
    assert written == plain
    assert "static" not in unrolled(add).__code__.co_names
