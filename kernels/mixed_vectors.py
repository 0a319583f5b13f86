"""Vectors in shared memory, as they come: how they get there and how one element is read, as device functions."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.bit_steps import WIDEN
from bcqfmt.kernels.mixed_ptx import lds16
from bcqfmt.kernels.ptx_numba import inlined
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["element_at", "vector_piece"]


def vector_piece(kind: int) -> Any:
    """A device function: 16 bytes of vector ``b`` from element ``start`` on, zeros after its last element.

    ``quick``: vectors are whole pieces of 16 bytes.
    """
    each = 1 if kind == 0 else 2

    def piece(x: Any, b: Any, start: Any, columns: Any, quick: Any) -> Any:
        w0, w1, w2, w3 = ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        if quick and start < columns:
            w0, w1, w2, w3 = ptx.ldg128_keep(x, ptx.u32((b * columns + start) // (4 * each)))
        for k in static(4 * each):
            word = ptx.u32(0)
            if not quick and start + k < columns:
                word = ptx.u32(ptx.u32(x[ptx.u32(b * columns + start + k)]) << (k % each * 16))
            if k // each == 0:
                w0 = ptx.u32(w0 | word)
            if k // each == 1:
                w1 = ptx.u32(w1 | word)
            if k // each == 2:
                w2 = ptx.u32(w2 | word)
            if k // each == 3:
                w3 = ptx.u32(w3 | word)
        return w0, w1, w2, w3

    return inlined(unrolled(piece))


def element_at(kind: int) -> Any:
    """A device function: element ``place`` of a vector in shared memory, as float32."""
    widen = WIDEN[kind]

    def full(address: Any, place: Any) -> Any:
        return ptx.lds_f32(ptx.u32(address + place * 4), ptx.u32(0))

    def half(address: Any, place: Any) -> Any:
        return widen(lds16(ptx.u32(address + place * 2), ptx.u32(0)))

    return inlined(full if kind == 0 else half)
