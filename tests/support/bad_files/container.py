"""Rows 1 to 20: the container. Lone files, so that no digest of a folder tells the fault first."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

from bad_files.by_hand import (
    canonical,
    described,
    example,
    example_descriptor,
    example_tensors,
    folder,
    frame,
    place,
    sparse,
)
from bad_files.case import case

HEADER_CAP = 25_000_000


def changed(where: Path, tensor: str, **fields: Any) -> Path:
    """The worked example with some fields of one tensor's entry replaced."""
    header, data = example()
    header[tensor].update(fields)
    return place(where, frame(header, data))


def spelled(where: Path, old: str, new: str) -> Path:
    """The worked example with one piece of the header's text replaced."""
    header, data = example()
    text = canonical(header)
    assert text.count(old) >= 1, old
    return place(where, frame(text.replace(old, new, 1).encode("utf-8", "surrogatepass"), data))


# -- rows 1 to 3: not the file at all ---------------------------------------------------------------------------


@case(1, "empty", "BCQ-V101", 4)
def empty(where: Path) -> Path:
    return place(where, b"")


@case(1, "seven-bytes", "BCQ-V101", 4)
def seven_bytes(where: Path) -> Path:
    return place(where, b"\x08" + bytes(6))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"


@case(2, "lfs-pointer", "BCQ-E201", 4)
def lfs_pointer(where: Path) -> Path:
    return place(where, POINTER)


@case(2, "lfs-pointer-as-shard", "BCQ-E201", 4, place="model-00002-of-", also=("BCQ-V605",))
def lfs_pointer_as_shard(where: Path) -> Path:
    target = folder(where, shards=True)
    next(target.glob("model-00002-of-*")).write_bytes(POINTER)
    return target


@case(3, "html", "BCQ-E202", 4)
def html(where: Path) -> Path:
    return place(where, b"<!DOCTYPE html>\n<html><head><title>404 \x1b[31mNot Found</title></head></html>\n")


@case(3, "html-after-spaces", "BCQ-E202", 4)
def html_after_spaces(where: Path) -> Path:
    return place(where, b"\n\n   <html><body>Sign in to continue</body></html>\n")


@case(3, "json-error", "BCQ-E202", 4)
def json_error(where: Path) -> Path:
    return place(where, b'{"error":"Repository not found"}')


@case(3, "plain-text", "BCQ-E202", 4)
def plain_text(where: Path) -> Path:
    return place(where, b"Entry not found")


# -- rows 4 to 7: lengths, counts, depth ------------------------------------------------------------------------


@case(4, "header-longer-than-file", "BCQ-V103", 4)
def header_longer_than_file(where: Path) -> Path:
    header, data = example()
    return place(where, frame(header, data, length=1_000_000))


def _length(id: str, length: int) -> None:
    @case(5, id, "BCQ-V102", 4)
    def make(where: Path) -> Path:
        header, data = example()
        return place(where, frame(header, data, length=length))


_length("2-to-63", 2**63)
_length("2-to-64-less-1", 2**64 - 1)
_length("zero", 0)
_length("one", 1)


@case(5, "one-above-the-cap", "BCQ-V102", 4)
def one_above_the_cap(where: Path) -> Path:
    """A file that really is that long."""
    return sparse(where / "model.safetensors", HEADER_CAP + 9, struct.pack("<Q", HEADER_CAP + 1) + b"{")


@case(6, "200001-tensors", "BCQ-V108", 4, heavy=True)
def too_many_tensors(where: Path) -> Path:
    entry = '"%x":{"data_offsets":[0,0],"dtype":"U8","shape":[0]}'
    return place(where, frame(("{" + ",".join(entry % i for i in range(200_001)) + "}").encode()))


@case(6, "two-million-keys", "BCQ-V109", 4, heavy=True)
def two_million_keys(where: Path) -> Path:
    """As many keys as the header's cap allows; none of them a tensor entry."""
    return place(where, frame(("{" + ",".join(f'"{i:x}":0' for i in range(2_300_000)) + "}").encode()))


@case(6, "eight-million-lists", "BCQ-V109", 4, heavy=True)
def eight_million_lists(where: Path) -> Path:
    """One entry that a parser turns into thirty times its size."""
    return place(where, frame(b'{"a":[' + b",".join([b"[]"] * ((HEADER_CAP - 100) // 3)) + b"]}"))


def nested(opening: str, closing: str, count: int = 100_000) -> str:
    return opening * count + closing * count


def _deep(id: str, header: str) -> None:
    @case(7, id, "BCQ-V106", 4)
    def make(where: Path) -> Path:
        return place(where, frame(header.encode()))


_deep("arrays", '{"a":' + nested("[", "]") + "}")
_deep("objects", '{"a":' + nested('{"a":', "}").replace("}", "0}", 1) + "}")
_deep("in-metadata", '{"__metadata__":{"a":' + nested("[", "]") + "}}")
_deep("never-closed", '{"a":' + "[" * 1_000_000 + "}")
_deep("seventeen", '{"a":' + nested("[", "]", 16) + "}")


@case(7, "in-descriptor", "BCQ-V203", 4)
def deep_descriptor(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), '{"version":"1.0","a":' + nested("[", "]") + "}")))


# -- rows 8 to 12: the text -------------------------------------------------------------------------------------


@case(8, "invalid-utf-8", "BCQ-V105", 4)
def invalid_utf8(where: Path) -> Path:
    header, data = example()
    raw = canonical(header).encode().replace(b'"w.bcq_s0_scale"', b'"w.bcq_s0_\xff\xfele"')
    return place(where, frame(raw, data))


@case(8, "byte-order-mark", "BCQ-V104", 4)
def byte_order_mark(where: Path) -> Path:
    """The mark comes before the brace, and that is the rule it breaks."""
    header, data = example()
    return place(where, frame(b"\xef\xbb\xbf" + canonical(header).encode(), data))


@case(8, "lone-surrogate", "BCQ-V105", 4)
def lone_surrogate(where: Path) -> Path:
    return spelled(where, '"format":"pt"', '"format":"pt","note":"\\ud800"')


@case(8, "encoded-surrogate", "BCQ-V105", 4)
def encoded_surrogate(where: Path) -> Path:
    return spelled(where, '"format":"pt"', '"format":"pt","note":"\ud800"')


@case(8, "utf-16", "BCQ-V104", 4)
def utf16(where: Path) -> Path:
    header, data = example()
    return place(where, frame(canonical(header).encode("utf-16"), data))


@case(9, "tensor-twice", "BCQ-V107", 4)
def tensor_twice(where: Path) -> Path:
    entry = '"w.bcq_s0_scale":{"data_offsets":[16,20],"dtype":"F16","shape":[2,1]}'
    return spelled(where, entry, f"{entry},{entry}")


@case(9, "tensor-twice-escaped", "BCQ-V107", 4)
def tensor_twice_escaped(where: Path) -> Path:
    """Two spellings of one name."""
    entry = '"w.bcq_s0_scale":{"data_offsets":[16,20],"dtype":"F16","shape":[2,1]}'
    return spelled(where, entry, f"{entry},{entry.replace('w', chr(92) + 'u0077', 1)}")


@case(9, "field-twice", "BCQ-V107", 4)
def field_twice(where: Path) -> Path:
    return spelled(where, '"dtype":"F16","shape":[2,1]', '"dtype":"F16","shape":[2,1],"dtype":"F16"')


@case(10, "metadata-key-twice", "BCQ-V107", 4)
def metadata_key_twice(where: Path) -> Path:
    return spelled(where, '"format":"pt"', '"format":"pt","format":"pt"')


@case(10, "descriptor-key-twice", "BCQ-V203", 4)
def descriptor_key_twice(where: Path) -> Path:
    text = canonical(example_descriptor()).replace('"features":[]', '"features":[],"features":[]')
    return place(where, frame(*described(example_tensors(), text)))


@case(11, "space-before-brace", "BCQ-V104", 4)
def space_before_brace(where: Path) -> Path:
    header, data = example()
    return place(where, frame(b" " + canonical(header).encode(), data))


@case(11, "array", "BCQ-V104", 4)
def array_header(where: Path) -> Path:
    return place(where, frame(b"[]"))


@case(11, "something-after-the-object", "BCQ-V106", 4)
def after_the_object(where: Path) -> Path:
    header, data = example()
    return place(where, frame(canonical(header).encode() + b"{}", data))


def _number(id: str, text: str, code: str, field: str = '"shape":[2,1]') -> None:
    @case(12, id, code, 4)
    def make(where: Path) -> Path:
        return spelled(where, field, text)


_OFFSETS = '"data_offsets":[16,20]'
_number("nan", '"shape":[2,NaN]', "BCQ-V106")
_number("infinity", '"shape":[2,-Infinity]', "BCQ-V106")
_number("float", '"shape":[2,1.0]', "BCQ-V106")
_number("exponent", '"data_offsets":[16,2e1]', "BCQ-V106", _OFFSETS)
_number("bool", '"shape":[2,true]', "BCQ-V109")
_number("negative", '"shape":[-2,-1]', "BCQ-V109")
_number("negative-offset", '"data_offsets":[-4,20]', "BCQ-V109", _OFFSETS)
_number("beyond-2-to-53", '"shape":[2,9007199254740992]', "BCQ-V106")
_number("beyond-2-to-64", '"data_offsets":[16,18446744073709551620]', "BCQ-V106", _OFFSETS)
_number("5000-digits", f'"shape":[2,{"9" * 5000}]', "BCQ-V106")
_number("string", '"shape":["2",1]', "BCQ-V109")
_number("null", '"shape":null', "BCQ-V109")
_number("end-before-begin", '"data_offsets":[20,16]', "BCQ-V109", _OFFSETS)
_number("three-offsets", '"data_offsets":[16,20,24]', "BCQ-V109", _OFFSETS)
_number("seventeen-dimensions", f'"shape":[2{",1" * 16}]', "BCQ-V109")
_number("extra-field", '"shape":[2,1],"stride":[1,1]', "BCQ-V109")
_number("no-dtype", "", "BCQ-V109", '"dtype":"F16",')


# -- rows 13 to 20: where the tensors lie -----------------------------------------------------------------------


@case(13, "overlap", "BCQ-V113", 4)
def overlap(where: Path) -> Path:
    header, data = example()
    header["w.bcq_s0_scale"]["data_offsets"] = [12, 16]
    return place(where, frame(header, data[:16]))


@case(13, "same-bytes-twice", "BCQ-V113", 4)
def same_bytes_twice(where: Path) -> Path:
    header, data = example()
    header["copy"] = header["w.bcq_s0_scale"]
    return place(where, frame(header, data))


@case(14, "hole", "BCQ-V114", 4)
def hole(where: Path) -> Path:
    header, data = example()
    header["w.bcq_s0_scale"]["data_offsets"] = [18, 22]
    return place(where, frame(header, data[:16] + b"\0\0" + data[16:]))


@case(14, "hole-at-the-start", "BCQ-V114", 4)
def hole_at_the_start(where: Path) -> Path:
    header, data = example()
    header["w.bcq_s0_planes"]["data_offsets"] = [8, 24]
    header["w.bcq_s0_scale"]["data_offsets"] = [24, 28]
    return place(where, frame(header, bytes(8) + data))


@case(15, "trailing-byte", "BCQ-V115", 4)
def trailing_byte(where: Path) -> Path:
    return place(where, frame(*example()) + b"\0")


@case(15, "polyglot", "BCQ-V115", 4)
def polyglot(where: Path) -> Path:
    """A ZIP archive at the end makes the file two files at once."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("data.pkl", b"cos\nsystem\n")
    return place(where, frame(*example()) + archive.getvalue())


@case(16, "truncated", "BCQ-V116", 4)
def truncated(where: Path) -> Path:
    return place(where, frame(*example())[:-3])


@case(16, "no-data", "BCQ-V116", 4)
def no_data(where: Path) -> Path:
    return place(where, frame(example()[0]))


def _volume(id: str, shape: list[int]) -> None:
    @case(17, id, "BCQ-V111", 4)
    def make(where: Path) -> Path:
        header, data = example()
        header["big"] = {"dtype": "U8", "shape": shape, "data_offsets": [len(data), len(data)]}
        return place(where, frame(header, data))


_volume("wraps-to-zero", [2**32, 2**32])
_volume("beyond-2-to-80", [2**40, 2**40])
_volume("times-zero", [2**40, 2**40, 0])
_volume("2-to-48", [2**24, 2**24])


@case(18, "size-and-shape", "BCQ-V112", 4)
def size_and_shape(where: Path) -> Path:
    return changed(where, "w.bcq_s0_scale", shape=[3, 1])


@case(18, "size-and-dtype", "BCQ-V112", 4)
def size_and_dtype(where: Path) -> Path:
    return changed(where, "w.bcq_s0_scale", dtype="F32")


@case(18, "half-a-byte", "BCQ-V112", 4)
def half_a_byte(where: Path) -> Path:
    header, data = example()
    header["nibbles"] = {"dtype": "F4", "shape": [3], "data_offsets": [len(data), len(data) + 2]}
    return place(where, frame(header, data + b"\0\0"))


@case(19, "unknown-dtype", "BCQ-V110", 5)
def unknown_dtype(where: Path) -> Path:
    return changed(where, "w.bcq_s0_scale", dtype="F3_E1M1")


@case(20, "unaligned-tensor", "BCQ-V117", 4)
def unaligned_tensor(where: Path) -> Path:
    tensors = {**example_tensors(), "byte": ("U8", [1], b"a"), "number": ("F32", [1], bytes(4))}
    return place(where, frame(*described(tensors, example_descriptor())))


@case(20, "unaligned-data", "BCQ-V117", 4)
def unaligned_data(where: Path) -> Path:
    header, data = example()
    raw = canonical(header).encode()
    return place(where, frame(raw + b" " * ((1 - len(raw)) % 8), data, pad=False))
