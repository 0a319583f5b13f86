"""Words of codes that a lane takes from shared memory."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined


def words_of(width: int) -> Any:
    """A device function: the words of a field of that width that a lane has, of those of a warp at an address."""

    def one(address: Any, lane: Any) -> Any:
        return (ptx.lds32(ptx.u32(address + lane * 4), ptx.u32(0)),)

    def three(address: Any, lane: Any) -> Any:
        return (
            ptx.lds32(ptx.u32(address + lane * 12), ptx.u32(0)),
            ptx.lds32(ptx.u32(address + lane * 12), ptx.u32(4)),
            ptx.lds32(ptx.u32(address + lane * 12), ptx.u32(8)),
        )

    def two(address: Any, lane: Any) -> Any:
        return ptx.lds64(ptx.u32(address + lane * 8), ptx.u32(0))

    def four(address: Any, lane: Any) -> Any:
        return ptx.lds128(ptx.u32(address + lane * 16), ptx.u32(0))

    def eight(address: Any, lane: Any) -> Any:
        low = ptx.lds128(ptx.u32(address + lane * 16), ptx.u32(0))
        high = ptx.lds128(ptx.u32(address + lane * 16), ptx.u32(512))
        return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]

    return inlined({1: one, 2: two, 3: three, 4: four, 8: eight}[width])
