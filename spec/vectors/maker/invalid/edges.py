"""Files at the edges of rules: one step beyond a limit, exactly at a limit (and breaking a later rule), and files in
which only the first or only the last of several things is wrong.

A reader that looks at one element less, or writes < for <=, passes all other vectors.
"""

from typing import Any

from maker.build import Lcg, Tensor, canonical, container, frame, tensor
from maker.catalogue import Invalid
from maker.encodings import affine, first, shifted, some_affine, some_bcq, some_numbers, some_second, table
from maker.valid.affine import worked_example
from maker.valid.structures import tile_segments
from maker.weights import Outliers, Weight, descriptor, metadata, tensors_of

from .container import entry, start, too_many, with_entry, with_header
from .content import flipped, swapped
from .descriptor import Edit, keep, made
from .keys import ENTRY, SEGMENT, path


def lengths() -> list[Invalid]:
    """V102 to V104: the length of the header and its first byte."""
    header, data = start()
    text = canonical(header)
    whole = frame(text, data)
    empty = container({}, metadata(descriptor([])))

    def stating(length: int) -> bytes:
        return length.to_bytes(8, "little") + whole[8:]

    return [
        Invalid("V102", "one-byte", "N = 1", stating(1)[:9]),
        Invalid("V102", "25000001", "N = 25,000,001 in a small file", stating(25_000_001)),
        Invalid("V102", "top-byte", "the highest byte of N is not zero", stating(len(whole) - len(data) - 8 + 2**56)),
        Invalid("V103", "25000000", "N = 25,000,000 in a small file", stating(25_000_000)),
        Invalid("V103", "one-byte-short", "the last byte of the header is missing", empty[:-1]),
        Invalid("V104", "closing-brace", "the header begins with }", frame("}" + text[1:], data)),
    ]


def entries() -> list[Invalid]:
    """V109 to V118: tensor entries and `__metadata__`."""

    def leading(dtype: Any) -> bytes:
        return with_header(lambda h: h.update({"!": entry(dtype, [0], 0, 0)}))

    def offsets(value: Any) -> bytes:
        return with_header(lambda h: h["x"].update(data_offsets=value))

    def meta(value: Any) -> bytes:
        return with_header(lambda h: h.update(__metadata__=value))

    odd = {"a": tensor("U8", [2], [1, 2]), "y": tensor("U8", [1], [3]), "z": tensor("I16", [1], [5])}
    order = ["w.bcq_s0_planes", "w.bcq_s0_scale", "a", "y", "z"]
    shifted_file = container(tensors_of([worked_example()], odd), metadata(descriptor([worked_example()])), order)
    return [
        Invalid(
            "V115", "200000-tensors", "200,000 tensors, and a byte after them", too_many(200_000) + b"\0", gzip=True
        ),
        Invalid("V109", "first-entry", "only the first entry of the header is wrong", leading(1)),
        Invalid("V110", "first-entry", "only the first entry of the header is wrong", leading("F63")),
        Invalid("V109", "offsets-null", "data_offsets is null", offsets(None)),
        Invalid("V109", "offset-string", "the second offset is a string", offsets([20, "24"])),
        Invalid("V112", "half-byte-down", "one byte for three F4", with_entry(entry("F4", [3], 24, 25), b"\5")),
        Invalid("V117", "last-entry", "only the last entry of the header is not aligned", shifted_file),
        Invalid("V118", "null", "__metadata__ is null", meta(None)),
        Invalid("V118", "array", "__metadata__ is an array", meta([])),
        Invalid("V118", "text", "__metadata__ is a string", meta("bcqfmt")),
        Invalid(
            "V118",
            "first-value",
            "only the first value is no string",
            with_header(lambda h: h["__metadata__"].update({"!": 1})),
        ),
    ]


def keys() -> list[Invalid]:
    """V208: every key with a value of another type, or next to its range."""
    rng = Lcg(801)
    one, codes = first("F16", [[0x3C00]]), [[0, 1, 2, 3] * 2]

    def weight(seg: Any, **more: Any) -> Weight:
        return Weight("w.weight", [1, 8], "F16", [seg], **more)

    floating = weight(shifted("float-zero", 2, 8, codes, one, ("F16", [[0]])))
    offset = weight(shifted("offset", 2, 8, codes, one, ("F16", [[0]])))
    binary = weight(some_bcq(rng, 1, 8, 2, 8, "F16", "F16"))
    coded = weight(affine(2, 8, codes, some_second(rng, 1, 1, 4, 2, "F16", "F16"), 1))
    spiked = weight(some_affine(rng, 1, 8, 2, 8, 1), outliers=Outliers("add", "F16", [0], [[]]))
    nested = weight(some_bcq(rng, 1, 8, 2, 8, "F16", None))
    nested.segments[0].spec["precisions"] = [1]
    nested.segments[0].plane_numbers["alpha_p1"] = [[[0x3C00]]]
    listed = weight(table(2, 8, codes, one, [0, 1, 2, 3]))
    scheme, marks = ("schemes", 0), ("schemes", 0, "outliers")
    cases: list[tuple[str, str, Edit, Weight | None]] = [
        ("features-object", "features is an object", path("features", value={}), None),
        ("features-nested", "an array among the features", path("features", value=[[]]), None),
        ("features-first", "only the first feature is no string", path("features", value=[1, "bcq"]), binary),
        ("features-last", "only the last feature is no string", path("features", value=["bcq", 1]), binary),
        ("schemes-object", "schemes is an object", path("schemes", value={}), None),
        ("scheme-array", "a scheme as an array of its keys", path(*scheme, value=["segments"]), None),
        ("segments-integer", "segments is an integer", path(*scheme, "segments", value=1), None),
        ("segment-string", "a segment is a string", path(*SEGMENT, value="affine"), None),
        ("weight-array", "a weight entry as an array", path(*ENTRY, value=["scheme", "shape", "dtype"]), None),
        ("shape-integer", "shape is an integer", path(*ENTRY, "shape", value=16), None),
        ("shape-negative", "-2 in a shape", path(*ENTRY, "shape", value=[-2, 8]), None),
        ("scheme-negative", "the scheme -1", path(*ENTRY, "scheme", value=-1), None),
        ("widths-integer", "widths is an integer", path(*ENTRY, "widths", value=8), None),
        ("widths-negative", "-8 in widths", path(*ENTRY, "widths", value=[-8]), None),
        ("encoding-array", "encoding is an array", path(*SEGMENT, "encoding", value=["affine"]), None),
        (
            "bits-0-zero-0",
            "no planes, zero point 0",
            lambda d: d["schemes"][0]["segments"][0].update(bits=0, zero=0),
            None,
        ),
        ("zero-empty", "zero is an empty object", path(*SEGMENT, "zero", value={}), None),
        ("group-size-2-31", "groups of 2^31", path(*SEGMENT, "group_size", value=2**31), None),
        ("table-integer", "table is an integer", path(*SEGMENT, "table", value=4), listed),
        ("table-first", "-2^28 - 1, first of the table", path(*SEGMENT, "table", 0, value=-(2**28) - 1), listed),
        ("table-last", "2^28 + 1, last of the table", path(*SEGMENT, "table", 3, value=2**28 + 1), listed),
        ("float-zero-bits", "float-zero with packed zeros", path(*SEGMENT, "zero", value={"bits": 1}), floating),
        ("float-zero-integer", "float-zero with an integer zero", path(*SEGMENT, "zero", value=1), floating),
        ("float-zero-type", "zeros in F64", path(*SEGMENT, "zero", value="F64"), floating),
        ("offset-f64", "offsets in F64", path(*SEGMENT, "offset", value="F64"), offset),
        ("alpha-type", "plane scales in F64", path(*SEGMENT, "alpha", value="F64"), binary),
        ("bias-type", "a bias in F64", path(*SEGMENT, "bias", value="F64"), binary),
        ("precisions-integer", "precisions is an integer", path(*SEGMENT, "precisions", value=1), nested),
        ("precisions-0", "the precision 0", path(*SEGMENT, "precisions", value=[0, 1]), nested),
        ("second-order-bits-0", "scale codes of no bits", path(*SEGMENT, "scale", "bits", value=0), coded),
        ("second-order-rows-2-31", "2^31 rows", path(*SEGMENT, "scale", "rows", value=2**31), coded),
        ("second-order-scale", "scale_scale in F64", path(*SEGMENT, "scale", "scale", value="F64"), coded),
        ("second-order-zero-f64", "scale_zero in F64", path(*SEGMENT, "scale", "zero", value="F64"), coded),
        ("outliers-type", "outliers in F64", path(*marks, "dtype", value="F64"), spiked),
        ("outliers-negative", "outliers in segment -1", path(*marks, "segments", value=[-1, 0]), spiked),
    ]
    return [
        Invalid("V208", what, comment, made(edit, [chosen] if chosen else None), schema="descriptor")
        for what, comment, edit, chosen in cases
    ]


def versions() -> list[Invalid]:
    """V205: what a loose pattern lets pass."""
    cases = {"no-point": "1x0", "digits-of-another-script": "1.1\u0662"}
    return [Invalid("V205", what, f"version {v!a}", made(path("version", value=v))) for what, v in cases.items()]


def shapes() -> list[Invalid]:
    """V210 to V212, and V304 for what is exactly at a limit: the parts of so large a weight are not there."""
    rng = Lcg(802)

    def pair(left: int, right: int) -> Weight:
        segs = [some_affine(rng, 1, left, 2, min(left, 8), 1), some_affine(rng, 1, right, 4, min(right, 8), 1)]
        for seg in segs:
            seg.spec["group_size"] = 8
        return Weight("w.weight", [1, left + right], "F16", segs)

    def stated(*shape: int, widths: list[int] | None = None) -> Edit:
        more = {"widths": widths} if widths is not None else {}
        return lambda d: d["weights"]["w.weight"].update(shape=list(shape), **more)

    def no_columns(tensors: dict[str, Tensor]) -> None:
        tensors["w.bcq_s0_planes"] = Tensor("I32", [2, 2, 0], b"")
        tensors["w.bcq_s0_scale"] = Tensor("F16", [2, 0], b"")

    def empty_stack(d: dict[str, Any]) -> None:
        d["weights"]["w.weight"]["shape"] = [0, 2, 8]
        d["features"] = ["stack"]

    both, wide = pair(16, 8), 2**18
    return [
        Invalid("V210", "no-columns", "in = 0", made(stated(2, 0), parts=no_columns)),
        Invalid("V210", "empty-stack", "E = 0", made(empty_stack)),
        Invalid("V210", "a-little-too-large", "2^40 bits and a few more", made(stated(2**20, 2**19 + 8))),
        Invalid(
            "V210",
            "widest-segment",
            "more than 2^40 bits by the segment with the most planes",
            made(stated(2**20, wide + 8, widths=[wide, 8]), [both]),
        ),
        Invalid("V211", "one-width", "one width, two segments", made(stated(1, 24, widths=[24]), [both])),
        Invalid("V211", "first-zero", "the first width is 0", made(stated(1, 24, widths=[0, 24]), [both])),
        Invalid("V211", "last-zero", "the last width is 0", made(stated(1, 24, widths=[24, 0]), [both])),
        Invalid("V211", "more", "16 + 8 of 16 columns", made(stated(1, 16), [both])),
        Invalid("V212", "one-column", "a segment of one column", made(keep, [pair(1, 8)])),
        Invalid("V304", "rows-2-31-1", "2^31 - 1 rows, but parts for two", made(stated(2**31 - 1, 8))),
        Invalid("V304", "bits-2-40", "exactly 2^40 bits, but parts for 32", made(stated(2**20, 2**19))),
    ]


def parts() -> list[Invalid]:
    """V302 and V215: stray tensors, and each condition of aligned64."""
    rng = Lcg(803)

    def tiled(columns: int = 128) -> Weight:
        zeros = rng.rows(2, 3 * columns // 64, 4)
        return Weight("w.weight", [2, columns], "F16", tile_segments(rng, 2, columns, zeros, 2, 1), True)

    def segment(k: int, **changes: Any) -> Edit:
        return lambda d: d["schemes"][0]["segments"][k].update(changes)

    def float_zero(d: dict[str, Any]) -> None:
        d["schemes"][0]["segments"][0].update(encoding="float-zero", zero="F16")
        d["features"] = sorted([*d["features"], "float-zero"])

    def offset(d: dict[str, Any]) -> None:
        scale = d["schemes"][0]["segments"][0]["scale"]
        moved = {"encoding": "offset", "bits": 2, "group_size": 16, "scale": scale, "offset": "F16"}
        d["schemes"][0]["segments"][0] = moved
        d["features"] = sorted([*d["features"], "offset"])

    def offsets(tensors: dict[str, Tensor]) -> None:
        tensors["w.bcq_s0_offset"] = tensor("F16", [2, 6], [0] * 12)

    def first_order(d: dict[str, Any]) -> None:
        d["schemes"][0]["segments"][0]["scale"] = "F16"
        d["features"].remove("second-order")

    scale = tiled().scheme["segments"][0]["scale"]
    dense = {"z_bcq_left": tensor("U8", [1], [0])}
    cases: list[tuple[str, str, Edit]] = [
        ("encoding", "segment 0 is float-zero", float_zero),
        ("bits", "segment 0 has three planes", segment(0, bits=3)),
        ("group-size", "segment 0 has groups of 48", segment(0, group_size=48)),
        ("group-size-8", "segment 0 has groups of 8", segment(0, group_size=8)),
        ("segment-1-bits-2", "segment 1 has two planes", segment(1, bits=2, zero=2)),
        ("first-order", "the scale of segment 0 is of first order", first_order),
        ("scale-zero", "zeros of the scale in F16", segment(0, scale={**scale, "zero": "F16"})),
    ]
    return [
        Invalid("V302", "last-tensor", "a stray tensor, the last of the header", made(keep, dense=dense)),
        Invalid("V215", "offset", "segment 0 is offset", made(offset, [tiled()], parts=offsets)),
        *(Invalid("V215", what, comment, made(edit, [tiled()])) for what, comment, edit in cases),
    ]


def content() -> list[Invalid]:
    """V401 to V410: only the first or the last number is wrong, or it is wrong by as little as possible."""
    rng = Lcg(804)
    one, infinity = 0x3C00, 0x7C00

    def sparse(columns: int, rows: list[list[int]], *shape: int, **more: Any) -> Weight:
        seg = some_affine(rng, len(rows), columns, 2, 8, 1)
        spikes = Outliers("add", "F16", [0], [[(c, one) for c in row] for row in rows])
        return Weight("w.weight", [*(shape or [len(rows)]), columns], "F16", [seg], outliers=spikes, **more)

    tiled = Weight("w.weight", [1, 64], "F16", tile_segments(rng, 1, 64, [[1, 2, 3]], 1, 1), True)
    odd = Weight("w.weight", [2, 63], "F16", [some_affine(rng, 2, 63, 1, 8, 0)])
    falls = swapped(sparse(32, [[1], [2], [3]]), outlier_indptr=tensor("I32", [4], [0, 1, 4, 3]))
    halves = [some_affine(rng, 4, 16, 2, 8, 1), some_affine(rng, 4, 16, 4, 8, 1)]
    order = [[*range(16, 32), *range(16)], list(range(32))]

    def moved(kind: Any) -> Weight:
        ones, numbers = first("F16", [[one]]), some_numbers(rng, 1, 1, kind, "offset")
        return Weight("w.weight", [1, 8], "F16", [shifted("offset", 2, 8, [[0, 1, 2, 3] * 2], ones, numbers)])

    coded = moved({"codes": "UE4M3", "rows": 1, "scale": "F16"})

    def split(*columns: int) -> bytes:
        spikes = Outliers("add", "F16", [1], [[(c, one)] if c >= 0 else [] for c in columns])
        return made(keep, [Weight("w.weight", [2, 2, 32], "F16", halves, perm=order, outliers=spikes)])

    return [
        Invalid(
            "V401", "first-byte", "16 in the first byte", swapped(tiled, s0_scale_zero=tensor("U8", [1, 3], [16, 0, 0]))
        ),
        Invalid(
            "V401", "last-byte", "16 in the last byte", swapped(tiled, s0_scale_zero=tensor("U8", [1, 3], [0, 0, 16]))
        ),
        Invalid("V401", "63-columns", "bit 63 of row 0", flipped(odd, "s0_planes", 7, 7)),
        Invalid(
            "V405",
            "tiled",
            "an infinite scale_scale of tiles",
            swapped(tiled, s0_scale_scale=tensor("F16", [1, 3], [infinity, one, one])),
        ),
        Invalid("V407", "last-falls", "only the last step falls", falls),
        Invalid("V408", "last-row", "column 32 of 32, in the last row", made(keep, [sparse(32, [[1], [2, 32]])])),
        Invalid("V408", "first-row", "column 32 of 32, in the first row", made(keep, [sparse(32, [[1, 32], [2]])])),
        Invalid("V409", "first-of-stack", "row 0 of matrix 0", split(20, -1, -1, -1)),
        Invalid("V409", "last-of-stack", "row 1 of matrix 1", split(-1, 3, 20, 3)),
        Invalid("V411", "offset", "7f as offset", swapped(moved("UE4M3"), s0_offset=tensor("U8", [1, 1], [0x7F]))),
        Invalid("V411", "offset-codes", "ff as code", swapped(coded, s0_offset_codes=tensor("U8", [1, 1], [0xFF]))),
        Invalid("V410", "one-too-many", "five outliers among 39 elements", made(keep, [sparse(39, [[0, 1, 2, 3, 4]])])),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*lengths(), *entries(), *versions(), *keys(), *shapes(), *parts(), *content()]
