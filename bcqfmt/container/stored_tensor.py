"""One tensor as it is stored: a view into a file, or an array in memory."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.version import pip_install

from .dtypes import BITS, name_of, nbytes_of, numpy_dtype
from .files import ByteSource
from .header import Header

Array = npt.NDArray[Any]
_CHUNK = 1 << 22


class StoredTensor:
    """A tensor of the container: ``name``, ``dtype`` (``"I32"``), ``shape``, and bytes that are read on demand."""

    __slots__ = ("_array", "_guard", "_make", "_new", "_source", "dtype", "name", "offset", "shape")

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        array: Array | None = None,
        source: ByteSource | None = None,
        offset: int = 0,
        make: Callable[[], Array] | None = None,
    ) -> None:
        """Backed by one of: an array; a file and a byte offset; a function that computes the array when asked."""
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.offset = offset
        self._source = source
        self._array = array
        self._make = make
        self._guard: Callable[[], None] | None = None
        self._new: Callable[[tuple[int, ...], Any], Array] = np.empty

    @classmethod
    def from_array(cls, name: str, array: Array, dtype: str | None = None) -> StoredTensor:
        """Wrap an array; ``dtype`` names bit containers whose numpy type is another one (I32 words as uint32)."""
        kind = dtype if dtype is not None else name_of(array)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        stored = np.ascontiguousarray(array).view(numpy_dtype(kind)).reshape(array.shape)
        stored.flags.writeable = False
        return cls(name, kind, tuple(int(dim) for dim in array.shape), array=stored)

    @classmethod
    def in_file(cls, name: str, header: Header, source: ByteSource) -> StoredTensor:
        """A tensor of a file whose header is known; its bytes are read on demand."""
        entry = header.tensors[name]
        return cls(name, entry.dtype, entry.shape, source=source, offset=header.data_start + entry.begin)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return nbytes_of(self.dtype, self.shape)

    @property
    def file(self) -> Path | None:
        """The file that holds it; None in memory. The bytes start at ``offset``, counted from the file's start."""
        return self._source.path if self._source is not None else None

    def renamed(self, name: str) -> StoredTensor:
        """The same bytes under another name."""
        found = copy.copy(self)
        found.name = name
        return found

    def __copy__(self) -> StoredTensor:
        found = StoredTensor(self.name, self.dtype, self.shape, array=self._array, source=self._source)
        found.offset, found._make, found._guard, found._new = self.offset, self._make, self._guard, self._new
        return found

    def made_by(self, make: Callable[[], Array]) -> StoredTensor:
        """The same tensor; ``make`` gives it as a whole, while `read_into` reads the file."""
        found = copy.copy(self)
        found._make = make
        return found

    def allocated_by(self, new: Callable[[tuple[int, ...], Any], Array]) -> StoredTensor:
        """The same tensor; what is read of its file is stored in arrays from ``new(shape, dtype)``."""
        found = copy.copy(self)
        found._new = new
        return found

    def guarded(self, check: Callable[[], None] | None) -> StoredTensor:
        """The same tensor; ``check`` is called whenever its numbers (not its bytes) are asked for, and may raise."""
        found = copy.copy(self)
        found._guard = check
        return found

    def array(self) -> Array:
        """The whole tensor, read-only; read from the file into one fresh buffer that the array views, not copies.

        Sub-byte types come as their bytes, one-dimensional uint8.
        """
        return self.read()

    def read(self, *ranges: tuple[int, int]) -> Array:
        """A block: ``ranges`` limit the leading axes; the others are whole. Reads only the bytes of the block."""
        if self._guard is not None:
            self._guard()
        held = self._held()
        if held is not None:
            return held[tuple(slice(a, b) for a, b in ranges)]
        if BITS[self.dtype] < 8:
            raw = self.bytes_at(0, self.nbytes)
            raw.flags.writeable = False
            return raw
        shape = tuple(b - a for a, b in ranges) + self.shape[len(ranges) :]
        out = self._new(shape, numpy_dtype(self.dtype))
        flat = out.reshape(-1).view(np.uint8)
        done = 0
        for start, size in self._runs(ranges):
            self._fill(start, flat[done : done + size])
            done += size
        out.flags.writeable = False
        return out

    def read_into(self, out: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill ``out``, uint8 and one-dimensional, with the bytes from ``start`` on."""
        if self._source is None:
            out[:] = self.bytes_at(start, out.size)
        else:
            self._fill(start, out)

    def map(self) -> Array:
        """A read-only memory map of the bytes: no copy, but the process crashes if the file shrinks meanwhile."""
        if self._source is None:
            return self.array()
        if self._guard is not None:
            self._guard()
        if self.nbytes == 0:
            return np.empty(self.shape, numpy_dtype(self.dtype))
        raw: Array = np.memmap(self._source.path, np.uint8, "r", self.offset, (self.nbytes,))
        return raw if BITS[self.dtype] < 8 else raw.view(numpy_dtype(self.dtype)).reshape(self.shape)

    def chunks(self, size: int = _CHUNK) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes in order, at most ``size`` at a time."""
        held = self._held()
        if held is not None:
            flat = held.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, size):
                yield flat[start : start + size]
            return
        for start in range(0, self.nbytes, size):
            yield self.bytes_at(start, min(size, self.nbytes - start))

    def bytes_at(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        """``size`` bytes from byte ``start`` of the tensor on."""
        held = self._held()
        if held is not None:
            return held.reshape(-1).view(np.uint8)[start : start + size]
        assert self._source is not None
        out = self._new((size,), np.uint8)
        self._fill(start, out)
        return out

    def tobytes(self) -> bytes:
        """All bytes, exactly as stored."""
        return self.bytes_at(0, self.nbytes).tobytes()

    def to_torch(self) -> Any:
        """A torch tensor that shares the memory of :meth:`array`; sub-byte types come as uint8."""
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise error("BCQ-E306", found="torch is not installed", hint=pip_install("torch")) from None
        array = self.array() if self._source is not None else self.array().copy()
        array.flags.writeable = True  # torch warns about read-only memory, and this buffer is used by nothing else
        if array.dtype.name.startswith(("bfloat", "float8")):  # types of ml_dtypes, which torch knows by the same name
            bits = array.view(np.uint8 if array.dtype.itemsize == 1 else np.int16)
            return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)

    def __repr__(self) -> str:
        place = f"{self._source.shown}@{self.offset}" if self._source is not None else "memory"
        return f"StoredTensor({self.name!r}, {self.dtype}, {list(self.shape)}, {place})"

    def _held(self) -> Array | None:
        """The array in memory, or the one that is computed now; None when it lies in a file."""
        if self._make is None:
            return self._array
        made = np.ascontiguousarray(self._make()).view(numpy_dtype(self.dtype))
        return made.reshape(self.shape)

    def _fill(self, start: int, view: npt.NDArray[np.uint8]) -> None:
        assert self._source is not None
        self._source.read_into(self.offset + start, view)

    def _runs(self, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
        """(start, size) of the contiguous byte runs of a block, in order."""
        kept = list(ranges)
        while kept and kept[-1] == (0, self.shape[len(kept) - 1]):
            kept.pop()
        strides = [numpy_dtype(self.dtype).itemsize]
        for dim in reversed(self.shape):
            strides.append(strides[-1] * dim)
        strides.reverse()  # strides[i + 1] = bytes of one step along axis i
        if not kept:
            yield 0, strides[0]
            return
        *outer, (first, last) = kept
        inner = strides[len(kept)]
        for index in itertools.product(*(range(a, b) for a, b in outer)):
            base = sum(i * strides[axis + 1] for axis, i in enumerate(index))
            yield base + first * inner, (last - first) * inner
