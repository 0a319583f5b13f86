"""Tensor maps: where the copy engine of sm_90 finds the boxes of a matrix; a kernel's argument of the kind ``map``.

A box of 64 columns comes to shared memory as rows of 128 bytes whose 16-byte pieces are exchanged by the row modulo 8,
which is how the tensor cores want them; zeros stand for what is outside of the matrix. A map is part of the arguments
of a launch, 128 bytes of them, so it lives as long as these do, also in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
from dataclasses import dataclass
from typing import Any

from bcqfmt.errors import error

from . import device

MAP_BYTES = 128
_COLUMNS = 64  # of a box: 128 bytes


@dataclass(frozen=True, eq=False, slots=True)
class TensorMap:
    """Columns ``start`` .. ``start + width`` of ``array`` (rows, columns), 16-bit numbers, in boxes of ``box`` rows.

    The array begins at a multiple of 16 bytes; ``start`` and its columns are multiples of 8.
    """

    array: Any
    start: int
    width: int
    box: int

    def encoded(self) -> bytes:
        """What the driver makes of it."""
        found = device.describe(self.array)
        return _encoded(found.address + 2 * self.start, found.shape[0], self.width, 2 * found.shape[1], self.box)


@functools.lru_cache(maxsize=4096)
def _encoded(address: int, rows: int, width: int, step: int, box: int) -> bytes:
    driver: Any = importlib.import_module("cuda.bindings.driver")
    long, word = driver.cuuint64_t, driver.cuuint32_t
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, address, [long(width), long(rows)], [long(step)],
        [word(_COLUMNS), word(box)], [word(1), word(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if status != 0:
        raise error("BCQ-E551", found=f"a tensor map of {rows} x {width}: {status.name}")
    return ctypes.string_at(made.getPtr(), MAP_BYTES)


def maps_by_value(text: str, numbers: list[int]) -> str:
    """The PTX of a kernel in which the arguments of these numbers, addresses for Numba, are maps themselves."""
    for number in numbers:
        name = rf"(\w+_param_{number})"
        text, declared = re.subn(rf"\.param \.u64 {name}\b", rf".param .align 64 .b8 \1[{MAP_BYTES}]", text)
        text, read = re.subn(
            rf"ld\.param\.u64\s+(%rd\d+), \[{name}\];", r"mov.u64 \1, \2; cvta.param.u64 \1, \1;", text
        )
        if declared != 1 or not read:  # by another version of the compiler
            raise error("BCQ-E551", found=f"PTX in which argument {number} is declared {declared} times, read {read}")
    return text
