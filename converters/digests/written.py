"""A file that is being written, or was, for whoever hashes what is in it."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from bcqfmt.container.durable import OutputFile
from bcqfmt.errors import BcqError, error

__all__ = ["Window", "WrittenFile"]

Bytes = npt.NDArray[np.uint8]


class WrittenFile:
    """It stays open until nobody wants to read it any more, whoever closes it before."""

    def __init__(self, output: OutputFile) -> None:
        self._path, self._descriptor = str(output.path), output.duplicate()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def duplicate(self) -> int:
        """A descriptor that is the caller's to close."""
        try:
            return os.dup(self._descriptor)
        except OSError as fault:
            raise self._failed(fault) from fault

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on."""
        view = buffer.data
        try:
            while view:
                done = os.preadv(self._descriptor, [view], offset)
                if not done:
                    raise error("BCQ-E402", self._path, found=f"byte {offset}, just written, is not there")
                view, offset = view[done:], offset + done
        except OSError as fault:
            raise self._failed(fault) from fault

    def window(self, offset: int, size: int) -> Window:
        """Bytes that were written. They are mapped, not copied: nobody else knows this file yet, or cuts it short."""
        before = offset % mmap.ALLOCATIONGRANULARITY
        how = mmap.MAP_SHARED, mmap.PROT_READ
        try:
            mapped = mmap.mmap(self._descriptor, before + size, *how, offset=offset - before)
        except OSError:  # some file systems cannot
            room = np.empty(size, np.uint8)
            self.read_into(offset, room)
            return Window(room, 0)
        return Window(np.frombuffer(mapped, np.uint8), before, mapped)

    def _failed(self, fault: OSError) -> BcqError:
        return error("BCQ-E402", self._path, found=fault.strerror or str(fault))


class Window:
    """Some bytes of a file as memory, whose address a ``with`` block gets, as long as it lasts."""

    def __init__(self, view: Bytes, before: int, mapped: mmap.mmap | None = None) -> None:
        """``before``: bytes of the view that were not asked for."""
        self._view, self._before, self._mapped = view, before, mapped

    def __enter__(self) -> int:
        return self._view.ctypes.data + self._before

    def __exit__(self, *_: object) -> None:
        del self._view
        if self._mapped is not None:
            self._mapped.close()
