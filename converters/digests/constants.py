"""The numbers of SHA-256 (FIPS 180-4), worked out from their definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["CONSTANTS", "START", "end_message"]


def _fraction(prime: int, root: int) -> int:
    """The first 32 bits of the fraction of a prime's square or cube root."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**root <= prime << 32 * root else (low, middle - 1)
    return low & 0xFFFFFFFF


_PRIMES = [n for n in range(2, 312) if all(n % d for d in range(2, n))]
CONSTANTS = np.array([_fraction(prime, 3) for prime in _PRIMES], np.uint32)  # of the 64 rounds
START = np.array([_fraction(prime, 2) for prime in _PRIMES[:8]], np.uint32)  # the state before the first byte


def end_message(room: npt.NDArray[np.uint8], count: int, size: int) -> int:
    """Put what ends a message of ``size`` bytes behind its last ``count``, which ``room`` begins with.

    How many blocks of 64 bytes that makes; there has to be room for them.
    """
    blocks = (count + 8) // 64 + 1
    room[count : 64 * blocks] = 0
    room[count] = 0x80
    room[64 * blocks - 8 : 64 * blocks] = np.frombuffer((8 * size).to_bytes(8, "big"), np.uint8)
    return blocks
