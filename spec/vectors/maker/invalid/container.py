"""Files that break one rule of section 3, BCQ-V101 to BCQ-V120."""

from collections.abc import Callable
from typing import Any

from maker.build import Tensor, canonical, container, frame, place, tensor
from maker.catalogue import Invalid
from maker.valid.affine import worked_example
from maker.weights import descriptor, metadata, tensors_of

BYTES = tensor("U8", [4], [1, 2, 3, 4])
ENTRY = '"x":{"data_offsets":[20,24],"dtype":"U8","shape":[4]}'


def start(dense: dict[str, Tensor] | None = None, order: list[str] | None = None) -> tuple[dict[str, Any], bytes]:
    """The header object and the data of a valid file: 20 bytes of parts, then the dense tensor x."""
    weight = worked_example()
    entries, data = place(tensors_of([weight], {"x": BYTES} if dense is None else dense), order)
    return {"__metadata__": metadata(descriptor([weight])), **entries}, data


def with_header(edit: Callable[[dict[str, Any]], None], more: bytes = b"") -> bytes:
    """That file with another header object and more data."""
    header, data = start()
    edit(header)
    return frame(canonical(header), data + more)


def with_text(old: str, new: str | bytes) -> bytes:
    """That file with another header text."""
    header, data = start()
    text = canonical(header)
    assert text.count(old) == 1, old
    return frame(text.encode().replace(old.encode(), new if isinstance(new, bytes) else new.encode()), data)


def with_entry(entry: Any, more: bytes = b"") -> bytes:
    """That file with one more tensor entry, y."""
    return with_header(lambda h: h.update(y=entry), more)


def with_two(first: int, second: int) -> bytes:
    """That file with two more tensors of four bytes."""

    def edit(header: dict[str, Any]) -> None:
        header["y"], header["z"] = entry("U8", [4], first, first + 4), entry("U8", [4], second, second + 4)

    return with_header(edit, bytes(second + 4 - 24))


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """A tensor entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _many_keys(header: dict[str, Any]) -> None:
    """Fill the metadata up to 1,001 keys."""
    more = 1001 - len(header["__metadata__"])
    header["__metadata__"] |= {f"k{i}": "" for i in range(more)}


def frames() -> list[Invalid]:
    """V101 to V104: lengths and the first byte."""
    header, data = start()
    text = canonical(header)
    whole = frame(text, data)
    long = frame(text + " " * (25_000_008 - len(text)), data)
    return [
        Invalid("V101", "empty", "no byte at all", b""),
        Invalid("V101", "seven-bytes", "seven bytes", whole[:7]),
        Invalid("V102", "no-header", "L = 0", bytes(8)),
        Invalid("V102", "header-too-long", "L = 25,000,008, all there, mostly spaces", long, gzip=True),
        Invalid("V103", "header-cut", "the file ends inside the header", whole[:200]),
        Invalid(
            "V103", "length-huge", "L = 24,999,992 in a small file", (24_999_992).to_bytes(8, "little") + whole[8:]
        ),
        Invalid("V104", "leading-space", "a space before the header object", frame(" " + text, data)),
    ]


def texts() -> list[Invalid]:
    """V105 to V107: UTF-8, JSON, duplicate keys."""
    deep: Any = "x"
    for _ in range(15):
        deep = [deep]
    header, data = start()
    text = canonical(header)
    pairs = [
        ("name", ENTRY, f"{ENTRY},{ENTRY}", "one tensor twice, with equal entries"),
        ("escaped-name", ENTRY, ENTRY + "," + ENTRY.replace('"x"', '"\\u0078"'), "the same name, once escaped"),
        ("inner-key", '"dtype":"U8"', '"dtype":"U8","dtype":"U8"', "a key of an entry twice"),
        ("metadata-key", '"format":"pt"', '"format":"pt","format":"pt"', "a key of __metadata__ twice"),
    ]
    return [
        Invalid("V105", "not-utf8", "the byte ff in a name", with_text('"x"', b'"x\xff"')),
        Invalid("V105", "overlong", "an overlong form of `/` in a name", with_text('"x"', b'"x\xc0\xaf"')),
        Invalid("V105", "utf8-surrogate", "a surrogate in UTF-8", with_text('"x"', b'"x\xed\xa0\x80"')),
        Invalid("V105", "lone-surrogate", "an escaped surrogate without its partner", with_text('"x"', '"x\\ud800"')),
        Invalid("V105", "swapped-surrogates", "low before high", with_text('"x"', '"x\\udc00\\ud800"')),
        Invalid("V106", "fraction", "4.0 in a shape", with_text('"shape":[4]', '"shape":[4.0]')),
        Invalid("V106", "exponent", "4e0 in a shape", with_text('"shape":[4]', '"shape":[4e0]')),
        Invalid("V106", "leading-zero", "04 in a shape", with_text('"shape":[4]', '"shape":[04]')),
        Invalid("V106", "minus-zero", "-0 as an offset", with_text('"data_offsets":[0,16]', '"data_offsets":[-0,16]')),
        Invalid("V106", "integer-2-53", "2^53 in a shape", with_text('"shape":[4]', f'"shape":[{2**53}]')),
        Invalid("V106", "long-integer", "5,000 digits in a shape", with_text('"shape":[4]', f'"shape":[{"9" * 5000}]')),
        Invalid("V106", "not-a-number", "NaN in a shape", with_text('"shape":[4]', '"shape":[NaN]')),
        Invalid("V106", "single-quotes", "not JSON", with_text('"x"', "'x'")),
        Invalid("V106", "control-character", "a raw line feed in a name", with_text('"x"', '"x\n"')),
        Invalid("V106", "trailing-comma", "a comma before the closing brace", frame(text[:-1] + ",}", data)),
        Invalid("V106", "unfinished", "the closing brace is missing", frame(text[:-1], data)),
        Invalid("V106", "line-feed-after", "a line feed after the object", frame(text + "\n", data)),
        Invalid("V106", "nul-padding", "padded with zero bytes", frame(text + "\0" * 8, data)),
        Invalid("V106", "second-object", "a second object after the first", frame(text + "{}", data)),
        Invalid("V106", "too-deep", "17 levels", with_header(lambda h: h["__metadata__"].update(deep=deep))),
        *(Invalid("V107", what, comment, with_text(old, new)) for what, old, new, comment in pairs),
    ]


def too_many(count: int = 200_001) -> bytes:
    """So many empty tensors; names and order are chosen so that the text compresses well, twice."""
    names = (format(i, "05x")[::-1] for i in range(count))
    body = '":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    described = canonical({"__metadata__": metadata(descriptor([]))})
    return frame(described[:-1] + "".join(',"' + name + body for name in names) + "}", b"")


def rest(broken: Any) -> bytes:
    """The data that an entry claims: one byte, unless it ends where it begins."""
    begin, end = [*(broken["data_offsets"] if isinstance(broken, dict) else []), 0, 1][:2]
    return b"" if begin == end else b"\x05"


def entries() -> list[Invalid]:
    """V108 to V112: number, form, type and size of tensors."""
    cases: list[tuple[str, str, Any]] = [
        ("negative-dimension", "-1 in a shape with a 0", entry("U8", [-1, 0], 24, 24)),
        ("boolean-dimension", "true is not 1", entry("U8", [True], 24, 25)),
        ("boolean-offset", "false is not 0", entry("U8", [0], False, False)),
        ("string-dimension", "a string in a shape", entry("U8", ["1"], 24, 25)),
        ("shape-not-array", "an integer as shape", entry("U8", 1, 24, 25)),
        ("dtype-not-string", "an integer as dtype", entry(8, [1], 24, 25)),
        ("one-offset", "one offset only", {**entry("U8", [1], 24, 25), "data_offsets": [24]}),
        ("three-offsets", "three offsets", {**entry("U8", [1], 24, 25), "data_offsets": [24, 25, 25]}),
        ("begin-after-end", "begin > end", entry("U8", [0], 25, 24)),
        ("rank-17", "17 dimensions", entry("U8", [1] * 17, 24, 25)),
        ("extra-key", "a fourth key", {**entry("U8", [1], 24, 25), "strides": [1]}),
        ("missing-key", "no shape", {"dtype": "U8", "data_offsets": [24, 25]}),
        ("not-object", "an array as entry", ["U8", [1], [24, 25]]),
        ("null", "null as entry", None),
    ]
    unknown = [("unknown", "F128"), ("lower-case", "u8"), ("alias", "F8_E4M3FN"), ("empty-name", "")]
    return [
        Invalid("V108", "too-many-tensors", "200,001 tensors, all empty", too_many(), gzip=True),
        *(Invalid("V109", what, comment, with_entry(e, rest(e))) for what, comment, e in cases),
        *(Invalid("V110", what, f"dtype {d!r}", with_entry(entry(d, [1], 24, 25), b"\x05")) for what, d in unknown),
        Invalid("V111", "product", "2^24 * 2^24, times 0", with_entry(entry("U8", [0, 2**24, 2**24], 24, 24))),
        Invalid(
            "V111", "product-wraps", "2^32 * 2^32 * 0: 2^64 wraps", with_entry(entry("U8", [2**32, 2**32, 0], 24, 24))
        ),
        Invalid("V112", "too-long", "five bytes for four U8", with_entry(entry("U8", [4], 24, 29), bytes(5))),
        Invalid("V112", "too-short", "two bytes for three U8", with_entry(entry("U8", [3], 24, 26), bytes(2))),
        Invalid("V112", "scalar", "a scalar has one element", with_entry(entry("U8", [], 24, 24))),
        Invalid("V112", "half-byte", "three F4 are no whole bytes", with_entry(entry("F4", [3], 24, 26), bytes(2))),
        Invalid("V112", "six-bits", "two F6 are no whole bytes", with_entry(entry("F6_E2M3", [2], 24, 26), bytes(2))),
    ]


def offsets() -> list[Invalid]:
    """V113 to V117: no overlap, no hole, no rest, alignment."""
    header, data = start()
    moved = {
        n: e if n == "__metadata__" else {**e, "data_offsets": [b + 8 for b in e["data_offsets"]]}
        for n, e in header.items()
    }
    one = {"x": tensor("U8", [2], [1, 2])}
    shifted, shifted_data = start(one, ["x", "w.bcq_s0_scale", "w.bcq_s0_planes"])
    eight = {"d": tensor("F64", [1], [0]), "x": BYTES}
    half, half_data = start(eight, ["w.bcq_s0_scale", "d", "w.bcq_s0_planes", "x"])
    text = canonical(header)
    odd = text + " " * (-len(text) % 8 + 1)
    return [
        Invalid("V113", "overlap", "a tensor begins inside another", with_entry(entry("U8", [4], 22, 26), bytes(2))),
        Invalid("V113", "same-range", "two tensors on the same bytes", with_entry(entry("U8", [4], 20, 24))),
        Invalid("V113", "inside", "an empty tensor inside another", with_entry(entry("U8", [0], 22, 22))),
        Invalid("V113", "then-hole", "an overlap, then a hole: the first deviation decides", with_two(22, 30)),
        Invalid("V114", "then-overlap", "a hole, then an overlap: the first deviation decides", with_two(26, 28)),
        Invalid("V114", "hole", "two bytes between tensors", with_entry(entry("U8", [4], 26, 30), bytes(6))),
        Invalid("V114", "hole-at-start", "the first tensor begins at 8", frame(canonical(moved), bytes(8) + data)),
        Invalid(
            "V114", "hole-before-empty", "an empty tensor far away", with_entry(entry("U8", [0], 30, 30), bytes(6))
        ),
        Invalid("V115", "trailing-byte", "one byte after the last tensor", frame(text, data + b"\0")),
        Invalid("V115", "no-tensors", "data but no tensor", container({}, metadata(descriptor([]))) + bytes(8)),
        Invalid("V116", "data-cut", "the last byte is missing", frame(text, data[:-1])),
        Invalid("V116", "no-data", "the file ends with the header", frame(text, b"")),
        Invalid("V117", "header-not-padded", "8+L = 1 modulo 8", frame(odd, data, pad=False)),
        Invalid("V117", "i32-at-6", "an I32 tensor at byte 6 of the data", frame(canonical(shifted), shifted_data)),
        Invalid("V117", "f64-at-4", "an F64 tensor at byte 4 of the data", frame(canonical(half), half_data)),
    ]


def names() -> list[Invalid]:
    """V118 to V120: metadata and names."""

    def named(*chosen: str) -> bytes:
        header, data = start(dict.fromkeys(chosen, BYTES))
        return frame(canonical(header), data)

    pairs = [
        ("case", "ASCII case", "Layer.A", "layer.a"),
        ("case-beside-others", "ASCII case next to another script", "\u0416Z\u00e9", "\u0416z\u00e9"),
    ]
    return [
        Invalid("V118", "1001-keys", "1,001 keys in __metadata__", with_header(_many_keys)),
        Invalid("V118", "integer-value", "an integer", with_header(lambda h: h["__metadata__"].update(note=1))),
        Invalid("V118", "object-value", "an object", with_header(lambda h: h["__metadata__"].update(note={}))),
        Invalid("V118", "null-value", "null", with_header(lambda h: h["__metadata__"].update(note=None))),
        Invalid("V119", "name-513", "a name of 513 bytes", named("n" * 513)),
        Invalid("V119", "name-171x3", "171 characters of three bytes", named("\u20ac" * 171)),
        *(Invalid("V120", what, comment, named(a, b)) for what, comment, a, b in pairs),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*frames(), *texts(), *entries(), *offsets(), *names()]
