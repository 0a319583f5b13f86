"""Arrays of a quantizer to a weight's spec and parts: what the ``BcqWeight.from_*`` constructors do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.container.dtypes import FLOATS, name_of, numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error, escape

from . import arguments
from .packing import pack, pack_planes, unpack
from .scheme import BYTE_FLOATS, OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec, sized

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Built = tuple[WeightSpec, Arrays]
_BYTES = {"F8_E8M0": "E8M0", "F8_E4M3": "UE4M3"}
_CODES = "integers, ([E,] out, in)"
_ZERO = "one integer, or integers for every group; without any, 0 or the code that means 0"
_GROUPS = "([E,] out, G) with G = ceil(in / group_size)"


class Coded(NamedTuple):
    """Scales or offsets as ``scale * (code - zero)``.

    ``codes`` ([E,] out, G) unsigned integers of ``bits`` bits, or without ``zero`` float8_e8m0fnu or float8_e4m3fn (no
    sign). ``scale`` ([E,] ceil(out/rows), ceil(G/groups)) float16, bfloat16 or float32; ``zero`` of the same shape,
    integers or floats, or one integer for all.
    """

    codes: Array
    scale: Array
    zero: Array | int = 0
    bits: int = 8
    rows: int = 1
    groups: int = 1


Numbers = Array | Coded


def wrap(spec: WeightSpec, arrays: Mapping[str, Array]) -> dict[str, StoredTensor]:
    """Arrays as parts in memory, in the types that the spec calls for."""
    wanted = spec.parts()
    parts = {}
    for suffix, array in arrays.items():
        dtype = wanted[suffix].dtype
        fits = name_of(array) == dtype or (
            dtype[0] in "IU" and array.dtype.kind in "iu" and array.dtype.itemsize == numpy_dtype(dtype).itemsize
        )
        if not fits:
            raise error("BCQ-E302", tensor=suffix, found=f"an array of type {array.dtype}", expected=dtype)
        parts[suffix] = StoredTensor.from_array(suffix, array, dtype)
    return parts


def affine(
    codes: Array, scale: Numbers, zero: int | Array, bits: int | None, group_size: int | str, dtype: str | None
) -> Built:
    """Codes (..., out, in), scale (..., out, G), zero points: an integer or (..., out, G).

    ``bits``: by default the fewest that hold codes and zero points.
    """
    codes = _matrix(codes)
    group, shape = _grouped(codes.shape, group_size)
    kind, arrays = _numbers(scale, "scale", shape)
    zero = arguments.integers(zero, "zero_point", _ZERO)
    if zero.ndim:
        zero = arguments.integers(zero, "zero_point", _GROUPS, shape)
    low, high = int(zero.min()), int(zero.max())
    if bits is None:
        bits = max(1, min(8, max(int(codes.max()).bit_length(), (high - 1).bit_length())))
    codes, bits = _codes(codes, bits)
    if low < 0 or high > 2**bits:
        raise arguments.wrong("zero_point", f"{low}..{high}", f"0..{2**bits} with {bits} bits")
    declared, part = declared_zero(zero, bits)
    segment = Segment(encoding="affine", bits=bits, **group, scale=kind, zero=declared)
    arrays |= {"s0_planes": pack_planes(codes, bits), **part}
    return one_segment(segment, codes.shape, dtype or _usual(kind)), arrays


def table(
    codes: Array, scale: Numbers, levels: Sequence[int], exponent: int, group_size: int | str, dtype: str | None
) -> Built:
    """Like :func:`affine` with the number of each code in ``levels``, multiples of 2^exponent."""
    numbers = arguments.integers(levels, "table", "2^q integers").ravel().tolist()
    codes, bits = _codes(codes, max(1, (len(numbers) - 1).bit_length()))
    group, shape = _grouped(codes.shape, group_size)
    kind, arrays = _numbers(scale, "scale", shape)
    segment = Segment(encoding="table", bits=bits, **group, scale=kind, table=tuple(numbers), table_exponent=exponent)
    arrays["s0_planes"] = pack_planes(codes, bits)
    return one_segment(segment, codes.shape, dtype or _usual(kind)), arrays


def float_second(
    encoding: str, codes: Array, scale: Numbers, second: Numbers, bits: int, group_size: int | str, dtype: str | None
) -> Built:
    """Like :func:`affine` with floating-point zeros (``float-zero``) or offsets (``offset``), (..., out, G)."""
    name = "zero" if encoding == "float-zero" else "offset"
    codes, bits = _codes(codes, bits)
    group, shape = _grouped(codes.shape, group_size)
    kind, arrays = _numbers(scale, "scale", shape)
    other, more = _numbers(second, name, shape)
    stored: dict[str, Any] = {"scale": kind, name: other}
    segment = Segment(encoding=encoding, bits=bits, **group, **stored)
    return one_segment(segment, codes.shape, dtype or _usual(kind)), {
        "s0_planes": pack_planes(codes, bits), **arrays, **more,
    }  # fmt: skip


def bcq(
    signs: Array,
    alpha: Array,
    bias: Array | None,
    group_size: int | str,
    dtype: str | None,
    scale_sets: Any,
) -> Built:
    """Bits (..., q, out, in) of 0 and 1, alpha (..., q, out, G), bias (..., out, G), scale sets by precision."""
    signs = arguments.array(signs, "bits", "0 and 1, ([E,] q, out, in)")
    if signs.ndim not in (3, 4) or not signs.size:
        raise arguments.wrong("bits", f"shape {list(signs.shape)}", "(q, out, in) or (E, q, out, in), no dimension 0")
    if not np.isin(signs, (0, 1)).all():
        raise arguments.wrong("bits", "numbers other than 0 and 1", "0 for -alpha, 1 for +alpha")
    q, shape = signs.shape[-3], (*signs.shape[:-3], *signs.shape[-2:])
    group, group_shape = _grouped(shape, group_size)
    alpha, bias = _plane_pair("alpha", "bias", alpha, bias, q, group_shape)
    if not isinstance(scale_sets, Mapping):
        raise arguments.wrong("scale_sets", f"a {type(scale_sets).__name__}", "a dict: planes -> (alpha, bias)")
    sets: dict[int, tuple[Array, Array | None]] = {}
    for given, pair in scale_sets.items():
        p = arguments.integer(given, "scale_sets", 1, q - 1, "planes")
        name = f"scale_sets[{p}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise arguments.wrong(name, f"a {type(pair).__name__}", "(alpha, bias), the bias may be None")
        sets[p] = _plane_pair(f"{name}[0]", f"{name}[1]", pair[0], pair[1], p, group_shape)
        kinds, whole = ([one if one is None else name_of(one) for one in two] for two in (sets[p], (alpha, bias)))
        if kinds != whole:
            raise arguments.wrong(name, f"alpha and bias of {kinds}", f"{whole}, the types for all planes")
    size = "row" if "row" in group else group["group_size"]
    segment, arrays = plane_numbers(q, size, alpha, bias, sets)
    planes = [pack_planes(signs[..., i, :, :].astype(np.uint8), 1)[..., 0, :, :] for i in range(q)]
    arrays["s0_planes"] = np.stack(planes, axis=-3)
    return one_segment(segment, shape, dtype or _float(alpha, "alpha")), arrays


def _plane_pair(
    first: str, second: str, alpha: Any, bias: Any, p: int, shape: tuple[int, ...]
) -> tuple[Array, Array | None]:
    """Plane scales and bias of ``p`` planes; ``shape`` ([E,] out, G), the names for messages."""
    wide = (*shape[:-2], p, *shape[-2:])
    alpha = arguments.array(alpha, first, "([E,] q, out, G) with G = ceil(in / group_size)", wide)
    return alpha, None if bias is None else arguments.array(bias, second, _GROUPS, shape)


def plane_numbers(
    bits: int,
    group_size: int | str,
    alpha: Array,
    bias: Array | None,
    scale_sets: Mapping[int, tuple[Array, Array | None]],
) -> tuple[Segment, Arrays]:
    """The bcq segment with these plane scales and biases, and its parts but for the planes."""
    arrays: Arrays = {}
    for suffix, (one, offset) in {"": (alpha, bias), **{f"_p{p}": pair for p, pair in scale_sets.items()}}.items():
        arrays[f"s0_alpha{suffix}"] = one
        if offset is not None:
            arrays[f"s0_bias{suffix}"] = offset
    segment = Segment(
        encoding="bcq",
        bits=bits,
        **sized(group_size),
        alpha=_float(alpha, "alpha"),
        bias=None if bias is None else _float(bias, "bias"),
        precisions=tuple(sorted(scale_sets)),
    )
    return segment, arrays


def second_order(built: Built, scale: Coded) -> Built:
    """Another scale for a weight of one segment."""
    spec, arrays = built
    order, made = _numbers(scale, "scale", (*spec.shape[:-1], spec.groups(0)), "")
    segment = replace(spec.scheme.segments[0], scale=order)
    kept = {name: array for name, array in arrays.items() if not name.startswith("s0_scale")}
    return replace(spec, scheme=replace(spec.scheme, segments=(segment,))), kept | made


def _numbers(
    given: Numbers, name: str, shape: tuple[int, ...], prefix: str | None = None
) -> tuple[str | SecondOrder, Arrays]:
    """What the scheme says of scales or offsets for groups of ``shape`` ([E,] out, G), and their parts.

    ``prefix`` of the names of coded ones in messages, by default ``name.``.
    """
    if not isinstance(given, Coded):
        kind, stored = _stored(arguments.array(given, name, _GROUPS, shape), name)
        return kind, {f"s0_{name}": stored}
    prefix = f"{name}." if prefix is None else prefix
    codes = arguments.array(given.codes, f"{prefix}codes", _GROUPS, shape)
    rows, groups = (arguments.integer(getattr(given, what), prefix + what, 1) for what in ("rows", "groups"))
    few = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // groups))
    numbers = arguments.array(given.scale, f"{prefix}scale", "([E,] ceil(out / rows), ceil(G / groups))", few)
    scale, zero = _float(numbers, f"{prefix}scale"), arguments.array(given.zero, f"{prefix}zero", "numbers")
    arrays = {f"s0_{name}_scale": numbers}
    if codes.dtype.kind not in "iu":
        kind, arrays[f"s0_{name}_codes"] = _stored(codes, f"{prefix}codes")
        if kind not in BYTE_FLOATS or zero.ndim or zero:
            raise arguments.wrong(f"{prefix}codes", f"type {kind} with zero", "integers, or no zero")
        return SecondOrder(kind, rows, scale, 0, groups), arrays
    codes, bits = _codes(codes, given.bits, prefix)
    arrays[f"s0_{name}_codes"] = pack(codes, bits)
    declared: int | str
    if not zero.ndim:
        declared = int(arguments.integers(zero, f"{prefix}zero", "one integer, or an array as the scale"))
    else:
        zero = arguments.array(zero, f"{prefix}zero", "as the scale", few)
        if zero.dtype.kind in "iu":
            declared, arrays[f"s0_{name}_zero"] = "packed", pack(_codes(zero, bits, prefix, "zero")[0], bits)
        else:
            declared, arrays[f"s0_{name}_zero"] = _float(zero, f"{prefix}zero"), zero
    return SecondOrder(bits, rows, scale, declared, groups), arrays


def _stored(array: Array, what: str) -> tuple[str, Array]:
    """The type that numbers have in a scheme, and the array to store: bytes for the types of one byte."""
    kind = _BYTES.get(name_of(array), "")
    return (kind, array.view(np.uint8)) if kind else (_float(array, what), array)


def _usual(kind: str | SecondOrder) -> str:
    """The logical dtype where none is asked for: that of the scales, or F32 where they are bytes."""
    found = kind.scale if isinstance(kind, SecondOrder) else kind
    return "F32" if found in BYTE_FLOATS else found


def concatenate(pieces: Sequence[tuple[WeightSpec, Mapping[str, Array]]]) -> Built:
    """One weight whose segments are those of the pieces, side by side."""
    if not pieces:
        raise error("BCQ-E302", found="no pieces", expected="at least one")
    first = pieces[0][0]
    segments: list[Segment] = []
    widths: list[int] = []
    arrays: Arrays = {}
    for spec, parts in pieces:
        plain = spec.scheme.outliers is None and not spec.scheme.perm and not spec.scheme.aligned64
        if not plain or spec.shape[:-1] != first.shape[:-1] or spec.dtype != first.dtype:
            raise error(
                "BCQ-E305",
                found=f"a piece of shape {list(spec.shape)}, dtype {spec.dtype}"
                + ("" if plain else ", with perm, outliers or tiles"),
                expected=f"plain pieces of {first.shape[-2]} rows and dtype {first.dtype}",
            )
        base = len(segments)
        for suffix, array in parts.items():
            k, _, rest = suffix[1:].partition("_")
            arrays[f"s{base + int(k)}_{rest}"] = array
        segments += spec.scheme.segments
        widths += spec.widths
    nonfinite = any(spec.scheme.nonfinite for spec, _ in pieces)
    spec = WeightSpec(
        scheme=Scheme(segments=tuple(segments), nonfinite=nonfinite),
        shape=(*first.shape[:-1], sum(widths)),
        dtype=first.dtype,
        widths=tuple(widths),
    )
    return spec, arrays


def with_perm(spec: WeightSpec, perm: Array) -> Built:
    """The scheme with ``perm``, and the part."""
    columns = _int32(perm, "perm", (*spec.shape[:-2], spec.columns))
    return replace(spec, scheme=replace(spec.scheme, perm=True)), {"perm": columns}


def with_outliers(
    spec: WeightSpec, indptr: Array, indices: Array, values: Array, mode: str, segments: Sequence[int] | None
) -> Built:
    """The scheme with CSR outliers, and the three parts; columns in original order."""
    count = len(spec.widths)
    asked = range(count) if segments is None else arguments.integers(segments, "segments", "segments of the weight")
    allowed = tuple(sorted({int(k) for k in np.ravel(asked)}))
    if not allowed or allowed[0] < 0 or allowed[-1] >= count:
        raise arguments.wrong("segments", str(list(allowed)), f"some of 0..{count - 1}")
    if mode not in ("add", "replace"):
        raise arguments.wrong("mode", escape(repr(mode)), "'add' or 'replace'")
    columns = _int32(indices, "indices")
    if columns.ndim != 1 or (columns.size and columns.max() >= spec.columns):
        found = f"shape {list(columns.shape)}, columns up to {columns.max(initial=0)}"
        raise arguments.wrong("indices", found, f"(nnz), columns in 0..{spec.columns - 1}")
    numbers = arguments.array(values, "values", "(nnz), as the indices", columns.shape)
    rule = OutlierRule(mode, _float(numbers, "values"), allowed)
    arrays = {
        "outlier_indptr": _int32(indptr, "indptr", (spec.stack * spec.out + 1,)),
        "outlier_indices": columns.astype(np.uint16 if spec.columns <= 65536 else np.int32),
        "outlier_values": numbers,
    }
    return replace(spec, scheme=replace(spec.scheme, outliers=rule)), arrays


def minimal_zeros(spec: WeightSpec, arrays: Arrays) -> Built:
    """The same weight with zero points in their shortest form: as the format demands of what is stored."""
    segments = list(spec.scheme.segments)
    for k, segment in enumerate(segments):
        if isinstance(segment.zero, PackedZero) and not (spec.scheme.aligned64 and k == 0):
            fields = unpack(arrays.pop(f"s{k}_zero"), segment.zero.bits, spec.groups(k))
            declared, part = declared_zero(fields, segment.bits, k)
            segments[k] = replace(segment, zero=declared)
            arrays.update(part)
    return replace(spec, scheme=replace(spec.scheme, segments=tuple(segments))), arrays


def one_segment(segment: Segment, shape: tuple[int, ...], dtype: str) -> WeightSpec:
    """The spec of a weight ``([E,] out, in)`` of one segment."""
    scheme = Scheme(segments=(segment,))
    return WeightSpec(scheme=scheme, shape=tuple(shape), dtype=dtype, widths=(int(shape[-1]),))


def _int32(values: Any, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[np.int32]:
    found = arguments.integers(values, name, "integers in 0..2^31-1", shape)
    if found.size and (int(found.min()) < 0 or int(found.max()) > limits.MAX_DIM):
        raise arguments.wrong(name, f"{found.min()}..{found.max()}", "integers in 0..2^31-1")
    return found.astype(np.int32)


def _matrix(codes: Any, name: str = "codes") -> Array:
    found = arguments.integers(codes, name, _CODES)
    if found.ndim not in (2, 3) or not found.size:
        raise arguments.wrong(name, f"shape {list(found.shape)}", f"{_CODES}, no dimension 0")
    return found


def _codes(given: Any, bits: Any, prefix: str = "", what: str = "codes") -> tuple[Array, int]:
    """Codes as uint8, and the bits that hold them."""
    codes, bits = _matrix(given, prefix + what), arguments.integer(bits, f"{prefix}bits", 1, 8)
    if not 0 <= int(codes.min()) <= int(codes.max()) < 2**bits:
        raise arguments.wrong(prefix + what, f"{what} {codes.min()}..{codes.max()}", f"0..{2**bits - 1}")
    return codes.astype(np.uint8), bits


def _grouped(shape: tuple[int, ...], group_size: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The fields of a segment for groups of codes of ``shape`` ([E,] out, in), and the shape ([E,] out, G)."""
    if isinstance(group_size, str) and group_size == "row":
        return sized("row"), (*shape[:-1], 1)
    size = arguments.integer(group_size, "group_size", 8, max(8, shape[-1]))
    return sized(size), (*shape[:-1], -(-shape[-1] // size))


def _float(array: Array, name: str) -> str:
    kind = name_of(array)
    if kind not in FLOATS:
        raise arguments.wrong(name, f"an array of type {array.dtype}", "float16, bfloat16 or float32")
    return kind


def declared_zero(zero: int | Array, q: int, k: int = 0) -> tuple[int | PackedZero, Arrays]:
    """How integer zero points of segment ``k`` are stored: one number in the scheme, or the fewest bits in a part.

    Returns what the scheme declares, and the part (``s0_zero``, packed words) where there is one.
    """
    values = np.asarray(zero)
    if values.dtype.kind not in "iu":
        raise error("BCQ-E302", found=f"zero points of type {values.dtype}", expected="integers")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 2**q:
        raise error("BCQ-V404", found=f"zero points {low}..{high}", expected=f"0..{2**q}")
    if low == high:
        return low, {}
    bits = high.bit_length()
    return PackedZero(bits), {f"s{k}_zero": pack(values, bits)}
