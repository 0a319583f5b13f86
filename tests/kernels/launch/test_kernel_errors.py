"""What a kernel cannot take is refused before the launch, with a code and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from bcqfmt.errors import BcqError
from bcqfmt.kernels import lut, matmul
from bcqfmt.kernels.gemm import gemm_operand
from bcqfmt.kernels.operands import Operand, OperandSegment, operand
from bcqfmt.kernels.operands.device import to_device
from bcqfmt.kernels.runtime import checks, device
from bcqfmt.weight.weight import BcqWeight
from products import kernel_samples as ks
from products import product_reference as reference
from products.pretended_gpu import pretend_products
from simulated import sim_errors, sim_mixed
from simulated.cuda_sim import SimulationError, simulate


@pytest.mark.parametrize("case", list(sim_errors.CASES))
def test_arguments(case: str) -> None:
    code, text = sim_errors.CASES[case]
    with pytest.raises(SimulationError) as caught:
        simulate(sim_errors.refused, case)
    assert caught.value.kind == code
    assert text in caught.value.text


@pytest.mark.parametrize("which", ["perm", "indices", "indptr"])
def test_wrong_indices_on_the_device_are_never_followed(which: str) -> None:
    assert simulate(sim_errors.hostile_tensors, which).shape == (1, 6)
    assert simulate(sim_errors.hostile_dense, which).shape == (6, 64)


_REQUIRE = """from bcqfmt.kernels.runtime import device
try:
    device.require_cuda()
except Exception as fault:
    print(fault, '|', fault.hint)
"""


def _no_gpu(code: str, simulated: str = "0") -> str:
    """The output of a program that sees no GPU."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": simulated, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


def test_no_gpu() -> None:
    said = _no_gpu(_REQUIRE)
    assert said.startswith("BCQ-E551: no usable GPU: ")
    assert said.count("\n") == 1
    assert "use the CPU (--device cpu)" in said
    assert "Traceback" not in said


def test_a_gpu_that_numba_only_simulates_is_none() -> None:
    said = _no_gpu(_REQUIRE, simulated="1")
    assert said.startswith("BCQ-E551: no usable GPU: ")
    assert "unset NUMBA_ENABLE_CUDASIM" in said
    assert said.count("\n") == 1


def test_no_gpu_comes_before_anything_about_arguments() -> None:
    """Also for the kernels of Atom, which have no weight that would have noticed."""
    said = _no_gpu(
        "import torch\n"
        "from bcqfmt.kernels import KvCache, decode_attention, quantize_kv, quantize_reorder, rmsnorm\n"
        "from bcqfmt.kernels import rmsnorm_reorder_quant, w4a4\n"
        "x = torch.ones(1, 256)\n"
        "for call in (lambda: quantize_reorder(x, x), lambda: rmsnorm_reorder_quant(x, x, x, eps=0.0),\n"
        "             lambda: rmsnorm(x, x, eps=0.0), lambda: w4a4(x, x), lambda: quantize_kv(x, x, x, x),\n"
        "             lambda: KvCache.empty(1, 1, 32, 64, like=x), lambda: decode_attention(x, x, x)):\n"
        "    try:\n        call()\n"
        "    except Exception as fault:\n        print(fault)\n"
    )
    assert [line.split(":")[0] for line in said.splitlines()] == ["BCQ-E551"] * 7


def test_no_numba_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device._trouble.cache_clear()
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(BcqError, match="BCQ-E306") as caught:
            lut.lut_gemv(None, None)  # type: ignore[arg-type]
        assert "pip install 'numba-cuda[cu13]>=" in caught.value.hint
    finally:
        device._trouble.cache_clear()


def test_a_numpy_that_numba_cuda_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device._trouble.cache_clear()
    monkeypatch.setattr(device.np, "__version__", "2.5.1")
    monkeypatch.delattr(device.np, "row_stack", raising=False)
    try:
        with pytest.raises(BcqError, match=r"BCQ-E306.*2\.5\.1"):
            device.require_cuda()
    finally:
        device._trouble.cache_clear()


def test_host_tensors_without_the_simulator() -> None:
    with pytest.raises(BcqError, match=r"BCQ-E552.*on the host.*\.to\('cuda'\)") as caught:
        checks.check_array("x", torch.ones(4), ("F32",), (4,))
    assert "bcqfmt.kernels.cpu" in caught.value.hint
    with pytest.raises(BcqError, match=r"BCQ-E552.*on the host"):
        checks.check_array("x", np.ones(4, np.float32), ("F32",), (4,))
    assert device.describe(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == "BF16"
    assert not device.describe(torch.ones(2, 4).T).contiguous


HALF = torch.ones(8, 64, dtype=torch.float16)
# what is given to a kernel that wants F16 or F32 (8, 64) at a multiple of 16 bytes -> what to do about it
STEPS: dict[str, tuple[Any, str]] = {
    "float64": (HALF.double(), ".to(torch.float16)"),
    "integers": (HALF.int(), ".to(torch.float16)"),
    "strides": (torch.ones(64, 8, dtype=torch.float16).T, ".contiguous()"),
    "an odd address": (torch.ones(520, dtype=torch.float16)[1:513].view(8, 64), ".clone()"),
    "a list": ([1.0], "torch.as_tensor(..., device='cuda')"),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_to_do_is_said(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the message, which is all that a traceback shows, and as the hint."""
    monkeypatch.setattr(device, "place_of", lambda array: 0)
    array, step = STEPS[case]
    with pytest.raises(BcqError, match="BCQ-E552") as caught:
        checks.check_array("x", array, ("F16", "F32"), (8, 64), 16)
    assert str(caught.value).endswith(f": {step}")
    assert caught.value.hint == f"call {step}"


def test_whatever_else_a_kernel_cannot_take_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "place_of", lambda array: 0)
    for call in (
        lambda: checks.check_array("x", HALF, ("F16",), (8, 63)),
        lambda: checks.check_array("x", torch.ones(1).expand(2**31), ("F32",), (None,)),
        lambda: device.dtype_name("float64"),
    ):
        with pytest.raises(BcqError, match=r"BCQ-E55[24]") as caught:
            call()
        assert caught.value.hint


@pytest.mark.parametrize(("kind", "natural"), [("F16", 2), ("BF16", 2), ("F32", 4), ("I32", 4)])
def test_an_array_may_start_at_any_of_its_elements(kind: str, natural: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in range(9):
        found = device.Described(kind, (3,), True, 4096 + address, 0)
        monkeypatch.setattr(device, "describe", lambda array, found=found: found)
        if address % natural == 0:
            assert checks.check_array("y", None, (kind,), (3,)) is found
        else:
            with pytest.raises(BcqError, match=f"BCQ-E552.*no multiple of {natural}"):
                checks.check_array("y", None, (kind,), (3,))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("path", ["mixed", "bits"])
def test_rows_of_a_result_that_start_at_odd_addresses(path: str, kind: str) -> None:
    """With an odd number of rows the second result of 16 bits starts at no multiple of four bytes."""
    weight = sim_mixed.weight(3, 32, 16) if path == "mixed" else ks.weight("bcq", 2, 3, 48, 16)
    x = ks.vectors(3, 48, kind)
    found, y = simulate(sim_errors.one_by_one, weight, x)
    assert found == path
    limit = {"F16": 1e-3, "BF16": 5e-3, "F32": 1e-5}[kind]
    assert reference.relative_error(y.astype(np.float32), reference.product(weight, x)) < limit


def test_a_cache_like_a_tensor_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is blamed for tensors that were not passed."""
    from bcqfmt.kernels import KvCache

    monkeypatch.setattr(device, "require_cuda", lambda: None)
    with pytest.raises(BcqError, match=r"BCQ-E552.*: like is on the host.*\.to\('cuda'\)"):
        KvCache.empty(1, 1, 32, 64, like=HALF)
    monkeypatch.setattr(device, "place_of", lambda array: 0)
    assert KvCache.empty(1, 2, 33, 64, like=HALF).keys.shape == (1, 2, 64, 8)
    for sizes in ((0, 1, 32, 64), (-1, 1, 32, 64), (1, 1, 0, 64), (1, 1, 32, 65)):
        with pytest.raises(BcqError, match=r"BCQ-E552.*a cache of"):
            KvCache.empty(*sizes, like=HALF)


class _On:
    """Something on a device of a number."""

    def __init__(self, index: int) -> None:
        self.index = index


def test_arrays_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "place_of", lambda array: array.index)
    checks.check_same_device(x=_On(1), y=_On(1), z=None)
    with pytest.raises(BcqError, match=r"BCQ-E552.*x on cuda:0, y on the host") as caught:
        checks.check_same_device(x=_On(0), y=_On(-1))
    assert caught.value.hint == "call y.to('cuda:0')"
    with pytest.raises(BcqError, match=r"x\.to\('cuda:0'\), out\.to\('cuda:0'\)"):
        checks.check_same_device(x=_On(1), out=_On(-1), weight=_On(0))
    with pytest.raises(BcqError, match=r": weight\.to\('cuda:1'\)"):
        checks.check_same_device(x=_On(1), weight=_On(-1))


@pytest.mark.parametrize(("count", "path"), [(1, None), (24, None), (24, "dequantize")])
def test_x_on_the_host_and_the_weight_on_a_gpu(count: int, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch multiplies, with a dense copy, and would have words of its own for it."""
    recorder = pretend_products(monkeypatch)
    x = torch.ones(count, 64, dtype=torch.float16)
    placed = matmul.MatmulWeight(operand(ks.weight("affine", 4, 16, 64, 32)), "cpu")
    matmul.matmul(placed, x, path=path)
    recorder.launched.clear()
    monkeypatch.setattr(device, "place_of", lambda array: -1 if array.data_ptr() == x.data_ptr() else 0)
    said = "x is on the host.*" if path is None else "x on the host, weight on cuda:0.*x"
    with pytest.raises(BcqError, match=rf"BCQ-E552.*{said}\.to\('cuda"):
        matmul.matmul(placed, x, path=path)
    assert not recorder.launched


def test_uploading_without_a_gpu() -> None:
    said = _no_gpu(
        "import numpy as np\nfrom bcqfmt.kernels.runtime import device\n"
        "try:\n    device.upload(np.ones(4, np.float32), 'cuda')\n"
        "except Exception as fault:\n    print(fault)\n"
    )
    assert "BCQ-E551" in said
    assert "Traceback" not in said


def test_too_large_is_said_before_anything_is_copied() -> None:
    weight = operand(ks.weight("bcq", 1, 1, 32, 32))
    segment = weight.segments[0]
    vast: Any = np.broadcast_to(segment.planes, (8, 2**29, 1))
    large = OperandSegment(
        planes=vast,
        start=0,
        width=32,
        group_size=32,
        formula="bcq",
        first=segment.first,
        second=segment.second,
    )
    wide = Operand(name="w", shape=(2**29, 32), dtype="F16", segments=(large,), perm=None, outliers=None)
    with pytest.raises(BcqError, match=r"BCQ-E554.*slice the weight by rows|BCQ-E554"):
        to_device(wide, "canonical", "cpu")


def test_weights_whose_numbers_leave_float32_are_dequantized() -> None:
    from bcqfmt import BcqWeight

    huge = np.full((2, 2), 3e38, np.float32)
    weight = BcqWeight.from_affine(np.full((2, 64), 255), huge, 0, group_size=32, bits=8)
    assert not matmul.MatmulWeight(operand(weight)).linear
    assert matmul.MatmulWeight(operand(ks.weight("affine", 2, 2, 64, 32))).linear


def _as_tensor(array: Any, target: Any) -> torch.Tensor:
    plain = np.array(array)
    return torch.from_numpy(plain.view(np.int32) if plain.dtype == np.uint32 else plain)


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go to a GPU stays where it is."""
    monkeypatch.setattr(device, "upload", lambda array, target: array)
    monkeypatch.setattr(device, "tensor", _as_tensor)
    monkeypatch.setattr(device, "settle", lambda array: None)


def kernel_of(weight: matmul.MatmulWeight, vectors: int, dtype: str = "F16") -> str:
    path = matmul.path_of(weight, vectors, dtype)
    assert (path.kernel == "gemm") == (path.why == "")
    return path.kernel


@pytest.mark.usefixtures("on_the_host")
def test_the_way_of_a_product_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        for planes in range(1, 9):
            weight = matmul.MatmulWeight(operand(ks.weight("bcq", planes, 2, 64, 32)))
            assert [kernel_of(weight, n) for n in (1, 9, 256, 257, 4096)] == [
                "bits",
                *["gemm"] * 2,
                *["dequantize"] * 2,
            ]
            assert [kernel_of(weight, n, "F32") for n in (1, 4096)] == ["bits", "dequantize"]
    with monkeypatch.context() as patch:  # on a GPU of capability 9.0
        patch.setattr(device, "gpu_of", lambda array: 0)
        weight = matmul.MatmulWeight(operand(ks.weight("bcq", 4, 2, 64, 32)))
        assert [kernel_of(weight, n) for n in (9, 257, 100_000)] == ["gemm"] * 3
    odd = matmul.MatmulWeight(operand(ks.weight("bcq", 2, 2, 60, 12)))
    assert [kernel_of(odd, n, kind) for n in (1, 2) for kind in ("F16", "F32")] == ["look-up"] * 2 + ["dequantize"] * 2
    short = [matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 256, g))) for g in (8, 16, 32)]
    assert [[weight.at_once(kind) for weight in short] for kind in ("F16", "F32")] == [[2, 4, 8], [1, 2, 4]]
    assert [[kernel_of(weight, n) for weight in short] for n in (2, 3, 6, 7)] == [
        *[["bits", "gemm", "gemm"]] * 3, ["dequantize", "gemm", "gemm"],
    ]  # fmt: skip
    assert [[kernel_of(weight, n, "F32") for weight in short] for n in (3, 6, 7, 8, 28)] == [
        ["bits"] * 3, ["look-up", "bits", "bits"], ["look-up", "look-up", "bits"], *[["dequantize"] * 2 + ["bits"]] * 2
    ]  # fmt: skip
    permuted = matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 256, 32, perm=True)))
    assert [kernel_of(permuted, n) for n in (4, 5)] == ["bits", "gemm"]
    for g in (32, 128):
        usual = matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 256, g)))
        assert [kernel_of(usual, n) for n in (1, 2)] == ["gemm", "gemm"]
        assert "bits" not in usual.__dict__  # one layout
    eight = matmul.MatmulWeight(operand(ks.weight("affine", 8, 2, 256, 32)))  # bfloat16 has no room for such codes
    assert [kernel_of(eight, n, "BF16") for n in (24, 25)] == ["bits", "dequantize"]
    for columns, g, most in ((49160, 8, 3), (100, 32, 24), (100, 16, 12)):
        slow = matmul.MatmulWeight(operand(ks.weight("affine", 1, 2, columns, g, perm=True)))
        assert [kernel_of(slow, n) for n in (most, most + 1)] == ["bits", "dequantize"]
    monkeypatch.setattr(device, "capability", lambda index: (8, 0))
    slow = matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 49160, 8, perm=True)))
    assert [kernel_of(slow, n) for n in (3, 4)] == ["look-up", "dequantize"]
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
    several = matmul.MatmulWeight(operand(ks.weight("bcq", 4, 2, 192, 96)))
    assert [kernel_of(several, n) for n in (3, 4)] == ["look-up", "dequantize"]
    wide, without = (ks.weight("affine", 1, 2, 65536, 128, outliers=mode, share=0.001) for mode in ("add", ""))
    assert kernel_of(matmul.MatmulWeight(operand(without)), 1) == "bits"
    assert kernel_of(matmul.MatmulWeight(operand(wide)), 1) == "bits"  # and outliers by themselves
    for least, found in ((2, "small"), (3, "affine"), (5, "bcq")):
        monkeypatch.setattr("bcqfmt.kernels.matmul_weight.SMALL", 512 if found == "small" else 511)
        for encoding in ("affine", "bcq") if found == "small" else (found,):
            sized = matmul.MatmulWeight(operand(ks.weight(encoding, 3, 2, 256, 32)))
            assert [kernel_of(sized, n) for n in (least - 1, least)] == ["bits", "gemm"]
    for capability in ((8, 0), (8, 6), (12, 0)):  # where no matrix is small
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        for encoding in ("affine", "bcq"):
            sized = matmul.MatmulWeight(operand(ks.weight(encoding, 3, 2, 256, 32)))
            assert [kernel_of(sized, n) for n in (1, 2)] == ["bits", "gemm"]
        long = matmul.MatmulWeight(operand(ks.weight("bcq", 4, 2, 28672, 128)))
        assert kernel_of(long, 1) == ("bits" if capability == (8, 0) else "gemm")
        assert kernel_of(long, 7, "F32") == "look-up"  # at most one of these vectors fits
        assert (long.bits is None) == (capability != (8, 0))  # nothing is made that does not fit


@pytest.mark.usefixtures("on_the_host")
def test_a_path_says_why_it_is_not_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
    usual, short, eight = (
        matmul.MatmulWeight(operand(ks.weight("affine", q, 2, 256, g))) for q, g in ((4, 64), (4, 8), (8, 32))
    )
    far = BcqWeight.from_bcq(
        np.zeros((1, 2, 64), np.uint8), np.full((1, 2, 1), 2.0**-24, np.float16), np.full((2, 1), 6e4, np.float16),
        group_size=64,
    )  # fmt: skip
    numbers = BcqWeight.from_table(
        np.zeros((2, 64), int), np.ones((2, 1), np.float16), [3**i for i in range(16)], group_size=64
    )
    wide, table = (matmul.MatmulWeight(operand(weight)) for weight in (far, numbers))
    bcq = matmul.MatmulWeight(operand(ks.weight("bcq", 3, 2, 256, 64)))
    odd = matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 60, 60)))
    few = matmul.MatmulWeight(
        operand(BcqWeight.from_table(np.zeros((2, 64), int), np.ones((2, 1), np.float16), [0, 1], group_size=64))
    )
    second = BcqWeight.from_segments([ks.weight("affine", 4, 2, 64, g) for g in (64, 8)])
    groups = "segment 0 has groups of 8 columns: not 16, 32, a multiple of 64 or whole rows"
    told = {
        (few, 1, "F16"): ("dequantize", "segment 0 has a table of 2 numbers: not of 16"),
        (matmul.MatmulWeight(operand(second)), 1, "F16"): ("bits", groups.replace("0", "1")),
        (usual, 9, "F16"): ("gemm", ""),
        (usual, 257, "F16"): ("dequantize", "more than 256 vectors on a GPU that is not sm_90"),  # there is no GPU
        (usual, 1, "F32"): ("bits", "x is F32: `gemm` multiplies F16 and BF16"),
        (short, 1, "F16"): ("bits", groups),
        (short, 99, "F16"): ("dequantize", groups),
        (eight, 30, "BF16"): ("dequantize", "segment 0 has codes of 8 bits: BF16 holds 7"),
        (wide, 9, "F16"): ("bits", "a row whose bias or zero, relative to its scales, is too large for F16"),
        (table, 1, "F16"): (
            "dequantize",
            "segment 0 has a table with 2187: F16 numbers up to 16384 are looked up",
        ),
        (bcq, 1, "F16"): ("bits", "fewer than 2 vectors: `bits` is faster"),
        (odd, 9, "F16"): ("bits", "columns of the matrix, or of a segment, that are not a multiple of 8"),
    }
    for (weight, vectors, dtype), wanted in told.items():
        assert matmul.path_of(weight, vectors, dtype) == wanted
    assert "F16" not in bcq._gemm  # it was not made only to be asked
    with pytest.raises(BcqError, match=r"BCQ-E553.*groups of 8 columns"):
        gemm_operand(short.operand, "F16")
    monkeypatch.setattr("bcqfmt.kernels.gemm.LIMIT", 15)
    large = matmul.MatmulWeight(operand(ks.weight("affine", 4, 2, 256, 64)))
    assert large.obstacle("F16") == "2048 words, expected at most 15"


@pytest.mark.usefixtures("on_the_host")
def test_one_layout_is_enough_where_memory_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
    weight, short = operand(ks.weight("affine", 3, 640, 512, 64)), operand(ks.weight("affine", 4, 2, 64, 8))
    for chosen in ("both", "one"):
        monkeypatch.setenv("BCQFMT_GPU_LAYOUTS", chosen)
        placed = matmul.MatmulWeight(weight)
        paths = [kernel_of(placed, n) for n in (1, 2, 16, 256, 257)]
        assert paths == ["bits" if chosen == "both" else "gemm", "gemm", "gemm", "gemm", "dequantize"]
        assert ("bits" in placed.__dict__) == (chosen == "both")
        assert placed.gemm("F16") is not None
        assert kernel_of(matmul.MatmulWeight(short), 1) == "bits"  # gemm does not take it
        assert kernel_of(placed, 1, "F32") == "bits"
    monkeypatch.setenv("BCQFMT_GPU_LAYOUTS", "two")
    with pytest.raises(BcqError, match=r"BCQ-E302.*BCQFMT_GPU_LAYOUTS=two.*one or both"):
        matmul.MatmulWeight(weight)


@pytest.mark.usefixtures("on_the_host")
def test_two_and_four_bit_weights_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, ways in (((8, 0), ["bits", "gemm"]), ((9, 0), ["mixed", "mixed"])):
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        weight = sim_mixed.weight(20, 256, 128, outliers="add")
        placed = matmul.MatmulWeight(operand(weight), None, weight)
        assert [kernel_of(placed, n) for n in (1, 19, 20, 257)] == [*ways, "gemm", "dequantize"]
        assert kernel_of(matmul.MatmulWeight(operand(weight)), 1) == "bits"  # no weight to look at
    assert [kernel_of(placed, n, "F32") for n in (35, 36)] == ["mixed", "dequantize"]
    plain = ks.weight("second-order", 2, 40, 64, 8)
    assert kernel_of(matmul.MatmulWeight(operand(plain), None, plain), 1) == "bits"
