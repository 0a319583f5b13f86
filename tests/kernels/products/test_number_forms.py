"""Tables, and scales and offsets that are made of codes or bytes: every product is right, or refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from bcqfmt import BcqError, BcqWeight, Coded
from bcqfmt.integrations.torch import BcqLinear
from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels import bits, cpu
from bcqfmt.kernels.matmul import MatmulWeight
from bcqfmt.kernels.operands import operand
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_kernels
from simulated.cuda_sim import simulate

pytestmark = pytest.mark.xdist_group("simulator-dequant")

ROWS, COLUMNS, G = 20, 256, 16
K = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
TABLES = ("table", "wide table", "table of bytes", "table and outliers", "table beside affine")


def made(form: str) -> BcqWeight:
    rng = np.random.default_rng(len(form))
    codes, groups = rng.integers(0, 16, (ROWS, COLUMNS)), COLUMNS // G
    d = rng.normal(0.1, 0.03, (ROWS, groups // 8)).astype(np.float16)
    plain = rng.normal(1, 0.2, (ROWS, groups)).astype(np.float16)
    options: dict[str, Any] = {"group_size": G, "dtype": "F32"}
    powers = rng.integers(120, 130, (ROWS, groups)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    small = rng.integers(1, 0x40, (ROWS, groups)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    coded = Coded(rng.integers(0, 64, (ROWS, groups)), d, 0, 6, groups=8)
    if form == "super-groups":
        return BcqWeight.from_affine(codes, coded._replace(zero=32), 8, bits=4, **options)
    if form == "2 bits, super-groups":  # what mixed_gemv takes, but for the columns that share scales
        low = Coded(coded.codes % 16, np.repeat(d[:2], 1, 0), 8, 4, rows=16, groups=8)
        return BcqWeight.from_affine(codes % 4, low, 1, bits=2, **options)
    if form == "second-order offset":
        return BcqWeight.from_offset(codes, coded, coded._replace(scale=-d), bits=4, **options)
    if form == "bytes":
        return BcqWeight.from_affine(codes, powers, 8, bits=4, **options)
    if form == "bytes and one number":
        whole = Coded(small, np.full((1, 1), 0.37, np.float32), rows=ROWS, groups=groups)
        return BcqWeight.from_affine(codes, whole, 8, bits=4, **options)
    if form == "table of bytes":
        return BcqWeight.from_table(codes, powers, K, exponent=-1, **options)
    if form == "wide table":
        return BcqWeight.from_table(codes, plain, [3**i - 3 ** (15 - i) for i in range(16)], exponent=-23, **options)
    table = BcqWeight.from_table(codes, plain, K, **options)
    if form == "table beside affine":
        return BcqWeight.from_segments([BcqWeight.from_affine(codes, plain, 8, bits=4, **options), table])
    return ks.with_outliers(table, "replace", 0.05) if form == "table and outliers" else table


FORMS = ("super-groups", "2 bits, super-groups", "second-order offset", "bytes", "bytes and one number", *TABLES)


@pytest.mark.parametrize("form", FORMS)
def test_products_on_the_processor(form: str) -> None:
    weight = made(form)
    matrix = cpu.prepare(weight)
    for dtype in ("float16", "float32", "float64"):
        assert matrix.dequantize(dtype).tobytes() == weight.dequantize(dtype).tobytes()
    assert not matrix.obstacle or form in TABLES  # small tables are looked up where the processor can
    assert matrix.obstacle or form not in ("wide table", "table and outliers")
    for batch in (1, 3):
        x = ks.vectors(batch, weight.spec.columns)
        assert matrix.path(batch) == ("values" if matrix.obstacle else "planes")
        assert reference.relative_error(matrix.matmul(x), reference.product(weight, x)) < 2e-6
        linear = BcqLinear.from_weight(weight)
        assert reference.relative_error(linear(torch.from_numpy(x)).numpy(), reference.product(weight, x)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_products_on_the_simulated_device(form: str) -> None:
    weight = made(form)
    for dtype, found in zip(("F16", "F32"), simulate(sim_kernels.dequantize, weight, ("F16", "F32")), strict=True):
        assert found.value.tobytes() == weight.dequantize(dtype).tobytes(), dtype
    x = ks.vectors(1, weight.spec.columns)
    found = simulate(sim_kernels.product, weight, x)
    assert reference.relative_error(found, reference.product(weight, x)) < 3e-6
    assert gpu_weight(weight.spec, weight.to_torch()) is None  # parts that are not what the device reads


@pytest.mark.parametrize("form", TABLES)
def test_kernels_that_add_planes_refuse_tables(form: str) -> None:
    weight = made(form)
    prepared = operand(weight)
    assert not MatmulWeight(prepared).linear
    found = [MatmulWeight(prepared, "cpu").path(1, kind) for kind in ("F16", "F32")]
    why = {  # else the kernel of `gemm` looks values up
        "wide table": "segment 0 has a table with -1.710523: F16 numbers up to 16384 are looked up",
        "table and outliers": "outliers that replace values of a table",
    }.get(form, "")
    assert found == [("dequantize" if why else "gemm", why), ("dequantize", "x is F32: `gemm` multiplies F16 and BF16")]
    assert (bits.layout_of(prepared.segments[-1]), prepared.segments[-1].formula) == (None, "table")
    assert simulate(sim_kernels.refusals, weight) == ["BCQ-E553"] * 3
    with pytest.raises(BcqError, match="BCQ-E553"):
        BcqLinear.from_weight(weight, trainable_scales=True)
    with pytest.raises(BcqError, match="BCQ-E304"):
        weight.alpha_z()
    with pytest.raises(BcqError, match="BCQ-E304"):
        weight.dequantize(planes=3)
