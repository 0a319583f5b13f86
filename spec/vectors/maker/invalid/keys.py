"""Files whose descriptor breaks BCQ-V208: keys, types and ranges of the tables in section 5."""

from collections.abc import Callable
from typing import Any

from maker.build import Lcg, Tensor, tensor
from maker.catalogue import Invalid
from maker.encodings import affine, first, shifted, some_affine, some_bcq, some_numbers, some_second, table
from maker.weights import Outliers, Weight

from .descriptor import Edit, keep, made


def path(*steps: Any, value: Any) -> Edit:
    """An edit that sets one place of the descriptor."""

    def edit(described: dict[str, Any]) -> None:
        place: Any = described
        for step in steps[:-1]:
            place = place[step]
        place[steps[-1]] = value

    return edit


def without(*steps: Any) -> Edit:
    """An edit that removes one key of the descriptor."""

    def edit(described: dict[str, Any]) -> None:
        place: Any = described
        for step in steps[:-1]:
            place = place[step]
        del place[steps[-1]]

    return edit


SEGMENT = ("schemes", 0, "segments", 0)
ENTRY = ("weights", "w.weight")
PLAIN: list[tuple[str, str, Edit]] = [
    ("unknown-key", "an unknown key in the descriptor", path("codec", value=1)),
    ("unknown-weight-key", "an unknown key in a weight entry", path(*ENTRY, "rows", value=2)),
    ("unknown-scheme-key", "an unknown key in a scheme", path("schemes", 0, "comment", value="")),
    ("unknown-segment-key", "an unknown key in a segment", path(*SEGMENT, "rounding", value="up")),
    ("key-of-other-encoding", "bias in an affine segment", path(*SEGMENT, "bias", value="F16")),
    ("missing-features", "no features", without("features")),
    ("missing-dtype", "no dtype", without(*ENTRY, "dtype")),
    ("missing-zero", "an affine segment without zero", without(*SEGMENT, "zero")),
    ("dtype", "logical dtype F64", path(*ENTRY, "dtype", value="F64")),
    ("scheme-string", "a string as scheme", path(*ENTRY, "scheme", value="0")),
    ("scheme-boolean", "false is not 0", path(*ENTRY, "scheme", value=False)),
    ("shape-string", "a string in a shape", path(*ENTRY, "shape", value=["2", 8])),
    ("group-size", "groups of 7", path(*SEGMENT, "group_size", value=7)),
    ("group-size-word", "a word that is not `row`", path(*SEGMENT, "group_size", value="column")),
    ("encoding", "an unknown encoding", path(*SEGMENT, "encoding", value="codebook")),
    ("bits-0", "no planes", path(*SEGMENT, "bits", value=0)),
    ("bits-9", "nine planes", path(*SEGMENT, "bits", value=9)),
    ("bits-boolean", "true is not 1", path(*SEGMENT, "bits", value=True)),
    ("scale-type", "scales in F64", path(*SEGMENT, "scale", value="F64")),
    ("zero-too-large", "the zero point 2^q + 1", path(*SEGMENT, "zero", value=5)),
    ("zero-negative", "the zero point -1", path(*SEGMENT, "zero", value=-1)),
    ("zero-bits", "zero points of q + 2 bits", path(*SEGMENT, "zero", value={"bits": 4})),
    ("zero-bits-0", "zero points of no bits", path(*SEGMENT, "zero", value={"bits": 0})),
    ("layout", "the canonical layout is not named", path("schemes", 0, "layout", value="canonical")),
    ("perm-false", "perm is true or absent", path("schemes", 0, "perm", value=False)),
    ("nonfinite-false", "nonfinite is true or absent", path("schemes", 0, "nonfinite", value=False)),
    ("ignorable", "ignorable is no object", path("ignorable", value=[])),
    ("no-segments", "no segments", path("schemes", 0, "segments", value=[])),
    ("weights-array", "weights is no object", path("weights", value=[])),
]

# where the tables of section 6 still give a part its shape, it has that shape
PARTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "bits-0": lambda t: t.update({"w.bcq_s0_planes": tensor("I32", [0, 2, 1], [])}),
    "bits-9": lambda t: t.update({"w.bcq_s0_planes": tensor("I32", [9, 2, 1], range(18))}),
    "bits-boolean": lambda t: t.update({"w.bcq_s0_planes": tensor("I32", [1, 2, 1], [1, 2])}),
    "scale-type": lambda t: t.update({"w.bcq_s0_scale": tensor("F64", [2, 1], [0, 0])}),
    "group-size": lambda t: t.update({"w.bcq_s0_scale": tensor("F16", [2, 2], [0] * 4)}),
}


def vectors() -> list[Invalid]:
    """All of this module."""
    rng = Lcg(604)
    spiked = Weight("w.weight", [1, 16], "F16", [some_affine(rng, 1, 8, 2, 8, 1), some_affine(rng, 1, 8, 3, 8, 1)])
    spiked.outliers = Outliers("add", "F16", [0, 1], [[]])

    def binary(*sets: int) -> Weight:
        seg = some_bcq(rng, 1, 8, 3, 8, "F16", None)
        seg.spec["precisions"] = list(sets)
        seg.plane_numbers.update({f"alpha_p{p}": [rng.floats("F16", 1, 1) for _ in range(p)] for p in sets})
        return Weight("w.weight", [1, 8], "F16", [seg])

    stored = Weight("w.weight", [2, 8], "F16", [some_affine(rng, 2, 8, 2, 8, None)])
    coded = affine(2, 8, rng.rows(1, 8, 4), some_second(rng, 1, 1, 4, 2, "F16", "packed"), 1)
    second = Weight("w.weight", [1, 8], "F16", [coded])
    more = Lcg(610)
    shared = {"bits": 4, "rows": 1, "groups": 2, "scale": "F16", "zero": 8}
    grouped = Weight(
        "w.weight", [1, 16], "F16", [affine(2, 8, more.rows(1, 16, 4), some_numbers(more, 1, 2, shared), 1)]
    )
    bytes_ = {"codes": "UE4M3", "rows": 1, "scale": "F32"}
    coded_bytes = Weight("w.weight", [1, 8], "F16", [affine(2, 8, [[0, 1] * 4], some_numbers(more, 1, 1, bytes_), 1)])
    ones = first("F16", [[0x3C00]])
    moved = Weight(
        "w.weight", [1, 8], "F16",
        [shifted("offset", 2, 8, [[0, 1] * 4], ones, some_numbers(more, 1, 1, {**shared, "groups": 3}, "offset"))],
    )  # fmt: skip
    zeroed = Weight("w.weight", [1, 8], "F16", [shifted("float-zero", 2, 8, [[0, 1] * 4], ones, ("F16", [[0x3C00]]))])
    listed = Weight("w.weight", [1, 8], "F16", [table(2, 8, [[0, 1] * 4], ones, [-1, 0, 1, 2], -1)])
    levels = (*SEGMENT, "table")
    many = Weight("w.weight", [1, 136], "F16", [some_affine(rng, 1, 8, 1, 8, 0) for _ in range(17)])
    marks = ("schemes", 0, "outliers")
    sets, scale = (*SEGMENT, "precisions"), (*SEGMENT, "scale")
    built: list[tuple[str, str, Edit, Weight]] = [
        ("outliers-mode", "an unknown mode", path(*marks, "mode", value="subtract"), spiked),
        ("outliers-missing-key", "outliers without segments", without(*marks, "segments"), spiked),
        ("outliers-empty", "no segment for outliers", path(*marks, "segments", value=[]), spiked),
        ("outliers-twice", "one segment twice", path(*marks, "segments", value=[0, 0]), spiked),
        ("zero-object", "an unknown key next to bits", path(*SEGMENT, "zero", "signed", value=True), stored),
        ("precisions-empty", "no precision", keep, binary()),
        ("precisions-q", "q itself as a precision", keep, binary(1, 3)),
        ("precisions-twice", "a precision twice", path(*sets, value=[1, 1]), binary(1)),
        ("second-order-bits", "scale codes of nine bits", path(*scale, "bits", value=9), second),
        ("second-order-rows", "row-groups of no rows", path(*scale, "rows", value=0), second),
        ("second-order-key", "an unknown key", path(*scale, "order", value=3), second),
        ("second-order-missing", "no zero", without(*scale, "zero"), second),
        ("second-order-zero", "a zero above 2^N_s", path(*scale, "zero", value=17), grouped),
        ("second-order-zero-negative", "a negative zero", path(*scale, "zero", value=-1), grouped),
        ("super-groups-1", "h = 1 is written by leaving `groups` out", path(*scale, "groups", value=1), grouped),
        ("super-groups-2-31", "h = 2^31", path(*scale, "groups", value=2**31), grouped),
        ("codes-and-bits", "codes next to bits", path(*scale, "bits", value=8), coded_bytes),
        ("codes-and-zero", "codes next to zero", path(*scale, "zero", value=0), coded_bytes),
        ("codes-type", "codes of type F8_E4M3", path(*scale, "codes", value="F8_E4M3"), coded_bytes),
        ("second-order-bytes", "a second-order scale of bytes", path(*scale, "scale", value="E8M0"), coded_bytes),
        ("offset-type", "an offset of type U8", path(*SEGMENT, "offset", value="U8"), moved),
        ("offset-rows", "no rows", path(*SEGMENT, "offset", "rows", value=0), moved),
        ("zero-e8m0", "a float zero of type E8M0", path(*SEGMENT, "zero", value="E8M0"), zeroed),
        ("table-missing", "no table", without(*levels), listed),
        ("table-short", "three numbers for two planes", path(*levels, value=[-1, 0, 1]), listed),
        ("table-long", "five numbers for two planes", path(*levels, value=[-1, 0, 1, 2, 3]), listed),
        ("table-range", "2^28 + 1", path(*levels, value=[-1, 0, 1, 2**28 + 1]), listed),
        ("table-boolean", "true is not 1", path(*levels, value=[-1, 0, True, 2]), listed),
        ("table-exponent-0", "x = 0 is written by leaving it out", path(*SEGMENT, "table_exponent", value=0), listed),
        ("table-exponent-low", "x = -127", path(*SEGMENT, "table_exponent", value=-127), listed),
        ("table-zero", "a zero next to a table", path(*SEGMENT, "zero", value=0), listed),
        ("segments-17", "17 segments", keep, many),
    ]
    unsorted: list[tuple[str, str, Edit, Weight]] = [
        ("outliers-unsorted", "segments not sorted", path(*marks, "segments", value=[1, 0]), spiked),
        ("outliers-no-segment", "no such segment", path(*marks, "segments", value=[0, 2]), spiked),
        ("precisions-unsorted", "precisions not sorted", keep, binary(2, 1)),
    ]
    return [
        *(
            Invalid("V208", what, comment, made(e, parts=PARTS.get(what)), schema="descriptor")
            for what, comment, e in PLAIN
        ),
        *(Invalid("V208", what, comment, made(e, [w]), schema="descriptor") for what, comment, e, w in built),
        *(Invalid("V208", what, comment, made(e, [w])) for what, comment, e, w in unsorted),
    ]
