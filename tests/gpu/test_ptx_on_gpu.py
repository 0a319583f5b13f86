"""Every instruction on the device against its Python twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from products.gpu_arrays import to_gpu
from simulated import sim_ptx
from simulator import arithmetic

COUNT = 4096
SPECIAL = {
    "u32": [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFF7FFF, 0x7C007C00, 0xFC00FC00, 0x00010001, 0x03FF0400, 0x3C003C00],
    "i32": [0, 1, -1, 2**31 - 1, -(2**31)],
    "f32": [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e-45, 6e-8, 2.98e-8, np.inf, -np.inf, 3.4e38, 1.00390625],
    "f64": [0.0, -0.0, 1 + 2**-8 + 2**-40, 65519.999, 65520.0, 5e-324, 1e-46, 3.5e38, -1e300, np.inf, 2.0**-133,
            2.0**-134],
}  # fmt: skip


def _numbers(kind: str, rng: Any) -> Any:
    if kind in ("u32", "i32"):
        random = rng.integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32).view(sim_ptx.NUMPY[kind])
    else:
        random = (rng.normal(size=COUNT) * 2.0 ** rng.integers(-140 if kind == "f32" else -160, 120, COUNT)).astype(
            sim_ptx.NUMPY[kind]
        )
        random[::3] = rng.normal(size=random[::3].size) * 2.0 ** rng.integers(-26, 17, random[::3].size)
    random[: len(SPECIAL[kind])] = np.array(SPECIAL[kind], sim_ptx.NUMPY[kind])
    return rng.permutation(random)


@pytest.mark.parametrize("name", sorted(sim_ptx.PURE))
def test_twins(name: str) -> None:
    rng = np.random.default_rng(len(name))
    result, *kinds = sim_ptx.PURE[name].split()
    with np.errstate(all="ignore"):
        given = [_numbers(kind, rng) for kind in kinds]
        if name in ("div_u32", "rem_u32"):
            given[1] |= np.uint32(1)
        expected = np.zeros(COUNT, sim_ptx.NUMPY[result])
        for i in range(COUNT):
            row = [column[i].item() if column.dtype.kind != "f" else column[i] for column in given]
            expected[i] = getattr(arithmetic, name)(*row)
    y = to_gpu(np.zeros(COUNT, sim_ptx.NUMPY[result]))
    sim_ptx.pure_kernel(name).launch((-(-COUNT // 256),), 256, *map(to_gpu, given), y, COUNT)
    found = y.cpu().numpy().view(sim_ptx.NUMPY[result])
    same = (found.view(np.uint8).reshape(COUNT, -1) == expected.view(np.uint8).reshape(COUNT, -1)).all(1)
    if result in ("f32", "f64"):
        same |= np.isnan(found) & np.isnan(expected)  # which NaN is the device's business
    if name in ("hadd2", "hsub2", "hmul2", "hfma2", "bfma2"):
        same |= _nan_halves(found, expected, 0x7F80 if name == "bfma2" else 0x7C00)
    wrong = np.flatnonzero(~same)
    assert not wrong.size, [(tuple(g[i] for g in given), found[i], expected[i]) for i in wrong[:5]]


def _nan_halves(found: Any, expected: Any, infinity: int) -> Any:
    """Pairs that agree wherever neither is a NaN."""
    f, e = found.view(np.uint16).reshape(-1, 2), expected.view(np.uint16).reshape(-1, 2)
    nan = (f & 0x7FFF > infinity) & (e & 0x7FFF > infinity)
    return ((f == e) | nan).all(1)


def test_integer_tensor_cores() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**32, (32, n), dtype=np.uint32) for n in (4, 2))
    c = rng.integers(-1000, 1000, (32, 4)).astype(np.int32)
    d = to_gpu(np.zeros((32, 4), np.int32))
    sim_ptx.mma_s8.launch((1,), 32, to_gpu(a), to_gpu(b), to_gpu(c), d)
    assert np.array_equal(d.cpu().numpy(), arithmetic.mma_s8_warp(a, b, c))


def test_float_tensor_cores() -> None:
    rng = np.random.default_rng(0)
    c = np.ones((32, 4), np.float32)
    for widen, kind, which in ((arithmetic.f16_values, np.float16, 0), (arithmetic.bf16_values, None, 1)):
        numbers = rng.normal(size=(32, 12)).astype(np.float32)
        bits = numbers.astype(kind).view(np.uint16) if kind else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        words = np.ascontiguousarray(bits).view(np.uint32)
        a, b = np.ascontiguousarray(words[:, :4]), np.ascontiguousarray(words[:, 4:])
        results = [to_gpu(np.zeros((32, 4), np.float32)) for _ in range(2)]
        sim_ptx.mma_float.launch((1,), 32, to_gpu(a), to_gpu(b), to_gpu(c), *results)
        expected = arithmetic.mma_f16_warp(a, b, c, widen)
        assert np.allclose(results[which].cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "shape"), [("exchanges", (10, 64)), ("copies", (4 * 256,))])
def test_kernels_agree_with_the_simulator(name: str, shape: tuple[int, ...]) -> None:
    """The same source, here and in the simulator."""
    from simulated.cuda_sim import simulate

    given = np.random.default_rng(0).integers(0, 2**31, 256 if name == "copies" else 64, dtype=np.uint32)
    extra = [np.zeros(1, np.uint32)] if name == "copies" else []
    expected = simulate(sim_ptx.run, name, given, np.zeros(shape, np.uint32), *extra)
    y = to_gpu(np.zeros(shape, np.uint32))
    getattr(sim_ptx, name).launch((1,), 64, to_gpu(given), y, *map(to_gpu, extra))
    torch.cuda.synchronize()
    found = y.cpu().numpy().view(np.uint32)
    if name == "copies":  # which thread draws which ticket is open
        assert sorted(found[960:1024]) == sorted(expected[1][960:1024])
        assert np.array_equal(found[:960], expected[1][:960])
    else:
        assert np.array_equal(found, expected[1])
