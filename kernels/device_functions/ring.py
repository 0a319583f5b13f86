"""A ring of buffers in shared memory that a producer warp fills: what its kernels have in common."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined


def next_stage(stages: int) -> Any:
    """A device function: where a producer warp stands after one more copy. Every tile is begun at block ``turn``.

    Tile, block, blocks that the tile still has (of ``blocks``), buffer, parity of the buffer's barrier.
    """

    def advance(
        tile: Any, block: Any, left: Any, spot: Any, parity: Any, step: Any, turn: Any, blocks: Any
    ) -> Any:  # fmt: skip
        block, left = ptx.u32(block + 1), ptx.u32(left - 1)
        if block == blocks:
            block = ptx.u32(0)
        if left == 0:
            tile, block, left = ptx.u32(tile + step), turn, blocks
        spot = ptx.u32(spot + 1)
        if spot == stages:
            spot, parity = ptx.u32(0), ptx.u32(parity ^ 1)
        return tile, block, left, spot, parity

    return inlined(advance)
