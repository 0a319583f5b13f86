"""Valid files with several segments, stacks, tiles and outliers."""

from maker.build import Lcg, exact, exact_rows
from maker.catalogue import Valid, lone
from maker.encodings import affine, first, second, shifted, some_affine, some_bcq, some_second
from maker.weights import Outliers, Segment, Weight


def segments() -> Valid:
    """2, 4 and 8 bits in one weight."""
    rng = Lcg(301)
    mixed = [
        some_affine(rng, 3, 48, 2, 16, None),
        some_bcq(rng, 3, 24, 4, 8, "BF16", "F16"),
        some_affine(rng, 3, 29, 8, 8, 128, "F32"),
    ]
    weights = [Weight("mixed.weight", [3, 101], "F16", mixed)]
    shift = shifted(
        "offset",
        2,
        8,
        rng.rows(2, 16, 4),
        first("F16", rng.floats("F16", 2, 2)),
        ("F16", rng.floats("F16", 2, 2)),
    )
    fz = shifted(
        "float-zero",
        4,
        8,
        rng.rows(2, 8, 16),
        first("F16", rng.floats("F16", 2, 1)),
        ("F16", rng.floats("F16", 2, 1)),
    )
    pair = [shift, fz, some_affine(rng, 2, 16, 8, 16, 3)]
    weights.append(Weight("pair.weight", [2, 40], "BF16", pair, perm=[rng.permutation(40)]))
    free = [some_affine(rng, 2, 32, 4, 32, 8), some_affine(rng, 2, 8, 8, 8, 128)]
    order = [*range(8, 40), *range(8)]
    rows = [[(1, exact("F16", 4.0)), (7, exact("F16", -2.5))], [(0, exact("F16", 0.125))]]
    weights.append(
        Weight("tail.weight", [2, 40], "F16", free, perm=[order], outliers=Outliers("add", "F16", [1], rows))
    )
    sixteen = [some_affine(rng, 1, 8, 1 + k % 8, 8, 0) for k in range(16)]
    weights.append(Weight("sixteen.weight", [1, 128], "F16", sixteen))
    comment = "segments with encodings, planes and groups of their own, each padding its words; up to 16 of them"
    return lone("segments", comment, weights, planes=True)


def stacks() -> Valid:
    """Three-dimensional weights."""
    rng = Lcg(302)
    single = Weight("one.weight", [1, 2, 40], "F16", [some_affine(rng, 2, 40, 3, 16, None)])
    rows: list[list[tuple[int, int]]] = [
        [],
        [(0, 0x3C00), (39, 0xBC00)],
        [],
        [(7, 0x4400)],
        [(1, 1), (2, 0x8001), (3, 0x5000)],
        [],
    ]
    fused = Weight(
        "experts.gate_up",
        [3, 2, 40],
        "BF16",
        [some_affine(rng, 6, 40, 4, 16, None, "BF16")],
        perm=[rng.permutation(40) for _ in range(3)],
        outliers=Outliers("add", "F16", [0], rows),
    )
    binary = Weight("experts.down", [3, 2, 16], "F32", [some_bcq(rng, 6, 16, 3, 8, "F16", "F32")])
    crowded = Weight("experts.crowded", [4, 1, 8], "F16", [some_affine(rng, 4, 8, 2, 8, 1)])
    crowded.outliers = Outliers("add", "F16", [0], [[(c, 0x3C00) for c in range(4)], [], [], []])
    blocks = [some_second(rng, 3, 2, 6, 2, "F16", "packed") for _ in range(2)]
    joined = {k: blocks[0][1][k] + blocks[1][1][k] for k in blocks[0][1]}
    two = affine(2, 8, rng.rows(6, 16, 4), (blocks[0][0], joined), 2)
    return lone(
        "stack",
        "E = 1 and more, with perm per matrix, outliers over E*out rows (half of one matrix), row-groups per matrix",
        [single, fused, binary, crowded, Weight("experts.second", [2, 3, 16], "F16", [two])],
        planes=True,
    )


def tile_segments(rng: Lcg, rows: int, inner: int, zeros: list[list[int]], g2: int, blocks: int) -> list[Segment]:
    """Two segments that fit aligned64, zero points given."""
    G = 3 * inner // 64
    codes = [[rng.below(16 if a % 3 == 0 else 8) for a in range(G)] for _ in range(rows)]
    scale = second(4, g2, codes, ("F16", rng.floats("F16", blocks, G)), ("packed", rng.rows(blocks, G, 16)))
    low = affine(2, 16, rng.rows(rows, 48 * inner // 64, 4), scale, zeros)
    low.spec["zero"] = {"bits": 2}
    high = affine(4, 16, rng.rows(rows, inner // 4, 16), first("F16", rng.floats("F16", rows, inner // 64)), 8)
    return [low, high]


def untile(weight: Weight) -> Weight:
    """The canonical form of an aligned64 weight."""
    low, high = weight.segments
    zeros = low.numbers["zero"]
    found = sorted({z for row in zeros for z in row})
    numbers = dict(low.numbers)
    if len(found) == 1:
        del numbers["zero"]
    kind = found[0] if len(found) == 1 else {"bits": found[-1].bit_length()}
    twin = Segment({**low.spec, "zero": kind}, low.codes, numbers)
    return Weight(weight.name, weight.shape, weight.dtype, [twin, high], perm=weight.perm, outliers=weight.outliers)


def tiled() -> list[Valid]:
    """The layout aligned64 and the same weights in canonical layout."""
    ramp = [m % 4 for m in range(16)] * 3
    scale = second(4, 1, [[9, 5, 7]], ("F16", exact_rows("F16", [[1.0, 0.5, -1.0]])), ("packed", [[0, 6, 15]]))
    low = affine(2, 16, [ramp], scale, [[1, 2, 3]])
    high = affine(4, 16, [list(range(16))], first("F16", exact_rows("F16", [[0.25]])), 8)
    rng = Lcg(303)
    mixed = tile_segments(rng, 5, 128, rng.rows(5, 6, 4), 2, 3)
    same = tile_segments(rng, 2, 64, [[2] * 3] * 2, 2, 1)
    small = tile_segments(rng, 2, 64, [[0, 1, 0], [1, 1, 0]], 2, 1)
    stacked = tile_segments(rng, 4, 64, rng.rows(4, 3, 4), 2, 2)
    rows: list[list[tuple[int, int]]] = [[(3, 0x4000)], [], [(0, 0x4200), (63, 0xC200)], []]
    weights = [
        Weight("section7.weight", [1, 64], "F16", [low, high], True),
        Weight("mixed.weight", [5, 128], "BF16", mixed, True, perm=[rng.permutation(128)]),
        Weight("same-zero.weight", [2, 64], "F16", same, True),
        Weight("small-zero.weight", [2, 64], "F32", small, True),
        Weight(
            "experts.tiled",
            [2, 2, 64],
            "F16",
            stacked,
            True,
            outliers=Outliers("replace", "F16", [0, 1], rows),
        ),
    ]
    group = {0: (9.0, 1), 1: (-0.5, 2), 2: (8.0, 3)}  # 1 * (9 - 0), 0.5 * (5 - 6), -1 * (7 - 15)
    hand = [s * (m % 4 - z) for s, z in group.values() for m in range(16)] + [0.25 * (m - 8) for m in range(16)]
    expect: dict[str, list[float] | str] = {"section7.weight": hand}
    twins = [untile(w) for w in weights]
    return [
        lone("aligned64", "tiles; section7.weight has the tile of annex A", weights, {}, True, expect),
        lone(
            "aligned64-twin",
            "the canonical form of every weight of aligned64: the same values",
            twins,
            {},
            True,
            expect,
        ),
    ]


def outliers() -> list[Valid]:
    """Sparse corrections."""
    ramp = [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    seg = affine(3, 8, ramp, first("F16", exact_rows("F16", [[1.0], [-0.5]])), 4)
    rows = [[(2, exact("F16", 0.75))], [(7, exact("F16", -3.0))]]
    made = {
        mode: Weight("w.weight", [2, 8], "F16", [seg], outliers=Outliers(mode, "F16", [0], rows))
        for mode in ("add", "replace")
    }
    head, tail = [-4.0, -3.0], [-1.0, 0, 1, 2, 3, 2, 1.5, 1, 0.5, -0.0, -0.5, -1.0]
    rng = Lcg(304)
    single = Weight("f32.weight", [3, 33], "BF16", [some_affine(rng, 3, 33, 4, 16, 7)])
    single.outliers = Outliers(
        "add", "F32", [0], [[(0, 0x3F8CCCCD)], [(1, 0xBDCCCCCD), (8, 0x00000001), (32, 0x7149F2CA)], []]
    )
    swapped = Weight("bf16.weight", [3, 33], "F16", [some_affine(rng, 3, 33, 4, 16, 7)], perm=[rng.permutation(33)])
    swapped.outliers = Outliers("replace", "BF16", [0], [[(4, 0x8000)], [(0, 0x3F80)], [(31, 0x0001)]])
    empty = Weight("empty.weight", [2, 8], "F16", [seg], outliers=Outliers("add", "F32", [0], [[], []]))
    result = [
        lone(
            "outliers-add",
            "E + v before the rounding",
            [made["add"], single],
            {},
            True,
            {"w.weight": [*head, -1.25, *tail, -4.5]},
        ),
        lone(
            "outliers-replace",
            "E := v; v is rounded to the logical dtype like any E",
            [made["replace"], swapped],
            {},
            True,
            {"w.weight": [*head, 0.75, *tail, -3.0]},
        ),
        lone(
            "outliers-none",
            "the feature in use with nnz = 0",
            [empty],
            expect={"empty.weight": [*head, -2.0, *tail, -1.5]},
        ),
    ]
    for inner in (65536, 65537):
        far = affine(
            1,
            32768,
            [[int(c % 3 == 0) for c in range(inner)]],
            first("F16", exact_rows("F16", [[1.0, 2.0, 4.0][: -(-inner // 32768)]])),
            0,
        )
        spikes = [(0, 0x4500), (65535, 0x4600)] + ([(65536, 0x4700)] if inner > 65536 else [])
        weight = Weight("w.weight", [1, inner], "F16", [far], outliers=Outliers("replace", "F16", [0], [spikes]))
        kind = "U16 indices up to 65535" if inner == 65536 else "I32 indices: more than 65536 columns"
        result.append(lone(f"outliers-{inner}", kind, [weight]))
    return result


def vectors() -> list[Valid]:
    """All of this module."""
    return [segments(), stacks(), *tiled(), *outliers()]
