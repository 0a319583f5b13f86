"""What a kernel cannot take is refused before the launch, with a code and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import kernel_samples as ks
import sim_errors
import sim_mixed
from bcqfmt.errors import BcqError
from bcqfmt.kernels import device, launch, matmul
from bcqfmt.kernels.operands import Operand, OperandSegment, operand
from bcqfmt.kernels.operands_device import to_device
from cuda_sim import SimulationError, simulate

pytestmark = pytest.mark.xdist_group("simulator-kernel_errors")


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


def _no_gpu(code: str) -> str:
    """The output of a program that sees no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


def test_no_gpu() -> None:
    said = _no_gpu(
        "from bcqfmt.kernels import device\n"
        "try:\n    device.require_cuda()\n"
        "except Exception as fault:\n    print(fault, '|', fault.hint)\n"
    )
    assert said.startswith("BCQ-E551: no usable CUDA device: ")
    assert said.count("\n") == 1
    assert "use the CPU kernels" in said
    assert "Traceback" not in said


def test_no_numba_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device._trouble.cache_clear()
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(BcqError, match="BCQ-E306") as caught:
            matmul.lut_gemv(None, None)  # type: ignore[arg-type]
        assert "pip install 'bcqfmt[cuda]'" in caught.value.hint
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
    torch = pytest.importorskip("torch")
    with pytest.raises(BcqError, match=r"BCQ-E552.*on the host"):
        launch.check_array("x", torch.ones(4), ("F32",), (4,))
    with pytest.raises(BcqError, match=r"BCQ-E552.*on the host"):
        launch.check_array("x", np.ones(4, np.float32), ("F32",), (4,))
    assert device.describe(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == "BF16"
    assert not device.describe(torch.ones(2, 4).T).contiguous


class _On:
    """Something on a device of a number."""

    def __init__(self, index: int) -> None:
        self.index = index


def test_arrays_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "place_of", lambda array: array.index)
    launch.check_same_device(x=_On(1), y=_On(1), z=None)
    with pytest.raises(BcqError, match=r"BCQ-E552.*x on cuda:0, y on the host"):
        launch.check_same_device(x=_On(0), y=_On(-1))


def test_uploading_without_a_gpu() -> None:
    said = _no_gpu(
        "import numpy as np\nfrom bcqfmt.kernels import device\n"
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
        dtype="F16",
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


def test_the_way_of_a_product_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "upload", lambda array, target: array)
    monkeypatch.setattr(device, "settle", lambda array: None)
    for capability, quick in (((8, 0), "look-up"), ((9, 0), "bits")):
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        for planes in range(1, 9):
            weight = matmul.MatmulWeight(operand(ks.weight("bcq", planes, 2, 64, 32)))
            assert matmul.path_of(weight, 1) == quick
            assert matmul.path_of(weight, 4096) == "dequantize"
    odd = matmul.MatmulWeight(operand(ks.weight("bcq", 2, 2, 60, 12)))
    assert matmul.path_of(odd, 1) == "look-up"
    wide, without = (ks.weight("affine", 1, 2, 65536, 128, outliers=mode, share=0.001) for mode in ("add", ""))
    assert matmul.path_of(matmul.MatmulWeight(operand(without)), 1) == "bits"
    assert matmul.path_of(matmul.MatmulWeight(operand(wide)), 1) == "look-up"  # x does not fit twice


def test_two_and_four_bit_weights_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "upload", lambda array, target: array)
    monkeypatch.setattr(device, "settle", lambda array: None)
    for capability, way, other in (((8, 0), "look-up", "look-up"), ((9, 0), "mixed", "bits")):
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        weight = sim_mixed.weight(20, 256, 128, outliers="add")
        assert matmul.path_of(matmul.MatmulWeight(operand(weight), None, weight), 1) == way
        assert matmul.path_of(matmul.MatmulWeight(operand(weight)), 1) == other  # no weight to look at
    plain = ks.weight("second-order", 2, 40, 64, 8)
    assert matmul.path_of(matmul.MatmulWeight(operand(plain), None, plain), 1) == "bits"
