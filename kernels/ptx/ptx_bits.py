"""More instructions in the manner of `ptx`, for the kernel that multiplies bit planes on tensor cores.

===========================  =====================================================================================
tensor cores                 mma_b1(a0, a1, b0): 16 x 128 by 128 x 8 bits, and + popcount, sums from 0;
                             mma_b1_wide(a0..a3, b0, b1): 16 x 256 by 256 x 8
shared memory                sts8(address, offset, word): the lowest byte
bulk copies, sm_90           bulk_init(barrier) bulk_fence() bulk_expect(barrier, bytes); bulk_copy(p, i, address,
                             bytes, barrier): 16-byte pieces from piece i on; bulk_wait(barrier, parity)
arrivals, sm_90              arrivals_init(barrier, count) arrive(barrier): so many end a phase; bulk_wait as above
warps with different work    meet(): all threads of the block, from whichever instruction each warp comes;
                             barrier_of(id, threads): some warps, all at the same instruction
integers                     mad_i32(a, b, c): a * b + c, in this order; the compiler would turn a sum of products
                             round and need one instruction more
global memory                ask_for(p, i): the 16 bytes i, with their neighbours, into the second cache
the kernels around, sm_90    after_earlier(): until all that was launched before is done and can be seen;
                             begin_next(): the next kernel may start, up to where it waits for this one
===========================  =====================================================================================

Fragments of ``mma_b1``: lane l has row l // 4 (a0) and l // 4 + 8 (a1), columns 32 (l % 4) .. + 31 of A; column l // 4,
the same 32 of B; of the sums rows l // 4 (first two) and l // 4 + 8, columns 2 (l % 4) and the next. The wide one has
columns 128 .. 255 in a2, a3 and b1.
"""

from __future__ import annotations

from typing import Any

from . import SIMULATED

__all__ = [
    "after_earlier", "arrivals_init", "arrive", "ask_for", "barrier_of", "begin_next", "bulk_copy", "bulk_expect",
    "bulk_fence", "bulk_init", "bulk_wait", "mad_i32", "meet", "mma_b1", "mma_b1_wide", "sts8",
]  # fmt: skip

if SIMULATED:
    import numpy as np

    from bcqfmt.kernels.simulator.block import current, named_barrier, pause, slot_of, together, wake
    from bcqfmt.kernels.simulator.memory import lane_id

    def mma_b1(*operands: Any) -> tuple[int, ...]:
        """The four sums of the calling lane."""
        return _sums(operands, 2)

    def mma_b1_wide(*operands: Any) -> tuple[int, ...]:
        """The four sums of the calling lane."""
        return _sums(operands, 4)

    def _sums(operands: Any, words: int) -> tuple[int, ...]:
        def whole(lanes: list[Any]) -> Any:
            given = np.array([[int(word) & 0xFFFFFFFF for word in lane] for lane in lanes], np.uint32)
            rows = given[:, :words].reshape(8, 4, words // 2, 2).transpose(3, 0, 1, 2).reshape(16, -1)
            columns = given[:, words:].reshape(8, -1)
            return np.bitwise_count(rows[:, None] & columns[None]).sum(-1, dtype=np.int64)

        sums = together(operands, whole)
        row, column = lane_id() // 4, 2 * (lane_id() % 4)
        return tuple(int(sums[row + 8 * (i // 2), column + i % 2]) for i in range(4))

    def mad_i32(a: Any, b: Any, c: Any) -> Any:
        """The last 32 bits, signed."""
        return ((int(a) * int(b) + int(c) + 2**31) % 2**32) - 2**31

    def sts8(address: int, offset: int, word: int) -> None:
        """The lowest byte."""
        slot_of(address + offset, 1)[0] = word & 0xFF

    def _state(barrier: int) -> Any:
        return slot_of(barrier, 8).view(np.uint32)  # phase; bytes still to come, or arrivals: wanted << 16 | to come

    def _next_phase(barrier: int) -> None:
        _state(barrier)[0] += np.uint32(1)
        wake(current().block, barrier)

    def bulk_init(barrier: int) -> None:
        """Phase 0, nothing expected."""
        _state(barrier)[:] = 0

    def bulk_fence() -> None:
        """Barriers are visible at once here."""

    def bulk_expect(barrier: int, size: int) -> None:
        """So many bytes end the phase."""
        _state(barrier)[1] += np.uint32(size)

    def bulk_copy(pointer: Any, index: Any, address: int, size: int, barrier: int) -> None:
        """Copies are immediate here."""
        start = 16 * int(index)
        found = pointer.bytes[start : start + size]
        if found.size != size or size % 16 or address % 16:
            raise IndexError(f"a copy of {size} bytes from {start} of {pointer.bytes.size} to {address:#x}")
        for at in range(0, size, 16):
            slot_of(address + at, 16)[:] = found[at : at + 16]
        state = _state(barrier)
        if state[1] < size:
            raise IndexError(f"{size} bytes where {state[1]} are expected")
        state[1] -= np.uint32(size)
        if not state[1]:
            _next_phase(barrier)

    def bulk_wait(barrier: int, parity: int) -> None:
        """Until the phase of that parity is over; that nobody ends it is noticed."""
        while int(_state(barrier)[0]) % 2 == parity:
            pause(current(), barrier)

    def arrivals_init(barrier: int, count: int) -> None:
        """Phase 0, nobody is there."""
        _state(barrier)[:] = 0, count << 16 | count

    def arrive(barrier: int) -> None:
        """One more is there; the last one ends the phase."""
        state = _state(barrier)
        state[1] -= np.uint32(1)
        if not state[1] & 0xFFFF:
            state[1] |= state[1] >> 16
            _next_phase(barrier)

    def ask_for(pointer: Any, index: Any) -> None:
        """Nothing is far away here."""

    def after_earlier() -> None:
        """Kernels follow one another here."""

    def begin_next() -> None:
        """As above."""

    def meet() -> None:
        """Wait for all threads of the block."""
        current().syncthreads()

    def barrier_of(number: int, threads: int) -> None:
        """Wait for that many threads at the barrier of that number."""
        lane = current()
        lane.block.wait(lane, named_barrier(lane.block, number, threads))

else:
    from .asm import I32, NONE, U32, asm, asm_at

    _B1 = "mma.sync.aligned.%s.row.col.s32.b1.b1.s32.and.popc {$0, $1, $2, $3}, %s, {0, 0, 0, 0};"
    mma_b1 = asm(_B1 % ("m16n8k128", "{$4, $5}, {$6}"), I32, U32, U32, U32, count=4, effects="warp")
    mma_b1_wide = asm(_B1 % ("m16n8k256", "{$4, $5, $6, $7}, {$8, $9}"), I32, *(U32,) * 6, count=4, effects="warp")
    mad_i32 = asm("mad.lo.s32 $0, $1, $2, $3;", I32, I32, I32, I32)
    _STS8 = "{ .reg .u32 a; add.u32 a, $0, $1; st.shared.u8 [a], $2; }"
    sts8 = asm(_STS8, NONE, U32, U32, U32, effects="memory")
    bulk_init = asm("mbarrier.init.shared.b64 [$0], 1;", NONE, U32, effects="memory")
    arrivals_init = asm("mbarrier.init.shared.b64 [$0], $1;", NONE, U32, U32, effects="memory")
    arrive = asm("mbarrier.arrive.shared.b64 _, [$0];", NONE, U32, effects="memory")
    bulk_fence = asm("fence.mbarrier_init.release.cluster;", NONE, effects="memory")
    bulk_expect = asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", NONE, U32, U32, effects="memory")
    bulk_copy = asm_at(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$3], $1, [$2];",
        NONE, U32, U32, U32, size=16, effects="memory",
    )  # fmt: skip
    bulk_wait = asm(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @!p bra W; }",
        NONE, U32, U32, effects="memory",
    )  # fmt: skip
    # bar.sync promises that all who meet come to the same instruction, barrier.sync does not
    meet = asm("barrier.sync 0;", NONE, effects="barrier")
    barrier_of = asm("bar.sync $0, $1;", NONE, U32, U32, effects="barrier")
    ask_for = asm_at("prefetch.global.L2 [$0];", NONE, size=16, effects="memory")
    after_earlier = asm("griddepcontrol.wait;", NONE, effects="memory")
    begin_next = asm("griddepcontrol.launch_dependents;", NONE, effects="memory")
