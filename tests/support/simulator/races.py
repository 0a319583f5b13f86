"""Races in shared memory: two threads at the same word, at least one of which writes, and no barrier between them.

The simulator runs one thread at a time, so a forgotten barrier need not change a result. Here every thread has a vector
clock: how much of every other thread's work is known to be over. Barriers join the clocks of those that meet; a barrier
in memory brings those that wait the clocks of those that arrived. An access is in order with an earlier one if its
thread knows the earlier one's time. Copies on their way have no time yet: nothing is in order with them before they are
waited for.

Not watched: arrays that a kernel indexes in Python, global memory, the initialisation of barriers, and which of the two
proxies an access goes through. An access of one or two bytes counts for its word, and two such writes are never a race.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import barriers
from .block import WARP, Block, _Lane, current
from .memory import runs_of

__all__ = ["found", "install"]

_MOST = 64  # barriers in memory of a block, each with a clock of its own for copies
_races: dict[str, int] = {}


class _Access:
    """By a thread or a barrier's copies (``who``) at a time; None: not over yet."""

    __slots__ = ("time", "who")

    def __init__(self, who: int, time: int | None) -> None:
        self.who, self.time = who, time


class _Watch:
    """What is known of one block."""

    def __init__(self, threads: int) -> None:
        # of every thread: what it knows of writes, and of reads
        self.clocks = np.zeros((threads, 2, threads + _MOST), np.int64)
        self.clocks[np.arange(threads), :, np.arange(threads)] = 1
        self.threads = threads
        self.writes: dict[int, list[_Access]] = {}
        self.reads: dict[int, dict[int, _Access]] = {}
        self.meetings: dict[Any, Any] = {}
        self.arrived: dict[tuple[int, int], Any] = {}  # by barrier and number of its phase
        self.phases: dict[int, tuple[int, int, int]] = {}  # of barriers: component of clocks, last phase seen, number
        self.copies: list[list[_Access]] = [[] for _ in range(threads)]  # of every thread, not committed
        self.groups: list[list[list[_Access]]] = [[] for _ in range(threads)]
        self.products: list[list[list[_Access]]] = [[[]] for _ in range(threads)]  # reads of tensor cores


def found() -> list[str]:
    """The races since the last call: kind, and where in the kernel."""
    told = [f"{what} ({count} words)" for what, count in _races.items()]
    _races.clear()
    return told


def _here() -> tuple[_Watch, int]:
    lane = current()
    block: Any = lane.block
    if not hasattr(block, "watch"):
        block.watch = _Watch(int(np.prod(block.shape)))
    return block.watch, lane.thread_id


def _report(kind: str) -> None:
    frame: Any = sys._getframe(2)
    while frame is not None and "unrolled" not in frame.f_code.co_filename:
        frame = frame.f_back
    place = f"{frame.f_code.co_name}, line {frame.f_lineno} of its unrolled form" if frame is not None else "?"
    _races[f"{kind} in {place}"] = _races.get(f"{kind} in {place}", 0) + 1


def _words(address: int, size: int) -> Iterable[int]:
    return range(address >> 2, (address + size + 3) >> 2)


def _time(watch: _Watch, thread: int) -> int:
    return int(watch.clocks[thread, 0, thread])


def _unknown(watch: _Watch, thread: int, earlier: _Access, row: int) -> bool:
    """``row``: 0 where it was a write, 1 where it was a read."""
    if earlier.time is None:
        return True
    return earlier.who != thread and bool(watch.clocks[thread, row, earlier.who] < earlier.time)


def _read(address: int, size: int, access: _Access | None = None) -> None:
    watch, thread = _here()
    access = access or _Access(thread, _time(watch, thread))
    for word in _words(address, size):
        if any(_unknown(watch, thread, write, 0) for write in watch.writes.get(word, ())):
            _report("a read of what may not be written yet")
        watch.reads.setdefault(word, {})[thread] = access


def _write(address: int, size: int, access: _Access | None = None) -> None:
    watch, thread = _here()
    access = access or _Access(thread, _time(watch, thread))
    for word in _words(address, size):
        writes = watch.writes.get(word, [])
        if size >= 4:  # neighbouring bytes may be written by different threads
            if any(_unknown(watch, thread, write, 0) for write in writes):
                _report("a second write in no order")
            writes = []
        if any(_unknown(watch, thread, read, 1) for read in watch.reads.pop(word, {}).values()):
            _report("a write over what may still be read")
        watch.writes[word] = [*writes, access]


def _phase_of(watch: _Watch, barrier: int) -> tuple[int, int]:
    """The component of a barrier's copies in clocks, and the number of its phase."""
    place, phase, number = watch.phases.get(barrier, (watch.threads + len(watch.phases), -1, 0))
    now = barriers._phase(barrier)
    watch.phases[barrier] = place, now, number + (now != phase)
    return place, watch.phases[barrier][2]


def _arrive(barrier: int) -> None:
    """What the thread knows goes to those who wait for this phase."""
    watch, thread = _here()
    known = watch.arrived.setdefault((barrier, _phase_of(watch, barrier)[1]), np.zeros_like(watch.clocks[thread]))
    np.maximum(known, watch.clocks[thread], out=known)
    watch.clocks[thread, :, thread] += 1


def _copied(barrier: int, copies: Iterable[_Access]) -> None:
    """The copies are over for those who wait for this phase."""
    watch, thread = _here()
    place, number = _phase_of(watch, barrier)
    known = watch.arrived.setdefault((barrier, number), np.zeros_like(watch.clocks[thread]))
    for copy in copies:
        copy.who, copy.time = place, number
        known[:, place] = number


def _waited(wait: Any) -> Any:
    def waited(barrier: int, parity: int) -> None:
        wait(barrier, parity)
        watch, thread = _here()
        known = watch.arrived.get((barrier, _phase_of(watch, barrier)[1] - 1))
        if known is not None:  # a phase that was over before the first arrival has none
            np.maximum(watch.clocks[thread], known, out=watch.clocks[thread])

    return waited


def _meeting(name: Callable[[int, Any], Any], call: Any, first: int = 0) -> Any:
    """A barrier that joins the clocks of those who meet; with ``first`` 1 only what they know of reads."""

    def meet(*arguments: Any) -> Any:
        watch, thread = _here()
        key = name(thread, arguments)
        own = watch.clocks[thread, first:]
        joined = watch.meetings.setdefault(key, np.zeros_like(own))
        np.maximum(joined, own, out=joined)
        result = call(*arguments)
        if watch.meetings.get(key) is joined:
            del watch.meetings[key]
        np.maximum(own, joined, out=own)
        watch.clocks[thread, :, thread] += 1
        return result

    return meet


def _over(watch: _Watch, thread: int, groups: list[list[_Access]], pending: int) -> None:
    while len(groups) > pending:
        for access in groups.pop(0):
            access.time = _time(watch, thread)


def install(instructions: dict[str, Any]) -> None:
    """Watch all of them; has to be called before kernels are imported."""
    sizes = {"8": 1, "16": 2, "32": 4, "_f32": 4, "64": 8, "64_f32": 8, "128": 16, "128_f32": 16}
    for end, size in sizes.items():
        for name, note in ((f"lds{end}", _read), (f"sts{end}", _write)):
            if name in instructions:
                instructions[name] = _noted(instructions[name], note, size)
    instructions["ldmatrix_x4"] = _noted(instructions["ldmatrix_x4"], _read, 16)
    instructions["looked_up"] = _looked_up(instructions["looked_up"])
    _watch_copies(instructions)
    _watch_products(instructions)
    for name in ("mbarrier_wait", "mbarrier_poll"):
        instructions[name] = _waited(instructions[name])
    for name in ("mbarrier_arrive", "mbarrier_expect"):
        instructions[name] = _arriving(instructions[name])
    instructions["syncwarp"] = _meeting(lambda thread, _: ("warp", thread // WARP), instructions["syncwarp"])
    instructions["sync_warps"] = _meeting(lambda _, given: ("warps", given[0]), instructions["sync_warps"])
    _Lane.syncthreads = _meeting(lambda *_: "block", _Lane.syncthreads)  # type: ignore[method-assign]
    run = Block.run

    def afresh(self: Any, *arguments: Any) -> None:  # every block of threads has a shared memory of its own
        self.__dict__.pop("watch", None)
        run(self, *arguments)

    Block.run = afresh  # type: ignore[method-assign]


def _noted(call: Any, note: Any, size: int) -> Any:
    def noted(address: int, *others: Any) -> Any:
        note(address + (others[0] if others else 0), size)
        return call(address, *others)

    return noted


def _looked_up(make: Any) -> Any:
    def looked_up(stride: int, span: int, planes: int) -> Any:
        look = make(stride, span, planes)

        def noted(words: Any, table: int, lane: int, part: int) -> Any:
            for t in range(part * span, (part + 1) * span):
                for i in range(planes):
                    entry = int(words[8 * i + t // 4]) >> 8 * ((lane ^ t) & 3) & 0xFF
                    _read(table + entry * stride + 4 * (lane ^ t), 4)
            return look(words, table, lane, part)

        return noted

    return looked_up


def _arriving(call: Any) -> Any:
    def arriving(barrier: int, *others: Any) -> None:
        _arrive(barrier)
        call(barrier, *others)

    return arriving


def _watch_copies(instructions: dict[str, Any]) -> None:
    one, arrive, bulk, box = (instructions[n] for n in ("cp_async16", "cp_async_arrive", "bulk_copy", "tensor_copy"))

    def cp_async16(pointer: Any, index: Any, address: int, count: int) -> None:
        watch, thread = _here()
        access = _Access(thread, None)
        _write(address, 16, access)
        watch.copies[thread].append(access)
        one(pointer, index, address, count)

    cp_async_run = runs_of(cp_async16)

    def cp_async_commit() -> None:
        watch, thread = _here()
        watch.groups[thread].append(watch.copies[thread])
        watch.copies[thread] = []

    def cp_async_wait(pending: int) -> None:
        watch, thread = _here()
        _over(watch, thread, watch.groups[thread], pending)

    def cp_async_arrive(barrier: int) -> None:
        watch, thread = _here()
        _copied(barrier, watch.copies[thread])
        watch.copies[thread] = []
        arrive(barrier)

    def bulk_copy(pointer: Any, index: Any, address: int, size: int, barrier: int) -> None:
        _write(address, size, access := _Access(-1, None))
        _copied(barrier, [access])
        bulk(pointer, index, address, size, barrier)

    def tensor_copy(map_: Any, column: int, row: int, address: int, barrier: int) -> None:
        _write(address, 128 * map_.box, access := _Access(-1, None))
        _copied(barrier, [access])
        box(map_, column, row, address, barrier)

    made = (cp_async16, cp_async_run, cp_async_commit, cp_async_wait, cp_async_arrive, bulk_copy, tensor_copy)
    instructions.update({function.__name__: function for function in made})


def _watch_products(instructions: dict[str, Any]) -> None:
    """Tensor cores that read shared memory until they are waited for."""
    make = instructions["wgmma"]

    def wgmma(vectors: int, kind: str) -> Any:
        # its operands are in registers, so what the lanes of a warp have read for them is over
        multiply = _meeting(lambda thread, _: ("operands", thread // WARP), make(vectors, kind), first=1)

        def product(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, start: int, piece: int) -> None:
            watch, thread = _here()
            if thread % WARP == 0:
                access = _Access(thread, None)
                watch.products[thread][-1].append(access)
                for v in range(vectors):
                    for half in range(2):
                        at = start + piece // 64 * 1024 + 128 * v + ((piece % 64 + half) ^ (v & 7)) * 16
                        _read(at, 16, access)
            multiply(sums, a0, a1, a2, a3, start, piece)

        return product

    def wgmma_commit() -> None:
        watch, thread = _here()
        watch.products[thread].append([])

    def wgmma_wait(pending: int) -> None:
        watch, thread = _here()
        _over(watch, thread, watch.products[thread], pending + 1)  # the last group is not committed

    instructions.update(wgmma=wgmma, wgmma_commit=wgmma_commit, wgmma_wait=wgmma_wait)
