"""The products need no luck: accesses to shared memory are in order by barriers (`simulator.races`)."""

from __future__ import annotations

from typing import Any

import pytest

from products import kernel_samples as ks
from simulated import sim_bits, sim_gemm, sim_kernels, sim_mixed
from simulated.cuda_sim import races

FEW = {"groups": 8, "height": 2}
MMA = {"engine": "mma", "vectors": 16, "groups": 2, "depth": 2, "stages": 2, "height": 2, "producers": 2}
WGMMA = {"engine": "wgmma", "vectors": 16, "depth": 2}
# encoding, q, rows, columns, group size, dtype of x, vectors, options
PRODUCTS = {
    "few": ("affine", 4, 40, 1032, 128, "F16", 5, {**FEW, "vectors": 8, "stages": 3, "early": True}),
    "few, two at once": ("bcq", 4, 40, 1032, 64, "BF16", 16, {**FEW, "vectors": 16, "depth": 2, "stages": 2}),
    "few, table": ("table", 4, 40, 1024, 32, "F16", 9, {**FEW, "vectors": 16, "stages": 3}),
    "mma": ("table", 4, 70, 512, 32, "F16", 17, MMA),
    "wgmma": ("affine", 4, 70, 768, 128, "F16", 17, WGMMA),
    "wgmma, one at once": ("bcq", 3, 70, 448, 64, "F16", 9, {**WGMMA, "depth": 1}),
}


def sample(encoding: str, q: int, rows: int, columns: int, g: int, kind: str, count: int) -> tuple[Any, Any, str]:
    return ks.weight(encoding, q, rows, columns, g, seed=q), ks.vectors(count, columns, kind), kind


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_the_product_of_many_vectors(case: tuple[Any, ...]) -> None:
    *given, options = case
    assert races(sim_gemm.product, *sample(*given), **options) == []


READ, WRITTEN = "a read of what may not be written yet", "a write over what may still be read"


@pytest.mark.parametrize(
    ("case", "forgotten", "found"),
    [
        ("few", "syncwarp", {READ, WRITTEN}), ("few", "cp_async_wait", {READ}), ("few", "sync_block", {READ}),
        ("mma", "mbarrier_poll", {READ, WRITTEN}), ("wgmma", "wgmma_wait", {WRITTEN}),
    ],
)  # fmt: skip
def test_what_a_kernel_has_forgotten_is_found(case: str, forgotten: str, found: set[str]) -> None:
    *given, options = PRODUCTS[case]
    told = races(sim_gemm.without, forgotten, *sample(*given), **options)
    assert {line.partition(" in ")[0] for line in told} >= found


@pytest.mark.parametrize(
    ("function", "given", "options"),
    [
        (sim_bits.bits, ("bcq", 3, 70, 600, 128, "F16", 2), {"slices": 3, "tiles": 2}),
        (sim_bits.bits, ("affine", 4, 40, 600, 64, "F32", 1), {"parts": 3}),
        (sim_bits.whole_bytes, ("affine", 4, 70, 600, 32, "BF16", 4), {"slices": 2, "tiles": 2, "stages": 3}),
        (sim_bits.whole_bytes, ("affine", 4, 40, 264, 16, "F16", 2), {"slices": 2}),
        (sim_bits.bits, ("bcq", 3, 70, 1500, 128, "F16", 1), {"slices": 3, "tiles": 2, "bulk": False}),
        (sim_bits.whole_bytes, ("bcq", 4, 70, 1100, 32, "BF16", 4), {"slices": 2, "stages": 3, "bulk": False}),
    ],
)
def test_the_product_of_few_vectors(function: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    assert races(function, *sample(*given), **options) == []


def test_look_ups_and_weights_of_two_and_four_bits() -> None:
    assert races(sim_kernels.lut_gemv, *sample("bcq", 2, 37, 200, 64, "F16", 2)[:2], threads=64) == []
    assert races(sim_mixed.product, sim_mixed.weight(37, 256, 136, outliers="add"), ks.vectors(2, 392, "F16")) == []
