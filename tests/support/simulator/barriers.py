"""Barriers in shared memory, bulk copies that complete them, and barriers of some warps, as the simulator runs them.

A barrier has 8 bytes: its phase, and the bytes or arrivals that still have to come before the phase ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .block import current, named_barrier, pause, slot_of, wake


def _state(barrier: int) -> Any:
    return slot_of(barrier, 8).view(np.uint32)  # phase; bytes still to come, or arrivals: wanted << 16 | to come


def _next_phase(barrier: int) -> None:
    _state(barrier)[0] += np.uint32(1)
    wake(current().block, barrier)


def mbarrier_init(barrier: int) -> None:
    """Phase 0, nothing expected."""
    _state(barrier)[:] = 0


def mbarrier_fence() -> None:
    """No effect: barriers are visible immediately."""


def mbarrier_expect(barrier: int, size: int) -> None:
    """That many bytes end the phase."""
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


def mbarrier_wait(barrier: int, parity: int) -> None:
    """Until the phase of that parity is over; a phase that never ends is an error."""
    while int(_state(barrier)[0]) % 2 == parity:
        pause(current(), barrier)


def mbarrier_init_arrivals(barrier: int, count: int) -> None:
    """Phase 0, no arrivals."""
    _state(barrier)[:] = 0, count << 16 | count


def mbarrier_arrive(barrier: int) -> None:
    """One more arrival; the last one ends the phase."""
    state = _state(barrier)
    state[1] -= np.uint32(1)
    if not state[1] & 0xFFFF:
        state[1] |= state[1] >> 16
        _next_phase(barrier)


def wait_previous_kernel() -> None:
    """No effect: kernels run one after the other."""


def launch_next_kernel() -> None:
    """No effect, as above."""


def sync_block() -> None:
    """Wait for all threads of the block."""
    current().syncthreads()


def sync_warps(number: int, threads: int) -> None:
    """Wait for that many threads at the barrier of that number."""
    lane = current()
    lane.block.wait(lane, named_barrier(lane.block, number, threads))
