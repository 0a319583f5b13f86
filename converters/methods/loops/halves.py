"""Half precision to single in a compiled loop; numpy's own cast is slow where a processor lacks the instruction."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.loops import compiled

_SCALE = np.float32(2.0**112)  # what the bias of binary16's exponent lacks to that of binary32


@compiled
def widen(halves: Any, out: Any) -> None:
    """binary16 bits, uint16 ``[n]``, to float32 ``[n]``; exact, and infinities and NaNs keep their bits."""
    for i in range(halves.size):
        size = np.uint32(halves[i] & np.uint16(0x7FFF))
        sign = np.uint32(halves[i] & np.uint16(0x8000)) << np.uint32(16)
        scaled = np.float32(np.uint32(size << np.uint32(13)).view(np.float32) * _SCALE)
        bits = np.float32(scaled).view(np.uint32)
        if size >= np.uint32(0x7C00):
            bits = np.uint32(0x7F800000) | np.uint32(size << np.uint32(13))
        out[i] = np.uint32(bits | sign).view(np.float32)
