"""Valid files with affine weights: widths, zero points, scales, shapes, rounding, names."""

from math import inf

from maker.build import FORMATS, Lcg, exact_rows
from maker.catalogue import Valid, lone
from maker.encodings import affine, first, groups, some_affine
from maker.weights import Outliers, Weight

FLOATS = ("F16", "BF16", "F32")


def plain(name: str, scale: str, scales: list[list[float]], codes: list[list[int]], q: int, zero: int) -> Weight:
    """One group a row, numbers written out."""
    n = len(codes[0])
    seg = affine(q, n, codes, first(scale, exact_rows(scale, scales)), zero)
    return Weight(name, [len(codes), n], "F16", [seg])


def worked_example() -> Weight:
    """The weight of section 14."""
    codes = [[0, 1, 2, 3, 3, 2, 1, 0], [2, 2, 2, 2, 0, 0, 3, 3]]
    return plain("w.weight", "F16", [[0.5], [-1.0]], codes, 2, 2)


def worked() -> Valid:
    """Section 14."""
    values = [-1, -0.5, 0, 0.5, 0.5, 0, -0.5, -1, -0.0, -0.0, -0.0, -0.0, 2, 2, -1, -1]
    comment = "the complete file of section 14"
    return lone(
        "worked-example",
        comment,
        [worked_example()],
        planes=True,
        expect={"w.weight": list(map(float, values))},
    )


def widths() -> Valid:
    """Every number of planes."""
    rng = Lcg(101)
    weights = [Weight(f"bits{q}.weight", [2, 40], "F16", [some_affine(rng, 2, 40, q, 16, None)]) for q in range(1, 9)]
    comment = "affine with 1 to 8 planes, stored zero points from 0 to 2^q, a short last group; all truncations"
    return lone("affine-bits", comment, weights, planes=True)


def zeros() -> Valid:
    """Zero points: constant at both ends, packed in every relation of width to q."""
    ramp = [list(range(8)), list(range(7, -1, -1))]
    one = first("F16", exact_rows("F16", [[1.0], [0.25]]))
    cases = {
        "constant-0": affine(3, 8, ramp, one, 0),
        "constant-8": affine(3, 8, ramp, one, 8),
        "packed-b1": affine(3, 8, ramp, one, [[0], [1]]),
        "packed-b3": affine(3, 8, ramp, one, [[7], [2]]),
        "packed-b4": affine(3, 8, ramp, one, [[8], [0]]),
    }
    wide = affine(
        8,
        8,
        [[0, 1, 127, 128, 129, 254, 255, 3] * 5],
        first("F16", exact_rows("F16", [[0.5] * 5])),
        [[256, 0, 255, 1, 128]],
    )
    weights = [Weight(f"{name}.weight", [2, 8], "F16", [seg]) for name, seg in cases.items()]
    comment = "zero points in the scheme (0 and 2^q) and stored with 1, q and q+1 bits; 9-bit fields straddle words"
    expect: dict[str, list[float] | str] = {
        "constant-8.weight": [
            -8.0,
            -7,
            -6,
            -5,
            -4,
            -3,
            -2,
            -1,
            -0.25,
            -0.5,
            -0.75,
            -1,
            -1.25,
            -1.5,
            -1.75,
            -2,
        ],
        "packed-b4.weight": [-8.0, -7, -6, -5, -4, -3, -2, -1, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0],
        "packed-b1.weight": [0.0, 1, 2, 3, 4, 5, 6, 7, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0, -0.25],
    }
    return lone("affine-zeros", comment, [*weights, Weight("q8.weight", [1, 40], "F16", [wide])], {}, True, expect)


def wide_zeros() -> Valid:
    """Zero points that a writer should have stored in fewer bits, or in the scheme."""
    cases = {
        "wide": ([[3], [1]], 4),
        "one-bit-enough": ([[0], [1]], 2),
        "equal": ([[2], [2]], 2),
        "zero": ([[0], [0]], 4),
    }
    weights = []
    for name, (values, bits) in cases.items():
        seg = affine(3, 8, [list(range(8))] * 2, first("F16", exact_rows("F16", [[1.0], [0.25]])), values)
        seg.spec["zero"] = {"bits": bits}
        weights.append(Weight(f"{name}.weight", [2, 8], "F16", [seg]))
    return lone("affine-zeros-wide", "zero points in more bits than they need, and equal ones stored", weights)


def scales() -> Valid:
    """Negative, zero and subnormal scales."""
    tiny = 2.0**-24
    ramp = [0, 1, 2, 3, 0, 1, 2, 3]
    weight = plain("w.weight", "F16", [[-1.5], [0.0], [-0.0], [tiny], [-3 * tiny]], [ramp] * 5, 2, 1)
    bits = ["003e0080", "00be00c2", "00800000", "00000000", "00000080", "00800080"]
    rows = [bits[0] + bits[1], bits[2] + bits[3], bits[4] + bits[5], "0180000001000200", "0300008003800680"]
    small = plain("b.weight", "BF16", [[2.0**-133], [-(2.0**-126)]], [ramp] * 2, 2, 1)
    small.dtype = "BF16"
    single = plain("f.weight", "F32", [[2.0**-149], [-(2.0**-148)]], [ramp] * 2, 2, 1)
    single.dtype = "F32"
    comment = "scales that are negative, +0, -0 and subnormal: the sign of a zero is part of the value"
    return lone(
        "affine-scales",
        comment,
        [weight, small, single],
        {},
        True,
        {"w.weight": "".join(row * 2 for row in rows)},
    )


def dtypes() -> Valid:
    """Every scale type with every logical dtype."""
    rng = Lcg(102)
    weights = [
        Weight(f"{s}-as-{d}.weight".lower(), [1, 24], d, [some_affine(rng, 1, 24, 5, 8, 11, s)])
        for s in FLOATS
        for d in FLOATS
    ]
    return lone("affine-dtypes", "scales of every type delivered in every logical dtype", weights)


def shapes() -> Valid:
    """Rows, words and groups that do not come out even."""
    rng = Lcg(103)
    sizes = [(1, 8, 8), (1, 9, 8), (3, 31, 8), (2, 32, 32), (2, 33, 8), (1, 65, 64), (5, 20, 20), (1, 96, 13)]
    weights = [
        Weight(f"m{out}x{n}g{g}.weight", [out, n], "F16", [some_affine(rng, out, n, 3, g, 4)]) for out, n, g in sizes
    ]
    comment = "one row; fewer than 32 columns; no multiple of 32; short last groups, down to one column"
    return lone("shapes", comment, weights)


def ties() -> Valid:
    """Numbers half way between two of the logical dtype, and close to that."""
    codes = [[1, 0] * 4]
    half, quarter = 2.0**-8, 2.0**-25
    table = {
        "BF16": [1 + half, 1 + 3 * half, 1 + half + 2.0**-23, 1 + half - 2.0**-23, 2.0**-134, 3 * 2.0**-134],
        "F16": [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2049.0, 2051.0, quarter, 3 * quarter],
    }
    weights = []
    for dtype, numbers in table.items():
        for i, x in enumerate(numbers):
            w = plain(f"{dtype.lower()}-{i}.weight", "F32", [[x], [-x]], codes * 2, 1, 0)
            w.dtype = dtype
            weights.append(w)
    expect: dict[str, list[float] | str] = {
        "bf16-0.weight": "803f0000" * 4 + "80bf0080" * 4,
        "bf16-1.weight": "823f0000" * 4 + "82bf0080" * 4,
        "bf16-2.weight": "813f0000" * 4 + "81bf0080" * 4,
        "bf16-3.weight": "803f0000" * 4 + "80bf0080" * 4,
        "bf16-4.weight": "00000000" * 4 + "00800080" * 4,
        "bf16-5.weight": "02000000" * 4 + "02800080" * 4,
        "f16-0.weight": "003c0000" * 4 + "00bc0080" * 4,
        "f16-1.weight": "023c0000" * 4 + "02bc0080" * 4,
        "f16-2.weight": "00680000" * 4 + "00e80080" * 4,
        "f16-3.weight": "02680000" * 4 + "02e80080" * 4,
        "f16-4.weight": "00000000" * 4 + "00800080" * 4,
        "f16-5.weight": "02000000" * 4 + "02800080" * 4,
    }
    return lone("rounding-ties", "ties go to the even neighbour, among subnormal numbers too", weights, expect=expect)


def overflow() -> Valid:
    """From finite parts to infinities."""
    codes = [[1, 0] * 4]
    top = {d: (2 - 2.0 ** (1 - FORMATS[d][0])) * (2.0**15 if d == "F16" else 2.0**127) for d in FLOATS}
    f16 = plain("f16.weight", "F32", [[65519.99609375], [65520.0], [-65520.0], [top["F32"]]], codes * 4, 1, 0)
    bf16 = plain(
        "bf16.weight",
        "F32",
        [[top["BF16"]], [(2 - 2.0**-8 - 2.0**-23) * 2.0**127], [-top["F32"]]],
        codes * 3,
        1,
        0,
    )
    bf16.dtype = "BF16"
    f32 = plain("f32.weight", "F32", [[top["F32"]], [-top["F32"]]], [[3, 2, 1, 0] * 2] * 2, 2, 1)
    f32.dtype = "F32"
    big = top["F32"]
    expect: dict[str, list[float] | str] = {
        "f16.weight": [65504.0, 0.0] * 4 + [inf, 0.0] * 4 + [-inf, -0.0] * 4 + [inf, 0.0] * 4,
        "bf16.weight": [top["BF16"], 0.0] * 8 + [-inf, -0.0] * 4,
        "f32.weight": [inf, big, 0.0, -big] * 2 + [-inf, -big, -0.0, big] * 2,
    }
    comment = "a finite product beyond the logical dtype is an infinity (F16 from 65520 on); no feature needed"
    return lone("rounding-overflow", comment, [f16, bf16, f32], expect=expect)


def nonfinite() -> Valid:
    """Infinities and NaNs among the scales."""
    rows = [[0x7C00], [0xFC00], [0x7E00], [0xFD55], [0x3C00]]
    ramp = [0, 1, 2, 3, 0, 1, 2, 3]
    weights = []
    for dtype in FLOATS:
        seg = affine(2, 8, [ramp] * 5, first("F16", rows), 1)
        spiked = Outliers("add", "F16", [0], [[(0, 0x7C00)], [], [], [(3, 0xFC00)], [(7, 0x7DAA)]])
        weights.append(Weight(f"{dtype.lower()}.weight", [5, 8], dtype, [seg], outliers=spiked, nonfinite=True))
    nan = "007e"
    expect = (nan + nan + "007c007c" + "00fc" + nan + "007c007c") + ("007c" + nan + "00fc00fc") * 2
    expect += nan * 16 + ("00bc" + "0000" + "003c" + "0040") + "00bc" + "0000" + "003c" + nan
    comment = "inf * 0 and inf - inf are NaN; every NaN is delivered as 7e00, 7fc0 or 7fc00000"
    return lone("nonfinite", comment, weights, {}, True, {"f16.weight": expect})


def names() -> Valid:
    """How part names come from weight names."""
    rng = Lcg(104)
    chosen = [
        "weight",
        "a.weight.weight",
        "experts.gate_up",
        "_x:y+z-0.weights",
        "a_bcq_b",
        "a.bcq_c.weight",
        "L" * 473 + ".weight",
        "9",
    ]
    weights = [Weight(n, [1, 8], "F16", [some_affine(rng, 1, 8, 2, 8, 1)]) for n in chosen]
    comment = "names that do not end in .weight, a name that is `weight`, one of 480 bytes, names with bcq in them"
    return lone("names", comment, weights)


def permuted() -> Valid:
    """Reordered columns."""
    codes = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]]
    hand = plain("hand.weight", "F16", [[1.0], [0.5]], codes, 3, 0)
    hand.perm = [[3, 0, 1, 2, 7, 6, 5, 4]]
    rng = Lcg(105)
    seg = some_affine(rng, 3, 50, 4, 16, None)
    free = Weight("free.weight", [3, 50], "BF16", [seg], perm=[rng.permutation(50)])
    expect: dict[str, list[float] | str] = {"hand.weight": [1.0, 2, 3, 0, 7, 6, 5, 4, 3, 2.5, 2, 3.5, 0, 0.5, 1, 1.5]}
    return lone(
        "perm",
        "stored column j holds column perm[j]; groups are groups of stored columns",
        [hand, free],
        {},
        True,
        expect,
    )


def truncation() -> Valid:
    """Fewer planes of affine weights."""
    rng = Lcg(106)
    G = groups(48, 16)
    precise = affine(6, 16, rng.rows(2, 48, 64), first("F32", rng.floats("F32", 2, G)), [[0, 64, 31], [32, 7, 63]])
    weights = [
        Weight("f32.weight", [2, 48], "F32", [precise]),
        Weight("bf16.weight", [2, 48], "BF16", [some_affine(rng, 2, 48, 4, 16, 8, "BF16")]),
    ]
    spiked = some_affine(rng, 2, 48, 4, 16, None)
    outliers = Outliers("add", "F16", [0], [[(5, 0x4200)], [(0, 0xC100), (47, 0x3C01)]])
    weights.append(Weight("outliers.weight", [2, 48], "F16", [spiked], outliers=outliers))
    comment = "the first p planes of affine weights (section 8.1); outliers still apply"
    return lone("truncation", comment, weights, planes=True)


def vectors() -> list[Valid]:
    """All of this module."""
    return [
        worked(),
        widths(),
        zeros(),
        wide_zeros(),
        scales(),
        dtypes(),
        shapes(),
        ties(),
        overflow(),
        nonfinite(),
        names(),
        permuted(),
        truncation(),
    ]
