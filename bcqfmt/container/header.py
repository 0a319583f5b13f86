"""The safetensors header: a strict reading of it, and its canonical bytes (spec section 3)."""

from __future__ import annotations

import contextlib
import gc
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt import limits
from bcqfmt.errors import Finding, Sink, escape, refuse

from .dtypes import BITS, element_bytes, nbytes_of
from .files import ByteSource, SourceFile
from .header_json import HeaderFault, scan_header
from .other_files import other_kind
from .strict_json import canonical

_KEYS = {"dtype", "shape", "data_offsets"}
_FORM = "dtype, shape and data_offsets, integers from 0 on"
_MAX_FAULTS = 100  # malformed entries after which the rest is not looked at


class TensorEntry(NamedTuple):
    """Where a tensor lies; ``begin`` and ``end`` count from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A header that obeys the container's rules; ``data_start`` is 8+L."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


def read_header(file: ByteSource, sink: Sink) -> Header | None:
    """BCQ-V101 to V116 and V118; None when the file is unusable. No size that it states is trusted."""

    def report(code: str, found: str, expected: str = "", tensor: str = "") -> None:
        sink(Finding(code, file.shown, tensor, found, expected))

    raw = _raw_header(file, report)
    if raw is None:
        return None
    tensors: dict[str, TensorEntry] = {}
    right: dict[tuple[str, tuple[int, ...]], int] = {}  # type and shape -> size, as checked before
    faults = 0

    def plain(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        if right.get((dtype, shape)) == end - begin:
            tensors[name] = TensorEntry(dtype, shape, begin, end)
        elif begin > end:
            report("BCQ-V109", f"data_offsets [{begin}, {end}]", _FORM, name)
            count_fault()
        elif _right_size(name, dtype, shape, end - begin, report):
            right[dtype, shape] = end - begin
            tensors[name] = TensorEntry(dtype, shape, begin, end)
        else:
            count_fault()

    def entry(name: str, value: Any) -> None:
        wrong = _misfit(value)
        if wrong is None:
            plain(name, value["dtype"], tuple(value["shape"]), *value["data_offsets"])
        else:
            report("BCQ-V109", wrong, _FORM, name)
            count_fault()

    def count_fault() -> None:
        nonlocal faults
        faults += 1
        if faults >= _MAX_FAULTS:
            raise HeaderFault("BCQ-V109", f"{faults} malformed entries; the rest was not looked at")

    try:
        with _without_collector(len(raw)):
            metadata = scan_header(raw, entry, plain)
            covered = not faults and _covers(tensors, file.size - 8 - len(raw), report)
    except HeaderFault as fault:
        report(fault.code, fault.found, fault.expected, fault.tensor)
        return None
    if not covered:
        return None
    return Header(tensors, metadata, 8 + len(raw))


def require_header(file: ByteSource) -> Header:
    """As :func:`read_header`; the first fault is raised."""
    header = read_header(file, refuse)
    assert header is not None  # refuse has raised otherwise
    return header


def header_of(path: Path) -> Header:
    """The header of a file, which is opened for that."""
    with contextlib.closing(SourceFile(path)) as source:
        return require_header(source)


def check_strict(header: Header, file: str, sink: Sink) -> None:
    """BCQ-V117, V119, V120: what a BCQ file keeps beyond the container's own rules."""
    if header.data_start % 8:
        sink(Finding("BCQ-V117", file, "", f"data starts at byte {header.data_start}", "a multiple of 8"))
    step = {dtype: element_bytes(dtype) for dtype in BITS}
    for name, entry in header.tensors.items():
        if entry.begin % step[entry.dtype]:
            sink(
                Finding(
                    "BCQ-V117", file, name, f"begins at {entry.begin}", f"a multiple of {element_bytes(entry.dtype)}"
                )
            )
        if len(name) * 4 > limits.MAX_NAME_BYTES and len(name.encode()) > limits.MAX_NAME_BYTES:
            sink(Finding("BCQ-V119", file, name, f"{len(name.encode())} bytes", f"at most {limits.MAX_NAME_BYTES}"))
    for name, other in twins(header.tensors):
        sink(Finding("BCQ-V120", file, name, f"equal to '{escape(other)}' but for case"))


def twins(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """BCQ-V120: (name, an earlier one) that differ only by the case of ASCII letters."""
    seen: dict[bytes, str] = {}
    for name in names:
        other = seen.setdefault(name.encode("utf-8", "surrogatepass").lower(), name)  # of bytes: ASCII letters only
        if other is not name:
            yield name, other


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Offsets for tensors (name -> dtype, shape): largest element first, then by name."""
    placed: dict[str, TensorEntry] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-BITS[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        size = nbytes_of(dtype, shape)
        placed[name] = TensorEntry(dtype, shape, offset, offset + size)
        offset += size
    return placed


def header_bytes(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The first 8+L bytes of a file: canonical JSON, padded with spaces to a multiple of 8."""
    value: dict[str, Any] = {
        name: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
        for name, entry in tensors.items()
    }
    value["__metadata__"] = dict(metadata)
    text = canonical(value).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw_header(file: ByteSource, report: Any) -> bytes | None:
    head = file.read(0, min(file.size, 64)).tobytes()
    if len(head) < 8:
        report("BCQ-V101", f"{file.size} bytes", "at least 8")
        return None
    (length,) = struct.unpack("<Q", head[:8])
    found: tuple[str, str, str] | None = None
    if not 2 <= length <= limits.MAX_HEADER_BYTES:
        (swapped,) = struct.unpack(">Q", head[:8])
        hint = " (with its bytes swapped it would be plausible)" if 2 <= swapped <= limits.MAX_HEADER_BYTES else ""
        found = ("BCQ-V102", f"{length}{hint}", f"2..{limits.MAX_HEADER_BYTES}")
    elif 8 + length > file.size:
        found = ("BCQ-V103", f"header of {length} bytes in a file of {file.size}", f"at least {8 + length} bytes")
    elif head[8:9] != b"{":
        found = ("BCQ-V104", f"byte 0x{head[8]:02x}" if len(head) > 8 else "nothing", "0x7b")
    if found is None:
        return file.read(8, length).tobytes()
    other = other_kind(head, "a safetensors file")
    if other is not None:
        report(*other)
    else:
        report(*found)
    return None


@contextlib.contextmanager
def _without_collector(size: int) -> Iterator[None]:
    """Pause garbage collection while a large header is parsed: it finds nothing and would double the time."""
    if size < 1_000_000 or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _right_size(name: str, dtype: str, shape: tuple[int, ...], nbytes: int, report: Any) -> bool:
    bits = BITS.get(dtype)
    if bits is None:
        report("BCQ-V110", f"'{escape(dtype, 40)}'", f"one of {', '.join(BITS)}", name)
        return False
    count = 1
    for dim in shape:
        count *= dim or 1
    if count >= limits.MAX_ELEMENTS:
        report("BCQ-V111", f"shape {list(shape)}", "fewer than 2^48 elements", name)
        return False
    size = 0 if 0 in shape else count * bits
    if size != nbytes * 8:
        report("BCQ-V112", f"{nbytes} bytes", f"{size / 8:g} for {dtype} {list(shape)}", name)
        return False
    return True


def _misfit(entry: Any) -> str | None:
    """What is wrong with an entry's form, in a few words; None when nothing is."""
    if type(entry) is not dict:
        return "no object"
    if entry.keys() != _KEYS:
        odd = min(entry.keys() ^ _KEYS)
        return f"the unknown key {odd[:40]!a}" if odd in entry else f"no {odd}"
    if type(entry["dtype"]) is not str:
        return "a dtype that is no string"
    for key in ("shape", "data_offsets"):
        numbers = entry[key]
        if type(numbers) is not list:
            return f"a {key} that is no array"
        for i, number in enumerate(numbers):
            if type(number) is not int or number < 0:
                return f"{key}[{i}] = {ascii(number)[:40]}"
    if len(entry["shape"]) > limits.MAX_RANK:
        return f"{len(entry['shape'])} dimensions, more than {limits.MAX_RANK}"
    offsets = entry["data_offsets"]
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets[:3]}"
    return None


def _covers(tensors: Mapping[str, TensorEntry], size: int, report: Any) -> bool:
    """No overlap, no hole, nothing missing, nothing left over; the first deviation decides."""
    at, before = 0, ""
    for begin, end, name in sorted((entry.begin, entry.end, name) for name, entry in tensors.items()):
        if begin < at:
            report("BCQ-V113", f"bytes {begin}..{end} overlap '{escape(before)}', which ends at {at}", "", name)
            return False
        if begin > at:
            report("BCQ-V114", f"{begin - at} unused bytes before byte {begin}", "none", name)
            return False
        at, before = end, name
    if size > at:
        report("BCQ-V115", _bytes(size - at), "none")
    elif size < at:
        report("BCQ-V116", f"{_bytes(at - size)} missing", f"{at} bytes of data")
    return size == at


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"
