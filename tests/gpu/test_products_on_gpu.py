"""Products and dense matrices on the device at full size, against the normative decoder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch.ops import lut as torch_ops
from bcqfmt.kernels import dequant, lut, matmul
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device
from products import kernel_samples as ks
from products import product_reference as reference
from products.gpu_arrays import guarded, to_gpu, twice

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
SHAPES = ((4096, 4096, 128), (1024, 11008, 64), (77, 1000, 100), (1, 4096, 4096), (4095, 515, 33), (3, 70000, 8))


def gemv(weight: BcqWeight, x: Any, planes: int | None = None) -> Any:
    placed = to_device(operand(weight, planes=planes), "lut-gemm")
    on_gpu = to_gpu(x)
    shape = (x.shape[0], weight.spec.out)
    found = twice(shape, torch.float32, lambda out: lut.lut_gemv(placed, on_gpu, out=out))
    return found.cpu().numpy()


@pytest.mark.parametrize(("rows", "columns", "g"), SHAPES)
@pytest.mark.parametrize("encoding", ks.ENCODINGS)
def test_shapes_and_encodings(encoding: str, rows: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, 4, rows, columns, g)
    x = ks.vectors(1, columns, "F16")
    assert reference.relative_error(gemv(weight, x), reference.product(weight, x)) < 1e-5


@pytest.mark.parametrize("q", range(1, 9))
def test_planes(q: int) -> None:
    weight = ks.weight("bcq", q, 515, 1032, 24, seed=q)
    x = ks.vectors(1 + q % 3, 1032, ("F16", "BF16", "F32")[q % 3])
    assert reference.relative_error(gemv(weight, x), reference.product(weight, x)) < 1e-5


@pytest.mark.parametrize("batch", range(1, 9))
def test_batches(batch: int) -> None:
    weight = ks.weight("affine", 3, 1024, 2048, 128)
    x = ks.vectors(batch, 2048, "BF16")
    assert reference.relative_error(gemv(weight, x), reference.product(weight, x)) < 1e-5


@pytest.mark.parametrize("outliers", ["add", "replace"])
def test_everything_at_once(outliers: str) -> None:
    weight = ks.mixed(1000, 3072, 1024, outliers=outliers)
    x = ks.vectors(2, 4096, "F16")
    assert reference.relative_error(gemv(weight, x), reference.product(weight, x)) < 1e-5


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_fewer_planes(planes: int) -> None:
    weight = ks.weight("affine", 4, 512, 1024, 64)
    x = ks.vectors(1, 1024)
    assert reference.relative_error(gemv(weight, x, planes=planes), reference.product(weight, x, planes=planes)) < 1e-5


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("encoding", ks.ENCODINGS)
@pytest.mark.parametrize(
    ("q", "rows", "columns", "g"),
    [(4, 1024, 4096, 128), (3, 513, 1064, 32), (8, 100, 515, 33), (2, 7, 70000, 8), (4, 100, 4096, 16)],
)
def test_dense_matrices_bit_by_bit(dtype: str, encoding: str, q: int, rows: int, columns: int, g: int) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, numbers="F32" if q == 3 else "F16")
    placed = to_device(operand(weight), "canonical")
    found = twice(weight.shape, DTYPES[dtype], lambda out: dequant.dequantize(placed, dtype, out=out))
    expected = weight.dequantize(dtype)
    assert found.view(torch.uint8).cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("q", "rows", "columns", "g"), [(4, 1024, 4096, 128), (8, 100, 28672, 32), (3, 513, 1064, 8), (2, 3, 50000, 40)]
)
def test_reordered_dense_matrices_bit_by_bit(dtype: str, q: int, rows: int, columns: int, g: int) -> None:
    """The last has rows that do not fit into shared memory."""
    weight = ks.weight("bcq", q, rows, columns, g, perm=True, numbers="F32" if q == 3 else "F16")
    placed = to_device(operand(weight), "canonical")
    found = twice(weight.shape, DTYPES[dtype], lambda out: dequant.dequantize(placed, dtype, out=out))
    assert found.view(torch.uint8).cpu().numpy().tobytes() == weight.dequantize(dtype).tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("outliers", ["add", "replace"])
@pytest.mark.parametrize("perm", [False, True])
def test_dense_matrices_with_everything(dtype: str, outliers: str, perm: bool) -> None:
    weight = ks.mixed(300, 1536, 512, outliers=outliers, perm=perm)
    placed = to_device(operand(weight), "canonical")
    found = twice(weight.shape, DTYPES[dtype], lambda out: dequant.dequantize(placed, dtype, out=out))
    assert found.view(torch.uint8).cpu().numpy().tobytes() == weight.dequantize(dtype).tobytes()


def test_dense_matrices_of_random_patterns() -> None:
    """All 65536 F16 patterns as scales, every code: subnormals, infinities, NaNs."""
    for kind in (np.float16, None):
        bits = np.arange(65536, dtype=np.uint16)
        scale = bits.view(kind) if kind else bits.view(ks.numpy_dtype("BF16"))
        scale = scale.reshape(1024, 64)
        codes = np.tile(np.arange(32) % 16, (1024, 64))
        for dtype in DTYPES:
            weight = BcqWeight.from_affine(codes, scale, 7, group_size=32, bits=4).allow_nonfinite()
            placed = to_device(operand(weight), "canonical")
            found = dequant.dequantize(placed, dtype).view(torch.uint8).cpu().numpy()
            assert found.tobytes() == weight.dequantize(dtype).tobytes()


@pytest.mark.parametrize("encoding", ks.ENCODINGS)
@pytest.mark.parametrize("q", [3, 4])
def test_matmul_by_every_way(q: int, encoding: str) -> None:
    weight = ks.weight(encoding, q, 1000, 2048, 128)
    placed = matmul.MatmulWeight(operand(weight))
    for count in (1, 7, 9, 40):
        x = ks.vectors(count, 2048, "F16")
        found = matmul.matmul(placed, to_gpu(x)).float().cpu().numpy()
        assert reference.relative_error(found, reference.product(weight, x)) < 2e-3


def test_a_cuda_graph_without_synchronising(without_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    weight = ks.mixed(512, 768, 256)
    look_up, exact = to_device(operand(weight), "lut-gemm"), to_device(operand(weight), "canonical")
    x = to_gpu(ks.vectors(2, 1024, "F16"))
    expected, dense = torch_ops.lut_gemv(x, look_up), torch_ops.dequantize(exact)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch_ops.lut_gemv(x, look_up)
        torch_ops.dequantize(exact)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), without_waiting():
        y, matrix = torch_ops.lut_gemv(x, look_up), torch_ops.dequantize(exact)
    for _ in range(3):
        y.zero_()
        matrix.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
        assert torch.equal(matrix.view(torch.int16), dense.view(torch.int16))


def test_launches_follow_the_current_stream() -> None:
    weight = ks.weight("bcq", 4, 4096, 4096, 128)
    placed = to_device(operand(weight), "lut-gemm")
    ones = to_gpu(np.ones((1, 4096), np.float16))
    expected = lut.lut_gemv(placed, ones)
    x = torch.zeros_like(ones)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on any other stream the product would come before the copy
        x.copy_(ones)
        found = lut.lut_gemv(placed, x)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_refused_before_the_launch() -> None:
    placed = to_device(operand(ks.weight("bcq", 2, 64, 128, 32)), "lut-gemm")
    good = torch.ones(1, 128, dtype=torch.float16, device="cuda")
    bad = [
        good.cpu(),
        good.double(),
        good.int(),
        torch.ones(1, 256, dtype=torch.float16, device="cuda")[:, ::2],
        torch.ones(1, 127, dtype=torch.float16, device="cuda"),
    ]
    for x in bad:
        with pytest.raises(BcqError, match="BCQ-E552"):
            lut.lut_gemv(placed, x)
    with pytest.raises(BcqError, match="BCQ-E552"):
        lut.lut_gemv(placed, good, out=torch.ones(1, 64))
    exact = to_device(operand(ks.weight("bcq", 2, 64, 128, 32)), "canonical")
    room, _ = guarded((64 * 128 + 8,), torch.float16, 0)
    with pytest.raises(BcqError, match=r"BCQ-E552.*multiple of 16"):
        dequant.dequantize(exact, out=room[1 : 64 * 128 + 1].reshape(64, 128))


def test_wrong_indices_in_device_memory_are_never_followed() -> None:
    """`make test-gpu-sanitizer` runs this under compute-sanitizer too."""
    from dataclasses import replace

    source = operand(ks.weight("bcq", 2, 64, 128, 32, perm=True, outliers="add", share=0.1))
    look_up, exact = to_device(source, "lut-gemm"), to_device(source, "canonical")
    x = torch.ones(1, 128, dtype=torch.float16, device="cuda")
    hostile = torch.tensor([2**31 - 1, -1, 128, 2**20] * 32, dtype=torch.int32, device="cuda")
    jumps = torch.randint(-(2**31), 2**31 - 1, look_up.indptr.shape, dtype=torch.int32, device="cuda")
    for spoiled in (
        {"perm": hostile, "stored": hostile},
        {"indices": hostile.repeat(100)[: look_up.indices.numel()]},
        {"indptr": jumps},
    ):
        lut.lut_gemv(replace(look_up, **spoiled), x)
        for dtype in DTYPES:
            dequant.dequantize(replace(exact, **spoiled), dtype)
        torch.cuda.synchronize()
