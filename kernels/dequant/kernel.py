"""Planes to dense numbers of 16 bits on the device, bit by bit what the normative decoder gives: 32 columns at a time.

Section 8 of the specification is followed exactly (`values`): binary64, the operations in the order
written, none fused (`ptx` has them so), one rounding at the end, every NaN the canonical one. With ``twice`` values are
rounded to the logical dtype first, as those of a dense copy are before it is loaded in another type.

A lane decodes a word of columns, by a table or one by one (`decoders`); `rows` writes rows of them.
`elements` takes any weight.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from bcqfmt.kernels import ptx
from bcqfmt.kernels.operands.device import DeviceSegment
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

from .decoders import table_decoder, word_decoder
from .rows import ARGUMENTS, THREADS, to_rows
from .values import FORMULAS


class Decoding(NamedTuple):
    """What a kernel is compiled for: one segment, everything a multiple of 8 columns.

    ``numbers``: "f32" or "f64", the type of the scales; ``logical`` and ``result``: kinds of the logical dtype and of
    the result, which has 16 bits. ``short``: groups are no whole words; ``finite``: no value can be a NaN, asked for by
    tables only. ``reordered`` as in `rows.to_rows`.
    """

    q: int
    formula: int
    numbers: str
    logical: int
    result: int
    twice: bool = False
    short: bool = False
    finite: bool = False
    reordered: bool = False

    @property
    def tabled(self) -> bool:
        """Whether values are looked up."""
        return self.q <= 4 and not self.short

    @property
    def unit(self) -> int:
        """Columns that group sizes are counted in, the kernel's argument ``span``."""
        return 8 if self.short else 32


def decoding_of(segment: DeviceSegment, logical: int, result: int, twice: bool, reordered: bool) -> Decoding:
    """How a segment in eights of columns is decoded."""
    formula, numbers = FORMULAS[segment.formula], "f64" if segment.numbers == "F64" else "f32"
    short = segment.group_size % 32 != 0
    found = Decoding(segment.bits, formula, numbers, logical, result, twice, short, reordered=reordered)
    return found._replace(finite=found.tabled and segment.finite and segment.formula != "float-zero")


@functools.cache
def rows_kernel(decoding: Decoding) -> Kernel:
    """The kernel; its grid as in `rows.to_rows`."""
    q, formula, numbers, logical, result, twice, short, finite, reordered = decoding
    if decoding.tabled:
        decode, blocks = table_decoder(q, formula, logical, result, finite, twice), 5
    else:
        decode, blocks = word_decoder(q, formula, logical, result, twice, short), 3
    run = to_rows(decode, reordered)

    @kernel(ARGUMENTS.format(numbers=numbers), threads=THREADS, blocks=blocks, variant=repr(decoding))
    def dequantize_rows(
        planes: Any, first: Any, second: Any, dense: Any, stored: Any, rows: Any, columns: Any, start: Any, width: Any,
        words: Any, groups: Any, span: Any, together: Any,
    ) -> None:  # fmt: skip
        base = ptx.shared_address(cuda.shared.array(0, types.uint32))
        run(planes, first, second, dense, stored, base, rows, columns, start, width, words, groups, span, together)

    return dequantize_rows
