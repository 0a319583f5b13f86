"""Everything about one tensor: its description, its parts and where they lie, a look at its values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.folder import MANIFEST
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.container.dtypes import BITS, float64_of, numpy_dtype
from bcqfmt.container.files import SourceFile
from bcqfmt.container.header import header_of, require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error, nearest_names
from bcqfmt.weight.describe import segment_text
from bcqfmt.weight.scheme_json import scheme_json
from bcqfmt.weight.weight import BcqWeight

from .kinds import model_files

_FIRST = 8
_BLOCK = 1 << 22  # elements looked at together


@dataclass(slots=True)
class Values:
    """Smallest and largest finite value, how many are not finite, and the first few."""

    low: float | int | None = None
    high: float | int | None = None
    nonfinite: int = 0
    first: list[float | int] = field(default_factory=list)

    def add(self, block: npt.NDArray[Any]) -> None:
        """Take in the next values, in order."""
        flat = block.reshape(-1)
        numbers: npt.NDArray[Any] = flat if flat.dtype.kind in "iu" else float64_of(flat)
        if len(self.first) < _FIRST:
            self.first += numbers[: _FIRST - len(self.first)].tolist()
        if numbers.dtype.kind == "f":
            finite = np.isfinite(numbers)
            if not finite.all():
                self.nonfinite += int(numbers.size - np.count_nonzero(finite))
                numbers = numbers[finite]
        if numbers.size:
            low, high = numbers.min().item(), numbers.max().item()
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)

    def as_dict(self) -> dict[str, Any]:
        """For JSON output, which has no infinities: they become text."""
        first = [value if np.isfinite(value) else str(value) for value in self.first]
        return {"min": self.low, "max": self.high, "nonfinite": self.nonfinite, "first": first}


@dataclass(slots=True)
class Details:
    """One weight or dense tensor."""

    name: str
    tensor: BcqWeight | StoredTensor
    digest: str | None = None
    values: Values | None = None

    @property
    def parts(self) -> dict[str, StoredTensor]:
        """What is stored: the parts of a weight by suffix, or the tensor itself."""
        return self.tensor.parts() if isinstance(self.tensor, BcqWeight) else {"": self.tensor}

    def as_dict(self) -> dict[str, Any]:
        tensor = self.tensor
        found: dict[str, Any] = {
            "name": self.name,
            "kind": "weight" if isinstance(tensor, BcqWeight) else "dense",
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "elements": prod(tensor.shape),
            "bytes": tensor.nbytes,
            "sha256": self.digest,
            "values": None if self.values is None else self.values.as_dict(),
            "parts": [
                {
                    "part": suffix or None,
                    "name": part.name,
                    "dtype": part.dtype,
                    "shape": list(part.shape),
                    "file": None if part.file is None else part.file.name,
                    "offset": part.offset,
                    "bytes": part.nbytes,
                }
                for suffix, part in self.parts.items()
            ],
        }
        if isinstance(tensor, BcqWeight):
            found["bits_per_weight"] = tensor.bits_per_weight
            found["scheme"] = scheme_json(tensor.scheme)
            found["segments"] = [{"text": segment_text(s), "width": width} for s, width in tensor.segments]
        return found


def tensor_details(path: str | os.PathLike[str], name: str) -> Details:
    """The tensor ``name`` of a BCQ checkpoint, or of any other safetensors file or folder. Reads all its values."""
    place = Path(path)
    if not os.path.lexists(place):
        raise error("BCQ-E101", str(place), found="nothing of that name exists")
    if os.path.lexists(place / MANIFEST) if place.is_dir() else "bcqfmt" in header_of(place).metadata:
        with open_checkpoint(place) as checkpoint:
            tensor = checkpoint[name]
    else:
        tensor = _foreign(place, name)
    details = Details(name, tensor, tensor.digest() if isinstance(tensor, BcqWeight) else None)
    if BITS[tensor.dtype] >= 8 and tensor.dtype != "C64":
        details.values = Values()
        for block in _blocks(tensor):
            details.values.add(block)
    return details


def row_blocks(weight: BcqWeight) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold about ``_BLOCK`` values each, all matrices of a stack counted."""
    step = max(1, _BLOCK // (weight.spec.stack * weight.spec.columns))
    for start in range(0, weight.spec.out, step):
        yield start, min(start + step, weight.spec.out)


def _blocks(tensor: BcqWeight | StoredTensor) -> Iterator[npt.NDArray[Any]]:
    if isinstance(tensor, BcqWeight):
        for rows in row_blocks(tensor):
            yield tensor.dequantize(rows=rows)
    else:
        for chunk in tensor.chunks():
            yield chunk.view(numpy_dtype(tensor.dtype))


def _foreign(place: Path, name: str) -> StoredTensor:
    paths = [place / file for file in model_files(place)] if place.is_dir() else [place]
    names: list[str] = []
    for path in paths:
        source = SourceFile(path)
        header = require_header(source)
        names += header.tensors
        if name in header.tensors:
            return StoredTensor.in_file(name, header, source)
        source.close()
    found = f"not in this checkpoint{nearest_names(name, names)}"
    raise error("BCQ-E301", place.name, name, found, hint="check the spelling")
