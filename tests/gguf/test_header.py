"""The reader of GGUF headers: real files, the package `gguf` as second opinion, all types, byte orders, alignments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import GgufHeader, read_gguf
from bcqfmt.errors import BcqError
from sources.gguf_files import CODES, DATA, EXPECTED, FILES, Writer, small


def header_of(data: bytes, folder: Path, name: str = "model.gguf") -> GgufHeader:
    path = folder / name
    path.write_bytes(data)
    source = SourceFile(path)
    try:
        return read_gguf(source)
    finally:
        source.close()


@pytest.mark.parametrize("name", FILES)
def test_real_files_are_read_as_other_programs_read_them(name: str) -> None:
    expected = EXPECTED[name]
    source = SourceFile(DATA / name)
    header = read_gguf(source)
    assert header.version == expected["version"]
    assert header.alignment == expected["alignment"]
    assert header.data_start == expected["data_offset"]
    assert len(header.values) == expected["kv_count"]
    assert {key: header.get(key) for key in expected["config"]} == expected["config"]
    found = [(t.name, t.type.name, list(t.shape), t.offset, t.nbytes) for t in header.tensors.values()]
    start = expected["data_offset"]
    assert found == [(t["name"], t["type"], t["shape"], start + t["offset"], t["nbytes"]) for t in expected["tensors"]]
    assert header.raw == (DATA / name).read_bytes()[: header.data_start]
    assert source.bytes_read < 1_100_000  # the beginning, not the data


@pytest.mark.parametrize("name", [name for name in FILES if name != "q1_0_q2_0.gguf"])  # gguf 0.19 lacks Q2_0
def test_every_key_value_is_the_one_that_gguf_py_reads(name: str) -> None:
    header = read_gguf(SourceFile(DATA / name))
    fields = {key: field for key, field in gguf.GGUFReader(DATA / name).fields.items() if not key.startswith("GGUF.")}
    assert header.values.keys() == fields.keys()
    for key, field in fields.items():
        value = header.get(key)
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 1, 4, 64, 1 << 20])
def test_versions_byte_orders_and_alignments(order: str, version: int, alignment: int | None, tmp_path: Path) -> None:
    writer = small(order=order, version=version, alignment=alignment)
    header = header_of(writer.bytes(), tmp_path)
    assert (header.version, header.order, header.alignment) == (version, order, alignment or 32)
    data = writer.bytes()
    for (name, sizes, _, content), info in zip(writer.tensors, header.tensors.values(), strict=True):
        assert (info.name, list(info.shape)) == (name.decode(), sizes[::-1])
        assert data[info.offset : info.offset + info.nbytes] == content


INTEGERS = {"u8": (0, 255), "i8": (-128, 127), "u16": (0, 2**16 - 1), "i16": (-(2**15), 2**15 - 1)}
INTEGERS |= {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}
INTEGERS |= {"bool": (0, 1)}


def values(kind: str) -> st.SearchStrategy[Any]:
    if kind == "str":
        return st.text(max_size=20)
    if kind in ("f32", "f64"):
        return st.floats(width=32 if kind == "f32" else 64, allow_nan=False)
    return st.integers(*INTEGERS[kind])


@given(st.data(), st.sampled_from("<>"))
def test_every_value_type_and_array_comes_back(data: st.DataObject, order: str) -> None:
    writer, wanted = Writer(order=order), {}
    for kind in CODES:
        wanted[f"one.{kind}"] = data.draw(values(kind))
        writer.pair(f"one.{kind}", kind, wanted[f"one.{kind}"])
        wanted[f"many.{kind}"] = data.draw(st.lists(values(kind), max_size=4))
        writer.pair(f"many.{kind}", f"{kind}[]", wanted[f"many.{kind}"])
    header = read_gguf(Memory(writer.bytes()))
    for key, value in wanted.items():
        found = header.get(key)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, key


class Memory(SourceFile):
    """Bytes in memory as a source."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size, self.shown, self.bytes_read = data, len(data), "memory.gguf", 0
        self._descriptor = -1

    def read_into(self, offset: int, buffer: Any) -> None:
        assert offset + buffer.size <= self.size, "read beyond the end"
        buffer[:] = np.frombuffer(self._data, np.uint8, buffer.size, offset)


@given(st.data())
def test_damage_is_refused_with_a_code_or_harmless(data: st.DataObject) -> None:
    raw = bytearray(small().bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    found = outcome(bytes(raw[:cut]))
    if isinstance(found, BcqError):
        assert found.exit_code == 4
        assert found.hint
    else:
        assert found.data_end <= cut


def outcome(data: bytes) -> GgufHeader | BcqError:
    try:
        return read_gguf(Memory(data))
    except BcqError as fault:
        return fault


def test_a_long_tokenizer_is_read_in_growing_windows(tmp_path: Path) -> None:
    words = [f"token{i}" * (1 + i % 7) for i in range(60_000)]
    writer = small().pair("t.tokens", "str[]", words).pair("t.scores", "f32[]", [0.5] * 60_000)
    header = header_of(writer.bytes(), tmp_path)
    assert header.get("t.tokens") == words
    assert header.get("t.scores").tolist() == [0.5] * 60_000


def test_bytes_after_the_last_tensor_are_allowed(tmp_path: Path) -> None:
    writer = small()
    writer.tail, writer.fill = b"more", b"\xff"
    header = header_of(writer.bytes(), tmp_path)
    assert header.data_end == len(writer.bytes()) - 4


def test_a_file_without_tensors_may_end_with_its_header(tmp_path: Path) -> None:
    data = Writer().pair("a", "u8", 1).header()
    assert header_of(data, tmp_path).data_start == len(data)


def test_gguf_py_reads_what_the_tests_write(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small(alignment=64).pair("a.list", "i32[]", [1, -2]).bytes())
    reader = gguf.GGUFReader(path)
    assert reader.fields["a.list"].contents() == [1, -2]
    assert [(t.name, t.tensor_type.name) for t in reader.tensors] == [("a.weight", "F32"), ("b.weight", "Q4_0")]
