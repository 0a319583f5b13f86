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
from bcqfmt.errors import error

from .packing import pack, pack_planes, unpack
from .scheme import BYTE_FLOATS, OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec, sized

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Built = tuple[WeightSpec, Arrays]
_BYTES = {"F8_E8M0": "E8M0", "F8_E4M3": "UE4M3"}


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
    codes: Array, scale: Numbers, zero: int | Array, bits: int, group_size: int | str, dtype: str | None
) -> Built:
    """Codes (..., out, in), scale (..., out, G), zero points: an integer or (..., out, G)."""
    codes = _codes(codes, bits)
    kind, arrays = _numbers(scale, "scale")
    shape = (scale.codes if isinstance(scale, Coded) else scale).shape
    if np.ndim(zero) and np.shape(zero) != shape:
        found = f"zero points {np.shape(zero)}"
        raise error("BCQ-E302", found=found, expected=f"one integer, or {shape} as the scales")
    declared, part = declared_zero(zero, bits)
    segment = Segment(encoding="affine", bits=bits, **sized(group_size), scale=kind, zero=declared)
    arrays |= {"s0_planes": pack_planes(codes, bits), **part}
    return one_segment(segment, codes.shape, dtype or _usual(kind)), arrays


def table(
    codes: Array, scale: Numbers, levels: Sequence[int], exponent: int, group_size: int | str, dtype: str | None
) -> Built:
    """Like :func:`affine` with the number of each code in ``levels``, multiples of 2^exponent."""
    bits = max(1, (len(levels) - 1).bit_length())
    codes = _codes(codes, bits)
    kind, arrays = _numbers(scale, "scale")
    segment = Segment(
        encoding="table",
        bits=bits,
        **sized(group_size),
        scale=kind,
        table=tuple(int(level) for level in levels),
        table_exponent=exponent,
    )
    arrays["s0_planes"] = pack_planes(codes, bits)
    return one_segment(segment, codes.shape, dtype or _usual(kind)), arrays


def float_second(
    encoding: str, codes: Array, scale: Numbers, second: Numbers, bits: int, group_size: int | str, dtype: str | None
) -> Built:
    """Like :func:`affine` with floating-point zeros (``float-zero``) or offsets (``offset``), (..., out, G)."""
    name = "zero" if encoding == "float-zero" else "offset"
    codes = _codes(codes, bits)
    kind, arrays = _numbers(scale, "scale")
    other, more = _numbers(second, name)
    stored: dict[str, Any] = {"scale": kind, name: other}
    segment = Segment(encoding=encoding, bits=bits, **sized(group_size), **stored)
    return one_segment(segment, codes.shape, dtype or _usual(kind)), {
        "s0_planes": pack_planes(codes, bits), **arrays, **more,
    }  # fmt: skip


def bcq(
    signs: Array,
    alpha: Array,
    bias: Array | None,
    group_size: int | str,
    dtype: str | None,
    scale_sets: Mapping[int, tuple[Array, Array | None]],
) -> Built:
    """Bits (..., q, out, in) of 0 and 1, alpha (..., q, out, G), bias (..., out, G), scale sets by precision."""
    if signs.ndim not in (3, 4):
        raise error("BCQ-E302", found=f"bits of {signs.ndim} dimensions", expected="(q, out, in) or (E, q, out, in)")
    q = signs.shape[-3]
    if signs.size and not np.isin(signs, (0, 1)).all():
        raise error("BCQ-E302", found="bits other than 0 and 1", expected="0 for -alpha, 1 for +alpha")
    for p, (_, set_bias) in sorted(scale_sets.items()):
        if (set_bias is None) != (bias is None):
            raise error("BCQ-E302", found=f"precision {p}", expected="a bias in every scale set, or in none")
    segment, arrays = plane_numbers(q, group_size, alpha, bias, scale_sets)
    planes = [pack_planes(signs[..., i, :, :].astype(np.uint8), 1)[..., 0, :, :] for i in range(q)]
    arrays["s0_planes"] = np.stack(planes, axis=-3)
    return one_segment(segment, (*signs.shape[:-3], *signs.shape[-2:]), dtype or _float(alpha, "alpha")), arrays


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
    order, made = _numbers(scale, "scale")
    segment = replace(spec.scheme.segments[0], scale=order)
    kept = {name: array for name, array in arrays.items() if not name.startswith("s0_scale")}
    return replace(spec, scheme=replace(spec.scheme, segments=(segment,))), kept | made


def _numbers(given: Numbers, name: str) -> tuple[str | SecondOrder, Arrays]:
    """What the scheme says of scales or offsets, and their parts."""
    if not isinstance(given, Coded):
        kind, array = _stored(given, name)
        return kind, {f"s0_{name}": array}
    scale, zero = _float(given.scale, f"{name}.scale"), given.zero
    arrays = {f"s0_{name}_scale": given.scale}
    if given.codes.dtype.kind not in "iu":
        kind, arrays[f"s0_{name}_codes"] = _stored(given.codes, f"{name}.codes")
        if kind not in BYTE_FLOATS or not isinstance(zero, int) or zero:
            raise error("BCQ-E302", found=f"{name}.codes of type {kind} with zero", expected="integers, or no zero")
        return SecondOrder(kind, given.rows, scale, 0, given.groups), arrays
    arrays[f"s0_{name}_codes"] = pack(_codes(given.codes, given.bits), given.bits)
    declared: int | str
    if isinstance(zero, int | np.integer):
        declared = int(zero)
    elif zero.dtype.kind in "iu":
        declared, arrays[f"s0_{name}_zero"] = "packed", pack(_codes(zero, given.bits), given.bits)
    else:
        declared, arrays[f"s0_{name}_zero"] = _float(zero, f"{name}.zero"), zero
    return SecondOrder(given.bits, given.rows, scale, declared, given.groups), arrays


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
    return replace(spec, scheme=replace(spec.scheme, perm=True)), {"perm": _int32(perm, "perm")}


def with_outliers(
    spec: WeightSpec, indptr: Array, indices: Array, values: Array, mode: str, segments: Sequence[int] | None
) -> Built:
    """The scheme with CSR outliers, and the three parts; columns in original order."""
    allowed = tuple(range(len(spec.widths))) if segments is None else tuple(sorted(set(segments)))
    if mode not in ("add", "replace") or not set(allowed) <= set(range(len(spec.widths))) or not allowed:
        found = f"mode {mode!r}, segments {list(allowed)}"
        raise error("BCQ-E302", found=found, expected="add or replace; segments of the weight")
    columns = _int32(indices, "indices")
    if columns.size and (columns.min() < 0 or columns.max() >= spec.columns):
        raise error("BCQ-V408", found=f"columns up to {columns.max()}", expected=f"0..{spec.columns - 1}")
    rule = OutlierRule(mode, _float(values, "values"), allowed)
    arrays = {
        "outlier_indptr": _int32(indptr, "indptr"),
        "outlier_indices": columns.astype(np.uint16 if spec.columns <= 65536 else np.int32),
        "outlier_values": values,
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


def _int32(values: Array, what: str) -> npt.NDArray[np.int32]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > limits.MAX_DIM):
        raise error("BCQ-E302", found=f"{what} of type {array.dtype}", expected="integers in 0..2^31-1")
    return array.astype(np.int32)


def _codes(codes: Array, bits: int) -> Array:
    if codes.ndim not in (2, 3):
        raise error("BCQ-E302", found=f"an array of {codes.ndim} dimensions", expected="2, or 3 in a stack")
    if codes.dtype.kind not in "iu":
        raise error("BCQ-E302", found=f"codes of type {codes.dtype}", expected="integers")
    if not 1 <= bits <= 8:
        raise error("BCQ-E302", found=f"{bits} bits", expected="1..8")
    if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < 2**bits:
        raise error("BCQ-E302", found=f"codes {codes.min()}..{codes.max()}", expected=f"0..{2**bits - 1}")
    return codes.astype(np.uint8)


def _float(array: Array, what: str) -> str:
    name = name_of(array)
    if name not in FLOATS:
        raise error("BCQ-E302", found=f"{what} of type {array.dtype}", expected="float16, bfloat16 or float32")
    return name


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
