"""Calls that must be refused, run in the simulator, where everything but the argument in question is in order.

And products that are carried out vector by vector.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.kernels import dequant, lut, matmul, matmul_weight, mixed
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device
from bcqfmt.kernels.runtime import checks, device, launch
from products import kernel_samples as ks


def refused(case: str) -> str:
    """The code and text of the error that a case raises."""
    weight = operand(ks.weight("bcq", 2, 6, 64, 32))
    look_up, exact = to_device(weight, "lut-gemm"), to_device(weight, "canonical")
    x = np.ones((1, 64), np.float16)
    room = np.zeros(6 * 64 * 4 + 64, np.uint8)
    half = np.dtype(np.float16)
    calls: dict[str, Any] = {
        "x of another length": lambda: lut.lut_gemv(look_up, np.ones((1, 63), np.float16)),
        "x of three dimensions": lambda: lut.lut_gemv(look_up, np.ones((1, 1, 64), np.float16)),
        "x of integers": lambda: lut.lut_gemv(look_up, np.ones((1, 64), np.int32)),
        "x in float64": lambda: lut.lut_gemv(look_up, np.ones((1, 64))),
        "x with strides": lambda: lut.lut_gemv(look_up, np.ones((1, 128), np.float16)[:, ::2]),
        "x at an odd address": lambda: lut.lut_gemv(look_up, room[1:129].view(half).reshape(1, 64)),
        "no vector": lambda: lut.lut_gemv(look_up, np.ones((0, 64), np.float16)),
        "nine vectors": lambda: lut.lut_gemv(look_up, np.ones((9, 64), np.float16)),
        "x that is a list": lambda: lut.lut_gemv(look_up, [1.0] * 64),
        "the wrong layout": lambda: lut.lut_gemv(exact, x),
        "the other wrong layout": lambda: dequant.dequantize(look_up),
        "an unknown layout": lambda: to_device(weight, "tiles"),
        "out of another shape": lambda: lut.lut_gemv(look_up, x, out=np.zeros((1, 7), np.float16)),
        "out of integers": lambda: lut.lut_gemv(look_up, x, out=np.zeros((1, 6), np.int16)),
        "dense in float64": lambda: dequant.dequantize(exact, "float64"),
        "dense in nonsense": lambda: dequant.dequantize(exact, "float12"),
        "dense into another shape": lambda: dequant.dequantize(exact, out=np.zeros((6, 63), np.float16)),
        "dense into another type": lambda: dequant.dequantize(exact, "float16", out=np.zeros((6, 64), np.float32)),
        "dense at an odd address": lambda: dequant.dequantize(exact, out=room[8:776].view(half).reshape(6, 64)),
        "matmul of another length": lambda: matmul.matmul(matmul.MatmulWeight(weight), np.ones(65, np.float16)),
        "a scalar": lambda: matmul.matmul(matmul.MatmulWeight(weight), np.ones((), np.float16)),
        "a grid too high": lambda: _grid((1, 65536)),
        "a grid too wide": lambda: _grid((2**31, 1)),
        "too many elements": lambda: checks.check_array("x", _vast(), ("U8",), (None,)),
    }
    calls[case]()
    return "nothing was refused"


CASES = {
    "x of another length": ("BCQ-E552", "shape [1, 63]"),
    "x of three dimensions": ("BCQ-E552", "shape [1, 1, 64]"),
    "x of integers": ("BCQ-E552", "dtype I32"),
    "x in float64": ("BCQ-E552", "dtype F64"),
    "x with strides": ("BCQ-E552", "not contiguous"),
    "x at an odd address": ("BCQ-E552", "no multiple of 2"),
    "no vector": ("BCQ-E552", "0 vectors"),
    "nine vectors": ("BCQ-E552", "9 vectors"),
    "x that is a list": ("BCQ-E552", "a list"),
    "the wrong layout": ("BCQ-E552", "layout canonical"),
    "the other wrong layout": ("BCQ-E552", "layout lut-gemm"),
    "an unknown layout": ("BCQ-E552", "tiles"),
    "out of another shape": ("BCQ-E552", "shape [1, 7]"),
    "out of integers": ("BCQ-E552", "dtype I16"),
    "dense in float64": ("BCQ-E552", "float64"),
    "dense in nonsense": ("BCQ-E552", "float12"),
    "dense into another shape": ("BCQ-E552", "shape [6, 63]"),
    "dense into another type": ("BCQ-E552", "dtype F32"),
    "dense at an odd address": ("BCQ-E552", "no multiple of 16"),
    "matmul of another length": ("BCQ-E552", "shape [65]"),
    "a scalar": ("BCQ-E552", "shape []"),
    "a grid too high": ("BCQ-E554", "65536"),
    "a grid too wide": ("BCQ-E554", "2147483648"),
    "too many elements": ("BCQ-E554", "2147483648 elements"),
}


def _grid(size: tuple[int, int]) -> None:
    idle = launch.kernel("u32* y", threads=32)(lambda y: None)
    idle.launch(size, 32, np.zeros(1, np.uint32))


def _vast() -> Any:
    """2^31 bytes that are never touched."""
    return np.zeros(2**31, np.uint8)


def hostile_tensors(which: str) -> Any:
    """A product with wrong indices in device arrays: skipped, never followed; the simulator would notice."""
    from dataclasses import replace

    plain = operand(ks.weight("bcq", 2, 6, 64, 32, perm=True, outliers="add", share=0.2))
    placed = to_device(plain, "lut-gemm")
    bad = np.array([2**31 - 1, -1, 64, 2**20] * 16, np.int32)
    if which == "perm":
        placed = replace(placed, perm=bad)
    elif which == "indices":
        placed = replace(placed, indices=np.resize(bad, placed.indices.shape))
    else:
        placed = replace(placed, indptr=np.array([-7, 2**30, 5, -(2**31), 2**31 - 1, 0, 2**31 - 1], np.int32))
    return lut.lut_gemv(placed, np.ones((1, 64), np.float16))


def hostile_dense(which: str) -> Any:
    """The same for dense matrices."""
    from dataclasses import replace

    placed = to_device(operand(ks.weight("bcq", 2, 6, 64, 32, perm=True, outliers="add", share=0.2)), "canonical")
    bad = np.array([2**31 - 1, -1, 64, 2**20] * 16, np.int32)
    if which == "perm":
        placed = replace(placed, perm=bad, stored=bad)
    elif which == "indices":
        placed = replace(placed, indices=np.resize(bad, placed.indices.shape))
    else:
        placed = replace(placed, indptr=np.array([-7, 2**30, 5, -(2**31), 2**31 - 1, 0, 2**31 - 1], np.int32))
    return dequant.dequantize(placed)


def one_by_one(weight: BcqWeight, x: Any) -> tuple[str, Any]:
    """The path and the product where a launch takes one vector, as with weights whose rows are long."""
    with (
        mock.patch.object(device, "capability", return_value=(9, 0)),
        mock.patch.object(mixed, "batch_limit", return_value=1),
        mock.patch.object(matmul.MatmulWeight, "at_once", return_value=1),
        mock.patch.object(matmul_weight, "SMALL", 0),
    ):
        placed = matmul.MatmulWeight(operand(weight), None, weight)
        return matmul.path_of(placed, len(x)).kernel, matmul.matmul(placed, x)
