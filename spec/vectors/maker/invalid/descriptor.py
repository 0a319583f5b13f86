"""Files that break one rule of section 5 or 7, BCQ-V201 to BCQ-V215."""

from collections.abc import Callable
from typing import Any

from maker.build import Lcg, Tensor, canonical, container, frame, place, tensor
from maker.catalogue import Invalid
from maker.encodings import affine, first, shifted, some_affine, some_bcq, some_numbers, table
from maker.valid.affine import worked_example
from maker.valid.structures import tile_segments
from maker.weights import Weight, descriptor, metadata, tensors_of

DENSE = {"x": tensor("U8", [4], [1, 2, 3, 4])}
Edit = Callable[[dict[str, Any]], Any]


def made(
    edit: Edit,
    weights: list[Weight] | None = None,
    dense: dict[str, Tensor] | None = None,
    parts: Callable[[dict[str, Tensor]], Any] | None = None,
    version: str = "1.0",
) -> bytes:
    """A valid file with another descriptor, and other tensors where that needs them."""
    chosen = [worked_example()] if weights is None else weights
    described = descriptor(chosen, version, {"k": ["\u00e9", 0]})
    edit(described)
    tensors = tensors_of(chosen, dense)
    if parts:
        parts(tensors)
    return container(tensors, metadata(described))


def keep(_: dict[str, Any]) -> None:
    """No edit."""


def spelled(change: Callable[[str], str]) -> bytes:
    """A valid file with another text of its descriptor."""
    weight = worked_example()
    text = canonical(descriptor([weight], ignorable={"k": ["\u00e9", 0]}))
    assert change(text) != text
    return container(tensors_of([weight]), {"bcqfmt": change(text), "format": "pt"})


def replaced(old: str, new: str) -> bytes:
    """A valid file, one piece of its descriptor's text exchanged."""
    return spelled(lambda text: text.replace(old, new, 1))


def metadata_rules() -> list[Invalid]:
    """V201 to V204: where the descriptor stands and how it is written."""
    body = canonical(descriptor([]))
    deep: Any = 0
    for _ in range(15):
        deep = [deep]
    return [
        Invalid("V201", "no-metadata", "no __metadata__ at all", frame(canonical(place(DENSE)[0]), place(DENSE)[1])),
        Invalid("V201", "no-descriptor", "__metadata__ without bcqfmt", container(DENSE, {"format": "pt"})),
        Invalid("V202", "no-format", "__metadata__ without format", container(DENSE, {"bcqfmt": body})),
        Invalid("V202", "format-np", "format is np", container(DENSE, {"bcqfmt": body, "format": "np"})),
        Invalid("V203", "empty", "an empty text", spelled(lambda _: "")),
        Invalid("V203", "not-json", "the closing brace is missing", spelled(lambda text: text[:-1])),
        Invalid("V203", "array", "an array", spelled(lambda text: f"[{text}]")),
        Invalid("V203", "fraction", "0.5 in `ignorable`", replaced(",0]", ",0.5]")),
        Invalid("V203", "integer-2-53", "2^53 in `ignorable`", replaced(",0]", ",9007199254740992]")),
        Invalid("V203", "too-deep", "17 levels", made(lambda d: d["ignorable"].update(k=deep))),
        Invalid("V203", "duplicate-key", "a key twice", replaced('"k":', '"k":0,"k":')),
        Invalid("V203", "lone-surrogate", "half a surrogate pair", replaced("\\u00e9", "\\ud83d")),
        Invalid("V204", "space", "a space after a colon", replaced('":', '": ')),
        Invalid("V204", "line-feed", "a line feed at the end", spelled(lambda text: text + "\n")),
        Invalid(
            "V204",
            "key-order",
            "scale before group_size",
            replaced('"group_size":8,"scale":"F16"', '"scale":"F16","group_size":8'),
        ),
        Invalid("V204", "needless-escape", "a letter escaped", replaced("affine", "\\u0061ffine")),
        Invalid("V204", "upper-case-escape", "hexadecimal digits in upper case", replaced("\\u00e9", "\\u00E9")),
        Invalid("V204", "raw-character", "a character beyond ASCII", replaced("\\u00e9", "\u00e9")),
        Invalid("V204", "minus-zero", "-0", replaced(",0]", ",-0]")),
    ]


def version_rules() -> list[Invalid]:
    """V205 to V207: version and features."""
    versions = {
        "major-2": "2.0",
        "major-0": "0.9",
        "no-minor": "1",
        "three-numbers": "1.0.0",
        "leading-zero": "1.00",
        "leading-zero-major": "01.0",
        "space": "1.0 ",
        "line-feed": "1.0\n",
        "sign": "1.+0",
        "other-digits": "1.\u0660",
        "empty": "",
    }
    rng = Lcg(601)
    binary = Weight("b.weight", [1, 8], "F16", [some_bcq(rng, 1, 8, 2, 8, "F16", None)])
    permuted = Weight("p.weight", [1, 8], "F16", [some_affine(rng, 1, 8, 2, 8, 1)], perm=[list(range(8))])
    both = [binary, permuted]
    return [
        *(
            Invalid("V205", what, f"version {v!a}", made(lambda d, v=v: d.update(version=v)))  # type: ignore[misc]
            for what, v in versions.items()
        ),
        Invalid("V205", "absent", "no version", made(lambda d: d.pop("version"))),
        Invalid("V205", "not-string", "an integer as version", made(lambda d: d.update(version=1))),
        Invalid("V206", "unknown", "an unknown feature", made(lambda d: d["features"].append("vector-codes"))),
        Invalid("V206", "affine", "affine is no feature", made(lambda d: d["features"].append("affine"))),
        Invalid(
            "V206", "newer", "a new feature of 1.7", made(lambda d: d["features"].append("lattice"), version="1.7")
        ),
        Invalid("V207", "missing", "bcq in use, not named", made(lambda d: d["features"].remove("bcq"), both)),
        *(
            Invalid(
                "V207", what, f"{what} in use, not named", made(lambda d, f=what: d["features"].remove(f), [weight])
            )  # type: ignore[misc]
            for what, weight in new_features(rng).items()
        ),
        Invalid("V207", "not-in-use", "perm named, not in use", made(lambda d: d["features"].append("perm"))),
        Invalid("V207", "order", "not sorted", made(lambda d: d["features"].reverse(), both)),
        Invalid("V207", "twice", "one feature twice", made(lambda d: d["features"].append("perm"), both)),
    ]


def new_features(rng: Lcg) -> dict[str, Weight]:
    """A weight for each feature of scales, offsets and tables."""
    shared = {"bits": 4, "rows": 1, "groups": 2, "scale": "F16", "zero": 8}
    codes, ones = rng.rows(1, 16, 4), first("F16", [[0x3C00] * 2])
    segments = {
        "byte-floats": affine(2, 8, codes, some_numbers(rng, 1, 2, "E8M0"), 1),
        "second-order-offset": shifted("offset", 2, 8, codes, ones, some_numbers(rng, 1, 2, shared, "offset")),
        "super-groups": affine(2, 8, codes, some_numbers(rng, 1, 2, shared), 1),
        "table": table(2, 8, codes, ones, [-1, 0, 1, 2]),
    }
    return {name: Weight("w.weight", [1, 16], "F16", [segment]) for name, segment in segments.items()}


def weight_rules() -> list[Invalid]:
    """V209 to V212: schemes, shapes, widths, groups."""
    rng = Lcg(602)

    def pair(first_width: int, last: int, g: int = 8) -> Weight:
        segs = [some_affine(rng, 1, first_width, 2, g, 1), some_affine(rng, 1, last, 4, 8, 1)]
        return Weight("w.weight", [1, first_width + last], "F16", segs)

    def shape(*dims: int) -> Edit:
        return lambda d: d["weights"]["w.weight"].update(shape=list(dims))

    def widths(*sizes: int) -> Edit:
        return lambda d: d["weights"]["w.weight"].update(widths=list(sizes))

    def no_rows(tensors: dict[str, Tensor]) -> None:
        tensors["w.bcq_s0_planes"] = Tensor("I32", [2, 0, 1], b"")
        tensors["w.bcq_s0_scale"] = Tensor("F16", [0, 1], b"")

    def twice(d: dict[str, Any]) -> None:
        d["schemes"].append(d["schemes"][0])
        d["weights"]["v.weight"]["scheme"] = 1

    twin = worked_example()
    twin.name = "v.weight"
    wide = affine(2, 8, [[0] * 8], first("F16", [[0x3C00]]), 1)
    wide.spec["group_size"] = 16
    narrow = affine(2, 7, [[0] * 7], first("F16", [[0x3C00]]), 1)
    narrow.spec["group_size"] = "row"
    ghost = {"scheme": 1, "shape": [2, 8], "dtype": "F16"}
    unused = descriptor([pair(16, 8)])["schemes"][0]["segments"][:1]
    return [
        Invalid("V209", "no-such-scheme", "a weight points past the end", made(lambda d: d["weights"].update(g=ghost))),
        Invalid(
            "V209", "unused", "a scheme that no weight uses", made(lambda d: d["schemes"].append({"segments": unused}))
        ),
        Invalid("V209", "equal", "two equal schemes", made(twice, [worked_example(), twin])),
        Invalid("V210", "one-dimension", "shape [16]", made(shape(16))),
        Invalid("V210", "four-dimensions", "shape [1, 1, 2, 8]", made(shape(1, 1, 2, 8))),
        Invalid("V210", "no-rows", "out = 0", made(shape(0, 8), parts=no_rows)),
        Invalid("V210", "too-large", "2^40 elements of two bits", made(shape(2**20, 2**20))),
        Invalid("V210", "dimension", "2^31 rows", made(shape(2**31, 8))),
        Invalid("V211", "one-segment", "widths with one segment", made(widths(8))),
        Invalid(
            "V211",
            "absent",
            "two segments, no widths",
            made(lambda d: d["weights"]["w.weight"].pop("widths"), [pair(16, 8)]),
        ),
        Invalid("V211", "sum", "16 + 8 of 32 columns", made(shape(1, 32), [pair(16, 8)])),
        Invalid("V211", "count", "three widths, two segments", made(widths(8, 8, 8), [pair(16, 8)])),
        Invalid(
            "V212",
            "group-too-wide",
            "groups of 16, eight columns",
            made(keep, [Weight("w.weight", [1, 8], "F16", [wide])]),
        ),
        Invalid(
            "V212",
            "row-of-seven",
            "one group a row of seven columns",
            made(keep, [Weight("w.weight", [1, 7], "F16", [narrow])]),
        ),
        Invalid("V212", "short-group-inside", "24 columns in groups of 16, not last", made(keep, [pair(24, 8, 16)])),
    ]


def name_rules() -> list[Invalid]:
    """V213 and V214: names of weights."""
    names = {
        "space": "a b.weight",
        "leading-dot": ".weight",
        "two-dots": "a..b.weight",
        "not-ascii": "\u00e9.weight",
        "empty": "",
        "leading-minus": "-a.weight",
        "slash": "a/b.weight",
        "line-feed": "w.weight\n",
        "481-bytes": "n" * 481,
    }

    def named(name: str) -> bytes:
        weight = worked_example()
        weight.name = name
        return made(keep, [weight])

    return [
        *(Invalid("V213", what, f"a weight named {name[:20]!a}", named(name)) for what, name in names.items()),
        Invalid(
            "V214",
            "dense-twin",
            "a dense tensor with the name of a weight",
            made(keep, dense={"w.weight": tensor("F16", [2, 8], [0] * 16)}),
        ),
    ]


def tile_rules() -> list[Invalid]:
    """V215: what aligned64 asks for."""
    rng = Lcg(603)
    weight = Weight("w.weight", [2, 128], "F16", tile_segments(rng, 2, 128, rng.rows(2, 6, 4), 2, 1), True)

    def segment(k: int, **changes: Any) -> Edit:
        return lambda d: d["schemes"][0]["segments"][k].update(changes)

    def halves(tensors: dict[str, Tensor]) -> None:
        tensors["w.bcq_s0_scale_scale"] = tensor("F16", [1, 4], [0x3C00] * 4)
        tensors["w.bcq_s0_scale_zero"] = tensor("U8", [1, 4], [0] * 4)
        tensors["w.bcq_s1_scale"] = tensor("F16", [2, 4], [0x3C00] * 8)

    def binary(d: dict[str, Any]) -> None:
        d["schemes"][0]["segments"][1] = {"encoding": "bcq", "bits": 4, "group_size": 16, "alpha": "F16"}
        d["features"] = sorted([*d["features"], "bcq"])

    def alphas(tensors: dict[str, Tensor]) -> None:
        del tensors["w.bcq_s1_scale"]
        tensors["w.bcq_s1_alpha"] = tensor("F16", [4, 2, 2], [0x3C00] * 16)

    def shared(d: dict[str, Any]) -> None:
        d["schemes"][0]["segments"][0]["scale"]["groups"] = 2
        d["features"].append("super-groups")

    def pairs(tensors: dict[str, Tensor]) -> None:
        tensors["w.bcq_s0_scale_scale"] = tensor("F16", [1, 3], [0x3C00] * 3)
        tensors["w.bcq_s0_scale_zero"] = tensor("U8", [1, 3], [0] * 3)

    scale = {**weight.scheme["segments"][0]["scale"], "bits": 5}
    even = {"widths": [64, 64]}
    return [
        Invalid(
            "V215",
            "widths",
            "half of the columns in each segment",
            made(lambda d: d["weights"]["w.weight"].update(even), [weight], parts=halves),
        ),
        Invalid("V215", "zero-bits", "zero points of three bits", made(segment(0, zero={"bits": 3}), [weight])),
        Invalid("V215", "zero-constant", "one zero point in the scheme", made(segment(0, zero=1), [weight])),
        Invalid("V215", "scale-bits", "scale codes of five bits", made(segment(0, scale=scale), [weight])),
        Invalid("V215", "scale-groups", "groups that share scales", made(shared, [weight], parts=pairs)),
        Invalid("V215", "segment-1-bits", "eight planes in segment 1", made(segment(1, bits=8), [weight])),
        Invalid("V215", "segment-1-bcq", "segment 1 is not affine", made(binary, [weight], parts=alphas)),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*metadata_rules(), *version_rules(), *weight_rules(), *name_rules(), *tile_rules()]
