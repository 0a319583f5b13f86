"""Broken GGUF files: every fault has a code and exit 4, quickly, and nothing is read that the file does not have."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.errors import BcqError
from sources.gguf_files import DATA, Writer, small

STORED = {
    "array_length_huge": "BCQ-E213",
    "bad_magic": "BCQ-E211",
    "empty_file": "BCQ-E211",
    "kv_count_huge": "BCQ-E214",
    "n_dims_5": "BCQ-E215",
    "offset_overlap": "BCQ-E216",
    "offset_unaligned": "BCQ-E216",
    "string_length_overflow": "BCQ-E213",
    "tensor_count_huge": "BCQ-E215",
    "truncated_data": "BCQ-E213",
    "truncated_info": "BCQ-E213",
    "truncated_kv": "BCQ-E213",
    "type_removed": "BCQ-E217",
    "type_unknown": "BCQ-E217",
    "version_1": "BCQ-E212",
    "version_99": "BCQ-E212",
}


def fault_of(path: Path) -> BcqError:
    with pytest.raises(BcqError) as caught:
        read_gguf(SourceFile(path))
    return caught.value


def test_every_stored_file_is_tried() -> None:
    assert {path.stem for path in (DATA / "broken").iterdir()} == STORED.keys()


@pytest.mark.parametrize("name", STORED)
def test_stored_files_are_refused(name: str) -> None:
    fault = fault_of(DATA / f"broken/{name}.gguf")
    assert (fault.code, fault.exit_code, fault.finding.file) == (STORED[name], 4, f"{name}.gguf")
    assert fault.hint


def test_a_newer_version_needs_a_newer_program() -> None:
    assert "llama.cpp" in fault_of(DATA / "broken/version_1.gguf").hint
    assert fault_of(DATA / "broken/version_99.gguf").hint.startswith("install the latest bcqfmt")


def pair(raw: bytes) -> bytes:
    """A file whose last key value is these bytes."""
    writer = small()
    writer.pairs.append(raw)
    return writer.bytes()


def key(name: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(name)) + name


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return key() + struct.pack("<IIQ", 9, kind, count) + rest


def tensor(name: bytes | str = "c", shape: list[int] | None = None, kind: int = 0, size: int = 64) -> bytes:
    return small().tensor(name, shape or [16], kind, b"x" * size).bytes()


def moved(offset: int) -> bytes:
    writer = small()
    writer.offsets[1] = offset
    return writer.bytes()


def counted(tensors: int, pairs: int) -> bytes:
    writer = small()
    writer.counts = tensors, pairs
    return writer.bytes()


def aligned(kind: str, value: int) -> bytes:
    return small().pair("general.alignment", kind, value).bytes()


def without_last_padding() -> bytes:
    return small().bytes()[:-28]  # 36 bytes of Q4_0, padded to 64


MADE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "magic cut": ("BCQ-E211", lambda: b"GGU"),
    "nothing but the magic": ("BCQ-E213", lambda: b"GGUF"),
    "git-lfs pointer": ("BCQ-E201", lambda: b"version https://git-lfs.github.com/spec/v1\n"),
    "web page": ("BCQ-E202", lambda: b"<!DOCTYPE html><html>"),
    "version 0": ("BCQ-E212", lambda: b"GGUF" + bytes(60)),
    "one tensor too many": ("BCQ-E213", lambda: counted(200_000, 2)),
    "2^64 - 1 tensors": ("BCQ-E215", lambda: counted(2**64 - 1, 2)),
    "one pair too many": ("BCQ-E213", lambda: counted(2, 60_000)),
    "2^64 - 1 pairs": ("BCQ-E214", lambda: counted(2, 2**64 - 1)),
    "empty key": ("BCQ-E214", lambda: pair(key(b"") + struct.pack("<IB", 0, 1))),
    "key with a NUL": ("BCQ-E214", lambda: pair(key(b"a\0b") + struct.pack("<IB", 0, 1))),
    "key not ASCII": ("BCQ-E214", lambda: pair(key("ä".encode()) + struct.pack("<IB", 0, 1))),
    "key too long": ("BCQ-E214", lambda: pair(key(b"k" * 65536) + struct.pack("<IB", 0, 1))),
    "key twice": ("BCQ-E214", lambda: small().pair("k", "u8", 1).pair("k", "u8", 2).bytes()),
    "value type 13": ("BCQ-E214", lambda: pair(key() + struct.pack("<IQ", 13, 1))),
    "bool 2": ("BCQ-E214", lambda: pair(key() + struct.pack("<IB", 7, 2))),
    "bool 2 in an array": ("BCQ-E214", lambda: pair(array(7, 3, b"\0\1\2"))),
    "array of arrays": ("BCQ-E214", lambda: pair(array(9, 1, struct.pack("<IQ", 0, 0)))),
    "array of type 99": ("BCQ-E214", lambda: pair(array(99, 1, b"x"))),
    "array of 2^61 doubles": ("BCQ-E213", lambda: pair(array(12, 2**61))),
    "array of 2^63 strings": ("BCQ-E213", lambda: pair(array(8, 2**63))),
    "array longer than allowed": ("BCQ-E214", lambda: pair(array(0, 2**24 + 1, bytes(2**24 + 1)))),
    "array of one string that is too long": ("BCQ-E213", lambda: pair(array(8, 1, struct.pack("<Q", 2**40)))),
    "string of 2^63 bytes": ("BCQ-E213", lambda: pair(key() + struct.pack("<IQ", 8, 2**63))),
    "alignment 0": ("BCQ-E214", lambda: aligned("u32", 0)),
    "alignment 48": ("BCQ-E214", lambda: aligned("u32", 48)),
    "alignment 2^21": ("BCQ-E214", lambda: aligned("u32", 2**21)),
    "alignment of 64 bits": ("BCQ-E214", lambda: aligned("u64", 32)),
    "name empty": ("BCQ-E215", lambda: tensor("")),
    "name of 64 bytes": ("BCQ-E215", lambda: tensor("n" * 64)),
    "name not UTF-8": ("BCQ-E215", lambda: tensor(b"\xff\xfe")),
    "name with a NUL": ("BCQ-E215", lambda: tensor(b"a\0b")),
    "name twice": ("BCQ-E215", lambda: tensor("a.weight")),
    "no dimensions": ("BCQ-E215", lambda: small().tensor("c", [], 0, b"").bytes()),
    "2^32 - 1 dimensions": ("BCQ-E215", lambda: small().bytes().replace(struct.pack("<I", 2), b"\xff" * 4)),
    "a dimension of 0": ("BCQ-E215", lambda: tensor(shape=[0, 4])),
    "2^33 x 2^33 elements": ("BCQ-E215", lambda: tensor(shape=[2**33, 2**33])),
    "2^64 - 1 elements": ("BCQ-E215", lambda: tensor(shape=[2**64 - 1])),
    "2^47 elements": ("BCQ-E213", lambda: tensor(shape=[2**47])),
    "half a block": ("BCQ-E215", lambda: tensor(shape=[48], kind=2)),
    "type 31, removed": ("BCQ-E217", lambda: tensor(kind=31)),
    "type 43": ("BCQ-E217", lambda: tensor(kind=43)),
    "type 2^32 - 1": ("BCQ-E217", lambda: tensor(kind=2**32 - 1)),
    "hole before a tensor": ("BCQ-E216", lambda: moved(128)),
    "tensors in another order": ("BCQ-E216", lambda: moved(0)),
    "offset 2^64 - 32": ("BCQ-E216", lambda: moved(2**64 - 32)),
    "last padding missing": ("BCQ-E213", without_last_padding),
    "data missing": ("BCQ-E213", lambda: small().header()),
}


@pytest.mark.parametrize("name", MADE)
def test_made_files_are_refused(name: str, tmp_path: Path) -> None:
    code, make = MADE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    fault = fault_of(path)
    assert (fault.code, fault.exit_code, fault.finding.file) == (code, 4, "model.gguf")
    assert fault.finding.found
    assert fault.hint


@pytest.mark.parametrize("order", ["<", ">"])
def test_every_cut_is_refused(order: str, tmp_path: Path) -> None:
    data = small(order=order).bytes()
    path = tmp_path / "model.gguf"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert fault_of(path).code in ("BCQ-E211", "BCQ-E213")


def test_a_header_longer_than_allowed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = Writer()
    writer.pairs.append(key() + struct.pack("<IQ", 8, 10**8))
    path.write_bytes(writer.header())
    os.truncate(path, 2 * 10**8)  # sparse
    assert (fault_of(path).code, fault_of(path).exit_code) == ("BCQ-E219", 4)


def test_names_are_shown_escaped(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(Writer().tensor("a\x1b[31m", [16], 99, b"x" * 64).bytes())
    assert "\x1b" not in str(fault_of(path))
