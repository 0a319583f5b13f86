"""Numba's CUDA simulator with warps, exact barriers, shared addresses and jit options.

Numba starts one thread per CUDA thread and polls them. Here a CUDA thread is a greenlet, which runs until it reaches a
barrier or ends; then the next one runs. That is deterministic, needs no locks, is several times faster, and a barrier
that not all threads reach is an error instead of a hang. :func:`install` puts it in place of Numba's own.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

__all__ = ["Cuda", "Pointer", "exchange", "install", "pause", "shared_slot", "slot_of", "together", "wake"]

WARP = 32
_RESULT = -1  # key of the result that the lanes of a warp share


class _Stop(BaseException):
    """Ends a thread of a block in which another one failed."""


class _Lane:
    """A simulated CUDA thread."""

    def __init__(self, block: Block, thread_id: int, blockIdx: Any, threadIdx: Any) -> None:
        self.block, self.thread_id = block, thread_id
        self.blockIdx, self.threadIdx = blockIdx, threadIdx
        self.fiber = greenlet(self.run)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            try:
                self.block.check()
                self.block.task()
            except _Stop:
                pass
            except Exception as fault:  # noqa: BLE001 - the launch reports any fault of a kernel
                self.block.fail(self, fault)
        self.block.leave(self)

    def syncthreads(self) -> None:
        self.block.wait(self, self.block.everyone)


class _Barrier:
    """A barrier of a warp, of the block, or of some warps."""

    def __init__(self) -> None:
        self.members = 0
        self.waiting: list[_Lane] = []
        self.brought: dict[int, Any] = {}
        self.taken: dict[int, Any] = {}


class Block:
    """One thread block, with the interface of Numba's ``BlockManager``."""

    running: _Lane  # of all blocks: only one thread runs at a time

    def __init__(self, function: Callable[..., None], grid_dim: Any, block_dim: Any, debug: bool) -> None:
        self.function = function
        self.shape = block_dim
        self.task: Callable[[], None]
        self.everyone = _Barrier()
        self.warps: list[_Barrier] = []
        self.named: dict[int, _Barrier] = {}
        self.ready: deque[_Lane] = deque()
        self.live = 0
        self.error: Exception | None = None
        self.slots = _slots()

    def run(self, grid_point: Any, *arguments: Any) -> None:
        """Run all threads of the block to their end; raises what the first failing one raised."""
        dim3 = _numba("kernelapi").Dim3
        x, y, z = self.shape
        self.live = self.everyone.members = x * y * z
        self.warps = [_Barrier() for _ in range(-(-self.live // WARP))]
        self.task = functools.partial(self.function, *arguments)
        for i in range(self.live):
            self.warps[i // WARP].members += 1
            self.ready.append(_Lane(self, i, dim3(*grid_point), dim3(i % x, i // x % y, i // (x * y))))
        self.home = getcurrent()
        while self.live:
            if not self.ready:
                self._abort(RuntimeError("a barrier that some threads never reach"))
            Block.running = self.ready.popleft()
            Block.running.fiber.switch()
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        """Let others run until the calling thread is ready again."""
        lane = Block.running
        if self.ready and self.ready[0].fiber:  # it has begun; begun from here, it would count our depth of calls too
            Block.running = self.ready.popleft()
            if Block.running is not lane:
                Block.running.fiber.switch()
        else:
            self.home.switch()
        self.check()

    def wait(self, lane: _Lane, barrier: _Barrier) -> None:
        """Until every living member of the barrier waits there."""
        self.check()
        barrier.waiting.append(lane)
        self._open(barrier)
        self.pause()

    def gather(self, lane: _Lane, barrier: _Barrier, value: Any) -> dict[int, Any]:
        """The values of all members of the barrier, by thread number."""
        barrier.brought[lane.thread_id] = value
        self.wait(lane, barrier)
        return barrier.taken

    def leave(self, lane: _Lane) -> None:
        """A thread has ended; others may have waited only for this one."""
        self.live -= 1
        for barrier in (self.everyone, self.warps[lane.thread_id // WARP]):
            barrier.members -= 1
            self._open(barrier)

    def check(self) -> None:
        """End the calling thread if the block has failed."""
        if self.error is not None:
            raise _Stop

    def fail(self, lane: _Lane, fault: Exception) -> None:
        """Remember the first fault and where it happened, let all others end."""
        if self.error is None:
            place = f"block {tuple(lane.blockIdx)} thread {tuple(lane.threadIdx)}"
            fault.add_note(place)
            self._abort(fault)

    def _abort(self, fault: Exception) -> None:
        self.error = self.error or fault
        for barrier in (self.everyone, *self.warps, *self.named.values()):
            self.ready.extend(barrier.waiting)
            barrier.waiting = []

    def _open(self, barrier: _Barrier) -> None:
        if barrier.waiting and len(barrier.waiting) == barrier.members:
            self.ready.extend(barrier.waiting)
            barrier.waiting = []
            barrier.taken, barrier.brought = barrier.brought, {}


def current() -> Any:
    """The calling thread."""
    return Block.running


def exchange(value: Any) -> list[Any]:
    """The values that the 32 lanes of the calling warp give; None for lanes that have ended."""
    found: list[Any] = together(value, lambda values: values)
    return found


def together(value: Any, compute: Callable[[list[Any]], Any]) -> Any:
    """What ``compute`` makes of the values of all lanes of the calling warp; computed once, for all of them."""
    lane = current()
    warp = lane.thread_id // WARP
    found = lane.block.gather(lane, lane.block.warps[warp], value)
    if _RESULT not in found:
        found[_RESULT] = compute([found.get(warp * WARP + i) for i in range(WARP)])
    return found[_RESULT]


def named_barrier(block: Block, number: int, threads: int) -> Any:
    """The barrier of that number, for that many threads of the block."""
    barrier = block.named.setdefault(number, _Barrier())
    barrier.members = threads
    return barrier


def pause(lane: Any, place: int) -> None:
    """The calling thread waits until :func:`wake` is called for that shared address."""
    block = lane.block
    block.check()
    block.named.setdefault(place, _Barrier()).waiting.append(lane)
    block.pause()


def wake(block: Block, place: int) -> None:
    """Resume all threads that wait there."""
    if place in block.named:
        block.ready.extend(block.named[place].waiting)
        block.named[place].waiting = []


class Pointer:
    """An array as a kernel sees a pointer: elements by index, words as Python integers, no index out of bounds."""

    __slots__ = ("_array", "_count", "_mask", "bytes")

    def __init__(self, array: Any) -> None:
        self._array = array
        self._count = array.size
        self._mask = 0 if array.dtype.kind == "f" else (1 << 8 * array.dtype.itemsize) - 1
        self.bytes = array.view(np.uint8)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"read at {index} of {self._count} elements")
        return self._array[index].item() if self._mask else self._array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if not 0 <= index < self._count:
            raise IndexError(f"write at {index} of {self._count} elements")
        if self._mask and self._array.dtype.kind == "u":
            value = int(value) & self._mask
        self._array[index] = value


# -- shared memory has addresses ----------------------------------------------------------------------------------

_SLOT = 20  # every shared array gets a megabyte of addresses: running over its end is noticed


def shared_slot(array: Any) -> int:
    """The address of a shared array in this launch."""
    slots = current().block.slots
    flat = array.reshape(-1).view(np.uint8)
    place = flat.__array_interface__["data"][0]
    for i, known in enumerate(slots):
        if known.__array_interface__["data"][0] == place:
            return (i + 1) << _SLOT
    slots.append(flat)
    return len(slots) << _SLOT


def slot_of(address: int, size: int) -> Any:
    """The ``size`` bytes at a shared address, as a view; they must be aligned and inside the array."""
    slots = Block.running.block.slots
    slot, offset = (address >> _SLOT) - 1, address & ((1 << _SLOT) - 1)
    if not 0 <= slot < len(slots) or offset % size or offset + size > slots[slot].size:
        raise IndexError(f"{size} bytes at shared address {address:#x}: outside of the array, or not aligned")
    return slots[slot][offset : offset + size]


def _slots() -> list[Any]:
    """The shared arrays of this launch."""
    context = _numba("kernel")._get_kernel_context()
    if not hasattr(context, "bcq_slots"):
        context.bcq_slots = []
    slots: list[Any] = context.bcq_slots
    return slots


class Cuda:
    """``numba.cuda`` as kernels see it: inside a launch that of the launch, outside the module.

    Numba would replace the module in the globals of every device function, at every call.
    """

    def __getattr__(self, name: str) -> Any:
        if name in ("threadIdx", "blockIdx", "syncthreads"):  # Numba asks the thread of the operating system
            return getattr(Block.running, name)
        return getattr(_numba("kernel")._get_kernel_context() or importlib.import_module("numba.cuda"), name)


def install() -> None:
    """Replace Numba's block manager."""
    _numba("kernel").BlockManager = Block


@functools.cache
def _numba(name: str) -> Any:
    """A module of Numba's simulator."""
    return importlib.import_module(f"numba.cuda.simulator.{name}")
