"""One tensor: read, quantized, measured, and spooled until its shard is complete.

A method may take minutes for a weight, and how many outliers it finds is known only afterwards, while a shard's header
comes first. So weights wait, a few at a time in one file of the work folder, and the shard is put together from there:
memory holds one weight, and a run that is killed has lost a few weights and not a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.manifest import FileRecord
from bcqfmt.checkpoint.model_file import read_model_file
from bcqfmt.checkpoint.shards import Unit
from bcqfmt.checkpoint.writer import write_shard
from bcqfmt.container.files import SourceFile
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.methods.errors import Sums, square_sums
from bcqfmt.converters.methods.protocol import InputStats, Job, Method, Reading
from bcqfmt.converters.methods.stacking import stack
from bcqfmt.errors import error, refuse
from bcqfmt.weight.weight import BcqWeight

from .dense import read_matrix

__all__ = ["Finished", "Measured", "finite", "measured_again", "quantize_tensor", "read_spool", "write_spool"]


class Measured(NamedTuple):
    """A quantized weight, what its method noted, and how far off it is."""

    weight: BcqWeight
    notes: dict[str, Any]
    sums: Sums

    def record(self) -> dict[str, Any]:
        """What is recorded about it (JSON values); ten digits, which do not depend on how sums are taken."""
        found = {
            "shape": list(self.weight.shape),
            "bytes": self.weight.nbytes,
            "bits_per_weight": self.weight.bits_per_weight,
            **_recorded(self.sums),
        }
        return {**found, "notes": finite(self.notes)} if self.notes else found


class Finished(NamedTuple):
    """A quantized weight that was measured before, and what was recorded then."""

    weight: BcqWeight
    recorded: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """The same again."""
        return self.recorded


def quantize_tensor(
    tensor: StoredTensor, method: Method, stats: InputStats | None = None, threads: int = 1,
    target: npt.NDArray[np.float32] | None = None, lower: tuple[Reading, ...] = (),
) -> Measured:  # fmt: skip
    """Quantize a matrix, or every matrix of a stack on its own; the values compared are those that a reader gets.

    ``target``: what is quantized in place of a matrix, ``[out, in]``; the result is compared with the matrix.
    ``lower``: see :class:`Job`.
    """
    pieces, notes, sums = [], [], Sums(0.0, 0.0, 0)
    for index in range(tensor.shape[0] if len(tensor.shape) == 3 else 1):
        matrix = read_matrix(tensor, index)
        wanted = matrix if target is None else target
        made = method.quantize(Job(tensor.name, wanted, tensor.dtype, stats, threads, lower))
        power, noise = square_sums(matrix, made.weight, threads)
        if not math.isfinite(noise):
            raise error(
                "BCQ-E621",
                "",
                tensor.name,
                f"numbers that {tensor.dtype} cannot hold once they are rounded",
                "smaller ones",
            )
        sums += Sums(power, noise, matrix.size)
        pieces.append(made.weight)
        notes.append(made.notes)
        del matrix
    if len(tensor.shape) == 2:
        (weight,), (note,) = pieces, notes
    else:
        weight, note = stack(pieces), {"matrices": notes} if any(notes) else {}
    return Measured(BcqWeight(tensor.name, weight.spec, weight.parts()), note, sums)


def measured_again(tensor: StoredTensor, weight: BcqWeight, threads: int = 1) -> dict[str, float | None]:
    """What is recorded about the error of a weight, of a matrix whose numbers have changed."""
    matrix = read_matrix(tensor)
    return _recorded(Sums(*square_sums(matrix, weight, threads), matrix.size))


def write_spool(
    path: Path, made: Sequence[Measured | Finished], tick: Callable[[int], None] | None = None
) -> FileRecord:
    """Quantized weights as one BCQ file; their content is checked once more, as `bcqfmt.save` would."""
    weights = {one.weight.name: one.weight for one in made}
    for weight in weights.values():
        weight.check()
    return write_shard(path, [Unit.of_weight(weight) for weight in weights.values()], weights, tick=tick)


def read_spool(path: Path) -> tuple[SourceFile, dict[str, BcqWeight]]:
    """The weights of a spool file, their parts read when asked for; close the file when they are written."""
    source = SourceFile(path, path.name)
    file = read_model_file(source, refuse)
    assert file is not None  # refuse has raised otherwise
    return source, {name: BcqWeight(name, spec, file.parts(name)) for name, spec in file.specs.items()}


def _recorded(sums: Sums) -> dict[str, float | None]:
    numbers = {**sums.figures(), "power": sums.power, "noise": sums.noise}
    return {key: None if value is None else float(f"{value:.10g}") for key, value in numbers.items()}


def finite(value: Any) -> Any:
    """Notes as JSON can say them: infinities and NaNs become texts."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
