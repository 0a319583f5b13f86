"""The tensors of a module, gathered and checked against what its layout prescribes, before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape

Kinds = Mapping[str, tuple[Sequence[str], Sequence[int]]]  # suffix -> element types and numbers of dimensions
_SHOWN = 5  # names in a message


def prefixes(source: SourceCheckpoint, suffix: str) -> list[str]:
    """What stands before ``.suffix`` in the names of tensors, in the order of the files."""
    ending = f".{suffix}"
    return [name.removesuffix(ending) for name in source.tensors if name.endswith(ending) and name != ending]


def gather(
    source: SourceCheckpoint, name: str, kinds: Kinds, optional: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """The tensors of a module by suffix: BCQ-E603 when one is missing, BCQ-E604 when one is of other kind or empty."""
    tensors = {s: source.tensors[f"{name}.{s}"] for s in kinds if f"{name}.{s}" in source.tensors}
    required = [suffix for suffix in kinds if suffix not in optional]
    if not tensors.keys() >= set(required):
        raise _incomplete(source, name, next(iter(tensors)), required)
    for suffix, tensor in tensors.items():
        dtypes, ranks = kinds[suffix]
        if tensor.dtype not in dtypes or len(tensor.shape) not in ranks or 0 in tensor.shape:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            wanted = f"{' or '.join(dtypes)} of {' or '.join(map(str, ranks))} dimensions, none of them 0"
            raise error("BCQ-E604", source.home[tensor.name], tensor.name, found, wanted)
    return tensors


def _incomplete(source: SourceCheckpoint, name: str, present: str, required: Sequence[str]) -> BcqError:
    """BCQ-E603 for a module that has the tensor ``present`` and not all ``required`` ones; others like it are named."""

    def missing(module: str) -> list[str]:
        return [suffix for suffix in required if f"{module}.{suffix}" not in source.tensors]

    found = f"{present} without {', '.join(missing(name))}"
    lacking = [module for module in prefixes(source, present) if missing(module)]
    if len(lacking) > 1:
        shown = escape(", ".join(lacking[:_SHOWN])) + (" ..." if len(lacking) > _SHOWN else "")
        found += f"; {len(lacking)} modules are incomplete: {shown}"
    return error("BCQ-E603", source.home[f"{name}.{present}"], name, found, "all tensors of every module")


def expect(
    source: SourceCheckpoint,
    tensor: StoredTensor,
    dtypes: Sequence[str],
    shape: tuple[int, ...],
    why: str,
    hint: str | None = None,
) -> None:
    """BCQ-E604 unless the tensor has one of the types and this shape; ``why``: what the shape follows from."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        expected = f"{' or '.join(dtypes)} {list(shape)} {why}"
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise error("BCQ-E604", source.home[tensor.name], tensor.name, found, expected, hint)


def columns_per_group(source: SourceCheckpoint, name: str, stated: int, columns: int) -> int:
    """A stated group size as a number of columns: -1 is the whole row, and none is longer than that."""
    size = columns if stated == -1 else min(stated, columns)
    if size < 8:  # the format's smallest group
        raise error("BCQ-E608", source.folder.name, name, f"group size {stated} over {columns} columns", "8 and more")
    return size


def padded_groups(columns: int, size: int) -> int:
    """The number of groups with the padding that AWQ's kernels for one token want."""
    multiple = {32: 4, 64: 2}.get(size, 1)
    groups = -(-columns // size)
    return 8 * multiple * -(-groups // (8 * multiple))
