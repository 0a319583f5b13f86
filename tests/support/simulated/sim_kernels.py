"""What the tests ask of the simulator: products and dense matrices, with guards around every result."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from bcqfmt import BcqError, BcqWeight
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels import bits, dequant, lut, matmul, mixed
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device

_GUARD = 64  # elements before and after a result
_PATTERN = 0xA5


class Guarded(NamedTuple):
    """A result; whether a second run, if there was one, gave the same bits; whether the guards are untouched."""

    value: Any
    same: bool
    intact: bool


def guarded(shape: tuple[int, ...], dtype: str, run: Any, small: int = 32) -> Guarded:
    """Run into memory full of NaN, which stays where nothing is written and spreads from where it is read.

    A result of at most ``small`` elements is made a second time, over zeros: the simulator is slow.
    """
    found, intact = [], True
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape))
    for fill in (0xFF, 0x00) if size <= small else (0xFF,):
        room = np.full((size + 2 * _GUARD) * kind.itemsize, _PATTERN, np.uint8)
        inside = room[_GUARD * kind.itemsize : -_GUARD * kind.itemsize]
        inside[:] = fill
        run(inside.view(kind).reshape(shape))
        found.append(inside.view(kind).reshape(shape).copy())
        outside = np.concatenate([room[: _GUARD * kind.itemsize], room[-_GUARD * kind.itemsize :]])
        intact &= bool((outside == _PATTERN).all())
    return Guarded(found[0], found[0].tobytes() == found[-1].tobytes(), intact)


def lut_gemv(
    weight: BcqWeight,
    x: Any,
    *,
    result: str = "F32",
    planes: int | None = None,
    index: int | None = None,
    threads: int = 32,
) -> Guarded:
    """``x W^T`` by the readable look-up kernel."""
    placed = to_device(operand(weight, planes=planes, index=index), "lut-gemm")

    def run(out: Any) -> None:
        with mock.patch("bcqfmt.kernels.lut.kernel.THREADS", threads):
            lut.lut_gemv(placed, x, out=out)

    return guarded((x.shape[0], weight.spec.out), result, run)


def dequantize(
    weight: BcqWeight, dtypes: tuple[str, ...] = ("F16", "BF16", "F32"), *, planes: int | None = None,
    threads: int = 64, by_way_of_the_logical: bool = False,
) -> list[Guarded]:  # fmt: skip
    """The dense matrix in several dtypes."""
    placed = to_device(operand(weight, planes=planes), "canonical")

    def run(out: Any) -> None:
        with mock.patch("bcqfmt.kernels.dequant.rows.THREADS", threads):
            dequant.dequantize(placed, out.dtype.name, out=out, twice=by_way_of_the_logical)

    return [guarded(weight.shape, dtype, run, small=1024 if dtype == dtypes[0] else 0) for dtype in dtypes]


def fast_segments(weight: BcqWeight, dtype: str) -> list[bool]:
    """Which segments the fast dequantizer takes."""
    placed = to_device(operand(weight), "canonical")
    return dequant.in_words(placed, dtype)


def product(weight: BcqWeight, x: Any) -> Any:
    """`matmul`, whichever way it chooses."""
    return matmul.matmul(matmul.MatmulWeight(operand(weight)), x)


def refusals(weight: BcqWeight) -> list[str]:
    """With which codes look-ups, the fast product and the 2/4-bit product refuse a weight."""
    found = []
    made = operand(weight)
    for take in (
        lambda: to_device(made, "lut-gemm"),
        lambda: bits.bit_operand(made),
        lambda: mixed.mixed_operand(weight),
    ):
        try:
            take()
        except BcqError as refusal:
            found.append(refusal.code)
    return found
