"""Valid files and folders at the edges of rules: exactly at a limit, and next to what is forbidden."""

from maker.build import Lcg, Tensor, exact_rows, tensor
from maker.catalogue import Valid, lone, whole
from maker.encodings import affine, first, second, some_affine, some_bcq, some_second
from maker.folder import INDEX, Files, Folder, Shard
from maker.weights import Outliers, Weight

from .affine import worked_example
from .folders import SHARDS, crowded, sharded, single
from .structures import tile_segments


def containers() -> list[Valid]:
    """1,000 keys of metadata; names and shapes that are just allowed."""
    empty = {f"k{i:03}": "" for i in range(998)}
    names = ["x@", "x`", "x[", "x{", "x\u0130", "xi\u0307", "x\u212a", "xk"]
    dense = {name: tensor("U8", [1], [i]) for i, name in enumerate(names)}
    dense["huge"] = Tensor("U8", [0, 2**24, 2**24 - 1], b"")
    return [
        lone("metadata-1000", "1,000 keys in __metadata__", [], extra=empty),
        lone(
            "names-and-shapes",
            "names around the ASCII letters, 2^48 - 2^24 elements times 0",
            [worked_example()],
            dense,
        ),
    ]


def words() -> Valid:
    """Packed rows that end exactly with a word, or one bit later."""
    rng = Lcg(811)
    weights = []
    for columns, bits in ((64, 4), (88, 3), (256, 1), (264, 1)):
        G = columns // 8
        zeros = [[(r + a) % (1 << bits) for a in range(G)] for r in range(3)]
        zeros[0][0] = (1 << bits) - 1
        scale = some_second(rng, 3, G, bits, 2, "F16", "packed")
        weights.append(
            Weight(
                f"n{columns}-b{bits}.weight",
                [3, columns],
                "F16",
                [affine(4, 8, rng.rows(3, columns, 16), scale, zeros)],
            )
        )
    return lone("packed-rows", "rows of 32 and 33 packed bits: scale codes, their zeros and zero points", weights)


def tiles() -> Valid:
    """aligned64 with everything that segment 1 can have, and more tiles than 63."""
    rng = Lcg(812)
    low, _ = tile_segments(rng, 4, 128, rng.rows(4, 6, 4), 3, 2)
    scale = some_second(rng, 4, 4, 5, 3, "BF16", "packed")
    high = affine(4, 8, rng.rows(4, 32, 16), scale, [[0, 16, 3, 7]] * 4)
    long = tile_segments(rng, 1, 4032, rng.rows(1, 189, 4), 1, 1)
    floating = tile_segments(rng, 1, 64, [[1, 2, 3]], 1, 1)
    floating[1] = affine(
        4, 16, rng.rows(1, 16, 16), second(2, 1, [[3]], ("F32", exact_rows("F32", [[0.3125]])), ("F16", [[0x3555]])), 0
    )
    constant = tile_segments(rng, 2, 64, [[0] * 3] * 2, 1, 2)
    constant[1] = affine(4, 16, rng.rows(2, 16, 16), first("F32", rng.floats("F32", 2, 1)), [[5], [9]])
    weights = [
        Weight("both.weight", [4, 128], "F16", [low, high], True),
        Weight("long.weight", [1, 4032], "F16", long, True),
        Weight("float.weight", [1, 64], "F32", floating, True),
        Weight("constant.weight", [2, 64], "BF16", constant, True),
    ]
    return lone(
        "aligned64-edges", "segment 1 with codes for scales and zero points; 63 tiles a row", weights, planes=True
    )


def many_features() -> Folder:
    """Two files, the second with many features and a weight of two segments."""
    rng = Lcg(813)
    left, right = some_affine(rng, 2, 8, 2, 8, 1), some_affine(rng, 2, 16, 4, 8, 8)
    spikes = Outliers("add", "F16", [0], [[], [(3, 0x3C00)]])
    wide = Weight("c.weight", [2, 24], "F16", [left, right], perm=[rng.permutation(24)], outliers=spikes)
    stack = Weight("e.weight", [2, 2, 8], "F32", [some_bcq(rng, 4, 8, 2, 8, "F16", None)], nonfinite=True)
    return Folder({SHARDS[0]: Shard([worked_example()]), SHARDS[1]: Shard([wide, stack])})


def folders() -> list[Valid]:
    """White space before JSON, config.json of exactly 16,000,000 bytes, an index with 2,000,000 values and names."""

    def spaced(files: Files) -> None:
        files["config.json"] = b" \t\r\n" + files["config.json"]
        files[INDEX] = b"\n\n" + files[INDEX]

    def filled(files: Files) -> None:
        files["config.json"] += b" " * (16_000_000 - len(files["config.json"]))

    loose, full = whole("folder-white-space", "white space before config.json and the index", sharded()), single()
    loose.content = sharded().build(spaced)
    long = whole("folder-config-16000000", "config.json of 16,000,000 bytes, mostly spaces", full)
    content, text = full.build(filled), full.files()["config.json"]
    content["config.json"] = text
    long.content = content
    long.setup = [{"append_spaces": {"path": "config.json", "count": 16_000_000 - len(text)}}]
    crowd = whole("folder-index-2000000", "an index with 2,000,000 of the characters , [ {", sharded())
    crowd.content, crowd.setup = crowded(2_000_000)
    several = "features, and a weight with widths, in the last file only"
    return [loose, long, crowd, whole("folder-features", several, many_features())]


def vectors() -> list[Valid]:
    """All of this module."""
    return [*containers(), words(), tiles(), *folders()]
