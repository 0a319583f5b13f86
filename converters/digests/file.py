"""The digests of a BCQ file that is being written, where `digests` takes a part in them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from bcqfmt.container.durable import OutputFile

from . import ManyDigests, worth_lanes
from .along import DigestsAlong
from .written import WrittenFile

__all__ = ["FileDigests", "file_digests"]

Bytes = npt.NDArray[np.uint8]
_SMALL = 1 << 16  # bytes of a tensor that are hashed on the way


class FileDigests:
    """The digests of a file that is being written: of the whole on the way, of large tensors from what was written."""

    def __init__(
        self, many: ManyDigests, wanted: Collection[str], head: bytes, output: OutputFile, sizes: Mapping[str, int]
    ) -> None:
        """``wanted``: the tensors whose digests are of interest; ``sizes``: of all tensors, in order."""
        self._many, self._file = many, WrittenFile(output)
        self._whole, self._single = hashlib.sha256(head), hashlib.sha256()
        self._begin = self._at = len(head)
        self._names, self._wanted = iter(sizes), wanted
        self._large = worth_lanes({name: size for name, size in sizes.items() if name in wanted and size >= _SMALL})
        self._sizes, self._name, self._apart = sizes, "", False
        self._found: dict[str, str] = {}
        self._futures: dict[str, Future[str]] = {}
        self._begin_tensor()

    def __enter__(self) -> FileDigests:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._many.forget(self._awaited())

    def update(self, chunk: Bytes) -> None:
        """The next bytes; all before them are written."""
        self._update_whole(chunk)
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

    def result(self) -> tuple[str, dict[str, str]]:
        """Digest of everything, and of each tensor that is wanted; without those that are late."""
        return self.late()

    @property
    def is_late(self) -> bool:
        """Whether some digests would have to be waited for."""
        return not all(future.done() for future in self._awaited())

    def late(self) -> tuple[str, dict[str, str]]:
        """All digests; they are computed now if they have not been yet."""
        whole = self._whole_digest()
        parts = zip(self._futures, self._many.results(self._futures.values()), strict=True)
        return whole, {**self._found, **dict(parts)}

    def _begin_tensor(self) -> None:
        """Decide how the next one is hashed; the last ones of all on the way, not to be waited for."""
        self._begin, self._name = self._at, next(self._names, "")
        if self._name:
            self._many.begin(self._sizes[self._name])
        self._apart = self._name in self._large and not self._many.ending

    def _update_whole(self, chunk: Bytes) -> None:
        self._whole.update(chunk.data)

    def _whole_digest(self) -> str:
        return self._whole.hexdigest()

    def _awaited(self) -> list[Future[str]]:
        return list(self._futures.values())


class _FollowedDigests(FileDigests):
    """The same where files go along with streams: nothing is waited for, there is time until `late` is asked."""

    def __init__(
        self, many: DigestsAlong, wanted: Collection[str], head: bytes, output: OutputFile, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(many, wanted, head, output, sizes)
        self._along = many
        self._stream = many.follow(self._file, len(head) + sum(sizes.values()))

    def result(self) -> tuple[str, dict[str, str]]:
        """The digests that were computed on the way."""
        self._along.reach(self._stream, self._at)
        return "", self._found

    def _update_whole(self, chunk: Bytes) -> None:
        self._along.reach(self._stream, self._at)

    def _whole_digest(self) -> str:
        return self._along.result(self._stream.future)

    def _awaited(self) -> list[Future[str]]:
        return [*super()._awaited(), self._stream.future]


def file_digests(
    many: ManyDigests, wanted: Collection[str], head: bytes, output: OutputFile, sizes: Mapping[str, int]
) -> FileDigests:
    """The digests of a file, as `many` makes them."""
    if isinstance(many, DigestsAlong):
        return _FollowedDigests(many, wanted, head, output, sizes)
    return FileDigests(many, wanted, head, output, sizes)
