"""The instructions that touch memory or other lanes, in Python; they run inside the simulator of `block`.

Accesses outside of an array, or not aligned as the instruction needs them, raise IndexError.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import arithmetic
from .block import WARP, current, exchange, named_barrier, shared_slot, slot_of, together

Words = tuple[int, ...]


def _at(pointer: Any, index: Any, size: int) -> Any:
    """``size`` bytes of a kernel's argument at ``size * index``, as a view."""
    start = size * int(index)
    found = pointer.bytes[start : start + size]
    if start < 0 or found.size != size:
        raise IndexError(f"{size} bytes at index {index} of {pointer.bytes.size} bytes")
    return found


def _shared(address: int, offset: int, size: int) -> Any:
    """``size`` bytes of shared memory, as a view."""
    return slot_of(address + offset, size)


def _words(view: Any) -> Words:
    return tuple(view.view(np.uint32).tolist())


def _load(place: Any, kind: Any, count: int) -> Any:
    """``f(a, b)``: ``count`` elements of 4 bytes at ``place(a, b, bytes)``, as a tuple if there are several.

    Words are Python integers.
    """

    def load(a: Any, b: Any) -> Any:
        view = place(a, b, 4 * count)
        found = _words(view) if kind is np.uint32 else tuple(view.view(kind))
        return found if count > 1 else found[0]

    return load


def _store(place: Any, kind: Any, count: int) -> Any:
    """``f(a, b, *values)``, the counterpart of :func:`_load`."""

    def store(a: Any, b: Any, *values: Any) -> None:
        view = place(a, b, 4 * count).view(kind)
        view[:] = [arithmetic.u32(v) for v in values] if kind is np.uint32 else values

    return store


ldg32, ldg64, ldg128 = (_load(_at, np.uint32, count) for count in (1, 2, 4))
ldg128_keep = ldcg128 = ldg128
ldcg_f32, ldcg128_f32 = (_load(_at, np.float32, count) for count in (1, 4))
stg64, stg128 = (_store(_at, np.uint32, count) for count in (2, 4))
stg128_stream = stg128

lds32, lds64, lds128 = (_load(_shared, np.uint32, count) for count in (1, 2, 4))
lds_f32, lds64_f32, lds128_f32 = (_load(_shared, np.float32, count) for count in (1, 2, 4))
sts32, sts64, sts128 = (_store(_shared, np.uint32, count) for count in (1, 2, 4))
sts_f32, sts64_f32, sts128_f32 = (_store(_shared, np.float32, count) for count in (1, 2, 4))


def prefetch(pointer: Any, index: Any) -> None:
    """No effect in the simulator."""


def atomic_inc(pointer: Any, index: Any, limit: int) -> int:
    """The old value; up to ``limit``, then 0 again."""
    word = _at(pointer, index, 4).view(np.uint32)
    old = int(word[0])
    word[0] = 0 if old >= limit else old + 1
    return old


def shared_address(array: Any) -> int:
    """Where a shared array begins."""
    return shared_slot(array)


def lds8(address: int, offset: int) -> int:
    """8 bits, the rest is 0."""
    return int(slot_of(address + offset, 1)[0])


def lds16(address: int, offset: int) -> int:
    """16 bits, the upper half is 0."""
    return int(slot_of(address + offset, 2).view(np.uint16)[0])


def sts8(address: int, offset: int, word: int) -> None:
    """The lowest byte."""
    slot_of(address + offset, 1)[0] = word & 0xFF


def cp_async16(pointer: Any, index: Any, address: int, count: int) -> None:
    """``count`` bytes and zeros up to 16."""
    target = slot_of(address, 16)
    target[:] = 0
    if count:
        target[:count] = _at(pointer, index, 16)[:count]


def runs_of(one: Any) -> Any:
    """`ptx.asm.copy_run`, with ``one`` for every copy."""

    def cp_async_run(count: int, step: int) -> Any:
        def copy(pointer: Any, index: Any, address: int) -> None:
            for i in range(count):
                one(pointer, index + i * step // 16, address + i * step, 16)

        return copy

    return cp_async_run


cp_async_run = runs_of(cp_async16)


def cp_async_commit() -> None:
    """Copies are immediate here."""


def cp_async_wait(pending: int) -> None:
    """Copies are immediate here."""


# -- warps ------------------------------------------------------------------------------------------------------------


def lane_id() -> int:
    """0..31."""
    lane: int = current().thread_id % WARP
    return lane


def syncwarp() -> None:
    """Wait for the warp."""
    exchange(None)


def shfl_u32(value: Any, lane: int) -> Any:
    """The value of a lane."""
    return exchange(value)[lane & 31]


def shfl_xor_u32(value: Any, mask: int) -> Any:
    """The value of the lane whose number differs in the bits of the mask."""
    return exchange(value)[lane_id() ^ mask]


shfl_f32, shfl_xor_f32 = shfl_u32, shfl_xor_u32


def ballot(value: Any) -> int:
    """One bit per lane: whether its value is not 0."""
    return sum(bool(v) << i for i, v in enumerate(exchange(value)))


def warp_max_u32(word: Any) -> int:
    """The largest word of the warp."""
    return max(int(other) for other in exchange(word))


def transpose(word: Any) -> int:
    """Row r of the 8 x 8 halves of the warp becomes column r."""
    words, lane = exchange(word), lane_id()
    row, pair = lane // 4, 2 * (lane % 4)
    low, high = (int(words[4 * (pair + i) + row // 2]) >> 16 * (row % 2) & 0xFFFF for i in range(2))
    return high << 16 | low


def mma_s8(*operands: Any) -> tuple[int, ...]:
    """The four sums of the calling lane."""
    return tuple(multiplied(operands, np.int64, arithmetic.mma_s8_warp).tolist())


def mma_u8(*operands: Any) -> tuple[int, ...]:
    """The four sums of the calling lane."""
    unsigned = functools.partial(arithmetic.mma_s8_warp, kind=np.uint8)
    return tuple(multiplied(operands, np.int64, unsigned).tolist())


def mma_f16(*operands: Any) -> tuple[Any, ...]:
    """The four sums of the calling lane."""
    return tuple(multiplied(operands, np.float32, arithmetic.mma_f16_warp))


def mma_bf16(*operands: Any) -> tuple[Any, ...]:
    """The four sums of the calling lane."""
    widen = arithmetic.bf16_values
    return tuple(multiplied(operands, np.float32, lambda a, b, c: arithmetic.mma_f16_warp(a, b, c, widen)))


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
        sums = np.bitwise_count(rows[:, None] & columns[None]).sum(-1, dtype=np.int64)
        return sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4).tolist()  # those of every lane

    return tuple(together(operands, whole)[lane_id()])


def multiplied(operands: Any, kind: Any, compute: Any) -> Any:
    """What ``compute`` makes of the a, b and sums (32 rows each) of a warp, for the calling lane."""

    def whole(lanes: list[Any]) -> Any:
        words = np.array([[arithmetic.u32(v) for v in lane[:6]] for lane in lanes], np.uint32)
        return compute(words[:, :4], words[:, 4:], np.array([lane[6:] for lane in lanes], kind))

    return together(operands, whole)[lane_id()]


def ldmatrix_x4(address: int) -> Words:
    """Four 8x8 matrices of 16-bit elements; lane 8m+r gives the address of row r of matrix m."""
    rows = exchange(address)
    lane = lane_id()
    return tuple(_words(slot_of(rows[8 * m + lane // 4], 16))[lane % 4] for m in range(4))


# -- tensor cores that read shared memory -----------------------------------------------------------------------------


def wgmma(vectors: int, kind: str) -> Any:
    """As `ptx.asm.multiply_group`; the sums are there at once."""
    widen = arithmetic.bf16_values if kind == "bf16" else arithmetic.f16_values

    def multiply(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, start: int, piece: int) -> None:
        lane = current()
        group = lane.thread_id // (4 * WARP)
        block = lane.block
        found = block.gather(lane, named_barrier(block, -1 - group, 4 * WARP), (a0, a1, a2, a3))
        if "x" not in found:
            pieces = [
                slot_of(start + piece // 64 * 1024 + 128 * v + ((piece % 64 + half) ^ (v & 7)) * 16, 16).view(np.uint16)
                for v in range(vectors)
                for half in range(2)
            ]
            found["x"] = widen(np.concatenate(pieces)).reshape(vectors, 16)
            words = [[arithmetic.u32(word) for word in found[128 * group + i]] for i in range(128)]
            halves = np.array(words, np.uint32).view(np.uint16).reshape(4, 8, 4, 2, 2, 2)  # warp, row, m, k, row + 8
            found["y"] = widen(halves.transpose(0, 4, 1, 3, 2, 5).reshape(64, 16)) @ found["x"].T
        row, column = lane.thread_id % 128 // 32 * 16 + lane.thread_id % 32 // 4, 2 * (lane.thread_id % 4)
        for k in range(vectors // 8):
            for i in range(4):
                sums[4 * k + i] = np.float32(sums[4 * k + i] + found["y"][row + i // 2 * 8, 8 * k + column + i % 2])

    return multiply


def wgmma_fence() -> None:
    """Products are immediate here."""


def wgmma_commit() -> None:
    """Products are immediate here."""


def wgmma_wait(pending: int) -> None:
    """Products are immediate here."""


def more_registers(count: int) -> None:
    """There are always enough here."""


def fewer_registers(count: int) -> None:
    """No effect, as above."""
