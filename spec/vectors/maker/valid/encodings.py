"""Valid files with the other encodings: float-zero, offset, table, bcq, second-order numbers, single rounding."""

from maker.build import Lcg, exact_rows, number
from maker.catalogue import Valid, lone
from maker.encodings import (
    affine,
    bcq,
    first,
    groups,
    second,
    shifted,
    some_affine,
    some_bcq,
    some_numbers,
    some_second,
    table,
)
from maker.weights import Outliers, Segment, Weight


def float_zero() -> Valid:
    """The difference is rounded to the logical dtype before the product."""
    codes = [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
    scales, zeros = [[2.0], [-1.0], [3.0]], [[3 + 2.0**-12], [3.0], [5 * 2.0**-14]]
    hand = shifted(
        "float-zero", 3, 8, codes, first("F16", exact_rows("F16", scales)), ("F32", exact_rows("F32", zeros))
    )
    # row 0: 4 - zero is 1 - 2^-12, a tie that goes to 1; row 2: 1 - zero becomes 1 - 2^-11, so that the
    # product 3 - 3 * 2^-11 becomes 3 - 2^-9, while 3 * (1 - zero) rounded once would be 3
    low = [-6.0, -4.0, -2.0, -(2.0**-11), 2.0, 4.0, 6.0, 8.0]
    high = [-15 * 2.0**-14, 3 - 2.0**-9, 6, 9, 12, 15, 18, 21]
    expect: dict[str, list[float] | str] = {"hand.weight": [*low, 3.0, 2, 1, -0.0, -1, -2, -3, -4, *high]}
    weights = [Weight("hand.weight", [3, 8], "F16", [hand])]
    rng = Lcg(201)
    for dtype, zero in (("F16", "F16"), ("F16", "F32"), ("BF16", "F16"), ("BF16", "BF16"), ("F32", "F32")):
        seg = shifted(
            "float-zero",
            4,
            16,
            rng.rows(2, 40, 16),
            first("F16", rng.floats("F16", 2, 3)),
            (zero, rng.floats(zero, 2, 3)),
        )
        weights.append(Weight(f"{dtype}-{zero}.weight".lower(), [2, 40], dtype, [seg]))
    second_order = shifted(
        "float-zero",
        4,
        16,
        rng.rows(3, 40, 16),
        some_second(rng, 3, 3, 5, 2, "F16", "F16"),
        ("F16", rng.floats("F16", 3, 3)),
    )
    weights.append(Weight("second.weight", [3, 40], "F16", [second_order]))
    comment = "code - zero is rounded to the logical dtype, then the product is; no value with fewer planes"
    return lone("float-zero", comment, weights, {}, True, expect)


def float_zero_overflow() -> Valid:
    """An infinite intermediate."""
    seg = shifted(
        "float-zero",
        1,
        8,
        [[0, 1] * 4] * 3,
        first("F16", exact_rows("F16", [[1.0], [-1.0], [0.0]])),
        ("F32", exact_rows("F32", [[65520.0], [-(2.0**100)], [2.0**100]])),
    )
    comment = "finite parts whose difference overflows the logical dtype; 0 * inf is the NaN 7e00"
    return lone(
        "float-zero-overflow",
        comment,
        [Weight("w.weight", [3, 8], "F16", [seg])],
        expect={"w.weight": "00fcfffb" * 4 + "00fc" * 8 + "007e" * 8},
    )


def offset() -> Valid:
    """Scale times code plus offset."""
    codes = [[0, 1, 2, 3, 0, 1, 2, 3]] * 4
    scales = exact_rows("F16", [[0.5], [-0.5], [-0.0], [1.0]])
    hand = shifted(
        "offset",
        2,
        8,
        codes,
        first("F16", scales),
        ("F16", exact_rows("F16", [[-0.5], [-0.0], [-0.0], [-0.0]])),
    )
    expect: dict[str, list[float] | str] = {
        "hand.weight": [-0.5, 0.0, 0.5, 1.0] * 2 + [-0.0, -0.5, -1.0, -1.5] * 2 + [-0.0] * 8 + [0.0, 1.0, 2.0, 3.0] * 2
    }
    rng = Lcg(202)
    weights = [Weight("hand.weight", [4, 8], "F16", [hand])]
    for dtype, s, o in (("F16", "F16", "F16"), ("BF16", "F32", "F32"), ("F32", "F32", "BF16")):
        seg = shifted("offset", 4, 16, rng.rows(2, 40, 16), first(s, rng.floats(s, 2, 3)), (o, rng.floats(o, 2, 3)))
        weights.append(Weight(f"{dtype}-{s}-{o}.weight".lower(), [2, 40], dtype, [seg]))
    seg = shifted(
        "offset",
        3,
        8,
        rng.rows(5, 16, 8),
        some_second(rng, 5, 2, 8, 2, "F32", "packed"),
        ("F32", rng.floats("F32", 5, 2)),
    )
    weights.append(Weight("second.weight", [5, 16], "F32", [seg]))
    comment = "(s * code) + offset, with -0 scales and offsets; there is no value with fewer planes"
    return lone("offset", comment, weights, {}, True, expect)


def binary() -> Valid:
    """Sums of signed plane scales."""
    codes = [[0, 1, 2, 3, 3, 2, 1, 0]] * 2
    alphas = [exact_rows("F16", [[1.0], [-2.0]]), exact_rows("F16", [[0.25], [0.0]])]
    hand = bcq(2, 8, codes, ("F16", alphas), ("F16", exact_rows("F16", [[0.5], [-0.5]])))
    bare = bcq(2, 8, codes, ("F16", alphas))
    one = bcq(1, 8, [[0, 1] * 4], ("BF16", [exact_rows("BF16", [[1.5]])]))
    zero = bcq(1, 8, [[0, 1] * 4] * 2, ("F16", [exact_rows("F16", [[0.0], [-0.0]])]))
    signed = bcq(1, 8, [[0, 1] * 4] * 2, ("F16", [exact_rows("F16", [[0.0], [-0.0]])]), ("F16", [[0x8000], [0x8000]]))
    huge = [exact_rows("F32", [[2.0**60]]), exact_rows("F32", [[1.0]]), exact_rows("F32", [[2.0**60]])]
    order = bcq(3, 8, [[0, 1, 2, 3, 4, 5, 6, 7]], ("F32", huge))
    rng = Lcg(203)
    weights = [
        Weight("hand.weight", [2, 8], "F16", [hand]),
        Weight("bare.weight", [2, 8], "F16", [bare]),
        Weight("one.weight", [1, 8], "F16", [one]),
        Weight("zero.weight", [2, 8], "F16", [zero]),
        Weight("signed-zero.weight", [2, 8], "F16", [signed]),
        Weight("order.weight", [1, 8], "F32", [order]),
        Weight("bf16.weight", [3, 40], "BF16", [some_bcq(rng, 3, 40, 4, 16, "BF16", "F32")]),
        Weight("f32.weight", [2, 24], "F32", [some_bcq(rng, 2, 24, 8, 8, "F32", "F16")]),
    ]
    two = 2.0**61
    expect: dict[str, list[float] | str] = {
        "hand.weight": [
            -0.75,
            -0.25,
            1.25,
            1.75,
            1.75,
            1.25,
            -0.25,
            -0.75,
            1.5,
            1.5,
            -2.5,
            -2.5,
            -2.5,
            -2.5,
            1.5,
            1.5,
        ],
        "bare.weight": [-1.25, -0.75, 0.75, 1.25, 1.25, 0.75, -0.75, -1.25, 2.0, 2.0, -2, -2, -2, -2, 2, 2],
        "one.weight": [-1.5, 1.5] * 4,
        "zero.weight": [0.0] * 16,  # 0 - 0, 0 + 0, 0 - -0 and 0 + -0 are all +0
        "signed-zero.weight": [-0.0, 0.0] * 4 + [0.0, -0.0] * 4,
        "order.weight": [-two, 0.0, -two, 0.0, 0.0, two, 0.0, two],  # 2^60 + 1 is 2^60 in binary64
    }
    return lone(
        "bcq",
        "with and without bias, negative and zero plane scales, the order of the sum",
        weights,
        {},
        True,
        expect,
    )


def multi_precision() -> Valid:
    """Scale sets of their own for fewer planes."""
    rng = Lcg(204)

    def made(sets: list[int], bias: str | None) -> Weight:
        seg = some_bcq(rng, 2, 40, 4, 16, "F16", bias)
        for p in sets:
            seg.spec.setdefault("precisions", []).append(p)
            seg.plane_numbers[f"alpha_p{p}"] = [rng.floats("F16", 2, 3) for _ in range(p)]
            if bias:
                seg.numbers[f"bias_p{p}"] = rng.floats(bias, 2, 3)
        return Weight(f"p{''.join(map(str, sets))}{'-bias' if bias else ''}.weight", [2, 40], "F16", [seg])

    comment = "p in precisions uses alpha_p and bias_p, any other p < q the first p of alpha, and bias"
    return lone("multi-precision", comment, [made([1, 2, 3], "F16"), made([2], None), made([3], "F32")], planes=True)


def second_order() -> Valid:
    """Scales that are made of codes."""
    codes = [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
    scale = second(2, 2, [[0], [3], [1]], ("F16", exact_rows("F16", [[0.5], [4.0]])), ("packed", [[1], [1]]))
    hand = affine(3, 8, codes, scale, 4)
    rng = Lcg(205)
    weights = [Weight("hand.weight", [3, 8], "F16", [hand])]
    for bits, g2, s, zero in (
        (3, 2, "F16", "packed"),
        (5, 3, "BF16", "packed"),
        (8, 1, "F32", "F32"),
        (1, 9, "F32", "F16"),
    ):
        seg = affine(4, 8, rng.rows(5, 100, 16), some_second(rng, 5, 13, bits, g2, s, zero), 7)
        weights.append(Weight(f"n{bits}-rows{g2}-{s}-{zero}.weight".lower(), [5, 100], "BF16", [seg]))
    stored = affine(2, 16, rng.rows(4, 40, 4), some_second(rng, 4, 3, 4, 3, "F16", "packed"), [[0, 1, 4]] * 4)
    weights.append(Weight("zeros.weight", [4, 40], "F32", [stored]))
    ramp = [-4.0, -3, -2, -1, 0, 1, 2, 3]
    expect: dict[str, list[float] | str] = {
        # s = 0.5 * (0 - 1), 0.5 * (3 - 1), 4 * (1 - 1)
        "hand.weight": [
            2.0,
            1.5,
            1,
            0.5,
            -0.0,
            -0.5,
            -1,
            -1.5,
            *ramp,
            -0.0,
            -0.0,
            -0.0,
            -0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        ]
    }
    comment = "packed and float zeros of the scale, a short last row-group, more rows in a group than there are"
    return lone("second-order", comment, weights, {}, True, expect)


def super_groups() -> Valid:
    """Second-order numbers that neighbouring groups share."""
    ramp = [0, 1, 2, 3, 4, 5, 6, 7]
    kind = {"bits": 2, "rows": 1, "groups": 2, "scale": "F16", "zero": 1}
    tables = {"scale_codes": [[0, 1, 3], [2, 2, 1]], "scale_scale": exact_rows("F16", [[0.5, -1.0], [2.0, 4.0]])}
    hand = affine(3, 8, [ramp * 3] * 2, (kind, tables), 4)
    rng = Lcg(206)
    kinds = [
        {"bits": 8, "rows": 1, "groups": 16, "scale": "F16", "zero": 128},
        {"bits": 6, "rows": 2, "groups": 3, "scale": "BF16", "zero": "packed"},
        {"bits": 3, "rows": 3, "groups": 4, "scale": "F32", "zero": "F16"},
        {"bits": 1, "rows": 9, "groups": 2**31 - 1, "scale": "F32", "zero": 2},
        {"bits": 7, "rows": 2, "scale": "F16", "zero": 0},
    ]
    weights = [Weight("hand.weight", [2, 24], "F16", [hand])]
    for n, kind in enumerate(kinds):
        seg = affine(6, 8, rng.rows(5, 139, 64), some_numbers(rng, 5, 18, kind), 32)
        weights.append(Weight(f"w{n}.weight", [5, 139], "F32", [seg]))
    stack = affine(2, 8, rng.rows(4, 40, 4), some_numbers(rng, 4, 5, kinds[0]), 1)
    weights.append(Weight("stack.weight", [2, 2, 40], "F32", [stack]))
    expect: dict[str, list[float] | str] = {
        # s = 0.5 * (0 - 1), 0.5 * (1 - 1), -1 * (3 - 1); 2 * (2 - 1) twice, 4 * (1 - 1)
        "hand.weight": [
            *(2, 1.5, 1, 0.5, -0.0, -0.5, -1, -1.5), *([-0.0] * 4 + [0.0] * 4), *(8.0, 6, 4, 2, -0.0, -2, -4, -6),
            *(-8.0, -6, -4, -2, 0, 2, 4, 6) * 2, *([-0.0] * 4 + [0.0] * 4),
        ]
    }  # fmt: skip
    comment = "h groups share second-order numbers; zeros in the scheme, packed and floating; a short last column"
    return lone("super-groups", comment, weights, {}, True, expect)


def second_order_offset() -> Valid:
    """Offsets that are made of codes."""
    codes = [[0, 1, 2, 3, 0, 1, 2, 3]] * 3
    kind = {"bits": 4, "rows": 1, "scale": "F16", "zero": 0}
    scale = kind, {"scale_codes": [[2], [0], [0]], "scale_scale": exact_rows("F16", [[0.5], [1.0], [-1.0]])}
    offset = kind, {"offset_codes": [[3], [0], [0]], "offset_scale": exact_rows("F16", [[-0.25], [-1.0], [-1.0]])}
    hand = shifted("offset", 2, 8, codes, scale, offset)
    rng = Lcg(207)
    shared = {"bits": 6, "rows": 1, "groups": 8, "scale": "F16", "zero": 0}
    cases = {
        "both": (shared, shared),
        "only-offset": ("F16", {"bits": 4, "rows": 2, "groups": 2, "scale": "F32", "zero": "packed"}),
        "differ": ({**shared, "groups": 3}, {"bits": 5, "rows": 4, "scale": "BF16", "zero": "F16"}),
        "bytes": ("E8M0", {"codes": "UE4M3", "rows": 1, "groups": 16, "scale": "F32"}),
    }
    weights = [Weight("hand.weight", [3, 8], "F16", [hand])]
    for name, (s, o) in cases.items():
        parts = some_numbers(rng, 3, 16, s), some_numbers(rng, 3, 16, o, "offset")
        seg = shifted("offset", 4, 8, rng.rows(3, 125, 16), *parts)
        weights.append(Weight(f"{name}.weight", [3, 125], "F32", [seg]))
    ramp = [-0.75, 0.25, 1.25, 2.25] * 2
    # row 1: (1 * 0) * code + (-1 * 0) is 0 + -0; row 2: -0 + -0
    expect: dict[str, list[float] | str] = {"hand.weight": [*ramp, *[0.0] * 8, *[-0.0] * 8]}
    comment = "o = offset_scale * (offset_code - offset_zero), with numbers of its own; no value with fewer planes"
    return lone("second-order-offset", comment, weights, {}, True, expect)


def tables() -> Valid:
    """A number for every code."""
    fp4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    hand = table(4, 16, [list(range(16))] * 2, first("F16", exact_rows("F16", [[2.0], [-1.0]])), fp4, -1)
    rng = Lcg(208)
    wide = [rng.below(2**29 + 1) - 2**28 for _ in range(256)]
    levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    ends = [-(2**28), 2**28]
    weights = [
        Weight("hand.weight", [2, 16], "F32", [hand]),
        Weight("mxfp4.weight", [2, 36], "F32", [made_table(rng, 4, 32, "E8M0", fp4, -1)]),
        Weight("nvfp4.weight", [2, 36], "BF16", [made_table(rng, 4, 16, "UE4M3", fp4, -1)]),
        Weight("wide.weight", [2, 36], "F32", [made_table(rng, 8, 16, "F32", wide, -126)]),
        Weight("ends.weight", [2, 36], "F16", [made_table(rng, 1, 8, "BF16", ends, -28)]),
    ]
    shared = {"bits": 6, "rows": 1, "groups": 8, "scale": "F16", "zero": 32}
    scaled = {"codes": "UE4M3", "rows": 2**31 - 1, "groups": 2**31 - 1, "scale": "F32"}
    weights.append(Weight("coded.weight", [2, 36], "F16", [made_table(rng, 4, 8, shared, levels, 0)]))
    weights.append(Weight("two-level.weight", [2, 36], "F32", [made_table(rng, 4, 16, scaled, fp4, -1)]))
    low = [0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    high = [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    comment = "s * (table[code] * 2^x); a zero of the table is +0; no value with fewer planes"
    return lone("table", comment, weights, {}, True, {"hand.weight": [*low, *high]})


def made_table(rng: Lcg, q: int, g: int, scale: object, levels: list[int], exponent: int) -> Segment:
    """A segment of two rows and 36 columns."""
    return table(q, g, rng.rows(2, 36, 1 << q), some_numbers(rng, 2, groups(36, g), scale), levels, exponent)


def byte_floats() -> Valid:
    """Every byte of the types of one byte."""
    every = [list(range(256))]
    ones = affine(1, 8, [[1, 0] * 1024], ("E8M0", {"scale": every}), 0)
    units = affine(1, 8, [[1, 0] * 508], ("UE4M3", {"scale": [list(range(127))]}), 0)
    hand = affine(1, 8, [[1] * 64], ("UE4M3", {"scale": [[0, 1, 7, 8, 9, 0x38, 0x7D, 0x7E]]}), 0)
    small = [0.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 9 * 2.0**-9, 1.0, 416.0, 448.0]
    edge = affine(1, 8, [[1] * 32], ("E8M0", {"scale": [[0, 126, 127, 255]]}), 0)
    weights = [
        Weight("e8m0.weight", [1, 2048], "F32", [ones]),
        Weight("ue4m3.weight", [1, 1016], "F32", [units]),
        Weight("hand.weight", [1, 64], "F32", [hand]),
        Weight("edge.weight", [1, 32], "F32", [edge]),
    ]
    expect: dict[str, list[float] | str] = {
        "hand.weight": [x for x in small for _ in range(8)],
        "edge.weight": "00004000" * 8 + "0000003f" * 8 + "0000803f" * 8 + "0000807f" * 8,  # 2^128 overflows F32
    }
    comment = "E8M0 2^-127 to 2^128, no NaN; UE4M3 0 to 448 with subnormal numbers"
    return lone("byte-floats", comment, weights, {}, False, expect)


def single() -> Valid:
    """Numbers that a detour through binary32 rounds twice."""
    lift, tip = 2.0**-8, 2.0**-40
    alphas = [exact_rows("F32", [[lift], [lift], [2.0**-11]]), exact_rows("F32", [[tip]] * 3)]
    bias = exact_rows("F32", [[1.0], [1 + 2.0**-7], [1.0]])
    codes = [[3, 2, 1, 0, 3, 2, 1, 0]] * 3
    weights = [
        Weight(f"{d.lower()}.weight", [3, 8], d, [bcq(2, 8, codes, ("F32", alphas), ("F32", bias))])
        for d in ("BF16", "F16")
    ]
    spike = exact_rows("F32", [[2.0**-8 + 2.0**-31]])[0][0]
    ones = affine(1, 8, [[1] * 8], first("F16", exact_rows("F16", [[1.0]])), 0)
    weights.append(
        Weight("outlier.weight", [1, 8], "BF16", [ones], outliers=Outliers("add", "F32", [0], [[(2, spike)]]))
    )
    expect: dict[str, list[float] | str] = {
        # 1 + 2^-8 + 2^-40, 1 + 2^-8 - 2^-40, 1 - 2^-8 + 2^-40, 1 - 2^-8 - 2^-40; from 1 + 2^-7; +-2^-11
        "bf16.weight": "813f803f7f3f7f3f" * 2 + "823f813f813f803f" * 2 + "803f" * 8,
        "outlier.weight": "803f803f813f" + "803f" * 5,
    }
    assert number("BF16", 0x3F81) == 1.0078125
    f16 = "043c043cf83bf83b" * 2 + "0c3c0c3c043c043c" * 2 + "013c003cff3bff3b" * 2
    expect["f16.weight"] = f16
    comment = "E = 1 + 2^-8 + 2^-40 and its neighbours: one rounding gives 3f81, two give 3f80"
    return lone("single-rounding", comment, weights, {}, False, expect)


def row_groups() -> Valid:
    """One group a row, whatever the width: weights of three widths share a scheme."""
    rng = Lcg(208)

    def row(segment: Segment) -> Segment:
        segment.spec["group_size"] = "row"
        return segment

    weights = [Weight(f"n{n}.weight", [3, n], "F16", [row(some_affine(rng, 3, n, 4, n, 8))]) for n in (8, 45, 64)]
    binary = row(some_bcq(rng, 2, 40, 2, 40, "F16", "F16"))
    weights.append(Weight("binary.weight", [2, 40], "F16", [binary]))
    pair = [row(some_affine(rng, 2, 20, 2, 20, None)), some_affine(rng, 2, 21, 4, 8, 3)]
    weights.append(Weight("first.weight", [2, 41], "BF16", pair))
    turned = [some_affine(rng, 2, 16, 2, 8, None), row(some_affine(rng, 2, 11, 4, 11, None))]
    weights.append(Weight("last.weight", [2, 27], "F32", turned))
    coded = affine(2, 16, rng.rows(3, 16, 4), some_second(rng, 3, 1, 4, 2, "F16", "packed"), 1)
    weights.append(Weight("second.weight", [3, 16], "F16", [row(coded)]))
    levels = row(table(2, 20, rng.rows(3, 20, 4), first("F16", rng.floats("F16", 3, 1)), [-7, 0, 1, 100]))
    weights.append(Weight("table.weight", [3, 20], "F16", [levels]))
    stated = Weight("number.weight", [3, 64], "F16", [some_affine(rng, 3, 64, 4, 64, 8)])
    comment = "the group size `row`: one group over a segment's whole width; the number 64 says the same of 64 columns"
    return lone("row-groups", comment, [*weights, stated], planes=True)


def vectors() -> list[Valid]:
    """All of this module."""
    return [
        float_zero(),
        float_zero_overflow(),
        offset(),
        binary(),
        multi_precision(),
        second_order(),
        super_groups(),
        second_order_offset(),
        tables(),
        byte_floats(),
        single(),
        row_groups(),
    ]
