"""Files whose parts break one rule of section 6, BCQ-V301 to BCQ-V411."""

from maker.build import Lcg, Tensor, exact, tensor
from maker.catalogue import Invalid
from maker.encodings import affine, first, shifted, some_affine, some_bcq, some_numbers, some_second
from maker.valid.affine import worked_example
from maker.valid.structures import tile_segments
from maker.weights import Outliers, Weight

from .descriptor import keep, made

Row = list[tuple[int, int]]
ONE = exact("F16", 1.0)


def swapped(weight: Weight | None = None, **parts: Tensor | None) -> bytes:
    """A valid file with other parts; None takes one away."""
    chosen = weight or worked_example()

    def change(tensors: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            if part is None:
                del tensors[chosen.prefix + name]
            else:
                tensors[chosen.prefix + name] = part

    return made(keep, [chosen], parts=change)


def flipped(weight: Weight, part: str, byte: int, bit: int) -> bytes:
    """A valid file with one more bit set in a part."""

    def change(tensors: dict[str, Tensor]) -> None:
        old = tensors[weight.prefix + part]
        data = bytearray(old.data)
        assert not data[byte] >> bit & 1
        data[byte] |= 1 << bit
        tensors[weight.prefix + part] = Tensor(old.dtype, old.shape, bytes(data))

    return made(keep, [weight], parts=change)


def part_rules() -> list[Invalid]:
    """V301 to V304: parts that are missing, stray, of another type or shape."""
    stray = {"s0_bias": tensor("F16", [2, 1], [0, 0])}
    words = tensor("I32", [2, 2, 1], [0x3C, 0xCF, 0x5A, 0xC0])
    spiked = Weight("w.weight", [2, 8], "F16", [some_affine(Lcg(605), 2, 8, 2, 8, 1)])
    spiked.outliers = Outliers("add", "F16", [0], [[(1, ONE)], [(2, ONE)]])
    lone = {"old.bcq_s0_planes": words}
    other = {"left_bcq_over": tensor("U8", [1], [0])}
    return [
        Invalid("V301", "no-scale", "the scale is missing", swapped(s0_scale=None)),
        Invalid("V301", "no-planes", "the planes are missing", swapped(s0_planes=None)),
        Invalid("V301", "no-indptr", "outliers without indptr", swapped(spiked, outlier_indptr=None)),
        Invalid("V302", "not-called-for", "a bias for an affine weight", swapped(None, **stray)),
        Invalid("V302", "no-weight", "parts of a weight that is not described", made(keep, dense=lone)),
        Invalid("V302", "infix", "_bcq_ in the name of a dense tensor", made(keep, dense=other)),
        Invalid("V303", "planes-u32", "planes as U32", swapped(s0_planes=Tensor("U32", [2, 2, 1], words.data))),
        Invalid(
            "V303", "scale-bf16", "BF16 where the scheme says F16", swapped(s0_scale=tensor("BF16", [2, 1], [1, 1]))
        ),
        Invalid(
            "V303",
            "indices-i32",
            "I32 indices for eight columns",
            swapped(spiked, outlier_indices=tensor("I32", [2], [1, 2])),
        ),
        Invalid("V304", "scale-flat", "[2] for [2, 1]", swapped(s0_scale=tensor("F16", [2], [0x3800, 0xBC00]))),
        Invalid("V304", "scale-wide", "one group too many", swapped(s0_scale=tensor("F16", [2, 2], [0x3800] * 4))),
        Invalid("V304", "planes-swapped", "rows before planes, one row", one_row_swapped()),
        Invalid(
            "V304", "values-short", "two indices, one value", swapped(spiked, outlier_values=tensor("F16", [1], [ONE]))
        ),
        Invalid(
            "V304", "indptr-short", "indptr without its end", swapped(spiked, outlier_indptr=tensor("I32", [2], [0, 2]))
        ),
    ]


def number_rules() -> list[Invalid]:
    """V301 to V304, V401, V405 and V411 for scales and offsets of every kind."""
    rng = Lcg(609)
    shared = {"bits": 3, "rows": 1, "groups": 2, "scale": "F16", "zero": "packed"}
    constant = {**shared, "zero": 4}
    codes = rng.rows(1, 24, 4)

    def scaled(kind: object) -> Weight:
        return Weight("w.weight", [1, 24], "F16", [affine(2, 8, codes, some_numbers(rng, 1, 3, kind), 1)])

    ones = first("F16", [[ONE] * 3])
    moved = Weight(
        "w.weight", [1, 24], "F16", [shifted("offset", 2, 8, codes, ones, some_numbers(rng, 1, 3, shared, "offset"))]
    )
    zeros = {"s0_scale_zero": tensor("I32", [1, 1], [4])}
    first_order = {"s0_offset": tensor("F16", [1, 3], [ONE] * 3)}
    two_level = scaled({"codes": "UE4M3", "rows": 1, "groups": 3, "scale": "F32"})
    unsigned, power = scaled("UE4M3"), scaled("E8M0")
    return [
        Invalid("V301", "no-offset-codes", "the codes of an offset are missing", swapped(moved, s0_offset_codes=None)),
        Invalid("V302", "zero-in-scheme", "stored zeros, none called for", swapped(scaled(constant), **zeros)),
        Invalid("V302", "offset-twice", "an offset of first order as well", swapped(moved, **first_order)),
        Invalid("V303", "e8m0-type", "F8_E8M0 for U8", swapped(power, s0_scale=tensor("F8_E8M0", [1, 3], [127] * 3))),
        Invalid("V303", "byte-codes", "no U8", swapped(two_level, s0_scale_codes=tensor("I32", [1, 3], [1, 2, 3]))),
        Invalid(
            "V304", "super-groups", "a number for every group, not for every two",
            swapped(scaled(constant), s0_scale_scale=tensor("F16", [1, 3], [ONE] * 3)),
        ),
        Invalid("V401", "offset-codes", "after three codes of three bits", flipped(moved, "s0_offset_codes", 1, 1)),
        Invalid("V401", "shared-zero", "after two zeros of three bits", flipped(scaled(shared), "s0_scale_zero", 0, 6)),
        Invalid(
            "V405", "offset-scale-inf", "an infinite second-order scale of the offset",
            swapped(moved, s0_offset_scale=tensor("F16", [1, 2], [ONE, 0x7C00])),
        ),
        Invalid("V411", "scale-7f", "the byte 7f", swapped(unsigned, s0_scale=tensor("U8", [1, 3], [0, 0x7F, 1]))),
        Invalid("V411", "codes-80", "80", swapped(two_level, s0_scale_codes=tensor("U8", [1, 3], [0, 1, 0x80]))),
    ]  # fmt: skip


def one_row_swapped() -> bytes:
    """Planes of shape [out, q, words] instead of [q, out, words]."""
    weight = Weight("w.weight", [1, 8], "F16", [some_affine(Lcg(606), 1, 8, 2, 8, 1)])
    return swapped(weight, s0_planes=tensor("I32", [1, 2, 1], [3, 5]))


def bit_rules() -> list[Invalid]:
    """V401 to V405: padding, zero points, numbers that are not finite."""
    rng = Lcg(607)
    ramp = [[0, 1, 2, 3] * 2] * 2
    one = first("F16", [[ONE], [ONE]])

    def zeros(values: list[list[int]], bits: int) -> bytes:
        seg = affine(2, 8, ramp, one, values)
        seg.spec["zero"] = {"bits": bits}
        return made(keep, [Weight("w.weight", [2, 8], "F16", [seg])])

    def finite(dtype: str, part: str, bits: int, weight: Weight, shape: list[int]) -> bytes:
        return swapped(weight, **{part: tensor(dtype, shape, [bits])})

    stored = Weight("w.weight", [2, 40], "F16", [some_affine(rng, 2, 40, 3, 8, None)])
    coded = affine(2, 8, ramp, some_second(rng, 2, 1, 4, 2, "F16", "packed"), 1)
    second = Weight("w.weight", [2, 8], "F16", [coded])
    tiled = Weight("w.weight", [2, 64], "F16", tile_segments(rng, 2, 64, rng.rows(2, 3, 4), 2, 1), True)
    plain = Weight("w.weight", [1, 8], "F16", [some_affine(rng, 1, 8, 2, 8, 1, "F32")])
    binary = Weight("w.weight", [1, 8], "F16", [some_bcq(rng, 1, 8, 1, 8, "BF16", "F16")])
    floating = affine(2, 8, ramp[:1], some_second(rng, 1, 1, 4, 2, "F16", "F16"), 1)
    loose = Weight("w.weight", [1, 8], "F16", [floating])
    spiked = Weight("w.weight", [1, 8], "F16", [some_affine(rng, 1, 8, 2, 8, 1)])
    spiked.outliers = Outliers("replace", "F16", [0], [[(1, ONE)]])
    return [
        Invalid("V401", "planes", "the bit after the last column", flipped(worked_example(), "s0_planes", 1, 0)),
        Invalid("V401", "last-row", "the last bit of the last plane", flipped(worked_example(), "s0_planes", 15, 7)),
        Invalid("V401", "zero", "after five zero points of four bits", flipped(stored, "s0_zero", 2, 4)),
        Invalid("V401", "scale-codes", "after one scale code", flipped(second, "s0_scale_codes", 0, 4)),
        Invalid("V401", "scale-zero", "after one zero of the scale", flipped(second, "s0_scale_zero", 3, 7)),
        Invalid("V401", "aligned64", "the upper half of a byte", flipped(tiled, "s0_scale_zero", 1, 4)),
        Invalid("V404", "zero-too-large", "the zero point 2^q + 1", zeros([[5], [1]], 3)),
        Invalid("V405", "scale-inf", "an infinite scale", finite("F32", "s0_scale", 0x7F800000, plain, [1, 1])),
        Invalid("V405", "alpha-nan", "a NaN plane scale", finite("BF16", "s0_alpha", 0xFFC1, binary, [1, 1, 1])),
        Invalid("V405", "bias-inf", "an infinite bias", finite("F16", "s0_bias", 0xFC00, binary, [1, 1])),
        Invalid(
            "V405", "scale-zero-nan", "a NaN zero of the scale", finite("F16", "s0_scale_zero", 0x7C01, loose, [1, 1])
        ),
        Invalid("V405", "outlier-inf", "an infinite outlier", finite("F16", "outlier_values", 0x7C00, spiked, [1])),
    ]


def index_rules() -> list[Invalid]:
    """V406 to V410: perm and outliers."""
    rng = Lcg(608)

    def sparse(rows: list[Row]) -> Weight:
        seg = some_affine(rng, len(rows), 32, 2, 8, 1)
        return Weight("w.weight", [len(rows), 32], "F16", [seg], outliers=Outliers("add", "F16", [0], rows))

    def permuted(*perm: int) -> bytes:
        seg = some_affine(rng, 1, 8, 2, 8, 1)
        return made(keep, [Weight("w.weight", [1, 8], "F16", [seg], perm=[list(perm)])])

    def pointed(*indptr: int) -> bytes:
        weight = sparse([[(1, ONE), (2, ONE)], [(5, ONE)], [(9, ONE)]])
        return swapped(weight, outlier_indptr=tensor("I32", [4], indptr))

    def indexed(*columns: int) -> bytes:
        return made(keep, [sparse([[(c, ONE) for c in columns], []])])

    def split(column: int, perm: list[int] | None) -> bytes:
        segs = [some_affine(rng, 1, 16, 2, 8, 1), some_affine(rng, 1, 16, 4, 8, 1)]
        spikes = Outliers("add", "F16", [1], [[(column, ONE)]])
        return made(keep, [Weight("w.weight", [1, 32], "F16", segs, perm=[perm] if perm else None, outliers=spikes)])

    three = Weight("w.weight", [3, 1, 8], "F16", [some_affine(rng, 3, 8, 2, 8, 1)])
    three.perm = [list(range(8)), [1, 0, 2, 3, 4, 5, 6, 7], [0] * 8]
    crowded = sparse([[(c, ONE) for c in range(5)]])
    return [
        Invalid("V406", "twice", "column 2 twice", permuted(0, 1, 2, 2, 4, 5, 6, 7)),
        Invalid("V406", "too-large", "column 8 of eight", permuted(0, 1, 2, 3, 4, 5, 6, 8)),
        Invalid("V406", "negative", "column -1", permuted(0, 1, 2, 3, 4, 5, 6, -1)),
        Invalid("V406", "stack", "the last matrix of a stack", made(keep, [three])),
        Invalid("V407", "start", "indptr begins at 1", pointed(1, 2, 3, 4)),
        Invalid("V407", "falls", "indptr falls", pointed(0, 2, 1, 4)),
        Invalid("V407", "end", "indptr ends before nnz", pointed(0, 2, 3, 3)),
        Invalid("V407", "past-end", "indptr ends after nnz", pointed(0, 2, 3, 5)),
        Invalid("V407", "negative", "indptr goes below 0", pointed(0, -1, 3, 4)),
        Invalid("V408", "falls", "columns 9, 3", indexed(9, 3)),
        Invalid("V408", "twice", "column 9 twice", indexed(9, 9)),
        Invalid("V408", "too-large", "column 32 of 32", indexed(3, 32)),
        Invalid("V409", "other-segment", "an outlier in segment 0, only 1 is named", split(3, None)),
        Invalid("V409", "permuted", "column 20 is stored column 11", split(20, [*range(9, 32), *range(9)])),
        Invalid("V410", "too-many", "five outliers among 32 elements", made(keep, [crowded])),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*part_rules(), *number_rules(), *bit_rules(), *index_rules()]
