"""The digests of a BCQ file that is being written, where `digests` takes a part in them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.digests import ManyDigests, worth_lanes
from bcqfmt.converters.digests_along import DigestsAlong
from bcqfmt.converters.digests_written import WrittenFile
from bcqfmt.durable import OutputFile

__all__ = ["FileDigests"]

_SMALL = 1 << 16  # bytes of a tensor that are hashed on the way


class FileDigests:
    """The digests of a file that is being written: of the whole on the way, of large tensors from what was written.

    Where files go along with streams, neither is waited for: there is time until `late` is asked.
    """

    def __init__(
        self, many: ManyDigests, wanted: Collection[str], head: bytes, output: OutputFile, sizes: Mapping[str, int]
    ) -> None:
        """``wanted``: the tensors whose digests are of interest; ``sizes``: of all tensors, in order."""
        self._many, self._file = many, WrittenFile(output)
        self._along = many if isinstance(many, DigestsAlong) else None
        self._whole: Any = hashlib.sha256(head)
        if self._along is not None:
            self._whole = self._along.follow(self._file, len(head) + sum(sizes.values()))
        self._single, self._at = hashlib.sha256(), len(head)
        self._begin, self._names, self._wanted = len(head), iter(sizes), wanted
        self._large = worth_lanes({name: size for name, size in sizes.items() if name in wanted and size >= _SMALL})
        self._sizes, self._name, self._apart = sizes, "", False
        self._found: dict[str, str] = {}
        self._futures: dict[str, Future[str]] = {}
        self._begin_tensor()

    def __enter__(self) -> FileDigests:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._many.forget(self._all())

    def update(self, chunk: npt.NDArray[np.uint8]) -> None:
        """The next bytes; all before them are written."""
        if self._along is None:
            self._whole.update(chunk)
        else:
            self._along.reach(self._whole, self._at)
        self._at += chunk.size
        if self._name in self._wanted and not self._apart:
            self._single.update(chunk.data)

    def end_of_tensor(self, name: str) -> None:
        """The bytes of a tensor are complete."""
        if self._apart:
            self._futures[name] = self._many.submit(self._file, self._begin, self._at - self._begin)
        elif name in self._wanted:
            self._found[name] = self._single.hexdigest()
            self._single = hashlib.sha256()
        self._many.keep_up((self._at - self._begin) * (self._many.beside + self._apart))
        self._begin_tensor()

    def _begin_tensor(self) -> None:
        """Decide how the next one is hashed; the last ones of all on the way, not to be waited for."""
        self._begin, self._name = self._at, next(self._names, "")
        if self._name:
            self._many.begin(self._sizes[self._name])
        self._apart = self._name in self._large and not self._many.ending

    def result(self) -> tuple[str, dict[str, str]]:
        """Digest of everything, and of each tensor that is wanted; without those that are late."""
        if self._along is None:
            return self._whole.hexdigest(), {**self._found, **self._parts()}
        self._along.reach(self._whole, self._at)
        return "", self._found

    @property
    def is_late(self) -> bool:
        """Whether some digests would have to be waited for."""
        return not all(future.done() for future in self._all())

    def late(self) -> tuple[str, dict[str, str]]:
        """All digests; they are computed now if they have not been yet."""
        if self._along is None:
            return self.result()
        return self._along.result(self._whole.future), {**self._found, **self._parts()}

    def _all(self) -> list[Future[str]]:
        return [*self._futures.values(), *([] if self._along is None else [self._whole.future])]

    def _parts(self) -> dict[str, str]:
        return dict(zip(self._futures, self._many.results(self._futures.values()), strict=True))
