"""The benchmarks of kernels without a GPU: the same matrix in every form, right results, all rows that there should be.

Times come from a GPU alone; products are carried out in the simulator, or recorded where only rows count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight, bench
from bcqfmt.cli.machine.bench import table
from bcqfmt.kernels import bits as bit_gemv
from bcqfmt.kernels import matmul, operands
from bcqfmt.kernels.bits import layout as bit_layout
from bcqfmt.weight.packing import unpack_bits
from kernel_bench import atom, outliers, products
from kernel_bench import matmul as bench_matmul
from kernel_bench.plot import plot
from kernel_bench.timing import Row
from kernel_bench.weights import Weight, copies, random_vectors, random_weight
from products import bench_on_host, pretended_gpu
from products.lut_gemm_arrays import to_lut_gemm
from simulated.cuda_sim import simulate

FORMS = [
    ("bcq", 3, 33, 512, 128), ("bcq", 8, 16, 256, 8), ("bcq", 1, 16, 768, 768), ("affine", 4, 48, 512, 32),
    ("affine", 2, 20, 256, 64),
]  # fmt: skip


def made(case: tuple[Any, ...]) -> tuple[Weight, BcqWeight]:
    """A random weight of the benchmarks, and the same one by way of the format."""
    with bench_on_host.host():
        weight = random_weight(*case)
    planes, g = weight.planes.numpy().view(np.uint32), weight.group_size
    bits, first, second = unpack_bits(planes, weight.shape[1]), weight.first.numpy(), weight.second.numpy()
    if weight.formula == "bcq":
        return weight, BcqWeight.from_bcq(bits, first, second, group_size=g)
    codes = (bits * 2 ** np.arange(weight.bits - 1, -1, -1)[:, None, None]).sum(0)
    return weight, BcqWeight.from_affine(codes, first, second.astype(np.int64), group_size=g, bits=weight.bits)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_the_fast_product_and_the_dense_matrix_are_those_of_the_format(case: tuple[Any, ...]) -> None:
    weight, expected = made(case)
    (segment,) = operands.operand(expected).segments
    layout = products._layout(weight.bits, weight.shape[1], weight.group_size, weight.formula)
    (found,) = weight.operand(layout).segments
    stored, *pair = (
        torch.from_numpy(np.array(a)) for a in (segment.planes.view(np.int32), segment.first, segment.second)
    )
    assert torch.equal(found.planes, bit_layout.pack_planes(layout, stored))
    assert torch.equal(found.numbers, bit_layout.pack_numbers(layout, *pair))
    exact = _values(segment)
    assert np.array_equal(weight.values(0, weight.shape[0]).numpy(), exact)
    assert np.array_equal(weight.values(5, 9).numpy(), exact[5:9])


def _values(segment: Any) -> Any:
    """Elements in float64 from alpha and z, as section 8 of the specification has them."""
    signs = 2.0 * unpack_bits(segment.planes, segment.width) - 1
    alpha, z = (numbers.astype(np.float64).repeat(segment.group_size, -1) for numbers in (segment.alpha, segment.z))
    return (signs * alpha).sum(0) + z


def test_the_product_that_counts_is_exact_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_bench.weights._ELEMENTS", 7 * 512)
    weight, _ = made(("bcq", 3, 33, 512, 128))
    with bench_on_host.host():
        x = random_vectors(2, 512)
    dense, exact = weight.dense(x)
    whole = weight.values(0, 33)
    assert torch.equal(dense, whole.half())
    assert torch.allclose(exact, x.double() @ whole.T, rtol=1e-13)


@pytest.mark.parametrize("case", [case for case in FORMS if case[0] == "bcq"], ids=str)
def test_the_published_kernel_gets_its_arrays(case: tuple[Any, ...]) -> None:
    weight, expected = made(case)
    arrays = to_lut_gemm(expected)
    assert arrays.bias is not None
    words, alpha, bias = weight.lut_gemm()
    assert np.array_equal(words.numpy().view(np.uint32), arrays.words)
    assert np.array_equal(alpha.numpy(), arrays.alpha)
    assert np.array_equal(bias.numpy(), arrays.bias)
    assert all(tensor.is_contiguous() for tensor in (words, alpha, bias))


def test_tinygemm_gets_the_same_matrix() -> None:
    """Without rounding anything to bfloat16."""
    weight, _ = made(("affine", 4, 48, 512, 128))
    codes, pairs = weight.tinygemm()
    assert codes.is_contiguous()
    assert pairs.is_contiguous()
    both = torch.stack([codes >> 4, codes & 15], 2).reshape(48, -1).double()
    scale, offset = (pairs[..., i].T.double().repeat_interleave(128, 1) for i in range(2))
    assert torch.equal(scale * (both - 8) + offset, weight.values(0, 48))


def test_vectors_are_the_same_in_bfloat16() -> None:
    with bench_on_host.host():
        x = random_vectors(4, 4096)
    assert torch.equal(x.bfloat16().half(), x)


def test_copies_are_elsewhere() -> None:
    weight, _ = made(("bcq", 2, 16, 256, 128))
    found = copies(weight.operand(products._layout(2, 256, 128, "bcq")), 3)
    planes = [one.segments[0].planes for one in found]
    assert len({tensor.data_ptr() for tensor in planes}) == 3
    assert torch.equal(planes[0], planes[2])


def test_what_the_verb_measures_is_what_matmul_does() -> None:
    rows = [bench.Row(*found) for found in simulate(bench_on_host.measured, (64, 128), (1,))]
    assert [(row.bits, row.vectors) for row in rows] == [(4, 1), (2, 1)]
    assert [row.kernel for row in rows] == ["gemm, affine", "bits, bcq"]
    assert max(row.error for row in rows) < 1e-3
    planes, scales = 64 * 128 // 2, 2 * 64
    assert rows[0].floor == pytest.approx((planes + scales + 2 * (64 + 128)) / bench_on_host.SPEED * 1e6)
    assert table(rows)[2].startswith("| gemm, affine | 4 | 64 x 128 | 1 | 10.00 |")


@pytest.mark.parametrize(
    ("case", "kernel", "peers"),
    [
        (("bcq", 2, 16, 256, 128, 1), "bits, bcq", ["cuBLAS fp16"]),
        (("affine", 4, 32, 512, 128, 1), "bits, affine", ["cuBLAS fp16", "tinygemm int4"]),
        (("bcq", 4, 16, 256, 32, 2), "bytes, bcq", ["cuBLAS fp16"]),
        (("affine", 4, 16, 256, 128, 4), "bytes, affine", ["cuBLAS fp16"]),
    ],
    ids=str,
)
def test_all_multiply_the_same_weight(case: Any, kernel: str, peers: list[str]) -> None:
    (row,) = [Row(*found) for found in simulate(bench_on_host.products, case)]
    assert row.kernel == kernel
    assert row.error is not None
    assert row.error < 1e-3
    assert row.errors is not None
    assert list(row.errors) == list(row.peers) == peers
    for name, error in row.errors.items():
        assert error < (1e-2 if name == "tinygemm int4" else 1e-3)  # bfloat16 has three bits less


def test_a_weight_without_a_fast_product_is_timed_as_matmul_multiplies_it() -> None:
    (row,) = [Row(*found) for found in simulate(bench_on_host.looked_up, 2, 192, 96)]
    assert row.kernel == "look-up, bcq"
    assert row.error is not None
    assert row.error < 1e-3
    assert (row.joules, row.alone) == (0.002, None)
    usual = row._replace(kernel="bits, bcq", bits=4)
    assert 'fill="white" stroke=' in plot([usual, row])
    assert 'fill="white" stroke=' not in plot([usual])


@pytest.mark.parametrize(
    ("q", "g", "path"), [(4, 8, "bits"), (8, 8, "bits"), (8, 16, "bits"), (2, 96, "look-up"), (4, 96, "look-up")]
)
def test_which_weights_have_no_fast_product(q: int, g: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = made(("bcq", q, 16, 12288, g))
    pretended_gpu.pretend_products(monkeypatch)
    assert matmul.path_of(weight.placed(), 1).kernel == path


@pytest.mark.parametrize(("batch", "skewed"), [(1, False), (1, True), (4, False)])
def test_products_with_outliers_are_right(batch: int, skewed: bool) -> None:
    name = f"{'bits' if batch == 1 else 'bytes'}, affine, 0.5 % outliers{' in few rows' * skewed}"
    rows = [Row(*found) for found in simulate(bench_on_host.with_outliers, 32, 256, 0.005, batch, skewed)]
    assert [row.kernel for row in rows] == [name, f"{name}, two launches"]
    assert max(row.error or 1.0 for row in rows) < 1e-3


def test_outliers_in_few_rows() -> None:
    with bench_on_host.host():
        entries, (indptr, indices, values) = outliers.random_outliers(4000, 1024, 0.005, skewed=True)
    assert entries is not None
    counts = indptr.diff()
    assert len(indices) == len(values) == entries.count == int(counts.sum())
    assert entries.count == pytest.approx(0.005 * 4000 * 1024, rel=0.05)
    assert int(counts.sort().values[-40:].sum()) == pytest.approx(entries.count / 2, rel=0.05)


def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The shapes of all fast products from now on, on a GPU that is not there."""
    pretended_gpu.pretend_products(monkeypatch)
    seen: set[Any] = set()
    kernel_of = bit_gemv.kernel_of

    def noted(shape: Any) -> Any:
        seen.add(shape)
        return kernel_of(shape)

    monkeypatch.setattr(bit_gemv, "kernel_of", noted)
    return seen


def test_rows_of_products_with_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = launched(monkeypatch)
    monkeypatch.setattr(outliers, "SHAPES", ((32, 8192),))
    with bench_on_host.host():
        rows = list(outliers.with_outliers(bench_on_host.SPEED))
    assert [row.batch for row in rows] == [1] * (1 + 3 * 2 + 2) + [2] * 5 + [4] * 5 + [8] * 3  # eight do not fit
    assert len(shapes) > 4


def test_rows_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = pretended_gpu.pretend_products(monkeypatch)
    for name, value in {"SQUARE": (32, 256), "LONG": (16, 384), "TWO_AND_FOUR": (384, 128)}.items():
        monkeypatch.setattr(bench_matmul, name, value)
    with bench_on_host.host():
        rows = list(bench_matmul.dequantized(bench_on_host.SPEED))
    kinds = [(row.kernel.removeprefix("dequantize"), row.bits, row.group_size) for row in rows]
    plain = [("", 4, 128), ("", 4, 128), ("", 8, 128), ("", 4, 16), ("", 4, 8), ("", 2, 16)]
    assert kinds == [*plain, (" perm", 4, 128), (" perm", 8, 128), (" perm", 4, 32), (" 2/4-bit", 2.9, 16)]
    assert 'fill="white" stroke=' not in plot(rows)  # what `matmul` takes where it has no fast product
    # planes, a scale and a zero point of 4 bytes, and the matrix
    assert rows[0].bytes == 32 * 256 // 2 + 2 * 32 * 2 * 4 + 32 * 256 * 2
    assert rows[6].bytes == 16 * 384 // 2 + 2 * 16 * 3 * 4 + 16 * 384 * 2 + 4 * 384
    assert len(recorder.launched) == 2 * (9 + 3)  # of two segments and their order in three


def test_rows_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = pretended_gpu.pretend_products(monkeypatch)
    with bench_on_host.host():
        rows = list(atom.norms(bench_on_host.SPEED))
    peers = ["two launches", "three launches", "torch, norm and gather alone", "fused, not reordered"]
    assert [list(row.peers) for row in rows] == [peers] * 4
    assert len(recorder.launched) == 4 * 2 * (1 + 2 + 1 + 0 + 1)
