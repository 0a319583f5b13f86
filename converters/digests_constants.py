"""The numbers of SHA-256 (FIPS 180-4), worked out from their definition."""

from __future__ import annotations

import numpy as np

__all__ = ["CONSTANTS", "START"]


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
