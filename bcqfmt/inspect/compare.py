"""Two checkpoints compared, tensor by tensor: what is missing, what is described otherwise, what has other content.

Tensors of two files with the same digest, as both manifests state it, are equal and are not read. All others are
compared byte by byte, and where the bytes differ, value by value, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.shards import natural
from bcqfmt.container.dtypes import BITS, float64_of, numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .tensor_details import row_blocks

Tensor = BcqWeight | StoredTensor
_CHUNK = 1 << 22


@dataclass(slots=True)
class ValueDifference:
    """How far values differ; a NaN equals a NaN, and -0 equals 0."""

    elements: int = 0
    different: int = 0
    largest: float = 0.0

    def add(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        """Take in a block of both sides."""
        left, right = float64_of(a), float64_of(b)
        self.elements += left.size
        unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
        count = int(np.count_nonzero(unequal))
        if count:
            self.different += count
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.abs(left[unequal] - right[unequal])
            gap[np.isnan(gap)] = np.inf  # a number against a NaN, or opposite infinities
            self.largest = max(self.largest, float(gap.max()))

    def as_dict(self) -> dict[str, Any]:
        """For JSON output, which has no infinity: null."""
        largest = self.largest if np.isfinite(self.largest) else None
        return {"elements": self.elements, "different": self.different, "max_abs_difference": largest}


@dataclass(slots=True)
class Difference:
    """A tensor that both checkpoints have and that differs.

    ``kind`` is ``description`` (with ``details``) or ``content`` (with the ``parts`` that differ; for a dense tensor
    there are none). ``values`` is None where they were not compared.
    """

    name: str
    kind: str
    details: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    values: ValueDifference | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "details": self.details,
            "parts": self.parts,
            "values": None if self.values is None else self.values.as_dict(),
        }


@dataclass(slots=True)
class Comparison:
    """The outcome; ``unread`` of the ``equal_count`` tensors are equal by their files' digests alone."""

    equal_count: int = 0
    unread: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.differences)

    @property
    def counts(self) -> dict[str, int]:
        kinds = [difference.kind for difference in self.differences]
        return {
            "equal": self.equal_count,
            "unread": self.unread,
            "only_a": len(self.only_a),
            "only_b": len(self.only_b),
            "description": kinds.count("description"),
            "content": kinds.count("content"),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "counts": self.counts,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "differences": [difference.as_dict() for difference in self.differences],
        }


def compare(a: Checkpoint, b: Checkpoint, *, values: bool = False) -> Comparison:
    """Compare every weight and dense tensor; ``values``: also those of tensors that are described differently."""
    names_a, names_b = set(a), set(b)
    found = Comparison(only_a=sorted(names_a - names_b, key=natural), only_b=sorted(names_b - names_a, key=natural))
    for name in sorted(names_a & names_b, key=natural):
        left, right = a[name], b[name]
        details = _description(left, right)
        if details:
            seen = _value_difference(left, right) if values and left.shape == right.shape else None
            found.differences.append(Difference(name, "description", details, values=seen))
        elif _same_digest(left, a, right, b):
            found.equal_count += 1
            found.unread += 1
        elif (difference := _content(name, left, right)) is None:
            found.equal_count += 1
        else:
            found.differences.append(difference)
    return found


def _content(name: str, left: Tensor, right: Tensor) -> Difference | None:
    """How the bytes of two tensors of the same description differ; None where they do not."""
    other = _parts(right)
    parts = [suffix for suffix, part in _parts(left).items() if not _same_bytes(part, other[suffix])]
    if not parts:
        return None
    named = [suffix for suffix in parts if suffix]
    return Difference(name, "content", parts=named, values=_value_difference(left, right))


def _description(left: Tensor, right: Tensor) -> list[str]:
    """What the two descriptions say differently; empty when nothing."""
    if isinstance(left, BcqWeight) and isinstance(right, BcqWeight):
        return [] if left.spec == right.spec else _spec_differences(left.spec, right.spec)
    kinds = ["a quantized weight" if isinstance(side, BcqWeight) else "dense" for side in (left, right)]
    found = [f"{kinds[0]} / {kinds[1]}"] if kinds[0] != kinds[1] else []
    if left.dtype != right.dtype:
        found.append(f"dtype {left.dtype} / {right.dtype}")
    if left.shape != right.shape:
        found.append(f"shape {list(left.shape)} / {list(right.shape)}")
    return found


def _spec_differences(left: WeightSpec, right: WeightSpec) -> list[str]:
    from bcqfmt.weight.describe import scheme_text

    found = []
    for what, one, other in (
        ("shape", list(left.shape), list(right.shape)),
        ("dtype", left.dtype, right.dtype),
        ("scheme", scheme_text(left.scheme), scheme_text(right.scheme)),
        ("widths", list(left.widths), list(right.widths)),
    ):
        if one != other and not (what == "widths" and left.shape != right.shape):
            found.append(f"{what} {one} / {other}")
    groups = [["row" if s.row else s.group_size for s in side.scheme.segments] for side in (left, right)]
    if not found and groups[0] != groups[1]:
        found.append(f"group sizes {groups[0]} / {groups[1]}")
    return found or ["outlier segments"]


def _same_digest(left: Tensor, a: Checkpoint, right: Tensor, b: Checkpoint) -> bool:
    digest = _file_digest(left, a)
    return digest is not None and digest == _file_digest(right, b)


def _file_digest(tensor: Tensor, side: Checkpoint) -> str | None:
    """The digest of the file that holds a tensor, as the manifest states it; None without a manifest."""
    file = next(iter(_parts(tensor).values())).file
    if file is None or side.manifest is None:
        return None
    record = side.manifest.files.get(file.name)
    return None if record is None else record.sha256


def _parts(tensor: Tensor) -> dict[str, StoredTensor]:
    return tensor.parts() if isinstance(tensor, BcqWeight) else {"": tensor}


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:  # the number of outliers is not part of the description
        return False
    return all(np.array_equal(one, other) for one, other in zip(a.chunks(), b.chunks(), strict=True))


def _value_difference(left: Tensor, right: Tensor) -> ValueDifference | None:
    """None where a type has no values of its own to compare (below 8 bits, complex)."""
    for side in (left, right):
        if BITS[side.dtype] < 8 or side.dtype == "C64":
            return None
    found = ValueDifference()
    for one, other in _value_blocks(left, right):
        found.add(one, other)
    return found


def _value_blocks(left: Tensor, right: Tensor) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    weight = left if isinstance(left, BcqWeight) else right
    if isinstance(weight, BcqWeight):
        for rows in row_blocks(weight):
            yield _rows(left, rows), _rows(right, rows)
        return
    assert isinstance(left, StoredTensor)
    assert isinstance(right, StoredTensor)
    sizes = [numpy_dtype(side.dtype).itemsize for side in (left, right)]  # chunks of equally many elements
    chunks = zip(left.chunks(_CHUNK * sizes[0]), right.chunks(_CHUNK * sizes[1]), strict=True)
    for one, other in chunks:
        yield one.view(numpy_dtype(left.dtype)), other.view(numpy_dtype(right.dtype))


def _rows(tensor: Tensor, rows: tuple[int, int]) -> npt.NDArray[Any]:
    if isinstance(tensor, BcqWeight):
        return tensor.dequantize(rows=rows)
    lead = ((0, tensor.shape[0]),) if len(tensor.shape) == 3 else ()
    return tensor.read(*lead, rows)
