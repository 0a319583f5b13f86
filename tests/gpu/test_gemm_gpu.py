"""The product of many vectors on the device at full size, with both engines, against the normative decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels import matmul
from bcqfmt.kernels.gemm import gemm, gemm_operand
from bcqfmt.kernels.gemm.shape import gemm_shape
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime.limits import KINDS
from products import kernel_samples as ks
from products import product_reference as reference
from products.gpu_arrays import to_gpu, twice

LIMITS = {"F16": 7e-4, "BF16": 4e-3}
# encoding, q, rows, columns, group size, dtype of x
WEIGHTS = [
    ("affine", 4, 1000, 4096, 128, "F16"), ("affine", 3, 777, 2048, 64, "F16"), ("affine", 2, 4096, 1024, 32, "BF16"),
    ("affine", 8, 515, 4096, 16, "F16"), ("affine", 5, 300, 3000, 3000, "BF16"), ("bcq", 3, 1024, 4096, 128, "F16"),
    ("bcq", 4, 1001, 1032, 64, "BF16"), ("offset", 4, 512, 2048, 128, "F16"), ("float-zero", 6, 100, 2056, 64, "BF16"),
    ("second-order", 2, 512, 2048, 256, "F16"), ("bcq", 4, 1024, 8192, 128, "F16"), ("bcq", 2, 512, 2048, 64, "F16"),
    ("bcq", 5, 512, 2048, 128, "F16"), ("table", 4, 1000, 4096, 32, "F16"), ("table", 4, 512, 2048, 16, "BF16"),
    ("short table", 4, 512, 2048, 32, "F16"),
]  # fmt: skip


@pytest.mark.parametrize("engine", [pytest.param("wgmma", marks=pytest.mark.sm_90), "mma"])
@pytest.mark.parametrize("count", [1, 16, 50, 300])
@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "kind"), WEIGHTS)
def test_products(encoding: str, q: int, rows: int, columns: int, g: int, kind: str, count: int, engine: str) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q)
    x = ks.vectors(count, columns, kind)
    placed, on_gpu = gemm_operand(operand(weight), kind), to_gpu(x)
    shapes = [gemm_shape(s.layout, count, rows, KINDS[kind], KINDS[kind], engine) for s in placed.segments]
    found = twice((count, rows), on_gpu.dtype, lambda out: gemm(placed, on_gpu, out=out, shapes=shapes))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS[kind]


@pytest.mark.parametrize("engine", [pytest.param("wgmma", marks=pytest.mark.sm_90), "mma"])
@pytest.mark.parametrize("count", [5, 13, 40, 90])
@pytest.mark.parametrize(("encoding", "q", "kind"), [("affine", 4, "F16"), ("affine", 3, "BF16"), ("bcq", 4, "F16")])
def test_small_products_of_every_engine(encoding: str, q: int, kind: str, count: int, engine: str) -> None:
    """Stages in turns, blocks that share tiles, ends of rows and columns; `make test-gpu-sanitizer` runs this too."""
    weight, x = ks.weight(encoding, q, 333, 1032, 64, seed=q), ks.vectors(count, 1032, kind)
    placed, on_gpu = gemm_operand(operand(weight), kind), to_gpu(x)
    shape = gemm_shape(placed.segments[0].layout, count, 333, KINDS[kind], KINDS[kind], engine)
    assert shape.engine == ("few" if count <= 16 else engine)
    found = gemm(placed, on_gpu, shapes=[shape])
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS[kind]


@pytest.mark.parametrize("encoding", ["affine", "bcq"])
def test_sixteen_vectors_of_many_rows(encoding: str) -> None:
    """More than all blocks of `few` can take at the same time."""
    weight, x = ks.weight(encoding, 4, 12800, 512, 128), ks.vectors(16, 512, "F16")
    placed, on_gpu = gemm_operand(operand(weight), "F16"), to_gpu(x)
    assert gemm_shape(placed.segments[0].layout, 16, 12800, 1, 1, "wgmma").engine == "wgmma"
    found = twice((16, 12800), on_gpu.dtype, lambda out: gemm(placed, on_gpu, out=out))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS["F16"]


@pytest.mark.parametrize("count", [256, 512])
def test_tiles_that_blocks_do_not_share(count: int) -> None:
    """With 512 vectors of 176 each: two tiles for every block."""
    weight, x = ks.weight("affine", 4, 11008, 64, 64), ks.vectors(count, 64, "F16")
    placed, on_gpu = gemm_operand(operand(weight), "F16"), to_gpu(x)
    found = twice((count, 11008), on_gpu.dtype, lambda out: gemm(placed, on_gpu, out=out))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS["F16"]


@pytest.mark.parametrize("encoding", ["affine", "bcq"])
@pytest.mark.parametrize(
    ("rows", "count"), [*((11008, count) for count in (70, 100, 130, 144, 200, 330, 600, 1100, 1500)), (4096, 300)]
)
def test_tiles_of_all_widths(rows: int, count: int, encoding: str) -> None:
    """The last of them has few vectors."""
    weight, x = ks.weight(encoding, 4, rows, 512, 128), ks.vectors(count, 512, "F16")
    placed, on_gpu = gemm_operand(operand(weight), "F16"), to_gpu(x)
    found = twice((count, rows), on_gpu.dtype, lambda out: gemm(placed, on_gpu, out=out))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS["F16"]


@pytest.mark.parametrize("count", [5, 13, 64, 129, 512, 2500])
def test_as_matmul_chooses_it(count: int, gpu: tuple[int, int]) -> None:
    """Segments, reordered columns, outliers; several dimensions; an addend; several parts of x."""
    weight = ks.mixed(1000, 3072, 1024, outliers="add")
    x = ks.vectors(count, 4096, "F16")
    placed = matmul.MatmulWeight(operand(weight))
    assert matmul.path_of(placed, count).kernel == ("gemm" if gpu == (9, 0) or count <= 256 else "dequantize")
    found = matmul.matmul(placed, to_gpu(x)[None], path="gemm")[0].float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 1e-3


@pytest.mark.parametrize(
    ("encoding", "q", "rows", "columns", "g", "numbers", "kind"),
    [
        ("affine", 4, 1000, 4096, 128, "F16", "F16"), ("affine", 3, 777, 2048, 32, "BF16", "BF16"),
        ("affine", 8, 515, 1032, 16, "F32", "F16"), ("bcq", 3, 1001, 4096, 128, "F16", "F16"),
        ("bcq", 4, 300, 1032, 64, "F16", "BF16"), ("bcq", 5, 100, 2048, 32, "BF16", "F16"),
    ],
)  # fmt: skip
def test_the_dense_matrix_of_codes_has_the_bits_of_the_decoder(
    encoding: str, q: int, rows: int, columns: int, g: int, numbers: str, kind: str
) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, numbers=numbers)
    parts = {suffix: part.cuda() for suffix, part in weight.to_torch().items()}
    made = gpu_weight(weight.spec, parts)
    assert made is not None
    found = made.decoder(kind, twice=False)[1]().view(torch.int16).cpu().numpy()
    assert found.tobytes() == weight.dequantize(kind).tobytes()


def test_a_graph_and_two_streams_at_once() -> None:
    """Blocks that add up parts of one tile count themselves: products at the same time must not share counters."""
    weight = ks.weight("affine", 4, 512, 4096, 128)
    placed = gemm_operand(operand(weight), "F16")
    xs = [to_gpu(ks.vectors(40, 4096, "F16", seed=i)) for i in range(2)]
    expected = [gemm(placed, x) for x in xs]
    streams, graphs, results = [torch.cuda.Stream() for _ in xs], [], []
    for x, stream in zip(xs, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append([gemm(placed, x) for _ in range(20)])
        graphs.append(graph)
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, right) for found, right in zip(results, expected, strict=True) for y in found)


def test_same_values_as_a_dense_copy_where_nothing_is_rounded_twice() -> None:
    """Scales that are powers of two: every value is exact, and so is every sum of small integers."""
    rng = np.random.default_rng(0)
    from bcqfmt import BcqWeight

    codes = rng.integers(0, 16, (256, 512))
    weight = BcqWeight.from_affine(codes, np.full((256, 4), 0.25, np.float16), 8, group_size=128, bits=4)
    x = rng.integers(-3, 4, (40, 512)).astype(np.float16)
    found = gemm(gemm_operand(operand(weight), "F16"), to_gpu(x)).float().cpu().numpy()
    assert np.array_equal(found, x.astype(np.float32) @ ((codes - 8) * 0.25).T.astype(np.float32))


def test_more_tiles_than_processors() -> None:
    """Every block has tiles alone, and then parts of shared ones; y with an odd number of rows, and not aligned."""
    weight = ks.weight("affine", 4, 15001, 1024, 128, seed=1)
    x = ks.vectors(512, 1024, "F16")
    placed, on_gpu = gemm_operand(operand(weight), "F16"), to_gpu(x)
    found = twice((512, 15001), on_gpu.dtype, lambda out: gemm(placed, on_gpu, out=out))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(weight, x)) < LIMITS["F16"]
    even = gemm_operand(operand(ks.weight("affine", 4, 512, 1024, 128)), "F16")
    room = torch.zeros(40 * 512 + 1, dtype=torch.float16, device="cuda")
    shifted = gemm(even, on_gpu[:40], out=room[1:].view(40, 512))
    assert torch.equal(shifted, gemm(even, on_gpu[:40]))
