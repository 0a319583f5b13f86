"""Products with a weight on the CPU, and its values.

    >>> matrix = cpu.prepare(ckpt["model.layers.0.mlp.up_proj.weight"])
    >>> y = matrix.matmul(x)                     # x (in) or (batch, in) float32 -> (out) or (batch, out) float32
    >>> values = matrix.dequantize("float16")    # bit for bit what the normative decoder gives

A product takes one of two paths. *planes*: straight from the planes, for small batches and every weight but those that
`CpuMatrix.obstacle` names; by dot products of bytes (`dot_loops`), on x86-64 and ARM also of codes that stand for the
numbers of a small table, or by look-up tables where these are faster (`lut`, `layout.plane_segment`). It works with the
linear reading of `layout`: alpha and z in float32, float-zero without the rounding inside it. *values*: the elements
are decoded to float32 (`decode`), some rows at a time, and multiplied with BLAS. Sums are float32. Results do not
depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import aligned, scratch, together
from bcqfmt.container.dtypes import float64_of, logical_name, numpy_dtype
from bcqfmt.errors import error
from bcqfmt.kernels import operands
from bcqfmt.system import cores
from bcqfmt.weight.weight import BcqWeight

from .layout import LANES, WORDS, PlaneSegment, obstacle, plane_segment
from .machine import dot
from .machine import target as target

PLANE_WORK = 192  # vectors times planes up to which products from planes are faster than decoding
_BATCH = 8  # vectors that are multiplied together
_SMALL = 1 << 23  # elements times planes times vectors below which one thread is faster than two
_RUN = 16  # tiles of rows that a thread takes at a time, less where there would be too few for all threads
_BLOCK = 1 << 20  # elements decoded at a time for a product

Array = npt.NDArray[Any]
Float = npt.NDArray[np.float32]


def prepare(weight: BcqWeight, *, planes: int | None = None, index: int | None = None) -> CpuMatrix:
    """A weight ready for products; ``planes``: its first planes only; ``index``: which matrix of a stack.

    The weight is read and checked; its planes stay where they are if they are in memory already.
    """
    return CpuMatrix(weight, planes=planes, index=index)


class CpuMatrix:
    """One matrix ``shape`` = (out, in). ``obstacle``: why products are not made from planes; empty when they are."""

    def __init__(self, weight: BcqWeight, *, planes: int | None = None, index: int | None = None) -> None:
        self._weight, self._planes, self._index = weight, planes, index
        operand = operands.operand(weight, planes=planes, index=index)
        self.shape, self.dtype = operand.shape, operand.dtype
        self.obstacle = obstacle(operand)
        kept = () if self.obstacle else operand.segments
        self._segments = [plane_segment(segment, operand.rows) for segment in kept]
        self._bits = sum(segment.bits * segment.width for segment in operand.segments) / operand.columns
        self._perm = operand.perm
        self._sparse: tuple[Array, Array, Float] | None = None
        if operand.outliers is not None and operand.outliers.count and not self.obstacle:
            self._sparse = operand.outliers.indptr, operand.outliers.indices, operand.outliers.added

    @cached_property
    def _operand(self) -> operands.Operand:
        """Numbers for decoding, made at the first use."""
        return operands.operand(self._weight, planes=self._planes, index=self._index)

    def path(self, batch: int = 1) -> str:
        """The path of a product with that many vectors: "planes" or "values"."""
        return "values" if self.obstacle or batch * self._bits > PLANE_WORK else "planes"

    def matmul(self, x: Any, *, threads: int | None = None) -> Float:
        """``x W^T``: x (in) or (batch, in) float32, the result (out) or (batch, out) float32."""
        vectors = np.asarray(x)
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != self.shape[1] or vectors.dtype != np.float32:
            found = f"x of shape {list(vectors.shape)} and type {vectors.dtype}"
            expected = f"[{self.shape[1]}] or [batch, {self.shape[1]}], float32"
            raise error("BCQ-E552", tensor=self._weight.name, found=found, expected=expected)
        rows = np.ascontiguousarray(vectors.reshape(-1, self.shape[1]))
        work = self.shape[0] * self.shape[1] * self._bits * len(rows)
        count = cores() if threads is None else threads
        count = min(count, 1) if work < _SMALL else count
        if self.path(len(rows)) == "values":
            result = self._by_values(rows, count)
        elif len(rows) <= _BATCH:
            result = self._by_planes(rows, count)
        else:
            pieces = [self._by_planes(rows[b : b + _BATCH], count) for b in range(0, len(rows), _BATCH)]
            result = np.concatenate(pieces)
        return result if vectors.ndim == 2 else result[0]

    def dequantize(
        self, dtype: Any = None, *, rows: tuple[int, int] | None = None, threads: int | None = None
    ) -> Array:
        """Values (out, in) or of a range of rows, the bits of :meth:`BcqWeight.dequantize`."""
        kind = self.dtype if dtype is None else logical_name(dtype)
        start, stop = rows or (0, self.shape[0])
        if not 0 <= start < stop <= self.shape[0]:
            raise error("BCQ-E552", found=f"rows {start}..{stop}", expected=f"start < stop within 0..{self.shape[0]}")
        out = aligned((stop - start) * self.shape[1], numpy_dtype(kind)).reshape(-1, self.shape[1])
        self.decode_into(kind, start, out, threads=threads)
        return out

    # -- planes -----------------------------------------------------------------------------------------------

    def _by_planes(self, x: Float, threads: int) -> Float:
        batch, out = x.shape[0], self.shape[0]
        y = np.empty((batch, -(-out // LANES) * LANES), np.float32)  # the table kernel writes whole tiles
        run = max(1, min(_RUN, out // LANES // (4 * max(1, threads))))
        for k, segment in enumerate(self._segments):
            product = self._dot_product if segment.per else self._table_product
            together(product(x, segment, y, run, more=k > 0), threads)
        if self._sparse is not None:
            from . import sparse

            indptr, indices, added = self._sparse
            counter = np.zeros(1, np.uint64)
            together(lambda _: sparse.sparse_kernel()(counter, indptr, indices, added, x, y), threads)
        return y if y.shape[1] == out else np.ascontiguousarray(y[:, :out])

    def _table_product(self, x: Float, s: PlaneSegment, y: Float, run: int, more: bool) -> Callable[[int], None]:
        """What each thread does for a product by look-up tables; ``run``: tiles that it takes at a time."""
        from . import lut

        batch = x.shape[0]
        tables = scratch("tables", (batch, s.words * lut.WORD_TABLES), np.float32)
        sums = scratch("sums", (batch, s.groups), np.float32)
        lut.table_kernel()(self._inputs(x, s, s.words), tables, sums, s.span * 32 // s.pieces)
        kernel = lut.tile_kernel(s.bits, s.pieces, s.by_plane, 2 if batch % 2 == 0 else 1)
        counter, own = np.zeros(1, np.uint64), (batch * (s.bits + 1) * LANES,)
        given = (counter, run, s.planes, self.shape[0], s.words, s.span, tables, sums, s.numbers, y, more)

        def work(_: int) -> None:
            kernel(*given, scratch("held", (8 * LANES * LANES,), np.uint32), scratch("totals", own, np.float32))

        return work

    def _dot_product(self, x: Float, s: PlaneSegment, y: Float, run: int, more: bool) -> Callable[[int], None]:
        """What each thread does for a product by dot products."""
        from . import dot_loops, dots

        batch, chunks, looked = x.shape[0], -(-s.words // WORDS), bool(s.table.size)
        centre = dots.centre(s.bits, s.by_plane, looked)
        digits = dot_loops.digits(self._inputs(x, s, chunks * WORDS), s.pieces, centre)
        kernel = dot_loops.row_kernel(s.bits, s.pieces, s.by_plane, s.per, batch == 1, s.words % WORDS == 0, looked)
        counter, span = np.zeros(1, np.uint64), max(1, s.span // WORDS) if s.groups > 1 else chunks
        given = (counter, run * LANES, s.planes, self.shape[0], s.words, span, *digits, s.numbers, y, more)
        held, sums = dot().tile * 8 * WORDS, batch * dot().tile * WORDS

        def work(_: int) -> None:
            own = scratch("chunk", (held,), np.uint32), scratch("row sums", (sums,), np.float32)
            kernel(*given, *own, s.table)

        return work

    def _inputs(self, x: Float, segment: PlaneSegment, words: int) -> Float:
        """x of the columns of a segment, in stored order, padded with zeros to that many words."""
        padded = words * 32
        if self._perm is None and segment.width == padded == x.shape[1]:
            return x
        stored = slice(segment.start, segment.start + segment.width)
        inputs: Float = scratch("inputs", (x.shape[0], padded), np.float32)
        inputs[:, : segment.width] = x[:, stored] if self._perm is None else x[:, self._perm[stored]]
        inputs[:, segment.width :] = 0
        return inputs

    # -- values -----------------------------------------------------------------------------------------------

    def _by_values(self, x: Float, threads: int) -> Float:
        result = np.empty((x.shape[0], self.shape[0]), np.float32)
        step = max(1, _BLOCK // self.shape[1])
        block: Float = scratch("block", (min(step, self.shape[0]), self.shape[1]), np.float32)
        for top in range(0, self.shape[0], step):
            stop = min(top + step, self.shape[0])
            values = block[: stop - top]
            self.decode_into("F32", top, values, threads=threads)
            np.matmul(x, values.T, out=result[:, top:stop])
        return result

    def decode_into(
        self, kind: str, first_row: int, out: Array, *, threads: int | None = None, twice: bool = False
    ) -> None:
        """Fill ``out`` (rows, in), contiguous, with the values of rows ``first_row`` on, rounded once to ``kind``.

        ``out`` has that type, or another one of the same size (``"BF16"``: uint16) which then holds the patterns.
        ``twice``: rounded to the logical dtype first, as in a dense copy that is loaded in another type.
        """
        from . import decode

        operand = self._operand
        if kind == "F32" and self._in_floats:
            self._floats_into(operand, first_row, out.view(np.float32), threads)
            return
        patterns = out.view(decode.PATTERNS[kind])
        kernel = decode.decode_kernel(kind, twice and kind != operand.dtype)
        none = np.empty(0, np.int32)
        outliers = operand.outliers
        perm = none if operand.perm is None else operand.perm
        sparse: tuple[Array, ...] = (none, none, none, np.empty(0))
        if outliers is not None and outliers.count:
            sparse = outliers.indptr, outliers.indices, operand.stored, float64_of(outliers.values)
        for segment in operand.segments:
            words = segment.planes.shape[2]
            plan = np.array(
                [
                    operand.rows, words, segment.bits, segment.width, segment.group_size, segment.groups, segment.start,
                    first_row, decode.FORMULAS[segment.formula], decode.LOGICAL[operand.dtype],
                    outliers is not None and outliers.mode == "replace",
                ],
                np.uint64,
            )  # fmt: skip
            numbers = float64_of(segment.first).reshape(-1), float64_of(segment.second).reshape(-1)
            counter = np.zeros(1, np.uint64)

            def work(
                _: int, s: operands.OperandSegment = segment, plan: Any = plan, numbers: Any = numbers,
                counter: Any = counter, codes: int = words * 32,
            ) -> None:  # fmt: skip
                size = (decode.row_table_size(s.bits, s.group_size, s.groups),)
                exact = scratch("exact", size, np.float64)
                final = scratch("final " + kind, size, np.uint64 if kind == "F64" else np.uint32)
                kernel(
                    counter, plan, s.planes.reshape(-1), *numbers, perm, patterns, patterns.reshape(-1), *sparse,
                    scratch("codes", (codes,), np.uint8), exact, final,
                )  # fmt: skip

            together(work, cores() if threads is None else threads)

    @cached_property
    def _in_floats(self) -> bool:
        """Whether float32 arithmetic gives the values in F32, bit for bit."""
        from . import floats

        operand = self._operand
        plain = operand.dtype == "F32" and operand.perm is None and operand.outliers is None
        return plain and all(floats.fits(segment) for segment in operand.segments)

    def _floats_into(self, operand: operands.Operand, first_row: int, out: Float, threads: int | None) -> None:
        """`decode_into` in float32 arithmetic."""
        from . import floats

        for s in operand.segments:
            words = s.planes.shape[2]
            plan = [operand.rows, words, s.width, s.group_size, s.groups, first_row, *out.shape, s.start]
            counter, kernel = np.zeros(1, np.uint64), floats.float_kernel(s.bits, s.formula == "offset")
            numbers = (np.ascontiguousarray(n, np.float32).reshape(-1) for n in (s.first, s.second))
            given = counter, np.array(plan, np.uint64), s.planes.reshape(-1), *numbers, out.reshape(-1)

            def work(_: int, kernel: Any = kernel, given: Any = given, codes: int = words * 32) -> None:
                held = scratch("words", (8 * floats.HELD,), np.uint32)
                kernel(*given, scratch("codes", (codes,), np.uint8), held)

            together(work, cores() if threads is None else threads)
