"""The whole-array operations of `ptx.sums`, in Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arithmetic
from .block import slot_of

__all__ = ["add_rows", "at_once", "load_sums", "looked_up", "save_sums", "scale_sums", "store_sums", "zero_sums"]


def zero_sums(count: int) -> Any:
    """``f(sums)``."""

    def zero(sums: Any) -> None:
        sums[:] = 0

    return zero


def scale_sums(count: int, first: int = 0) -> Any:
    """``f(sums, scale, next_scale)``."""

    def scale(sums: Any, low: Any, high: Any) -> None:
        for i in range(count):
            sums[first + i] = np.float32(sums[first + i] * np.float32(high if i & 2 else low))

    return scale


def save_sums(count: int) -> Any:
    """``f(sums, pointer, index, step)``."""

    def save(sums: Any, pointer: Any, index: int, step: int) -> None:
        for i in range(count):
            pointer[4 * (index + i // 4 * step) + i % 4] = sums[i]

    return save


def at_once(count: int) -> int:
    """Of how many blocks."""
    return max(1, 32 // count)


def load_sums(count: int) -> Any:
    """``f(sums, pointer, index, step, further, left)``."""

    def load(sums: Any, pointer: Any, index: int, step: int, further: int, left: int) -> None:
        for m in range(min(left, at_once(count))):
            for i in range(count):
                sums[i] = np.float32(sums[i] + pointer[4 * (index + m * further + i // 4 * step) + i % 4])

    return load


def add_rows(count: int, first: int = 0) -> Any:
    """``f(sums, pointer, place, step, left, inside, next_inside)``."""

    def add(sums: Any, pointer: Any, place: int, step: int, left: int, *inside: int) -> None:
        for i, at in _wanted(count, place, step, left, inside):
            sums[first + i] = np.float32(sums[first + i] + pointer[at])

    return add


def store_sums(count: int, out: int, paired: bool, first: int = 0) -> Any:
    """``f(sums, pointer, place, step, left, inside, next_inside)``."""
    narrow: Any = (np.float32, arithmetic.f32_to_f16, arithmetic.f32_to_bf16)[out]

    def store(sums: Any, pointer: Any, place: int, step: int, left: int, *inside: int) -> None:
        if paired and (place % 2 or step % 2 or inside[0] != inside[1]):
            raise IndexError(f"pairs at {place} in steps of {step}")
        for i, at in _wanted(count, place, step, left, inside):
            pointer[at] = narrow(sums[first + i])

    return store


def _wanted(count: int, place: int, step: int, left: int, inside: tuple[int, ...]) -> Any:
    for i in range(count):
        k, h, j = i // 4, i >> 1 & 1, i & 1
        if 8 * k + j < left and inside[h]:
            yield i, place + step * (8 * k + j) + h


def looked_up(stride: int, span: int, planes: int) -> Any:
    """``f(words, table, lane, part)``."""

    def look_up(words: Any, table: int, lane: int, part: int) -> Any:
        totals = [np.float32(0)] * planes
        for t in range(part * span, (part + 1) * span):
            for i in range(planes):
                entry = int(words[8 * i + t // 4]) >> 8 * ((lane ^ t) & 3) & 0xFF
                totals[i] += slot_of(table + entry * stride + 4 * (lane ^ t), 4).view(np.float32)[0]
        return tuple(totals)

    return look_up
