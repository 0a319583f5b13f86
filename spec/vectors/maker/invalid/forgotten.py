"""What a reader that checks nearly everything may forget: parts, rows, matrices and links."""

from math import prod
from typing import Any

from maker.build import Lcg, Rows, exact, sha256, tensor
from maker.catalogue import Invalid
from maker.encodings import affine, bcq, first, shifted, some_affine, some_bcq
from maker.folder import INDEX, Files, Folder, pretty
from maker.valid.folders import inner_side, sharded, single
from maker.valid.structures import tile_segments
from maker.weights import Outliers, Weight

from .content import flipped, swapped
from .descriptor import keep, made
from .folder import replaced
from .manifest import manifest
from .source import SOURCE, sourced

ONE, INFINITE, NOT_A_NUMBER = exact("F16", 1.0), 0x7C00, 0x7E00


def parts() -> list[Invalid]:
    """V301, V303 and V304: parts of tiles, perm, zeros, bcq and stacks."""
    rng = Lcg(901)
    tiled = Weight("w.weight", [2, 64], "F16", tile_segments(rng, 2, 64, rng.rows(2, 3, 4), 2, 1), True)
    moved = Weight("w.weight", [2, 16], "F16", [some_affine(rng, 2, 16, 2, 8, None)], perm=[rng.permutation(16)])
    binary = Weight("w.weight", [2, 16], "F16", [some_bcq(rng, 2, 16, 2, 8, "F16", "F16")])
    stack = Weight("w.weight", [2, 1, 16], "F16", [some_affine(rng, 2, 16, 2, 8, 1)])
    stack.perm = [rng.permutation(16) for _ in range(2)]
    spiked = Weight("w.weight", [2, 16], "F16", [some_affine(rng, 2, 16, 2, 8, 1)])
    spiked.outliers = Outliers("add", "F16", [0], [[(1, ONE)], [(2, ONE)]])

    def zeros(dtype: str, *shape: int) -> Any:
        return tensor(dtype, list(shape), [0] * prod(shape))

    order = tensor("I32", [2, 8], [*range(8), *range(8)])
    missing = [
        ("tile", tiled, "tile"), ("tile-extra", tiled, "tile_extra"), ("tile-meta", tiled, "tile_meta"),
        ("perm", moved, "perm"), ("zero", moved, "s0_zero"), ("alpha", binary, "s0_alpha"), ("bias", binary, "s0_bias"),
    ]  # fmt: skip
    other = [
        ("V303", "tile-u32", tiled, "tile", zeros("U32", 2, 1, 4)),
        ("V303", "tile-extra-u32", tiled, "tile_extra", zeros("U32", 2, 1)),
        ("V303", "tile-meta-i16", tiled, "tile_meta", zeros("I16", 2, 1)),
        ("V303", "scale-zero-of-tiles", tiled, "s0_scale_zero", zeros("I32", 1, 3)),
        ("V303", "perm-i64", moved, "perm", tensor("I64", [16], range(16))),
        ("V303", "zero-u32", moved, "s0_zero", zeros("U32", 2, 1)),
        ("V303", "alpha-bf16", binary, "s0_alpha", zeros("BF16", 2, 2, 2)),
        ("V303", "bias-f32", binary, "s0_bias", zeros("F32", 2, 2)),
        ("V304", "tile-one-row", tiled, "tile", zeros("I32", 1, 1, 4)),
        ("V304", "tile-three-words", tiled, "tile", zeros("I32", 2, 1, 3)),
        ("V304", "tile-extra-one-row", tiled, "tile_extra", zeros("I32", 1, 1)),
        ("V304", "tile-meta-one-row", tiled, "tile_meta", zeros("U16", 1, 1)),
        ("V304", "scale-zero-of-tiles", tiled, "s0_scale_zero", zeros("U8", 1, 2)),
        ("V304", "perm-short", moved, "perm", tensor("I32", [15], range(15))),
        ("V304", "perm-rows", moved, "perm", order),
        ("V304", "perm-of-stack", stack, "perm", tensor("I32", [16], range(16))),
        ("V304", "zero-one-row", moved, "s0_zero", zeros("I32", 1, 1)),
        ("V304", "alpha-one-plane", binary, "s0_alpha", zeros("F16", 1, 2, 2)),
        ("V304", "bias-one-row", binary, "s0_bias", zeros("F16", 1, 2)),
        ("V304", "planes-of-stack", stack, "s0_planes", zeros("I32", 2, 2, 1)),
        ("V304", "scale-of-stack", stack, "s0_scale", zeros("F16", 2, 2)),
        ("V304", "indices-of-rows", spiked, "outlier_indices", tensor("U16", [2, 1], [1, 2])),
    ]  # fmt: skip
    return [
        *(Invalid("V301", f"no-{what}", f"{part} is missing", swapped(w, **{part: None})) for what, w, part in missing),
        *(
            Invalid(rule, what, f"{part}: {made_as.dtype} {made_as.shape}", swapped(weight, **{part: made_as}))
            for rule, what, weight, part, made_as in other
        ),
    ]


def contents() -> list[Invalid]:
    """V401 to V406 in other rows, groups, matrices and parts than the first."""
    rng = Lcg(902)
    ramp, ones = [[*range(4)] * 4] * 2, first("F16", [[ONE] * 2] * 2)

    def points(zero: Rows) -> bytes:
        seg = affine(2, 8, ramp, ones, zero)
        seg.spec["zero"] = {"bits": 3}
        return made(keep, [Weight("w.weight", [2, 16], "F16", [seg])])

    def ordered(*wrong: int) -> bytes:
        weight = Weight("w.weight", [3, 1, 8], "F16", [some_affine(rng, 3, 8, 2, 8, 1)])
        weight.perm = [[0] * 8 if e in wrong else list(range(8)) for e in range(3)]
        return made(keep, [weight])

    def moved(encoding: str, value: int) -> bytes:
        seg = shifted(encoding, 2, 8, ramp, ones, ("F16", [[ONE, ONE], [ONE, value]]))
        return made(keep, [Weight("w.weight", [2, 16], "F16", [seg])])

    def nested(alpha: int, bias: int) -> bytes:
        rows = [[ONE, ONE], [ONE, ONE]]
        sets = {1: ([[[ONE, ONE], [ONE, alpha]]], [[ONE, ONE], [ONE, bias]])}
        seg = bcq(2, 8, ramp, ("F16", [rows, rows]), ("F16", rows), sets)
        return made(keep, [Weight("w.weight", [2, 16], "F16", [seg])])

    def offset(zero: str, table: Rows) -> Weight:
        kind = {"bits": 3, "rows": 2, "scale": "F16", "zero": zero}
        tables = {"offset_codes": [[1, 2], [3, 4]], "offset_scale": [[ONE, ONE]], "offset_zero": table}
        return Weight("w.weight", [2, 16], "F16", [shifted("offset", 2, 8, ramp, ones, (kind, tables))])

    return [
        Invalid("V404", "second-group", "2^q + 1 in the second group of row 0", points([[1, 5], [1, 1]])),
        Invalid("V404", "second-row", "2^q + 1 at the start of row 1", points([[1, 1], [5, 1]])),
        Invalid("V404", "last", "2^q + 1 at the very end", points([[1, 1], [1, 5]])),
        Invalid("V406", "first-of-stack", "the first matrix of a stack", ordered(0)),
        Invalid("V406", "middle-of-stack", "the second of three matrices", ordered(1)),
        Invalid("V405", "float-zero-inf", "an infinite zero, the last", moved("float-zero", INFINITE)),
        Invalid("V405", "offset-nan", "an offset that is a NaN, the last", moved("offset", NOT_A_NUMBER)),
        Invalid(
            "V405", "offset-zero-inf", "an infinite zero of the offset",
            made(keep, [offset("F16", [[ONE, INFINITE]])]),
        ),
        Invalid("V405", "alpha-p-inf", "an infinite plane scale of one plane alone", nested(INFINITE, ONE)),
        Invalid("V405", "bias-p-nan", "a bias of one plane alone that is a NaN", nested(ONE, NOT_A_NUMBER)),
        Invalid(
            "V401", "offset-zero", "after two zeros of three bits",
            flipped(offset("packed", [[1, 2]]), "s0_offset_zero", 0, 6),
        ),
    ]  # fmt: skip


def texts() -> list[Invalid]:
    """V501, V511 and V702: texts outside the limits of section 4."""
    index, config = pretty(sharded().index()), pretty(single().config())

    def begun(text: bytes, piece: bytes) -> bytes:
        return b"{" + piece + b", " + text.lstrip()[1:]

    deep = b'"a": ' + b"[" * 16 + b"]" * 16
    cases = [
        ("too-deep", "17 levels", begun(index, deep)),
        ("nan", "NaN", begun(index, b'"a": NaN')),
        ("not-utf8", "the byte ff", begun(index, b'"a": "\xff"')),
        ("lone-surrogate", "an escaped surrogate without its partner", begun(index, b'"a": "\\ud800"')),
        ("byte-order-mark", "a byte order mark", b"\xef\xbb\xbf" + index),
    ]

    def archived(body: bytes) -> Files:
        def listed(s: dict[str, Any]) -> None:
            s["tensors"]["model.safetensors"] = {}

        header = len(body).to_bytes(8, "little") + body
        path, raw = "bcq_source/headers/model.safetensors.header", "bcq_source/raw.safetensors"
        return sourced(listed, **{path: header, raw: None})

    headers = [
        ("header-nan", "NaN", b'{"__metadata__":{"a":NaN}}'),
        ("header-too-deep", "17 levels", b'{"__metadata__":' + b"[" * 16 + b"]" * 16 + b"}"),
        ("header-duplicate-key", "a key twice", b'{"__metadata__":{"a":"","a":""}}'),
        ("header-not-utf8", "the byte ff", b'{"__metadata__":{"a":"\xff"}}'),
        ("header-lone-surrogate", "a surrogate without its partner", b'{"__metadata__":{"a":"\\ud800"}}'),
        ("header-byte-order-mark", "a byte order mark", b"\xef\xbb\xbf{}"),
    ]
    return [
        *(Invalid("V501", what, comment, replaced(INDEX, text, sharded())) for what, comment, text in cases),
        Invalid(
            "V511", "byte-order-mark", "a byte order mark", replaced("config.json", b"\xef\xbb\xbf" + config)
        ),
        *(Invalid("V702", what, f"an archived header: {comment}", archived(body)) for what, comment, body in headers),
    ]  # fmt: skip


def members() -> list[Invalid]:
    """V507, V508, V604, V701 and V703: links, folders in the place of files, records without their text."""
    same, sub = single().build(), inner_side()
    sided = single()
    sided.side = {"tokenizer.json": b"{}\n"}

    def gone(path: str, to: str, target: str) -> list[Any]:
        return [{"move": {"path": path, "to": to}}, {"symlink": {"path": path, "target": target}}]

    def folder(path: str) -> list[Any]:
        return [{"remove": path}, {"mkdir": path}]

    def through(m: dict[str, Any]) -> None:
        m["files"]["linked/notes.txt"] = {"size": 1, "sha256": sha256(b"x")}

    def part(s: dict[str, Any]) -> None:
        s["tensors"]["model.safetensors"]["norm.weight"] = [0, "w.bcq_s0_planes"]

    outside = "../../outside.txt"
    none = Folder({})  # no weights, no tensors, no file
    return [
        Invalid("V503", "empty-index", "an index that names no file", none.build()),
        Invalid(
            "V507", "link-in-subfolder", "a link in a folder below leads out", sub.build(),
            setup=gone("sub/notes.txt", "../outside.txt", outside),
        ),
        Invalid(
            "V507", "sibling", "a link into a folder beside, whose name begins with this one's", sided.build(),
            setup=gone("tokenizer.json", "../here-too/tokenizer.json", "../here-too/tokenizer.json"), place="here",
        ),
        Invalid(
            "V507", "no-snapshots", "a link into a blobs/ where the folder above is not snapshots/", sided.build(),
            setup=gone("tokenizer.json", "../../blobs/0123", "../../blobs/0123"), place="cache/revisions/0123456789abc",
        ),
        Invalid("V508", "model-folder", "a folder for the model file", same, setup=folder("model.safetensors")),
        Invalid("V508", "config-folder", "a folder for config.json", same, setup=folder("config.json")),
        Invalid("V508", "manifest-folder", "a folder for the manifest", same, setup=folder("bcq_manifest.json")),
        Invalid(
            "V604", "through-link", "a path that leads through a link to a folder", manifest(through, sub),
            setup=[{"symlink": {"path": "linked", "target": "sub"}}],
        ),
        Invalid("V701", "no-record", "files under bcq_source/ and no source.json", sourced(None, **{SOURCE: None})),
        Invalid("V703", "copy-of-a-part", "copy of a part of a weight", sourced(part)),
    ]  # fmt: skip


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*parts(), *contents(), *texts(), *members()]
