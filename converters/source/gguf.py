"""GGUF files as a source: one file, or the files of a split, with the names of Hugging Face where they are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import element_bytes
from bcqfmt.container.files import ByteSource
from bcqfmt.container.gguf.header import GgufHeader, TensorInfo, read_gguf
from bcqfmt.container.gguf.types import DENSE
from bcqfmt.container.header import Header, TensorEntry
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error, escape

from .gguf_names import Named, architecture, contradiction, namer
from .gguf_rows import copied, rows_put_back, swapped

Array = npt.NDArray[Any]
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
_MAX_TAIL = 1 << 30


class Blocks(NamedTuple):
    """A tensor of blocks: the weight it becomes, type, shape as numpy has it, heads to put back, byte order."""

    weight: str
    type: str
    shape: tuple[int, ...]
    heads: int
    order: str
    scale: str = ""  # NVFP4: the tensor with the number that the values are multiplied by


class Copy(NamedTuple):
    """A dense tensor under another name: what the file calls it, and the rule that gives its bytes back.

    ``original``: the tensor of the file, where the rule may fail and has to be tried.
    """

    stored: str
    rule: dict[str, Any]
    original: StoredTensor | None = None

    def gives_back(self, dense: StoredTensor) -> bool:
        """Whether the rule makes the file's bytes of ``dense``: 1 may have been added to a number near -1."""
        if self.original is None:
            return True
        return copied(dense.array(), self.rule).tobytes() == self.original.array().tobytes()


class GgufFile(NamedTuple):
    """What one file gives: its header, as one of safetensors too, and its tensors by the names of the result."""

    source: ByteSource
    gguf: GgufHeader
    header: Header


def split_names(path: str) -> list[str]:
    """The names of all files of the split that ``path`` (a name, no folder) belongs to; itself if it is whole."""
    found = _SPLIT.fullmatch(path)
    if found is None:
        return [path]
    count = int(found[3])
    return [f"{found[1]}-{i:05d}-of-{found[3]}.gguf" for i in range(1, count + 1)]


def read_files(names: list[str], open_file: Callable[[str], ByteSource], each: Callable[..., Any]) -> list[GgufFile]:
    """Headers of the files of one model, BCQ-E218 unless they belong together."""
    sources = [open_file(name) for name in names]
    headers = list(each(read_gguf, sources))
    first = headers[0]
    count = 1 if "split.count" not in first.values else _integer(first, "split.count", names[0])
    if count != len(names):
        found = f"split.count is {count}, the name says {len(names)}"
        raise error("BCQ-E218", names[0], found=found, expected="the same number", hint=_split_name(first))
    for i, (name, header) in enumerate(zip(names, headers, strict=True)) if len(names) > 1 else ():
        stated = _integer(header, "split.no", name), _integer(header, "split.count", name)
        if stated != (i, count):
            found = f"file {stated[0]} of {stated[1]}"
            raise error("BCQ-E218", name, found=found, expected=f"{i} of {count}, from 0")
    total = sum(len(header.tensors) for header in headers)
    if len(names) > 1 and (announced := _integer(first, "split.tensors.count", names[0])) != total:
        raise error("BCQ-E218", names[0], found=f"{total} tensors in all files", expected=f"{announced}")
    return [_file(source, header) for source, header in zip(sources, headers, strict=True)]


def _integer(header: GgufHeader, key: str, shown: str) -> int | None:
    """A number of a key; None without the key, BCQ-E214 for anything else."""
    value = header.get(key)
    if value is None or isinstance(value, int):
        return value
    found = "an array" if isinstance(value, list | np.ndarray) else escape(str(value), 40)
    raise error("BCQ-E214", shown, key, found, "an integer")


def _split_name(header: GgufHeader) -> str | None:
    """What a file of a split has to be called, as a hint; None where its header does not say it."""
    number, count = header.get("split.no"), header.get("split.count")
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < count < 100_000:
        return None
    return f"rename it to NAME-{number + 1:05d}-of-{count:05d}.gguf, and the other files of the split likewise"


def place_tensors(files: list[GgufFile]) -> tuple[dict[str, StoredTensor], dict[str, Blocks], dict[str, Copy], str]:
    """Tensors by name, which of them are blocks, which have another name in the file; why the names of GGUF are kept.

    That is empty when all names are those of Hugging Face, as far as there are any.
    """
    first = files[0].gguf
    table = namer(first)
    if table is None:
        kept = f"no table has those of Hugging Face for architecture {escape(architecture(first) or 'unknown', 40)}"
    else:
        kept = contradiction(first, {name: info.shape for file in files for name, info in file.gguf.tensors.items()})
    # all names or none: a mix would be no model that any program loads
    named = table if table is not None and not kept else (lambda name, shape: Named(name))
    tensors: dict[str, StoredTensor] = {}
    blocks: dict[str, Blocks] = {}
    copies: dict[str, Copy] = {}
    infos = [(file, info) for file in files for info in file.gguf.tensors.values()]
    scales = _second_scales(infos)
    for file, info in infos:
        name, heads, added = named(info.name, info.shape)
        order = file.gguf.order
        if info.name in scales.values() or (added and info.type.name != "F32"):
            name, added = info.name, 0  # it becomes part of a weight; or nothing is known of such norms
        if (info.name if info.type.name not in DENSE else name) in tensors:
            found = f"another tensor would be '{escape(name)}' too"
            raise error("BCQ-V120", file.source.shown, info.name, found)
        if info.type.name in DENSE:
            stored = StoredTensor(info.name, info.type.name, info.shape, source=file.source, offset=info.offset)
            tensors[name], rule = _dense(stored, name, heads, added, order)
            if name != info.name or len(rule) > 1:
                copies[name] = Copy(info.name, rule, stored if added else None)
            continue
        if heads and len(info.shape) < 2:
            name, heads = info.name, 0  # a bias whose elements would have to move, not rows
        rows = info.nbytes // info.row_bytes
        tensors[info.name] = StoredTensor(
            info.name, "U8", (rows, info.row_bytes), source=file.source, offset=info.offset
        )
        blocks[info.name] = Blocks(name, info.type.name, info.shape, heads, order, scales.get(info.name, ""))
    return tensors, blocks, copies, kept


def _second_scales(infos: Iterable[tuple[GgufFile, TensorInfo]]) -> dict[str, str]:
    """NVFP4 weight -> the tensor next to it with one more scale, F32, for every matrix."""
    known = {info.name: info for file, info in infos if info.type.name == "F32" and file.gguf.order == "<"}
    found = {}
    for _, info in infos:
        scale = known.get(f"{info.name.removesuffix('.weight')}.scale")
        if info.type.name == "NVFP4" and scale is not None and scale.nbytes == 4 * math.prod(info.shape[:-2]):
            found[info.name] = scale.name
    return found


def gaps(file: ByteSource, header: GgufHeader) -> Array | None:
    """The bytes behind the header that belong to no tensor, uint8; None when all of them are zero."""
    tail = file.size - header.data_end
    if tail > _MAX_TAIL:
        found = f"{tail} bytes after the last tensor"
        raise error("BCQ-E801", file.shown, found=found, expected=f"at most {_MAX_TAIL}", hint="cut them off")
    pieces = [file.read(begin, end - begin) for begin, end in gap_ranges(header, file.size)]
    joined = np.concatenate([np.empty(0, np.uint8), *pieces])
    return joined if joined.any() else None


def gap_ranges(header: GgufHeader, size: int) -> Iterable[tuple[int, int]]:
    """Begin and end of the padding after every tensor, and of what follows the last one, in a file of that size."""
    for info in header.tensors.values():
        end = info.offset + info.nbytes
        padded = header.data_start - (header.data_start - end) // header.alignment * header.alignment
        yield end, padded
    yield header.data_end, size


def _dense(stored: StoredTensor, name: str, heads: int, added: int, order: str) -> tuple[StoredTensor, dict[str, Any]]:
    """A dense tensor of the file under its new name, and the rule that undoes what was done to it."""
    swap = order == ">" and element_bytes(stored.dtype) > 1
    rule: dict[str, Any] = {"rule": "copy"}
    rule |= {"heads": heads} if heads else {}
    rule |= {"add": added} if added else {}
    rule |= {"byte_order": "big"} if swap else {}
    if len(rule) == 1:
        return stored.renamed(name), rule

    def make() -> Array:
        array = stored.array()
        array = rows_put_back(swapped(array) if swap else array, heads)
        return array - array.dtype.type(added) if added else array

    return StoredTensor(name, stored.dtype, stored.shape, make=make), rule


def _file(source: ByteSource, header: GgufHeader) -> GgufFile:
    entries = {}
    for info in header.tensors.values():
        begin = info.offset - header.data_start
        shape = info.shape if info.type.name in DENSE else (info.nbytes,)
        kind = info.type.name if info.type.name in DENSE else "U8"
        entries[info.name] = TensorEntry(kind, shape, begin, begin + info.nbytes)
    return GgufFile(source, header, Header(entries, {}, header.data_start))
