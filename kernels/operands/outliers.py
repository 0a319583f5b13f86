"""Outliers on a device as fused products read them: packed entries by row, and the shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.limits import ROWS

from . import Outliers

ROOM = 8192  # bytes of outliers of a tile that are prefetched, at most
_SHORT = 65536  # columns that fit into an entry of four bytes


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Entries:
    """CSR over original columns. ``indptr`` and ``entries`` are flat int32: rows padded to tiles, packed outliers.

    ``count`` of them, ``size`` bytes each; ``most``: bytes of the outliers of a tile at most, with 16 more.
    """

    indptr: Any
    entries: Any
    count: int
    size: int
    most: int

    @property
    def nbytes(self) -> int:
        return 4 * (device.describe(self.indptr).size + device.describe(self.entries).size)


class OutlierNeeds(NamedTuple):
    """What a product needs for outliers: bytes of an entry (0: there are none), columns, most bytes of a tile."""

    size: int = 0
    columns: int = 0
    most: int = 0

    @property
    def room(self) -> int:
        """Bytes for the outliers of a tile."""
        return min(-(-self.most // 16) * 16, ROOM) if self.size else 0

    @classmethod
    def of(cls, entries: Entries | None, columns: int) -> OutlierNeeds:
        """Those of a product with these outliers."""
        return NO_OUTLIERS if entries is None else cls(entries.size, columns, entries.most)

    def shared_bytes(self, batch: int, kind: int, sides: int) -> int:
        """Shared memory: all vectors as they come, and room for each of ``sides`` tiles."""
        return batch * x_bytes(self.columns, kind) + sides * self.room if self.size else 0


NO_OUTLIERS = OutlierNeeds()


def arguments(entries: Entries | None, instead: Any) -> tuple[Any, Any, int]:
    """indptr, entries and their count for a launch; ``instead`` where there are none: kernels then ignore them."""
    return (instead, instead, 0) if entries is None else (entries.indptr, entries.entries, entries.count)


def x_bytes(columns: int, kind: int) -> int:
    """Bytes of a vector in shared memory: whole pieces of 16, with a zero after the last element."""
    per = 4 if kind == 0 else 8
    return (columns + per) // per * 16


def entries_of(outliers: Outliers | None, rows: int, columns: int, target: Any) -> Entries | None:
    """Outliers of a matrix (rows, columns) on a device; None where there are none."""
    if outliers is None or not outliers.count:
        return None
    entries, size = packed_entries(outliers.indices, outliers.added, columns)
    indptr = np.full(-(-rows // ROWS) * ROWS + 1, outliers.count, np.uint32)
    indptr[: rows + 1] = outliers.indptr
    bounds = indptr[::ROWS].astype(np.int64)
    return Entries(
        indptr=device.upload(indptr, target),
        entries=device.upload(entries, target),
        count=outliers.count,
        size=size,
        most=int(np.max(bounds[1:] - bounds[:-1])) * size + 16,
    )


def packed_entries(indices: Any, values: Any, columns: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Outliers as words, and the bytes of one: column and float16 (4), or where that loses something, float32 (8).

    Padded with zeros to whole pieces of 16 bytes.
    """
    exact = values.astype(np.float64)
    with np.errstate(over="ignore"):
        short = round_to(exact, "F16")
    if columns <= _SHORT and np.array_equal(short.astype(np.float64), exact, equal_nan=True):
        size, made = 4, indices.astype(np.uint32) | short.view(np.uint16).astype(np.uint32) << np.uint32(16)
    else:
        pairs = [indices.astype(np.uint32), values.astype(np.float32).view(np.uint32)]
        size, made = 8, np.stack(pairs, axis=1).reshape(-1)
    return np.concatenate([made, np.zeros(-made.size % 4, np.uint32)]), size
