"""Barriers in shared memory, bulk copies that complete them, and barriers of some warps, as the simulator runs them.

A barrier has 8 bytes, which hold its phase (8 bits), how many arrivals end one (12), how many of them are still to come
(12) and how many bytes of copies (32). A phase ends when neither arrivals nor bytes are to come.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels.runtime import device

from .block import current, named_barrier, pause, slot_of, wake


def _state(barrier: int) -> Any:
    return slot_of(barrier, 8).view(np.uint32)


def _phase(barrier: int) -> int:
    return int(_state(barrier)[0]) & 0xFF


def _come(barrier: int, arrivals: int, size: int) -> None:
    """So many arrivals and bytes have come; those that are expected count as negative."""
    state = _state(barrier)
    word, left = int(state[0]), int(state[1].view(np.int32)) - size
    phase, wanted, due = word & 0xFF, word >> 8 & 0xFFF, (word >> 20) - arrivals
    if due < 0 or left < 0:
        raise IndexError(f"a barrier of {wanted} arrivals: {-due} arrivals or {-left} bytes too many")
    over = not due and not left
    state[:] = (phase + over) & 0xFF | wanted << 8 | (wanted if over else due) << 20, left
    if over:
        wake(current().block, barrier)


def mbarrier_init(barrier: int) -> None:
    """Phase 0, one arrival wanted: that of :func:`mbarrier_expect`."""
    mbarrier_init_arrivals(barrier, 1)


def mbarrier_fence() -> None:
    """No effect: barriers are visible immediately."""


def mbarrier_expect(barrier: int, size: int) -> None:
    """An arrival; that many bytes more end the phase."""
    _come(barrier, 0, -size)
    _come(barrier, 1, 0)


def bulk_copy(pointer: Any, index: Any, address: int, size: int, barrier: int) -> None:
    """Copies are immediate here."""
    start = 16 * int(index)
    found = pointer.bytes[start : start + size]
    if found.size != size or size % 16 or address % 16:
        raise IndexError(f"a copy of {size} bytes from {start} of {pointer.bytes.size} to {address:#x}")
    for at in range(0, size, 16):
        slot_of(address + at, 16)[:] = found[at : at + 16]
    _come(barrier, 0, size)


def prefetch_map(box: Any) -> None:
    """No effect in the simulator."""


def tensor_copy(box: Any, column: int, row: int, address: int, barrier: int) -> None:
    """A box of a `TensorMap`, zeros outside of the matrix; 16-byte pieces exchanged by the row modulo 8."""
    found = np.zeros((box.box, 64), np.uint16)
    inside = device.on_host(box.array).view(np.uint16)[row : row + box.box, box.start : box.start + box.width]
    inside = inside[:, column : column + 64]
    found[: inside.shape[0], : inside.shape[1]] = inside
    for v, piece in np.ndindex(box.box, 8):
        slot_of(address + 128 * v + ((piece ^ (v & 7)) << 4), 16)[:] = found[v, 8 * piece : 8 * piece + 8].view(
            np.uint8
        )
    _come(barrier, 0, 128 * box.box)


def mbarrier_wait(barrier: int, parity: int) -> None:
    """Until the phase of that parity is over; a phase that never ends is an error."""
    while _phase(barrier) % 2 == parity:
        pause(current(), barrier)


mbarrier_poll = mbarrier_wait


def cp_async_arrive(barrier: int) -> None:
    """One arrival: copies are immediate here."""
    _come(barrier, 1, 0)


def mbarrier_init_arrivals(barrier: int, count: int) -> None:
    """Phase 0, ``count`` arrivals wanted."""
    _state(barrier)[:] = count << 8 | count << 20, 0


def mbarrier_arrive(barrier: int) -> None:
    """One more arrival."""
    _come(barrier, 1, 0)


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
