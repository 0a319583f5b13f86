"""5 to 8 planes to 16-bit numbers on the device: as in `cuda_dequant.tables` a word of columns for each thread.

More than 16 values are too many to compute beforehand, so every element is computed, exactly as `cuda_dequant` says;
its planes and numbers are loaded once for 32 columns, and stores go through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.cuda_dequant import THREADS, code_value, rounding, row_writer
from bcqfmt.kernels.launch import Kernel, kernel
from bcqfmt.kernels.ptx_numba import cuda, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["compile_cases", "words"]


@functools.cache
def words(q: int, formula: int, numbers: str, logical: int, result: int, twice: bool = False) -> Kernel:
    """One segment: group size a multiple of 32, everything a multiple of 8 columns, no reordering.

    Arguments and shape of the grid as of `cuda_dequant.tables`.
    """
    staged, write, value_of = THREADS * 16, row_writer(), code_value(formula, logical)
    rounded = rounding(logical if twice else None)
    narrow = ptx.f64_to_f16 if result == 1 else ptx.f64_to_bf16
    nan = 0x7E00 if result == 1 else 0x7FC0

    @kernel(
        f"u32* planes, {numbers}* first, {numbers}* second, u32* dense, u32 rows, u32 columns, u32 start, u32 width, "
        "u32 words, u32 groups, u32 group_words",
        threads=THREADS,
        blocks=3,
        variant=repr((q, formula, numbers, logical, result, twice)),
    )
    @unrolled
    def dequantize_words(
        planes: Any, first: Any, second: Any, dense: Any, rows: Any, columns: Any, start: Any, width: Any,
        words: Any, groups: Any, group_words: Any,
    ) -> None:  # fmt: skip
        stage = cuda.shared.array(staged, types.uint32)
        plane = cuda.local.array(q, types.uint32)
        alpha = cuda.local.array(q, types.float64)
        lane = ptx.lane_id()
        warp = ptx.u32(cuda.threadIdx.x >> 5)
        base = ptx.u32(ptx.shared_address(stage) + warp * 2048)
        row = ptx.u32(cuda.blockIdx.x * (cuda.blockDim.x >> 5) + warp)
        front = ptx.u32(cuda.blockIdx.y * 32)
        if row < rows:
            word = ptx.min_u32(front + lane, words - 1)
            group = ptx.div_u32(word, group_words)
            at = ptx.u32(row * groups + group)
            for i in static(q):
                plane[i] = ptx.ldg32(planes, ptx.u32((i * rows + row) * words + word))
                if formula == 3:
                    alpha[i] = ptx.f64(first[ptx.u32((i * rows + row) * groups + group)])
            scale = ptx.f64(0.0) if formula == 3 else ptx.f64(first[at])
            other = ptx.f64(second[at])
            for k in range(4):
                pairs = cuda.local.array(4, types.uint32)
                for m in static(8):
                    if formula == 3:
                        exact = other
                        for i in static(q):
                            chosen = alpha[i] if plane[i] >> m & 1 else -alpha[i]
                            exact = ptx.add_f64(exact, chosen)
                    else:
                        code = ptx.u32(0)
                        for i in static(q):
                            up = q - 1 - i
                            moved = plane[i] >> (m - up) if m >= up else plane[i] << (up - m)
                            code = ptx.u32(code | moved & (1 << up))
                        exact = value_of(scale, other, code)
                    exact = rounded(exact)
                    bits = narrow(exact) if exact == exact else ptx.u32(nan)
                    pairs[m // 2] = ptx.u32(pairs[m // 2] | bits << 16) if m % 2 else bits
                for i in static(q):
                    plane[i] = ptx.u32(plane[i] >> 8)
                slot = ptx.u32((lane * 4 + (k ^ (lane >> 1 & 3))) * 16)
                ptx.sts128(base + slot, ptx.u32(0), pairs[0], pairs[1], pairs[2], pairs[3])
            ptx.syncwarp()
            write(dense, base, lane, row, front, columns, start, width)

    return dequantize_words


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What `tests/kernels/compile_check.py` compiles."""
    return {"words": [(8, 0, "f32", 1, 1), (5, 3, "f32", 1, 2), (6, 1, "f32", 2, 2), (8, 0, "f32", 1, 2, True)]}
