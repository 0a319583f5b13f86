"""Which of the fast products multiplies how many vectors: bits, bytes, or bytes of short groups."""

from __future__ import annotations

import functools

from bcqfmt.kernels.operands.outliers import NONE, Beside

from .byte_shape import ByteShape, byte_shape_for
from .layout import BitLayout
from .shape import BitShape, shape_for
from .short_shape import short_shape_for

__all__ = ["AnyShape", "at_once", "product_shape"]

AnyShape = BitShape | ByteShape


@functools.cache
def product_shape(
    layout: BitLayout, batch: int, kind: int, out: int, *, reordered: bool, added: bool, precise: bool = False,
    beside: Beside = NONE,
) -> AnyShape | None:  # fmt: skip
    """How up to eight vectors are multiplied: with bits of x, or with bytes where there are many or groups are short.

    ``precise``: as good as float32, which only bits are. ``beside``: outliers. None where x does not fit, or more than
    four vectors would have to be bits.
    """
    with_bytes: ByteShape | None = None
    if not precise:
        short = short_shape_for(layout, batch, kind, out, reordered=reordered, added=added, beside=beside)
        if short is not None:
            return short
        with_bytes = byte_shape_for(layout, batch, kind, out, reordered=reordered, added=added, beside=beside)
    if with_bytes is not None and (batch > 2 or layout.places == 4):
        return with_bytes
    if batch > 4:
        return None
    bits = shape_for(layout, batch, kind, out, reordered=reordered, added=added, precise=precise, beside=beside)
    return bits or with_bytes


@functools.cache
def at_once(
    layouts: tuple[BitLayout, ...], kind: int, out: int, *, reordered: bool, beside: Beside = NONE
) -> int:  # fmt: skip
    """How many vectors of a type one launch takes for every one of these segments; 0 where there is no way.

    ``out``: the type of the result. Outliers go with the last segment.
    """
    last = len(layouts) - 1
    for batch in (8, 4, 2, 1):
        found = (
            product_shape(
                layout, batch, kind, out, reordered=reordered, added=True, precise=0 in (kind, out),
                beside=beside if k == last else NONE,
            )
            for k, layout in enumerate(layouts)
        )  # fmt: skip
        if None not in found:
            return batch
    return 0
