"""How a product in groups of 8 or 16 columns is carried out: types, batch, warps, buffers, shared memory."""

from __future__ import annotations

from bcqfmt.kernels.operands.outliers import NONE, Beside

from .byte_shape import ByteShape, first_that_fits
from .layout import BitLayout

__all__ = ["ShortShape", "examples", "short_shape_for"]

_PAIR = 64  # bytes of 32 columns of x: high and low bytes
_FEW = 16  # chunks of a row, with which few warps a tile are faster
# slices, tiles, stages: the first that fits
_PREFERRED = (
    (8, 2, 4), (8, 2, 3), (4, 3, 3), (6, 2, 2), (8, 1, 2), (4, 2, 3), (4, 2, 2), (7, 1, 2), (6, 1, 2), (4, 1, 2),
    (3, 1, 2), (2, 1, 2),
)  # fmt: skip


class ShortShape(ByteShape):
    """The same for short groups, of whose bytes of x only those are stored that are not zero."""

    __slots__ = ()

    @property
    def stride(self) -> int:
        """Bytes of 128 columns of x."""
        return 4 * _PAIR * self.batch

    @property
    def zeros_at(self) -> int:
        """Where as many zeros lie as lanes read that have no column of x."""
        return 2 * self.layout.chunks * self.stride

    @property
    def sums_at(self) -> int:
        """Where sums of x and powers of two begin."""
        return self.zeros_at + self.stride

    @property
    def sums_bytes(self) -> int:
        """Bytes of them for 128 columns."""
        return (self.layout.passes + 1) * self.batch * 32

    @property
    def fixed_bytes(self) -> int:
        """Shared memory for x and its sums."""
        return -(-(self.sums_at + 2 * self.layout.chunks * self.sums_bytes) // 128) * 128


def short_shape_for(
    layout: BitLayout, batch: int, kind: int, out: int, *, reordered: bool, added: bool, beside: Beside = NONE
) -> ShortShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory.

    None as well for float32, whose 24 bits two bytes do not hold, for longer groups, and for more vectors than two in
    groups of 8 columns and four in groups of 16, for which there are not enough registers.
    """
    if kind == 0 or layout.passes == 1 or batch < 1 or batch * layout.passes > 8:
        return None
    few = layout.chunks <= _FEW
    most = 4 if few else 6 if batch > 2 else 8  # with more vectors, more would lack registers
    side_by_side = 3 if few and batch == 1 and beside == NONE else 2
    shape = ShortShape(layout, batch, kind, out, reordered, added)
    choices = [choice for choice in _PREFERRED if choice[0] <= most and choice[1] <= side_by_side]
    return first_that_fits(shape, choices, beside)


def examples() -> list[ShortShape]:
    """Both formulas, both group sizes, most warps, most vectors, outliers: what has to compile without spilling."""
    found = [
        short_shape_for(
            BitLayout(q, columns, g, formula, "F16"), batch, 1, 1, reordered=more, added=more, beside=beside
        )
        for q, columns, g, formula, batch, more, beside in (
            (3, 4096, 8, "bcq", 1, False, NONE),
            (3, 4352, 8, "affine", 2, True, Beside(4, 4352, 512)),
            (3, 8192, 16, "affine", 2, False, NONE),
            (3, 8192, 16, "affine", 4, True, NONE),
            (2, 4096, 16, "bcq", 1, False, Beside(4, 4096, 512)),
        )
    ]
    return [shape for shape in found if shape is not None]
