"""Valid files whose values need the arithmetic of section 8: binary64, in the order written, rounded once."""

from fractions import Fraction
from math import frexp, ldexp
from struct import pack, unpack
from typing import Any

from maker.build import FORMATS, Lcg, Rows, exact, exact_rows, number, round_once
from maker.catalogue import Valid, lone
from maker.encodings import affine, bcq, first, groups, second, shifted, table
from maker.weights import Outliers, Segment, Weight


def wild(rng: Lcg, dtype: str, count: int, width: int, spread: int = 12) -> Rows:
    """A table of raw bits with exponents far apart: most sums of them cannot be exact."""
    precision, total = FORMATS[dtype][0], FORMATS[dtype][4]
    bias = 15 if dtype == "F16" else 127

    def one() -> int:
        exponent = bias - spread + rng.below(2 * spread + 1)
        return rng.below(2) << (total - 1) | exponent << (precision - 1) | rng.below(1 << (precision - 1))

    return [[one() for _ in range(width)] for _ in range(count)]


def near_tie(factor: int, dtype: str) -> float:
    """An F32 number whose product with `factor` binary32 rounds onto a tie of `dtype`, and so to the wrong side."""
    step = 2.0 ** -FORMATS[dtype][0]  # half a unit in the last place of numbers from 1 on
    for odd in range(1, 4096, 2):
        for ulps in (-1, 0, 1):
            x = number("F32", exact("F32", _single((1 + odd * step) / factor)) + ulps)
            product = x * factor
            twice = round_once(number("F32", round_once(product, "F32")), dtype)
            if frexp(product)[1] == 1 and twice != round_once(product, dtype):
                return x
    raise AssertionError(f"no number for {factor}")


def _single(x: float) -> float:
    result: float = unpack("<f", pack("<f", x))[0]
    return result


def named(kind: str, dtype: str, seg: Segment, **more: Any) -> Weight:
    """A weight of one segment, named after what it is about."""
    return Weight(f"{kind}-{dtype.lower()}.weight", [len(seg.codes), seg.width], dtype, [seg], **more)


def products() -> Valid:
    """Products that lie next to a tie."""
    factors = [3, 5, 7, 11, 13, 19, 23, 29, 31]
    codes = [[k, 0, 1, k - 1, 31 - k, k, 31, 16] for k in factors for _ in (1, 2)]
    zeros = [[0]] * len(codes)
    weights = []
    for dtype in ("BF16", "F16"):
        rows = exact_rows("F32", [[near_tie(k, dtype) * sign] for k in factors for sign in (1, -1)])
        scale = first("F32", rows)
        above = [[5 + k for k in row] for row in codes]
        coded = second(5, 1, [row[:1] for row in codes], ("F32", rows), ("packed", zeros))
        weights += [
            named("affine", dtype, affine(5, 8, codes, scale, 0)),
            named("affine-zero", dtype, affine(6, 8, above, scale, 5)),
            named("float-zero", dtype, shifted("float-zero", 5, 8, codes, scale, (dtype, zeros))),
            named("offset", dtype, shifted("offset", 5, 8, codes, scale, ("F32", zeros))),
            named("second", dtype, affine(1, 8, [[1, 0] * 4] * len(codes), coded, 0)),
            named("table", dtype, table(5, 8, codes, scale, list(range(32)))),
        ]
    comment = "products of F32 scales and codes that binary32 would round onto a tie of BF16 or F16: one rounding only"
    return lone("single-rounding-products", comment, weights)


def differences() -> Valid:
    """float-zero: the difference next to a tie, which is rounded once and before the product."""
    weights = []
    for dtype, half in (("BF16", 2.0**-8), ("F16", 2.0**-11)):
        above, below = half * (1 + 2.0**-23), half * (3 - 2.0**-22)
        zeros = exact_rows("F32", [[-above], [above], [-below]])
        scale = first("F32", exact_rows("F32", [[1.0], [-3.0], [1 + 2.0**-20]]))
        seg = shifted("float-zero", 2, 8, [[0, 1, 2, 3] * 2] * 3, scale, ("F32", zeros))
        weights.append(Weight(f"{dtype.lower()}.weight", [3, 8], dtype, [seg]))
    comment = "1 + 2^-8 + 2^-31 as a difference: rounded once to the logical dtype, not first to binary32"
    return lone("float-zero-single-rounding", comment, weights)


def cancelling(rng: Lcg, dtype: str, order: str) -> Weight:
    """bcq with two equal plane scales (L) so large that they wipe out digits of the others before they cancel."""
    tables: list[Rows] = [[] for _ in order]
    for _ in range(2):
        large = [wild(rng, "F32", 1, 1, 3)[0][0] + ((44 - rng.below(6)) << 23) for _ in range(5)]
        for rows, kind in zip(tables, order, strict=True):
            rows.append(large if kind == "L" else wild(rng, "F32", 1, 5, 2)[0])
    seg = bcq(5, 8, rng.rows(2, 40, 32), ("F32", tables), ("F32", wild(rng, "F32", 2, 5, 2)))
    spikes = [[(3, wild(rng, "F32", 1, 1, 2)[0][0])], [(0, wild(rng, "F32", 1, 1, 2)[0][0])]]
    name = f"{dtype.lower()}-{order.lower()}.weight"
    return Weight(name, [2, 40], dtype, [seg], outliers=Outliers("add", "F32", [0], spikes))


def unfused() -> Weight:
    """offset where the product must be rounded before the sum: what is left of them shows the rounding."""
    rng, rows = Lcg(703), []
    while len(rows) < 8:
        scale, zero = (1 + rng.below(1 << 23) * 2.0**-23 for _ in "sz")
        code = 128 + rng.below(128)
        s = scale * (3.0 - zero)
        offset = _single(-s * code)
        left = Fraction(s) * code + Fraction(offset)
        if left and round_once(float(left), "F32") != round_once(s * code + offset, "F32"):
            rows.append((scale, zero, code, offset))
    codes = [[code, 0] * 4 for _, _, code, _ in rows]
    scale, zero, offset = (exact_rows("F32", [[row[i]] for row in rows]) for i in (0, 1, 3))
    seg = shifted("offset", 8, 8, codes, second(2, 1, [[3]] * 8, ("F32", scale), ("F32", zero)), ("F32", offset))
    return Weight("unfused.weight", [8, 8], "F32", [seg])


def far_apart() -> list[Valid]:
    """Numbers of very different size in every encoding: no operation may be exchanged, fused or narrowed."""
    rng, G = Lcg(701), groups(40, 8)
    weights = []
    for dtype in ("F32", "BF16", "F16"):
        codes = rng.rows(3, 40, 16)
        scale = first("F32", wild(rng, "F32", 3, G))
        coded = second(8, 2, rng.rows(3, G, 256), ("F32", wild(rng, "F32", 2, G)), ("F32", wild(rng, "F32", 2, G)))
        zeros = [[(r * G + a) % 17 for a in range(G)] for r in range(3)]
        offsets, near = ("F32", wild(rng, "F32", 3, G)), ("F32", wild(rng, "F32", 3, G, 6))
        weights += [
            named("offset", dtype, shifted("offset", 4, 8, codes, scale, offsets)),
            named("float-zero", dtype, shifted("float-zero", 4, 8, codes, scale, near)),
            named("second", dtype, affine(4, 8, codes, coded, zeros)),
            named("second-offset", dtype, shifted("offset", 4, 8, codes, coded, offsets)),
        ]
    weights.append(unfused())
    cases = [("F32", "LsLss"), ("F32", "sLsLs"), ("F32", "ssLLs"), ("BF16", "sLsLs"), ("F16", "LsLss")]
    sums = [cancelling(rng, dtype, order) for dtype, order in cases]
    plain = "F32 numbers of very different size: nothing fused, exchanged or in binary32"
    summed = "plane scales of very different size: the sum in the order of the planes, z first"
    return [
        lone("far-apart", plain, weights, planes=True),
        lone("far-apart-bcq", summed, sums, planes=True),
    ]


def thresholds() -> Valid:
    """Sums exactly at, and just below, the numbers from which on a type overflows."""
    weights = []
    for dtype, top in (("F16", 15), ("BF16", 127), ("F32", 127)):
        digits = FORMATS[dtype][0]
        largest, half = (2 - 2.0 ** (1 - digits)) * 2.0**top, ldexp(1.0, top - digits)
        below = number("F32", exact("F32", half) - 1)
        alphas = [exact_rows("F32", [[largest], [-largest]]), exact_rows("F32", [[half], [below]])]
        seg = bcq(2, 8, [[0, 1, 2, 3] * 2] * 2, ("F32", alphas))
        weights.append(Weight(f"{dtype.lower()}.weight", [2, 8], dtype, [seg]))
    comment = "the largest number plus half a unit is an infinity, anything less is the largest number"
    return lone("rounding-thresholds", comment, weights, planes=True)


def not_numbers() -> Valid:
    """Infinities and NaNs with signs and payloads in every kind of part, as every type."""
    nans = {"F16": (0x7C01, 0xFE00), "BF16": (0x7F81, 0xFFC1), "F32": (0x7F800001, 0xFFC12345)}
    codes = [[0, 1, 2, 3] * 2] * 4
    weights = []
    for dtype, (quiet, signed) in nans.items():
        plus, one = FORMATS[dtype][2], exact(dtype, 1.0)
        minus = plus | 1 << (FORMATS[dtype][4] - 1)
        rows, ones = [[plus], [minus], [quiet], [signed]], [[one]] * 4
        offsets = (dtype, [[minus], [minus], [one], [quiet]])
        some_zero = first(dtype, [[one], [0], [one], [one]])
        spikes = Outliers("replace", dtype, [0], [[(1, plus)], [(0, minus)], [(7, quiet)], [(3, signed)]])
        segments = {
            "offset": shifted("offset", 2, 8, codes, first(dtype, rows), offsets),
            "float-zero": shifted("float-zero", 2, 8, codes, some_zero, (dtype, rows)),
            "bcq": bcq(2, 8, codes, (dtype, [rows, [[plus], [one], [one], [plus]]]), (dtype, ones)),
            "second": affine(2, 8, codes, second(2, 1, [[1]] * 4, (dtype, rows), (dtype, ones)), 1),
        }
        weights += [named(kind, dtype, seg, nonfinite=True) for kind, seg in segments.items()]
        replaced = affine(2, 8, codes, first(dtype, ones), 1)
        weights.append(named("replaced", dtype, replaced, outliers=spikes, nonfinite=True))
    comment = "infinities and NaNs of either sign and any payload in every part: each NaN is delivered in its one form"
    return lone("nonfinite-parts", comment, weights)


def plain_segments() -> Valid:
    """Segments of affine and bcq only, for readers that know no other encoding."""
    rng = Lcg(702)
    left = affine(3, 8, rng.rows(2, 16, 8), first("F16", rng.floats("F16", 2, 2)), [[0, 8], [3, 1]])
    right = bcq(2, 16, rng.rows(2, 40, 4), ("BF16", [rng.floats("BF16", 2, 3) for _ in range(2)]))
    weight = Weight("w.weight", [2, 56], "F32", [left, right], perm=[rng.permutation(56)])
    return lone("segments-plain", "an affine and a bcq segment, reordered; no other encoding", [weight], planes=True)


def vectors() -> list[Valid]:
    """All of this module."""
    return [products(), differences(), *far_apart(), thresholds(), not_numbers(), plain_segments()]
