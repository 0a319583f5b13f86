"""The papers' arithmetic on sizes, counted on the parts of the format itself.

A *shape* is a :class:`WeightSpec` without bytes: what parts it has, of which types and sizes, follows from the scheme,
so a figure computed here is one about the bytes that a writer would write. Papers count numbers; files also pad rows of
fields to whole 32-bit words. :func:`counted_bits` leaves the padding out, :func:`stored_bits` has it in.
"""

from __future__ import annotations

from typing import Final

from bcqfmt.container.dtypes import BITS, nbytes_of
from bcqfmt.weight.scheme import OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec

__all__ = [
    "OPT_175B",
    "affine_shape",
    "bcq_shape",
    "counted_bits",
    "lut_gemm_bits",
    "mixed_shape",
    "model_bytes",
    "second_order_shape",
    "stored_bits",
]

# d and layers of OPT-175B; a layer has q, k, v, o (d x d) and the two matrices of its feed-forward network
_OPT = (12288, 96)
OPT_175B: Final = tuple(
    shape
    for _ in range(_OPT[1])
    for shape in [(_OPT[0], _OPT[0])] * 4 + [(4 * _OPT[0], _OPT[0]), (_OPT[0], 4 * _OPT[0])]
)


def lut_gemm_bits(rows: int, columns: int, q: int, g: int) -> int:
    """lut-gemm-arxiv-v3 equation 7, with a short last group where g does not divide the columns: m n q + 16 m n/g q."""
    return rows * columns * q + 16 * rows * -(-columns // g) * q


def bcq_shape(rows: int, columns: int, q: int, g: int, *, bias: bool = False) -> WeightSpec:
    """q planes with an F16 alpha per plane, row and group; with or without an F16 bias z."""
    kind = "F16" if bias else None
    return _shape(rows, columns, Segment(encoding="bcq", bits=q, group_size=g, alpha="F16", bias=kind))


def affine_shape(rows: int, columns: int, bits: int, g: int, *, zeros: bool = False) -> WeightSpec:
    """Uniform codes with an F16 scale per row and group; zero points of ``bits`` bits, or none stored."""
    zero = PackedZero(bits) if zeros else 2 ** (bits - 1)
    return _shape(rows, columns, Segment(encoding="affine", bits=bits, group_size=g, scale="F16", zero=zero))


def second_order_shape(rows: int, columns: int, bits: int, g1: int, scale_bits: int, g2: int) -> WeightSpec:
    """Uniform codes with zero points, whose scales are codes of ``scale_bits`` with a scale per g2 rows."""
    return _shape(rows, columns, _second_order(bits, g1, scale_bits, g2))


def mixed_shape(rows: int, columns: int, four_bit_ratio: float, *, outliers: bool = False) -> WeightSpec:
    """The 2/4-bit split of mixed24 with its defaults: 2 bit g1=16 second order, 4 bit g=128, perm, CSR outliers."""
    four = round(columns * four_bit_ratio)
    segments = (
        _second_order(2, 16, 4, 16),
        Segment(encoding="affine", bits=4, group_size=128, scale="F16", zero=PackedZero(4)),
    )
    rule = OutlierRule("add", "F16", (0,)) if outliers else None
    scheme = Scheme(segments=segments, perm=True, outliers=rule)
    return WeightSpec(scheme=scheme, shape=(rows, columns), dtype="F16", widths=(columns - four, four))


def counted_bits(spec: WeightSpec, outliers: int = 0) -> dict[str, int]:
    """Bits of the numbers in every part: fields without the padding at the end of each row. ``outliers``: their nnz."""
    found = {}
    for suffix, part in spec.parts().items():
        count = 1
        for dim in part.shape[:-1] if part.bits else part.shape:
            count *= outliers if dim == -1 else dim
        found[suffix] = count * part.fields * part.bits if part.bits else count * BITS[part.dtype]
    return found


def stored_bits(spec: WeightSpec, outliers: int = 0) -> int:
    """Bits of all parts as they lie in a file."""
    total = 0
    for part in spec.parts().values():
        total += 8 * nbytes_of(part.dtype, tuple(outliers if dim == -1 else dim for dim in part.shape))
    return total


def model_bytes(q: int, g: int | None) -> float:
    """lut-gemm-arxiv-v3 table 6: bytes of OPT-175B's matrices in q bits, an F16 scale per group (or row), no zeros."""
    sizes: dict[tuple[int, int], int] = {}
    for rows, columns in OPT_175B:
        if (rows, columns) not in sizes:
            sizes[rows, columns] = stored_bits(affine_shape(rows, columns, q, g or columns)) // 8
    return float(sum(sizes[shape] for shape in OPT_175B))


def _second_order(bits: int, g1: int, scale_bits: int, g2: int) -> Segment:
    order = SecondOrder(scale_bits, g2, "F16", "packed")
    return Segment(encoding="affine", bits=bits, group_size=g1, scale=order, zero=PackedZero(bits))


def _shape(rows: int, columns: int, segment: Segment) -> WeightSpec:
    return WeightSpec(scheme=Scheme(segments=(segment,)), shape=(rows, columns), dtype="F16", widths=(columns,))
