"""BcqWeight: a weight of the format, from a file or from a quantizer's arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.codes import CODES
from bcqfmt.container.dtypes import FLOATS, logical_name, numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import Finding, FormatError, UsageError, error, escape, refuse

from . import aligned64, arguments, build, checks, decode, slicing
from .packing import unpack_codes
from .scheme import Scheme, Segment, WeightSpec, part_prefix
from .scheme_json import Misfit, digest_of, scheme_json, scheme_of

Array = npt.NDArray[Any]
Range = tuple[int, int] | None


class BcqWeight:
    """A quantized matrix ``[out, in]`` or a stack of them ``[E, out, in]``; immutable, its parts read on demand.

    Attributes: ``name``; ``spec`` with shape, dtype, widths and scheme.
    """

    __slots__ = ("_parts", "name", "spec")

    def __init__(self, name: str, spec: WeightSpec, parts: Mapping[str, StoredTensor]) -> None:
        """``parts``: suffix (``"s0_planes"``) -> tensor; structure is checked here, indices when they are
        first read, all content by :meth:`check`.
        """
        self.name = name
        self.spec = spec
        prefix = part_prefix(name) if name else ""
        self._parts = {suffix: parts[suffix].renamed(prefix + suffix) for suffix in sorted(parts)}
        place = checks.Place(refuse, weight=name)
        checks.check_spec(spec, place)
        checks.check_parts(spec, {s: (p.name, p.dtype, p.shape) for s, p in self._parts.items()}, place)
        self._parts = checks.guard_indices(spec, self._parts, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(out, in)`` or ``(E, out, in)``."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The logical dtype: ``F16``, ``BF16`` or ``F32``."""
        return self.spec.dtype

    @property
    def scheme(self) -> Scheme:
        """Segments, layout, perm, outliers."""
        return self.spec.scheme

    @property
    def segments(self) -> tuple[tuple[Segment, int], ...]:
        """(segment, width in stored columns), in order."""
        return tuple(zip(self.spec.scheme.segments, self.spec.widths, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts.values())

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.stack * self.spec.out * self.spec.columns

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element, everything counted."""
        return self.nbytes * 8 / self.size

    def parts(self) -> dict[str, StoredTensor]:
        """Suffix -> raw tensor with name, dtype, shape, file and byte offset; nothing is read until asked for."""
        return dict(self._parts)

    def to_torch(self) -> dict[str, Any]:
        """Every part as a torch tensor, by suffix."""
        return {suffix: part.to_torch() for suffix, part in self._parts.items()}

    def digest(self) -> str:
        """The digest of section 9.4, computed: equal for equal weights, whatever their names and files."""
        sums = {}
        for suffix, part in self._parts.items():
            state = hashlib.sha256()
            for chunk in part.chunks():
                state.update(chunk.data)
            sums[suffix] = state.hexdigest()
        return digest_of(self.spec, {s: (p.dtype, p.shape, sums[s]) for s, p in self._parts.items()})

    def check(self) -> None:
        """Check the content of every part (BCQ-V401 to V409); raises the first fault."""
        checks.check_content(self.spec, self._parts, checks.Place(refuse, weight=self.name))

    def dequantize(
        self, dtype: Any = None, *, rows: Range = None, columns: Range = None, planes: int | None = None
    ) -> Array:
        """Values, shape ``shape`` or the given ``(start, stop)`` ranges of rows and columns.

        ``dtype``: the logical dtype by default; any other rounds the same exact E once to that type ("float64"
        gives E itself). ``planes``: use and read only the first ones (spec section 8.1).
        """
        kind = self.dtype if dtype is None else _value_type(dtype)
        row_range = _range(rows, self.spec.out, "rows")
        column_range = _range(columns, self.spec.columns, "columns")
        shape = (self.spec.stack, row_range[1] - row_range[0], column_range[1] - column_range[0])
        out = np.empty(shape, numpy_dtype(kind))
        for e in range(self.spec.stack):
            decode.decode_matrix(self.spec, self._parts, e, row_range, column_range, planes, kind, out[e])
        return out if len(self.shape) == 3 else out[0]

    def planes(self, first: int | None = None) -> tuple[Array, ...]:
        """Per segment the first ``first`` planes, ``([E,] p, out, words)`` uint32; reads only their bytes."""
        if first is not None:
            first = arguments.integer(first, "first", 1, unit="planes")
        source = self.to_canonical()._parts if self.scheme.aligned64 else self._parts
        lead = [(0, self.spec.stack)] if len(self.shape) == 3 else []
        found = []
        for k, segment in enumerate(self.scheme.segments):
            count = min(first or segment.bits, segment.bits)
            found.append(source[f"s{k}_planes"].read(*lead, (0, count)).view(np.uint32))
        return tuple(found)

    def alpha_z(self, planes: int | None = None) -> tuple[tuple[Array, Array], ...]:
        """Per segment the plane scales ``([E,] p, out, G)`` and the bias ``([E,] out, G)``, stored or derived.

        float32 where that is exact (first-order F16 and BF16 numbers that do not overflow it), else float64.
        """
        if planes is not None:
            decode.refuse_truncation(self.spec, planes)
        everything = (0, self.spec.out)
        pairs = []
        for k, segment in enumerate(self.scheme.segments):
            alphas, biases = [], []
            for e in range(self.spec.stack):
                numbers = decode.load_rows(self.spec, self._parts, e, everything, planes)
                alpha, z = decode.alpha_z(numbers, k)
                alphas.append(alpha)
                biases.append(z)
            stacked = (np.stack(alphas), np.stack(biases)) if len(self.shape) == 3 else (alphas[0], biases[0])
            pairs.append(_shortest(segment, *stacked))
        return tuple(pairs)

    # -- slices and other forms -------------------------------------------------------------------------------

    def rows(self, start: int, stop: int) -> BcqWeight:
        """Rows ``start..stop`` as a weight of its own; reads only their bytes."""
        start, stop = _range((start, stop), self.spec.out, "rows")
        return self._rebuilt(*slicing.slice_rows(self.spec, self._parts, start, stop))

    def columns(self, start: int, stop: int) -> BcqWeight:
        """Columns ``start..stop`` as a weight of its own (canonical layout); exact, or refused with BCQ-E303."""
        start, stop = _range((start, stop), self.spec.columns, "columns")
        plain = self.to_canonical()
        return self._rebuilt(*slicing.slice_columns(plain.spec, plain._parts, start, stop))

    def to_canonical(self) -> BcqWeight:
        """The same weight in the canonical layout; itself if it has it already."""
        return self._rebuilt(*aligned64.canonical_form(self.spec, self._parts)) if self.scheme.aligned64 else self

    def to_aligned64(self) -> BcqWeight:
        """The same weight as aligned64 tiles; refused with BCQ-E305 when it does not fit."""
        return self if self.scheme.aligned64 else self._rebuilt(*aligned64.aligned_form(self.spec, self._parts))

    def codes(self, segment: int = 0) -> npt.NDArray[np.uint8]:
        """Codes of a segment in stored column order, ``([E,] out, width)`` uint8."""
        arguments.integer(segment, "segment", 0, len(self.spec.widths) - 1)
        plain = self.to_canonical()
        return unpack_codes(plain._parts[f"s{segment}_planes"].array(), plain.spec.widths[segment])

    def _rebuilt(self, spec: WeightSpec, arrays: dict[str, Array]) -> BcqWeight:
        spec, arrays = build.minimal_zeros(spec, arrays)
        return BcqWeight(self.name, spec, build.wrap(spec, arrays))

    # -- from a quantizer's arrays ----------------------------------------------------------------------------

    @classmethod
    def from_affine(
        cls, codes: Array, scale: Array | build.Coded, zero_point: int | Array, *, group_size: int | str,
        bits: int | None = None, dtype: Any = None,
    ) -> BcqWeight:  # fmt: skip
        """``scale * (code - zero_point)``.

        codes ``([E,] out, in)`` unsigned integers; scale ``([E,] out, G)`` float16, bfloat16, float32, float8_e8m0fnu
        or float8_e4m3fn (unsigned), or :class:`Coded`; zero_point an integer or ``([E,] out, G)``; ``group_size``: as
        many columns, 8 or more, share a scale (G = ceil(in / group_size)), ``"row"`` for all; ``bits`` by default the
        fewest that hold codes and zero points; ``dtype`` by default that of the scales. All constructors take as an
        array what numpy does: lists and torch tensors on the CPU, too.
        """
        return cls._made(*build.affine(codes, scale, zero_point, bits, group_size, _logical(dtype)))

    @classmethod
    def from_float_zero(
        cls,
        codes: Array,
        scale: Array | build.Coded,
        zero: Array,
        *,
        group_size: int | str,
        bits: int,
        dtype: Any = None,
    ) -> BcqWeight:
        """``scale * RN(code - zero)`` with floating-point zeros ``([E,] out, G)``."""
        return cls._made(*build.float_second("float-zero", codes, scale, zero, bits, group_size, _logical(dtype)))

    @classmethod
    def from_offset(
        cls, codes: Array, scale: Array | build.Coded, offset: Array | build.Coded, *, group_size: int | str, bits: int,
        dtype: Any = None,
    ) -> BcqWeight:  # fmt: skip
        """``scale * code + offset`` with offsets ``([E,] out, G)`` of the same kinds as the scales."""
        return cls._made(*build.float_second("offset", codes, scale, offset, bits, group_size, _logical(dtype)))

    @classmethod
    def from_table(
        cls, codes: Array, scale: Array | build.Coded, table: Sequence[int], *, group_size: int, exponent: int = 0,
        dtype: Any = None,
    ) -> BcqWeight:  # fmt: skip
        """``scale * (table[code] * 2^exponent)``; ``table``: 2^q integers within +-2^28, ``exponent`` -126..0."""
        return cls._made(*build.table(codes, scale, table, exponent, group_size, _logical(dtype)))

    @classmethod
    def from_bcq(
        cls, bits: Array, alpha: Array, bias: Array | None = None, *, group_size: int | str, dtype: Any = None,
        scale_sets: Mapping[int, tuple[Array, Array | None]] | None = None,
    ) -> BcqWeight:  # fmt: skip
        """Sum of +-alpha plus bias.

        bits ``([E,] q, out, in)`` of 0 and 1, plane 0 first; alpha ``([E,] q, out, G)``; bias ``([E,] out, G)``;
        ``scale_sets``: p -> (alpha ``([E,] p, out, G)``, bias) for reading only p planes.
        """
        sets = {} if scale_sets is None else scale_sets
        return cls._made(*build.bcq(bits, alpha, bias, group_size, _logical(dtype), sets))

    @classmethod
    def from_segments(cls, pieces: Sequence[BcqWeight], *, perm: Array | None = None) -> BcqWeight:
        """Weights of equal rows and dtype side by side as segments of one; ``perm[j]`` is the column stored at j."""
        given: Any = pieces
        held = list(given) if isinstance(given, Iterable) else []
        if not held or not all(isinstance(piece, BcqWeight) for piece in held):
            kinds = ", ".join(sorted({type(piece).__name__ for piece in held})) or f"none in a {type(pieces).__name__}"
            raise arguments.wrong("pieces", escape(kinds), "a list of BcqWeight, at least one")
        made = cls._made(*build.concatenate([(piece.spec, piece._arrays()) for piece in held]))
        return made if perm is None else made.with_perm(perm)

    def with_second_order(self, codes: Array, scale: Array, zero: Array, *, bits: int, rows: int) -> BcqWeight:
        """Scales as ``scale * (code - zero)``: codes ``([E,] out, G)``, scale and zero ``([E,] ceil(out/rows), G)``.

        Integer zeros are stored packed, floating-point ones as they are. For weights of one segment with a scale.
        """
        if len(self.scheme.segments) != 1 or self.scheme.segments[0].scale is None:
            found = "no single segment with a scale"
            raise error("BCQ-E305", tensor=self.name, found=found, expected="apply it before from_segments")
        made = build.Coded(codes, scale, zero, bits, rows)
        return self._made(*build.second_order((self.spec, self._arrays()), made))

    def with_perm(self, perm: Array) -> BcqWeight:
        """The same stored columns; stored column j is original column ``perm[j]`` (``([E,] in)`` integers)."""
        if self.scheme.outliers is not None:
            found = "a weight with outliers"
            raise error("BCQ-E305", tensor=self.name, found=found, expected="with_perm before with_outliers")
        spec, part = build.with_perm(self.spec, perm)
        return self._made(spec, {**self._arrays(), **part})

    def with_outliers(
        self, indptr: Array, indices: Array, values: Array, *, mode: str = "add", segments: Sequence[int] | None = None
    ) -> BcqWeight:
        """CSR outliers over original columns: indptr ``(E*out + 1)``, indices and values ``(nnz)``."""
        spec, part = build.with_outliers(self.spec, indptr, indices, values, mode, segments)
        return self._made(spec, {**self._arrays(), **part})

    def allow_nonfinite(self) -> BcqWeight:
        """The same weight, marked so that infinities and NaNs among its numbers are legal."""
        spec = replace(self.spec, scheme=replace(self.scheme, nonfinite=True))
        return BcqWeight(self.name, spec, self._parts)

    def _arrays(self) -> dict[str, Array]:
        return {suffix: part.array() for suffix, part in self._parts.items()}

    @classmethod
    def _made(cls, spec: WeightSpec, arrays: Mapping[str, Array]) -> BcqWeight:
        try:
            scheme_of(scheme_json(spec.scheme), "scheme")
        except Misfit as misfit:
            raise error("BCQ-E302", found=str(misfit), expected="what the format can say") from None
        try:
            checks.check_spec(spec, checks.Place(refuse))
            made = cls("", spec, build.wrap(spec, arrays))
            checks.check_content(spec, made._parts, checks.Place(_refuse_except_nonfinite))
        except FormatError as fault:  # no file is at fault, as the hints of these codes say
            fault.hint = CODES["BCQ-E302"].hint
            raise
        return made

    def __repr__(self) -> str:
        kinds = " + ".join(f"{s.encoding} q={s.bits} g={s.group_size} x{w}" for s, w in self.segments)
        return f"BcqWeight({self.name!r}, {list(self.shape)}, {self.dtype}, {kinds}, {self.bits_per_weight:.3f} bit)"


def _shortest(segment: Segment, alpha: Array, z: Array) -> tuple[Array, Array]:
    """float32 where it holds the numbers exactly, else float64 as they are."""
    if segment.encoding != "bcq" and not {segment.scale} <= {"F16", "BF16"}:
        return alpha, z
    with np.errstate(over="ignore", invalid="ignore"):
        short = (alpha.astype(np.float32), z.astype(np.float32))
    for full, half in zip((alpha, z), short, strict=True):
        if (np.isfinite(full) & ~np.isfinite(half)).any():
            return alpha, z
    return short


def _refuse_except_nonfinite(finding: Finding) -> None:
    """Infinities may still be allowed by :meth:`BcqWeight.allow_nonfinite`; the writer asks again."""
    if finding.code != "BCQ-V405":
        refuse(finding)


def _logical(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = logical_name(dtype)
    if name not in FLOATS:
        raise error("BCQ-E302", found=f"logical dtype {name}", expected="F16, BF16 or F32")
    return name


def _value_type(dtype: Any) -> str:
    try:
        return logical_name(dtype)
    except UsageError as fault:
        fault.hint = "codes() has the integers; dequantize() gives floating-point numbers"
        raise


def _range(asked: Any, size: int, what: str) -> tuple[int, int]:
    if asked is None:
        return 0, size
    ends = tuple(asked) if isinstance(asked, tuple | list) else ()
    if (
        len(ends) != 2
        or not all(isinstance(end, int | np.integer) for end in ends)
        or not 0 <= ends[0] < ends[1] <= size
    ):
        found = "..".join(repr(end) for end in ends) or repr(asked)
        hint = f"the weight has {size} {what}: 0, {size} are all of them"
        raise arguments.wrong(what, f"{what} {escape(found, 40)}", f"start < stop within 0..{size}", hint)
    return int(ends[0]), int(ends[1])
