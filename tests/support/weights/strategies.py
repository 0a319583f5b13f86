"""Arbitrary legal weights out of random words, as the package's weight and as plain lists for the oracle."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from bcqfmt import BcqWeight, OutlierRule, PackedZero, Scheme, SecondOrder, Segment, StoredTensor, WeightSpec
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.weight.scheme import sized
from weights import oracle
from weights.oracle import Plain, Raw, ceil

EXPLORE = int(os.environ.get("BCQ_EXPLORE", "1"))  # above 1: that many times as many examples, and fresh ones
FLOATS = ("F16", "BF16", "F32")
BYTE_FLOATS = ("E8M0", "UE4M3")
ENCODINGS = ("affine", "float-zero", "offset", "table", "bcq")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# patterns worth meeting: zeros, subnormals, smallest and largest normal numbers, one, minus one
_SPECIAL = {
    "F16": (0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00),
    "BF16": (0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80),
    "F32": (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000),
}
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}
_NONFINITE = {
    "F16": (0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7D55),
    "BF16": (0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FA5),
    "F32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7FA55555),
}


def examples(count: int) -> settings:
    """That many examples in a normal run."""
    return settings(max_examples=count * EXPLORE)


class Source:
    """Random raw numbers: a style of floating-point numbers and a generator for everything else."""

    def __init__(self, seed: int, style: str, nonfinite: bool) -> None:
        self.random = random.Random(seed)
        self.style, self.nonfinite = style, nonfinite

    def float_(self, dtype: str) -> int:
        """A bit pattern of a finite number, now and then of another one where that is allowed."""
        if self.nonfinite and self.random.random() < 0.15:
            return self.random.choice(_NONFINITE[dtype])
        if self.style == "special" or (self.style == "any" and self.random.random() < 0.2):
            return self.random.choice(_SPECIAL[dtype])
        if self.style == "plain":  # what quantizers really write
            return oracle.rounded(self.random.uniform(-2, 2), dtype)
        while True:
            pattern = self.random.getrandbits(8 * oracle.BYTES[dtype])
            if pattern & _EXPONENT[dtype] != _EXPONENT[dtype]:
                return pattern

    def floats(self, dtype: str, *shape: int) -> Raw:
        return dtype, list(shape), [self.float_(dtype) for _ in range(_count(shape))]

    def numbers(self, dtype: str, *shape: int) -> Raw:
        """Numbers of any type that scales have."""
        if dtype in FLOATS:
            return self.floats(dtype, *shape)
        if self.style == "plain":  # up to 0.5
            low, top = (119, 126) if dtype == "E8M0" else (41, 48)
        else:
            low, top = (0, 255) if dtype == "E8M0" else (0, 0x7E)
        ends = (low, low + 1, low + 7, top)
        one = self.random
        found = [one.choice(ends) if one.random() < 0.2 else one.randint(low, top) for _ in range(_count(shape))]
        return "U8", list(shape), found

    def packed(self, bits: int, fields: int, *lead: int, limit: int | None = None) -> tuple[Raw, list[int]]:
        """Random fields below 2**bits (at most `limit`) and their words."""
        top = 2**bits - 1 if limit is None else limit
        rows = [[self.random.randint(0, top) for _ in range(fields)] for _ in range(_count(lead))]
        words = [word for row in rows for word in oracle.pack(row, bits)]
        return ("I32", [*lead, ceil(fields * bits, 32)], words), [value for row in rows for value in row]


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@st.composite
def weights(
    draw: st.DrawFn,
    *,
    encodings: tuple[str, ...] = ENCODINGS,
    max_segments: int = 3,
    max_rows: int = 6,
    max_groups: int = 4,
    perm: bool | None = None,
    outliers: bool | None = None,
    stack: bool | None = None,
    nonfinite: bool | None = False,
    second_order: bool | None = None,
    styles: tuple[str, ...] = ("any", "any", "special", "plain"),
) -> tuple[BcqWeight, Plain]:
    """A legal weight; an option that is None may go either way."""

    def maybe(option: bool | None) -> bool:
        return draw(st.booleans()) if option is None else option

    odd = maybe(nonfinite)
    source = Source(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(styles)), odd)
    lead = [draw(st.integers(1, 3))] if maybe(stack) else []
    out = draw(st.integers(1, max_rows))
    count = draw(st.integers(1, max_segments))
    segments: list[dict[str, Any]] = []
    widths: list[int] = []
    parts: dict[str, Raw] = {}
    for k in range(count):
        segment, width, found = _segment(draw, source, [*lead, out], k == count - 1, encodings, second_order)
        segments.append(segment)
        widths.append(width)
        parts.update({f"s{k}_{name}": raw for name, raw in found.items()})
    plain = Plain([*lead, out, sum(widths)], draw(st.sampled_from(FLOATS)), {"segments": segments}, widths, parts)
    if odd:
        plain.scheme["nonfinite"] = True
    if maybe(perm):
        _add_perm(plain, source)
    if maybe(outliers):
        rule = {
            "mode": draw(st.sampled_from(("add", "replace"))),
            "dtype": draw(st.sampled_from(FLOATS)),
            "segments": sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))),
        }
        _add_outliers(plain, source, rule, draw(st.sampled_from((0.0, 0.3, 1.0))))
    return build(plain), plain


def _segment(
    draw: st.DrawFn, source: Source, lead: list[int], last: bool, encodings: tuple[str, ...], second_order: bool | None
) -> tuple[dict[str, Any], int, dict[str, Raw]]:
    encoding = draw(st.sampled_from(encodings))
    q = draw(st.integers(1, 8))
    g = draw(st.sampled_from((8, 8, 9, 16, 31, 32, 33, 40)))
    groups = draw(st.integers(1, 4 if g < 20 else 2))
    width = groups * g
    if last and groups > 1:
        width -= draw(st.integers(0, g - 1))
    *stack, out = lead
    size = "row" if groups == 1 and draw(st.booleans()) else g
    segment: dict[str, Any] = {"encoding": encoding, "bits": q, "group_size": size}
    parts: dict[str, Raw] = {"planes": source.packed(1, width, *stack, q, out)[0]}
    if encoding == "bcq":
        _bcq_parts(draw, source, segment, parts, stack, out, groups)
        return segment, width, parts
    _number_parts(draw, source, segment, parts, lead, groups, "scale", second_order)
    if encoding == "affine":
        _zero_parts(draw, source, segment, parts, lead, groups)
    elif encoding == "float-zero":
        segment["zero"] = draw(st.sampled_from(FLOATS))
        parts["zero"] = source.floats(segment["zero"], *lead, groups)
    elif encoding == "offset":
        _number_parts(draw, source, segment, parts, lead, groups, "offset", second_order)
    else:
        top = draw(st.sampled_from((1, 12, 127) if source.style == "plain" else (1, 12, 127, 2**28)))
        segment["table"] = [source.random.randint(-top, top) for _ in range(2**q)]
        if draw(st.booleans()):
            segment["table_exponent"] = draw(st.sampled_from((-1,) if source.style == "plain" else (-126, -27, -1)))
    return segment, width, parts


def _bcq_parts(
    draw: st.DrawFn,
    source: Source,
    segment: dict[str, Any],
    parts: dict[str, Raw],
    stack: list[int],
    out: int,
    groups: int,
) -> None:
    q = segment["bits"]
    segment["alpha"] = draw(st.sampled_from(FLOATS))
    if draw(st.booleans()):
        segment["bias"] = draw(st.sampled_from(FLOATS))
    chosen = sorted(draw(st.sets(st.integers(1, q - 1)))) if q > 1 else []
    if chosen:
        segment["precisions"] = chosen
    for p in (q, *chosen):
        suffix = "" if p == q else f"_p{p}"
        parts[f"alpha{suffix}"] = source.floats(segment["alpha"], *stack, p, out, groups)
        if "bias" in segment:
            parts[f"bias{suffix}"] = source.floats(segment["bias"], *stack, out, groups)


def _number_parts(
    draw: st.DrawFn, source: Source, segment: dict[str, Any], parts: dict[str, Raw], lead: list[int], groups: int,
    key: str, second_order: bool | None,
) -> None:  # fmt: skip
    """A scale or an offset of any kind."""
    *stack, out = lead
    if not (draw(st.booleans()) if second_order is None else second_order):
        segment[key] = draw(st.sampled_from((*FLOATS, *BYTE_FLOATS)))
        parts[key] = source.numbers(segment[key], *lead, groups)
        return
    order: dict[str, Any] = {"rows": draw(st.integers(1, out + 2)), "scale": draw(st.sampled_from(FLOATS))}
    if draw(st.booleans()):
        order["groups"] = draw(st.integers(2, groups + 1))
    segment[key] = order
    shared = [*stack, ceil(out, order["rows"])], ceil(groups, order.get("groups", 1))
    parts[f"{key}_scale"] = source.floats(order["scale"], *shared[0], shared[1])
    if draw(st.integers(0, 3)) == 0:
        order["codes"] = draw(st.sampled_from(BYTE_FLOATS))
        parts[f"{key}_codes"] = source.numbers(order["codes"], *lead, groups)
        return
    bits = order["bits"] = draw(st.integers(1, 8))
    zero = order["zero"] = draw(st.sampled_from(("packed", *FLOATS, 0, 2 ** (bits - 1), 2**bits)))
    parts[f"{key}_codes"] = source.packed(bits, groups, *lead)[0]
    if zero == "packed":
        parts[f"{key}_zero"] = source.packed(bits, shared[1], *shared[0])[0]
    elif isinstance(zero, str):
        parts[f"{key}_zero"] = source.floats(zero, *shared[0], shared[1])


def _zero_parts(
    draw: st.DrawFn, source: Source, segment: dict[str, Any], parts: dict[str, Raw], lead: list[int], groups: int
) -> None:
    """A constant, or stored zero points in the one width that is legal for them."""
    top = draw(st.sampled_from((1, 2 ** (segment["bits"] - 1), 2 ** segment["bits"])))
    state = source.random.getstate()
    fields = source.packed(9, groups, *lead, limit=top)[1]
    if min(fields) == max(fields):
        segment["zero"] = max(fields)
        return
    source.random.setstate(state)
    bits = max(fields).bit_length()
    segment["zero"] = {"bits": bits}
    parts["zero"] = source.packed(bits, groups, *lead, limit=top)[0]


def _add_perm(plain: Plain, source: Source) -> None:
    plain.scheme["perm"] = True
    rows = [source.random.sample(range(plain.columns), plain.columns) for _ in range(plain.stack)]
    flat = [column for row in rows for column in row]
    plain.parts["perm"] = ("I32", [*plain.shape[:-2], plain.columns], flat)


def _add_outliers(plain: Plain, source: Source, rule: dict[str, Any], share: float) -> None:
    plain.scheme["outliers"] = rule
    owner = [k for k, width in enumerate(plain.widths) for _ in range(width)]
    places = []
    for e in range(plain.stack):
        perm = plain.matrix("perm", e) if "perm" in plain.parts else range(plain.columns)
        columns = sorted(perm[j] for j in range(plain.columns) if owner[j] in rule["segments"])
        places += [(e * plain.out + r, c) for r in range(plain.out) for c in columns]
    elements = plain.stack * plain.out * plain.columns
    nnz = min(int(elements // 8 * share), len(places))
    chosen = sorted(source.random.sample(places, nnz))
    indptr = [sum(row < r for row, _ in chosen) for r in range(plain.stack * plain.out + 1)]
    plain.parts["outlier_indptr"] = ("I32", [len(indptr)], indptr)
    plain.parts["outlier_indices"] = ("U16", [nnz], [column for _, column in chosen])
    plain.parts["outlier_values"] = source.floats(rule["dtype"], nnz)


@st.composite
def tiled_weights(draw: st.DrawFn) -> tuple[BcqWeight, Plain]:
    """A weight in the layout aligned64, out of random tiles."""
    source = Source(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(("any", "special", "plain"))), False)
    stack = [draw(st.integers(1, 2))] if draw(st.booleans()) else []
    out, tiles, rows = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    groups, row_groups = 3 * tiles, ceil(out, rows)
    words = source.random.getrandbits
    high: dict[str, Any] = {"encoding": "affine", "bits": 4, "group_size": draw(st.sampled_from((8, 16)))}
    high["scale"] = draw(st.sampled_from(FLOATS))
    lead = [*stack, out]
    parts: dict[str, Raw] = {}
    _zero_parts(draw, source, high, parts, lead, 16 * tiles // high["group_size"])
    parts = {f"s1_{name}": raw for name, raw in parts.items()}
    parts["s1_scale"] = source.floats(high["scale"], *lead, 16 * tiles // high["group_size"])
    scale = draw(st.sampled_from(FLOATS))
    order = {"bits": 4, "rows": rows, "scale": scale, "zero": "packed"}
    low = {"encoding": "affine", "bits": 2, "group_size": 16, "scale": order, "zero": {"bits": 2}}
    total = _count((*lead, tiles))
    parts["tile"] = ("I32", [*lead, tiles, 4], [words(32) for _ in range(4 * total)])
    parts["tile_extra"] = ("I32", [*lead, tiles], [words(32) for _ in range(total)])
    same = draw(st.booleans())  # every zero point equal: the canonical form has no zero part then
    meta = [words(16) & 0xFFC0 | 0x15 if same else words(16) for _ in range(total)]
    parts["tile_meta"] = ("U16", [*lead, tiles], meta)
    shape = [*stack, row_groups, groups]
    parts["s0_scale_zero"] = ("U8", shape, [words(4) for _ in range(_count(tuple(shape)))])
    parts["s0_scale_scale"] = source.floats(scale, *shape)
    scheme = {"segments": [low, high], "layout": "aligned64"}
    plain = Plain([*lead, 64 * tiles], draw(st.sampled_from(FLOATS)), scheme, [48 * tiles, 16 * tiles], parts)
    if draw(st.booleans()):
        _add_perm(plain, source)
    if draw(st.booleans()):
        _add_outliers(plain, source, {"mode": "add", "dtype": "F16", "segments": [0, 1]}, 1.0)
    return build(plain), plain


def build(plain: Plain, name: str = "") -> BcqWeight:
    """The package's weight over the same bytes, without its constructors for quantizers."""
    spec = WeightSpec(
        scheme=_scheme(plain.scheme), shape=tuple(plain.shape), dtype=plain.dtype, widths=tuple(plain.widths)
    )
    return BcqWeight(name, spec, {suffix: tensor(suffix, raw) for suffix, raw in plain.parts.items()})


def tensor(name: str, raw: Raw) -> StoredTensor:
    """A raw part as a tensor in memory."""
    dtype, shape, elements = raw
    array = np.array(elements, _UNSIGNED[oracle.BYTES[dtype]]).reshape(shape)
    return StoredTensor.from_array(name, array.view(numpy_dtype(dtype)), dtype)


def plain_of(weight: BcqWeight) -> Plain:
    """The other way: the raw words of a weight as lists."""
    from bcqfmt.checkpoint.descriptor import scheme_json

    parts: dict[str, Raw] = {}
    for suffix, part in weight.parts().items():
        size = oracle.BYTES[part.dtype]
        raw = part.tobytes()
        elements = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
        parts[suffix] = (part.dtype, list(part.shape), elements)
    return Plain(list(weight.shape), weight.dtype, scheme_json(weight.scheme), list(weight.spec.widths), parts)


def _scheme(value: dict[str, Any]) -> Scheme:
    rule = value.get("outliers")
    return Scheme(
        segments=tuple(_segment_of(segment) for segment in value["segments"]),
        aligned64="layout" in value,
        perm="perm" in value,
        outliers=OutlierRule(rule["mode"], rule["dtype"], tuple(rule["segments"])) if rule else None,
        nonfinite="nonfinite" in value,
    )


def _segment_of(value: dict[str, Any]) -> Segment:
    made = dict(value)
    for key in ("scale", "offset"):
        if isinstance(made.get(key), dict):
            order = {"zero": 0, **made[key]}
            made[key] = SecondOrder(bits=order.pop("codes", None) or order.pop("bits"), **order)
    if "table" in made:
        made["table"] = tuple(made["table"])
    if isinstance(made.get("zero"), dict):
        made["zero"] = PackedZero(**made["zero"])
    if "precisions" in made:
        made["precisions"] = tuple(made["precisions"])
    size = sized(made.pop("group_size"))
    return Segment(**made, **size)


def bits_of(array: np.ndarray[Any, Any]) -> list[int]:
    """Bit patterns of an array of floating-point numbers, row-major; NaNs of float64 made one."""
    if array.dtype == np.float64:
        array = np.where(np.isnan(array), np.float64("nan"), array)
    return np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize]).reshape(-1).tolist()
