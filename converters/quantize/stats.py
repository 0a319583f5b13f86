"""The file of calibration statistics: a safetensors file that `bcqfmt calibrate` writes and the methods read.

| tensor | dtype | shape | content |
|---|---|---|---|
| `<input>.square_sum` | F64 | [in] | sum over tokens of x^2 |
| `<input>.hessian` | F32 | [in, in] | sum over tokens of x x^T; neither doubled nor damped |
| `<weight>.hessian` | F32 | [in, in] | the same for one weight, where tokens count for each of them differently |

An input is called after the first (by code points) of the weights that read it. In a Hessian tokens may be weighted
(`weighting` of the record, one of `WEIGHTINGS`), in a square_sum they are not. ``__metadata__`` has `bcqfmt_stats`, a
canonical JSON text: version, the model's fingerprint, what was run, and for every input the weights that share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from bcqfmt.checkpoint.manifest import FileRecord
from bcqfmt.checkpoint.writer import write_tensors
from bcqfmt.container.files import SourceFile, named
from bcqfmt.container.header import require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, canonical, parse
from bcqfmt.converters.methods.protocol import InputStats
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape

KEY: Final = "bcqfmt_stats"
WEIGHTINGS: Final = ("none", "tokens", "loss")
_COUNTS: Final = ("rows", "seq", "tokens", "seed")
# what a configuration says about files and tools rather than about the model
_PASSING: Final = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_SAMPLE = 1024  # bytes hashed at either end of a tensor: two fine-tunings of one model differ there


class StatsFile(NamedTuple):
    """An opened file. ``record``: the metadata; ``inputs``: weight name -> name of its input; tensors by name."""

    path: Path
    record: dict[str, Any]
    inputs: dict[str, str]
    tensors: dict[str, StoredTensor]

    def check(self, source: SourceCheckpoint) -> None:
        """BCQ-E624 when the statistics were made with another model."""
        mine = fingerprint(source)
        stated = self.record["model"]
        differing = [what for what in mine if stated.get(what) != mine[what]]
        if differing:
            found = f"made with a model of other {' and '.join(differing)}"
            raise error("BCQ-E624", self.path.name, found=found, expected=f"statistics of {escape(source.folder.name)}")

    def of(self, name: str, *, hessian: bool = True) -> InputStats | None:
        """The statistics of a weight's input, read now; None where calibration did not see the weight."""
        leader = self.inputs.get(name)
        if leader is None:
            return None
        own = self.tensors.get(f"{name}.hessian", self.tensors[f"{leader}.hessian"])
        matrix = own.array() if hessian else None
        shared = tuple(self.record["inputs"][leader])
        return InputStats(self.tensors[f"{leader}.square_sum"].array(), matrix, self.record["tokens"], shared)


def fingerprint(source: SourceCheckpoint) -> dict[str, str]:
    """Digests of a model's configuration, of its tensors' names and shapes, and of samples of their numbers."""
    config = {key: value for key, value in source.config.items() if key not in _PASSING}
    shapes = {name: [tensor.dtype, *tensor.shape] for name, tensor in source.tensors.items()}
    numbers = hashlib.sha256()
    for name in sorted(source.tensors):
        tensor = source.tensors[name]
        model = source.models[source.home[name]]
        size = min(_SAMPLE, tensor.nbytes)
        for start in (tensor.offset, tensor.offset + tensor.nbytes - size):
            numbers.update(model.source.read(start, size).data)
    return {
        "configuration": _digest(repr(_ordered(config))),
        "tensors": _digest(canonical(shapes)),
        "numbers": numbers.hexdigest(),
    }


def stats_tensors(
    leader: str, square_sum: Any, hessian: Any, others: Mapping[str, Any] | None = None
) -> dict[str, StoredTensor]:
    """The tensors of an input: float64 ``[in]`` and float32 ``[in, in]`` arrays; ``others``: Hessians by weight."""
    pairs = {f"{leader}.square_sum": square_sum, f"{leader}.hessian": hessian}
    pairs |= {f"{name}.hessian": one for name, one in (others or {}).items()}
    return {name: StoredTensor.from_array(name, array) for name, array in pairs.items()}


def write_stats(path: Path, tensors: Mapping[str, StoredTensor], record: Mapping[str, Any]) -> FileRecord:
    """Write the file, whole or not at all; tensors are streamed."""
    return write_tensors(path, tensors, {"format": "pt", KEY: canonical({"version": 1, **record})})


def open_stats(path: str | Path) -> StatsFile:
    """Open and check a file of statistics; BCQ-E629 when it is none."""
    source = SourceFile(named(path), Path(path).name)
    header = require_header(source)
    record = _record(source.shown, header.metadata)
    tensors = {name: StoredTensor.in_file(name, header, source) for name in header.tensors}
    inputs: dict[str, str] = {}
    for leader, weights in record["inputs"].items():
        sums, matrix = tensors.get(f"{leader}.square_sum"), tensors.get(f"{leader}.hessian")
        fits = sums is not None and matrix is not None and sums.dtype == "F64" and matrix.dtype == "F32"
        if not fits or sums is None or matrix is None or matrix.shape != sums.shape * 2 or len(sums.shape) != 1:
            raise _malformed(source.shown, f"no square_sum and hessian of '{escape(leader)}'")
        for weight in weights:
            own = tensors.get(f"{weight}.hessian", matrix)
            if (own.dtype, own.shape) != (matrix.dtype, matrix.shape):
                raise _malformed(source.shown, f"a Hessian of '{escape(weight)}' that is not that of its input")
            if inputs.setdefault(weight, leader) != leader:
                raise _malformed(source.shown, f"'{escape(weight)}' has two inputs")
    return StatsFile(Path(path), record, inputs, tensors)


def _record(shown: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        raise _malformed(shown, f"no {KEY} in its metadata")
    try:
        record = parse(metadata[KEY].encode())
    except JsonFault as fault:
        raise _malformed(shown, escape(fault.detail)) from None
    if not isinstance(record, dict) or record.get("version") != 1:
        raise _malformed(shown, "a version other than 1")
    model, inputs = record.get("model"), record.get("inputs")
    counts = all(type(record.get(name)) is int and record[name] >= 0 for name in _COUNTS)
    lists = isinstance(inputs, dict) and all(
        isinstance(weights, list) and weights and all(isinstance(weight, str) for weight in weights)
        for weights in inputs.values()
    )
    record.setdefault("weighting", "none")
    if not isinstance(model, dict) or not counts or not lists or record["weighting"] not in WEIGHTINGS:
        raise _malformed(shown, "a record without model, inputs or counts")
    return record


def _malformed(shown: str, found: str) -> BcqError:
    return error("BCQ-E629", shown, found=found, expected="a file that bcqfmt calibrate wrote")


def _ordered(value: Any) -> Any:
    """A configuration in one order, whatever order its keys were written in; it may hold numbers of any kind."""
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
