"""The papers' arithmetic, counted on the parts of the format: what their tables say is what our bytes are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.methods.mixed24 import equation_6, equation_10, outlier_bits
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight
from methods import paper_figures as paper
from weights.strategies import examples


def weight(spec: WeightSpec, outliers: int = 0) -> BcqWeight:
    """A real weight of this shape, its structure checked; nobody asks for its bytes."""
    parts = {}
    for suffix, part in spec.parts().items():
        shape = tuple(outliers if dim == -1 else dim for dim in part.shape)
        parts[suffix] = StoredTensor(suffix, part.dtype, shape)
    return BcqWeight("w.weight", spec, parts)


# --------------------------------------------------------------------------------------------------- lut-gemm-iclr24
@pytest.mark.parametrize(("q", "g", "scales", "binary", "total"), [(3, 2, 768, 96, 864), (4, 4, 512, 128, 640)])
def test_iclr24_figure_6(q: int, g: int, scales: int, binary: int, total: int) -> None:
    """A 4 x 8 matrix; groups this short are below the format's 8 columns, their count follows the same rule."""
    bits = paper.counted_bits(paper.bcq_shape(4, 8, q, g))
    assert bits == {"s0_alpha": scales, "s0_planes": binary}
    assert sum(bits.values()) == total == paper.lut_gemm_bits(4, 8, q, g)


# ------------------------------------------------------------------------------------------------- lut-gemm-arxiv-v3
@examples(60)
@given(st.integers(1, 70), st.integers(8, 300), st.integers(1, 8), st.integers(8, 300))
def test_arxiv_equation_7(rows: int, columns: int, q: int, g: int) -> None:
    spec = paper.bcq_shape(rows, columns, q, min(g, columns))
    assert sum(paper.counted_bits(spec).values()) == paper.lut_gemm_bits(rows, columns, q, min(g, columns))
    assert paper.stored_bits(spec) == 8 * weight(spec).nbytes
    padding = -columns % 32 * rows * q
    assert paper.stored_bits(spec) == sum(paper.counted_bits(spec).values()) + padding


def test_arxiv_equation_7_as_the_paper_writes_it() -> None:
    for rows, columns, q, g in ((4096, 4096, 3, 128), (12288, 49152, 2, 32)):
        assert paper.lut_gemm_bits(rows, columns, q, g) == rows * columns * q * (1 + 16 / g)


@pytest.mark.parametrize(("q", "megabytes"), [(2, 4.2), (3, 6.3), (4, 8.4), (5, 10.5)])
def test_arxiv_table_7_memory_at_4096(q: int, megabytes: float) -> None:
    """Row-wise scales, everything counted, in a weight that the package accepts."""
    made = weight(paper.bcq_shape(4096, 4096, q, 4096))
    assert round(made.nbytes / 1e6, 1) == megabytes


@pytest.mark.parametrize(
    ("size", "q", "megabytes"),
    [(7168, 2, 12.9), (7168, 3, 19.3), (7168, 4, 25.7), (7168, 5, 32.1),
     (12288, 2, 37.8), (12288, 3, 56.6), (12288, 4, 75.5), (12288, 5, 94.4)],
)  # fmt: skip
def test_arxiv_table_7_memory_of_the_larger_ones(size: int, q: int, megabytes: float) -> None:
    """The table rounds FP16's size and divides; planes alone come within that."""
    bits = paper.counted_bits(paper.bcq_shape(size, size, q, size))
    assert bits["s0_planes"] / 8e6 == pytest.approx(megabytes, abs=0.06)
    assert bits["s0_alpha"] / bits["s0_planes"] == 16 / size


@pytest.mark.parametrize(("q", "g", "gigabytes"), [(3, None, 65.3), (2, 32, 54.4), (2, 64, 48.9), (2, 128, 46.2)])
def test_arxiv_table_6_opt_175b(q: int, g: int | None, gigabytes: float) -> None:
    assert round(paper.model_bytes(q, g) / 1e9, 1) == gigabytes


def test_opt_175b_is_what_the_table_says_it_is() -> None:
    elements = sum(rows * columns for rows, columns in paper.OPT_175B)
    assert round(2 * elements / 1e9, 1) == 347.9
    assert len(paper.OPT_175B) == 96 * 6


# ------------------------------------------------------------------------------------------------------------ iccad24
@pytest.mark.parametrize(("bits", "g"), [(2, 16), (4, 128), (3, 64), (4, 32), (8, 128)])
def test_iccad_equation_6_first_order(bits: int, g: int) -> None:
    spec = paper.affine_shape(512, 1024, bits, g, zeros=True)
    counted = sum(paper.counted_bits(spec).values()) / (512 * 1024)
    assert counted == equation_6(bits, g) == bits + (bits + 16) / g
    assert weight(spec).bits_per_weight == pytest.approx(counted, abs=32 / 1024)  # rows of zero points end in a word


@pytest.mark.parametrize(("bits", "g1", "scale_bits", "g2"), [(2, 16, 4, 16), (2, 8, 4, 16), (3, 32, 4, 64)])
def test_iccad_equation_6_second_order(bits: int, g1: int, scale_bits: int, g2: int) -> None:
    spec = paper.second_order_shape(1024, 4096, bits, g1, scale_bits, g2)
    counted = sum(paper.counted_bits(spec).values()) / (1024 * 4096)
    assert counted == equation_6(bits, g1, scale_bits, g2)
    assert weight(spec).bits_per_weight == counted  # 4096 columns leave no padding


def test_iccad_equation_10() -> None:
    """2.84 and 2.91 as printed; 2.60 for a tenth of 4 bit, cut off and not rounded."""
    assert round(equation_10(0.25), 2) == 2.84
    assert round(equation_10(0.25) + outlier_bits(0.002, 4096), 2) == 2.91
    assert int(100 * equation_10(0.10)) / 100 == 2.60


def test_iccad_equation_10_on_our_parts() -> None:
    """Without what the paper leaves out (numbers of the 4-bit part, the order of the columns): the very same."""
    n = 4096 * 4096
    bits = paper.counted_bits(paper.mixed_shape(4096, 4096, 0.25))
    uncounted = ("s1_scale", "s1_zero", "perm")
    assert sum(size for part, size in bits.items() if part not in uncounted) / n == equation_10(0.25)
    assert weight(paper.mixed_shape(4096, 4096, 0.25)).bits_per_weight == pytest.approx(2.88, abs=0.01)
    outliers = round(0.002 * n)
    spec = paper.mixed_shape(4096, 4096, 0.25, outliers=True)
    csr = paper.counted_bits(spec, outliers)
    extra = sum(size for part, size in csr.items() if part.startswith("outlier")) / n
    assert extra == pytest.approx(outlier_bits(0.002, 4096), abs=4e-6)  # one pointer more, whole outliers
    assert weight(spec, outliers).bits_per_weight == pytest.approx(2.95, abs=0.01)
    assert weight(spec, outliers).nbytes * 8 == paper.stored_bits(spec, outliers)
