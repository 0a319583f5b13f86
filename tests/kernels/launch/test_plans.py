"""Products with the same weight again and again: plans are computed once, and nothing passes unchecked."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.errors import BcqError
from bcqfmt.kernels import bits, gemm, matmul, matmul_weight, mixed
from bcqfmt.kernels.bits.shape import BitShape
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime import device, launch
from products import kernel_samples as ks
from products import product_reference as reference
from products.pretended_gpu import Recorder, pretend_products
from simulated import sim_mixed

WEIGHT = ks.weight("affine", 3, 33, 256, 64)
SEVERAL = BcqWeight.from_segments([ks.weight("affine", 2, 33, 96, 16), ks.weight("affine", 4, 33, 160, 32)])
MIXED = sim_mixed.weight(33, 128, 128, outliers="add")
WEIGHTS = pytest.mark.parametrize("weight", [WEIGHT, SEVERAL, MIXED], ids=["one segment", "two segments", "mixed"])


@pytest.fixture(autouse=True)
def _no_matrix_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small ones `gemm` multiplies two vectors already."""
    monkeypatch.setattr(matmul_weight, "SMALL", 0)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return pretend_products(monkeypatch)


def placed(weight: BcqWeight) -> matmul.MatmulWeight:
    return matmul.MatmulWeight(operand(weight), torch.device("cpu"), weight)


def vectors(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(*shape, 256, dtype=dtype)


@WEIGHTS
def test_every_product_is_launched_as_by_the_function_for_it(weight: BcqWeight, recorder: Recorder) -> None:
    """The same kernels, grids and arguments, but for x, y and the stream."""
    found = placed(weight)
    for shape in ((1,), (2,), (1, 2), (1,), ()):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = vectors(*shape, dtype=dtype)
            y = matmul.matmul(found, x)
            assert (y.shape, y.dtype) == ((*shape, 33), dtype)
            quick = list(recorder.launched)
            recorder.launched.clear()
            flat = x.reshape(-1, 256)
            if found.mixed is not None:
                mixed.mixed_gemv(found.mixed, flat, y.reshape(-1, 33))
            else:
                assert found.bits is not None
                bits.bit_gemv(found.bits, flat, out=y.reshape(-1, 33))
            assert len(quick) == len(recorder.launched) == (2 if weight is SEVERAL else 1)
            for one, other in zip(quick, recorder.launched, strict=True):
                # numbers of this small weight, not addresses, which begin at 2^20 or above wherever a heap lies
                fixed = [k for k, value in enumerate(other.values) if value < 2**20 or k in (0, 1)]
                assert one[:3] == other[:3]
                assert one.early == other.early
                assert [one.values[k] for k in fixed] == [other.values[k] for k in fixed]
            assert {x.data_ptr(), y.data_ptr()} <= {value for one in quick for value in one.values}
            recorder.launched.clear()


@WEIGHTS
def test_plans_are_computed_once(weight: BcqWeight, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(weight)
    matmul.matmul(found, vectors(1))
    for module, name in ((bits, "product_shape"), (mixed, "shape_for"), (bits, "at_once")):
        monkeypatch.setattr(module, name, None)  # asking again fails
    matmul.matmul(found, vectors(1))
    with pytest.raises(TypeError):
        matmul.matmul(found, vectors(2))
    assert len(recorder.launched) == (4 if weight is SEVERAL else 2)


def test_no_order_is_made_that_the_product_does_not_need(recorder: Recorder) -> None:
    found = placed(MIXED)
    matmul.matmul(found, vectors(1))
    assert "mixed" in vars(found)
    assert not {"bits", "look_up", "exact"} & set(vars(found))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "another length": (torch.ones(1, 255, dtype=torch.float16), "BCQ-E552", r"shape \[1, 255\]"),
    "a scalar": (torch.ones((), dtype=torch.float16), "BCQ-E552", r"shape \[\]"),
    "float64": (vectors(1, dtype=torch.float64), "BCQ-E552", "dtype F64"),
    "integers": (vectors(1, dtype=torch.int32), "BCQ-E552", "dtype I32"),
    "strides": (torch.ones(1, 512, dtype=torch.float16)[:, ::2], "BCQ-E552", "not contiguous"),
    "no tensor": ([1.0] * 256, "BCQ-E552", "a list"),
}


@WEIGHTS
@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_ever(case: str, weight: BcqWeight, recorder: Recorder) -> None:
    """Also after such a product was carried out."""
    found, (x, code, text) = placed(weight), REFUSED[case]
    for _ in range(2):
        recorder.launched.clear()
        with pytest.raises(BcqError, match=f"{code}.*{text}"):
            matmul.matmul(found, x)
        assert not recorder.launched
        matmul.matmul(found, vectors(1))


@WEIGHTS
def test_x_on_another_gpu_and_on_the_host(
    weight: BcqWeight, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = placed(weight), vectors(1)
    matmul.matmul(found, x)
    recorder.launched.clear()
    monkeypatch.setattr(device, "place_of", lambda array: 1 if array.data_ptr() == x.data_ptr() else 0)
    with pytest.raises(BcqError, match=r"BCQ-E552.*x on cuda:1, weight on cuda:0"):
        matmul.matmul(found, x)
    monkeypatch.setattr(device, "place_of", lambda array: -1)
    with pytest.raises(BcqError, match=r"BCQ-E552.*x is on the host"):
        matmul.matmul(found, x)
    with pytest.raises(BcqError, match=r"BCQ-E552.*x is on the host"):
        matmul.matmul(placed(weight), x)
    assert not recorder.launched


@WEIGHTS
def test_x_at_an_odd_address_is_copied(weight: BcqWeight, recorder: Recorder) -> None:
    found = placed(weight)
    room = torch.ones(1 + 256 + 8, dtype=torch.float16)
    x = room[1:257] if room.data_ptr() % 16 == 0 else room[:256]
    matmul.matmul(found, x)
    assert recorder.launched
    assert all(x.data_ptr() not in one.values for one in recorder.launched)


def test_a_gpu_below_9_0_has_another_way(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the GPU that a weight is on: kernels without bulk copies, after the previous one has ended."""
    monkeypatch.setattr(device, "_asked", lambda index: device.Gpu((8, 6) if index else (9, 0), 100, (9, 0)))
    for target in ("cuda:1", torch.device("cuda", 1), 1):
        assert matmul.MatmulWeight(operand(MIXED), target, MIXED).mixed is None
    outliers = ks.weight("bcq", 2, 33, 256, 128, outliers="add", share=0.1)
    for index, kernels in ((0, ["bit_gemv"]), (1, ["bit_gemv", "csr_outliers"])):
        monkeypatch.setattr(device, "place_of", lambda array, index=index: index)
        names: list[str] = []
        monkeypatch.setattr(
            launch.Kernel,
            "_compiled",
            lambda kernel, array, shared, names=names: (names.append(kernel.name), recorder)[1],
        )
        recorder.launched.clear()
        fast = bits.bit_operand(operand(outliers), "cpu")
        bits.bit_gemv(fast, vectors(1))
        assert names == kernels
        assert recorder.launched[0].early == (index == 0)
        (plan,) = [plan for key, plan in (fast if index == 0 else bits._bare(fast)).plans.items() if len(key) == 4]
        assert plan[0].shared <= (227 if index == 0 else 99) * 1024
    with pytest.raises(BcqError, match=r"BCQ-E551.*capability 8\.6"):
        mixed.mixed_gemv(mixed.mixed_operand(MIXED, "cpu"), vectors(1))
    plain = bits.bit_operand(operand(WEIGHT), "cpu")
    for bulk, fine in ((False, True), (True, False)):
        shapes = [BitShape(segment.layout, 1, 1, 1, 2, slices=1, bulk=bulk) for segment in plain.segments]
        with nullcontext() if fine else pytest.raises(BcqError, match=r"BCQ-E551.*capability 8\.6"):
            bits.bit_gemv(plain, vectors(1), shapes=shapes)


def test_the_stream_without_an_object_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's compiled code asks for it; where torch has no such function, as everybody does."""
    array = SimpleNamespace(device=torch.device("cuda", 1))
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: stream if place == array.device else None)
    assert device.stream_of(array) == 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    assert device.stream_of(array) == 41


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 5, 7, 11, 21])
def test_other_numbers_of_vectors_are_padded(
    count: int, dtype: torch.dtype, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel is compiled for three vectors, or five: four or eight are multiplied, and the results are those asked
    for. The product itself is the reference's here.
    """
    monkeypatch.setattr(matmul_weight, "GEMM_MOST", {"wgmma": 0, "mma": 0})
    found, asked = placed(WEIGHT), list[int]()
    assert found.bits is not None
    x = torch.from_numpy(np.random.default_rng(count).normal(size=(count, 256))).to(dtype)

    def product(operand: Any, plan: Any, batch: int, x: torch.Tensor, y: torch.Tensor, addend: Any = None) -> None:
        assert (operand, addend) == (found.bits, None)
        assert (x.is_contiguous(), len(x.reshape(-1, 256))) == (True, batch)
        asked.append(batch)
        y.copy_(torch.from_numpy(reference.product(WEIGHT, x.float().numpy())).to(x.dtype))

    monkeypatch.setattr(bits, "launch", product)
    y = matmul.matmul(found, x)
    most = found.at_once("F32" if dtype == torch.float32 else "F16")
    assert torch.equal(y, torch.from_numpy(reference.product(WEIGHT, x.float().numpy())).to(dtype))
    assert set(asked) <= set(bits.USUAL)
    assert asked == [most] * (count // most) + [n for n in (1, 2, 4, 8) if n >= count % most][:1] * (count % most > 0)


def test_only_usual_numbers_are_one_launch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_weight, "GEMM_MOST", {"wgmma": 0, "mma": 0})
    found = placed(WEIGHT)
    assert [n for n in range(1, 24) if found.product(n, "F16").start is not None] == list(bits.USUAL)


@pytest.mark.parametrize(
    ("narrow", "count", "parts"),
    [
        (8192, 3071, [3071]),
        (8192, 3072, [1536] * 2),
        (8192, 3074, [1536, 1538]),
        (8192, 5000, [1664, 1664, 1672]),
        (288, 2047, [2047]),
        (288, 2048, [1024] * 2),
        (288, 2050, [1024, 1026]),
        (288, 9217, [*[1024] * 8, 1025]),
    ],
)
def test_many_vectors_are_multiplied_in_parts(
    narrow: int, count: int, parts: list[int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of at least 1536 vectors where rows and columns together are few, else 1024; one after the other in x and y."""
    monkeypatch.setattr(gemm, "NARROW", narrow)  # the matrix has 33 rows and 256 columns
    many, launched = placed(WEIGHT).gemm("F16"), list[tuple[int, int, int]]()
    assert many is not None
    x, y = vectors(count), torch.empty(count, 33, dtype=torch.float16)

    def record(operand: Any, plan: Any, x_part: torch.Tensor, y_part: torch.Tensor, addend: Any) -> None:
        assert (operand, addend, len(y_part)) == (many, None, len(x_part))
        launched.append((len(x_part), x_part.data_ptr() - x.data_ptr(), y_part.data_ptr() - y.data_ptr()))

    monkeypatch.setattr(gemm, "_launch", record)
    gemm.multiply(many, x, y)
    begins = [sum(parts[:k]) for k in range(len(parts))]
    assert launched == [(part, 512 * b, 66 * b) for part, b in zip(parts, begins, strict=True)]


@WEIGHTS
def test_an_operand_that_was_used_can_be_copied(weight: BcqWeight, recorder: Recorder) -> None:
    found = placed(weight)
    matmul.matmul(found, vectors(1))
    used = found.bits if found.mixed is None else found.mixed
    assert used is not None
    assert used.plans
    for other in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert not other.plans
        assert (other.shape, other.settled) == (used.shape, used.settled)


def test_no_weight_is_prepared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_torch", lambda array: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BcqError, match="BCQ-E552"):
        device.settle(SimpleNamespace(device=SimpleNamespace(type="cuda")))


def test_an_unknown_path_is_refused(recorder: Recorder) -> None:
    with pytest.raises(BcqError, match=r"BCQ-E552.*path 'bit'"):
        matmul.matmul(placed(WEIGHT), vectors(1), path="bit")
