"""Export to GGUF: one file that llama.cpp loads, with the values that the BCQ folder has.

Every type is chosen before anything is written (`choice`); every block is decoded again and compared while it is
written (`encode`).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.durable import OutputFile, make_folders, output_path, refuse_existing_file, refuse_overlap
from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import MAGIC
from bcqfmt.container.gguf.writer import header_bytes, padding, pair
from bcqfmt.converters.export.checks import check_folder, check_intact, check_target
from bcqfmt.converters.jobs.pool import WORKERS
from bcqfmt.converters.source.gguf import split_names
from bcqfmt.errors import error, escape
from bcqfmt.weight.weight import BcqWeight

from .encode import Error
from .metadata import metadata_of
from .tensors import Tensor, tensors_of

# values of general.file_type
_FILE_TYPES: Final = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
_QUANTIZATION_VERSION: Final = 2


@dataclass(slots=True)
class GgufExport:
    """What was written. ``metadata``: the file that the key values are from; ``error`` of all weights together."""

    metadata: str
    tensors: list[Tensor]
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    error: Error = field(default_factory=Error)

    @property
    def weights(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.choice is not None]

    @property
    def exact(self) -> bool:
        return all(tensor.choice is None or tensor.choice.exact for tensor in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": "gguf",
            "exact": self.exact,
            "weights": len(self.weights),
            "dense": len(self.tensors) - len(self.weights),
            "bytes": self.nbytes,
            "metadata": self.metadata,
            "error": _error_dict(self.error),
            "tensors": [_tensor_dict(tensor) for tensor in self.weights],
            "notes": self.notes,
        }


def export_gguf(
    checkpoint: Checkpoint,
    target: Path,
    *,
    like: Path | None = None,
    allow_rounding: bool = False,
    overwrite: bool = False,
    tick: Callable[[int], None] | None = None,
) -> GgufExport:
    """Write ``checkpoint``, a BCQ folder, to the file ``target``; all of it or nothing.

    ``like``: a GGUF file of the same model, whose key values are taken. A weight that no type holds exactly ends the
    export with BCQ-E616, unless ``allow_rounding``: then it gets the nearest type, and the result has the error.
    """
    check_folder(checkpoint)
    meta = metadata_of(checkpoint, like)  # first: nobody should correct a name only to hear that there can be no file
    target = _checked(checkpoint, target, like, overwrite)
    notes = list(meta.notes)
    tensors = tensors_of(checkpoint, meta, notes)
    if not allow_rounding:
        _refuse_rounding(tensors)
    result = GgufExport(meta.origin, tensors, notes=notes)
    pairs = meta.pairs if meta.own else [*meta.pairs, *_type_pairs(tensors)]
    header = header_bytes(pairs, [(tensor.name, tensor.type, tensor.shape) for tensor in tensors])
    result.nbytes = len(header) + sum(tensor.nbytes + padding(tensor.nbytes) for tensor in tensors)
    check_intact(checkpoint)
    make_folders(target.parent)
    with OutputFile(target, result.nbytes) as output, ThreadPoolExecutor(WORKERS) as pool:
        output.write(header)
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks(partial(_in_order, pool)):
                output.write(chunk.data)
                written += chunk.size
                if tick is not None:
                    tick(chunk.size)
            if written != tensor.nbytes:
                raise error("BCQ-E613", target.name, tensor.name, f"{written} bytes made", f"{tensor.nbytes}")
            output.write(bytes(padding(written)))
            result.error.add(tensor.error)
    return result


def _in_order(pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map` on the threads of the pool, a few items ahead."""
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for job in waiting:
            job.cancel()


def _checked(checkpoint: Checkpoint, target: Path, like: Path | None, overwrite: bool) -> Path:
    """The path to write to; errors of the caller."""
    target = output_path(target)
    if target.suffix != ".gguf":
        found = "a name without .gguf"
        expected = "the name of a file"
        raise error("BCQ-E302", str(target), found=found, expected=expected, hint=f"call it {target.name}.gguf")
    check_target(checkpoint, target)
    if like is not None:
        for name in split_names(like.name):
            refuse_overlap(target, like.parent / name, "the donor")
    refuse_existing_file(target, overwrite=overwrite)
    if os.path.lexists(target) and not _is_gguf(target):
        hint = "choose another name, or remove it yourself if it is not needed"
        raise error("BCQ-E401", str(target), found="no GGUF file", expected="one to replace, or nothing", hint=hint)
    return target


def _is_gguf(path: Path) -> bool:
    if not path.is_file() or path.is_symlink():
        return False
    with closing(SourceFile(path)) as file:
        return file.read(0, min(file.size, len(MAGIC))).tobytes() == MAGIC


def _type_pairs(tensors: list[Tensor]) -> list[bytes]:
    """What most of the file is."""
    most: Counter[str] = Counter()
    for tensor in tensors:
        most[tensor.type] += tensor.nbytes
    number = _FILE_TYPES.get(most.most_common(1)[0][0])
    stated = [pair("general.file_type", "u32", number)] if number is not None else []
    return [*stated, pair("general.quantization_version", "u32", _QUANTIZATION_VERSION)]


def _refuse_rounding(tensors: list[Tensor]) -> None:
    wrong = [(tensor, tensor.choice) for tensor in tensors if tensor.choice is not None and not tensor.choice.exact]
    if not wrong:
        return
    first, choice = wrong[0]
    found = choice.found + (f" (and {len(wrong) - 1} more weights)" if len(wrong) > 1 else "")
    hint = f"--allow-rounding writes it as {first.type}, the nearest type, and tells the error; --to dense always works"
    raise error("BCQ-E616", tensor=first.names[0], found=found, expected=choice.expected, hint=hint)


def _tensor_dict(tensor: Tensor) -> dict[str, Any]:
    choice = tensor.choice
    assert choice is not None
    size = sum(member.size for member in tensor.members if isinstance(member, BcqWeight))
    return {
        "weight": [escape(name, 512) for name in tensor.names],
        "tensor": tensor.name,
        "type": tensor.type,
        "bits": round(8 * tensor.nbytes / size, 4),
        "exact": choice.exact,
        "reason": choice.found,
        "error": None if choice.exact else _error_dict(tensor.error),
    }


def _error_dict(found: Error) -> dict[str, float]:
    return {"relative_rms": found.relative, "largest": found.largest}
