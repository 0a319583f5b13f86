"""What three readers make of the same file: ours, the safetensors library, and huggingface_hub's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bcqfmt.container.files import SourceFile
from bcqfmt.container.header import read_header
from bcqfmt.errors import BcqError, refuse

# tensor -> (dtype, shape, begin, end); begin and end count from the start of the data
Tensors = dict[str, tuple[str, tuple[int, ...], int, int]]


class Opinion(NamedTuple):
    """The tensors and metadata that a reader sees; None where it does not tell."""

    tensors: Tensors
    metadata: dict[str, str] | None


def ours(path: Path) -> Opinion | None:
    """The strict header reader; None when it refuses."""
    source = SourceFile(path)
    try:
        header = read_header(source, refuse)
    except BcqError:
        return None
    finally:
        source.close()
    assert header is not None
    return Opinion({name: tuple(entry) for name, entry in header.tensors.items()}, dict(header.metadata))  # type: ignore[misc]


def of_safetensors(path: Path) -> Opinion | None:
    """The reference reader."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy", backend="pread") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            metadata = opened.metadata() or {}
            order = list(opened.offset_keys()) if hasattr(opened, "offset_keys") else None
    except (SafetensorError, OSError):
        return None
    return Opinion(_placed(path, found, order), metadata)


def of_hub(path: Path) -> Opinion | None:
    """huggingface_hub's parser of local files, the one it uses on range reads too."""
    from huggingface_hub import parse_local_safetensors_file_metadata
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        found = parse_local_safetensors_file_metadata(path)
    except (SafetensorsParsingError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # it does not wrap everything that a malformed header makes it raise
    tensors = {name: (str(info.dtype), tuple(info.shape), *info.data_offsets) for name, info in found.tensors.items()}
    return Opinion(tensors, dict(found.metadata or {}))  # type: ignore[arg-type]


def _placed(path: Path, found: dict[str, tuple[str, tuple[int, ...]]], order: list[str] | None) -> Tensors:
    """The library does not tell offsets; it accepts contiguous files only, so order and sizes give them."""
    from bcqfmt.container.dtypes import nbytes_of

    assert order is not None
    placed: Tensors = {}
    at = 0
    for name in order:
        dtype, shape = found[name]
        size = nbytes_of(dtype, shape)
        placed[name] = (dtype, shape, at, at + size)
        at += size
    return placed
