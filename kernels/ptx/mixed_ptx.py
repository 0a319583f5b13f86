"""Three more instructions in the manner of `ptx`.

===========================  =====================================================================================
shared memory                lds8 lds16(address, offset) -> word: 8 or 16 bits, the rest is 0
tensor cores                 mma_u8: m16n8k32 like ``ptx.mma_s8``, but A's bytes are unsigned
===========================  =====================================================================================
"""

from __future__ import annotations

from typing import Any

from . import SIMULATED

__all__ = ["lds8", "lds16", "mma_u8"]

if SIMULATED:
    import numpy as np

    from bcqfmt.kernels.simulator import arithmetic as twins
    from bcqfmt.kernels.simulator.block import slot_of
    from bcqfmt.kernels.simulator.memory import multiplied

    def lds8(address: int, offset: int) -> int:
        """8 bits, the rest is 0."""
        return int(slot_of(address + offset, 1)[0])

    def lds16(address: int, offset: int) -> int:
        """16 bits, the upper half is 0."""
        return int(slot_of(address + offset, 2).view(np.uint16)[0])

    def mma_u8(*operands: Any) -> tuple[int, ...]:
        """The four sums of the calling lane: twice the upper seven bits, once the lowest."""

        def whole(a: Any, b: Any, sums: Any) -> Any:
            return 2 * twins.mma_s8_warp(a >> 1 & 0x7F7F7F7F, b, 0 * sums) + twins.mma_s8_warp(a & 0x01010101, b, sums)

        return tuple(int(v) for v in multiplied(operands, np.int64, whole))

else:
    from .asm import I32, U32, asm

    _LDS16 = "{ .reg .u32 a; .reg .u16 h; add.u32 a, $1, $2; ld.shared.u16 h, [a]; cvt.u32.u16 $0, h; }"
    lds16 = asm(_LDS16, U32, U32, U32, effects="memory")
    lds8 = asm("{ .reg .u32 a; add.u32 a, $1, $2; ld.shared.u8 $0, [a]; }", U32, U32, U32, effects="memory")
    _MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
    _MMA += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    mma_u8 = asm(_MMA, I32, *(U32,) * 6, *(I32,) * 4, count=4, effects="warp")
