"""Writing: canonical bytes, streamed, hashed on the way, under their final name only when complete."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy.typing as npt

from bcqfmt import limits
from bcqfmt.codes import CODES
from bcqfmt.container.durable import OutputFile, folder_in_progress, make_folders, output_path, write_file
from bcqfmt.container.header import header_bytes, layout
from bcqfmt.container.read_ahead import read_ahead
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import JsonFault, canonical, parse
from bcqfmt.errors import error, escape, refuse
from bcqfmt.version import __version__
from bcqfmt.weight import arguments, checks
from bcqfmt.weight.scheme import features_of
from bcqfmt.weight.scheme_json import entry_json
from bcqfmt.weight.weight import BcqWeight

from .descriptor import Descriptor, descriptor_json, parse_weights, reserved_name
from .folder import CONFIG, INDEX, MANIFEST, config_entries, is_documentation
from .manifest import FileRecord, Manifest, WeightRecord, manifest_bytes, relative_path
from .shards import Unit, plan_shards, shard_names
from .validation import validate

DEFAULT_SHARD_BYTES = 5_000_000_000
_PIECE = 1 << 22  # bytes handed over at a time
Tensor = BcqWeight | StoredTensor | npt.NDArray[Any]
_TENSOR = "a BcqWeight, StoredTensor or numpy array"


def save(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    generator: Mapping[str, str] | None = None,
    ignorable: Mapping[str, Any] | None = None,
) -> None:
    """Write a BCQ folder, or one file when ``path`` ends in ``.safetensors``.

    ``tensors``: name -> :class:`BcqWeight`, :class:`StoredTensor` or numpy array (dense; also a torch tensor on the
    CPU, of a type that numpy has). ``config``: the model's config.json; ``quantization_config`` is added. ``files``:
    other files of the folder, path -> content. The same input gives the same bytes everywhere. Content is checked
    first; nothing appears under ``path`` until all is written.
    """
    target = output_path(path)
    _check_texts(ignorable, generator, config)
    _check_mapping(tensors)
    units = [_unit(name, tensor) for name, tensor in tensors.items()]
    weights = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, BcqWeight)}
    _check(weights)
    if target.suffix == ".safetensors":
        if target.exists() and not overwrite:
            raise error("BCQ-E401", str(target), found="it is there already", expected="a new file")
        write_shard(target, units, weights, ignorable, check=_validated)
        return
    extra = dict(files or {})
    _check_paths([*extra, CONFIG, INDEX, MANIFEST])
    for name in extra:
        if (
            not relative_path(name)
            or name.startswith(".")
            or name in (CONFIG, INDEX, MANIFEST)
            or name.endswith(".safetensors")
        ):
            found = "a file name that is not free"
            raise error("BCQ-E302", name, found=found, expected="a side file with a plain relative path")
    with folder_in_progress(target, overwrite=overwrite, like=MANIFEST) as work:
        _write_folder(work, units, weights, dict(config or {}), extra, max_shard_size, generator, ignorable)
        _validated(work)


def _write_folder(
    work: Path,
    units: list[Unit],
    weights: Mapping[str, BcqWeight],
    config: dict[str, Any],
    files: dict[str, bytes],
    max_shard_size: int,
    generator: Mapping[str, str] | None,
    ignorable: Mapping[str, Any] | None,
) -> None:
    shards = plan_shards(units, max_shard_size)
    names = shard_names(len(shards))
    records: dict[str, FileRecord] = {}
    found: dict[str, WeightRecord] = {}
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        records[name] = write_shard(work / name, shard, weights, ignorable)
        for unit in shard:
            weight_map.update(dict.fromkeys(unit.tensors, name))
            if unit.is_weight:
                found[unit.name] = WeightRecord(weights[unit.name].spec, name)
    if len(shards) > 1:
        total = sum(unit.nbytes for unit in units)
        files[INDEX] = _pretty({"metadata": {"total_size": total}, "weight_map": weight_map})
    features = features_of(weight.spec for weight in weights.values())
    config |= config_entries(features)
    files[CONFIG] = _pretty(config)
    for name, data in sorted(files.items()):
        make_folders((work / name).parent)
        write_file(work / name, data)
        if not is_documentation(name):
            records[name] = FileRecord.of(data)
    manifest = Manifest(
        generator=dict(generator or {"name": "bcqfmt", "version": __version__}),
        weights=found,
        files=records,
        ignorable=None if ignorable is None else dict(ignorable),
    )
    write_file(work / MANIFEST, manifest_bytes(manifest))


def write_shard(
    path: Path,
    units: list[Unit],
    weights: Mapping[str, BcqWeight],
    ignorable: Mapping[str, Any] | None = None,
    tick: Callable[[int], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> FileRecord:
    """One BCQ file of some units; ``tick`` gets the bytes written since the last call and may raise to stop.

    ``check`` is called with the finished temporary file and raises when it must not get its final name.
    """
    tensors = {name: tensor for unit in units for name, tensor in unit.tensors.items()}
    specs = {unit.name: weights[unit.name].spec for unit in units if unit.is_weight}
    descriptor = Descriptor(weights=specs, ignorable=None if ignorable is None else dict(ignorable))
    text = {"format": "pt", "bcqfmt": descriptor_json(descriptor)}
    return write_tensors(path, tensors, text, tick, check)


def write_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
    tick: Callable[[int], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> FileRecord:
    """One safetensors file, canonical: header first, then every tensor in file order, a chunk at a time.

    A thread makes the next chunks while these are hashed and written. ``tick`` and ``check``: see :func:`write_shard`.
    """
    entries = layout({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    head = header_bytes(entries, metadata)
    size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    state = hashlib.sha256(head)
    with OutputFile(path, size) as output:
        output.write(head)
        # a chain, because no piece of a tensor may be held while the next tensor is computed
        pieces = itertools.chain.from_iterable(tensors[name].chunks(_PIECE) for name in entries)
        with closing(read_ahead(pieces)) as stream:
            for chunk in stream:
                output.write(chunk.data, state)
                if tick is not None:
                    tick(chunk.size)
                del chunk  # the next tensor may need its memory
        if check is not None:
            check(output.temporary)
    return FileRecord(size, state.hexdigest())


def _unit(name: Any, tensor: Any) -> Unit:
    if not isinstance(name, str):
        raise error("BCQ-E302", found=f"a name of type {type(name).__name__}", expected="text")
    if isinstance(tensor, BcqWeight):
        return Unit.of_weight(BcqWeight(name, tensor.spec, tensor.parts()))
    if hasattr(tensor, "__array__"):  # of numpy, torch and others
        tensor = StoredTensor.from_array(name, arguments.array(tensor, name, _TENSOR))
    if not isinstance(tensor, StoredTensor):
        raise arguments.wrong(name, f"a {type(tensor).__name__}", _TENSOR)
    if not _encodable(name):
        raise error("BCQ-E302", tensor=name, found="a name with a lone surrogate", expected="text")
    if reserved_name(name):
        found = "a reserved or too long name"
        raise error("BCQ-V302", tensor=name, found=found, expected="another name for a dense tensor")
    return Unit.of_dense(tensor.renamed(name))


def _check(weights: Mapping[str, BcqWeight]) -> None:
    """Refuse weights that the validator would refuse."""

    def report(code: str, found: str, expected: str = "", weight: str = "") -> None:
        hint = "give the weight another name" if code == "BCQ-V213" else CODES["BCQ-E302"].hint  # no file is at fault
        raise error(code, tensor=weight, found=found, expected=expected, hint=hint)

    for name, weight in weights.items():
        spec = weight.spec
        parse_weights({name: entry_json(spec, 0)}, [spec.scheme], report)
        checks.check_content(spec, weight.parts(), checks.Place(refuse, weight=name))


def _check_mapping(tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        hint = 'give every tensor its name: save(path, {"layer.weight": weight})'
        raise arguments.wrong("tensors", f"a {type(tensors).__name__}", "a dict: name -> tensor", hint)


def _check_texts(
    ignorable: Mapping[str, Any] | None, generator: Mapping[str, str] | None, config: Mapping[str, Any] | None
) -> None:
    """Refuse JSON that would read back as something else."""
    for what, value in (("ignorable", ignorable), ("generator", generator), ("config", config)):
        if value is None:
            continue
        try:
            text = json.dumps(value) if what == "config" else canonical(value)
            deepest = limits.MAX_CONFIG_DEPTH if what == "config" else limits.MAX_JSON_DEPTH - 1
            back = parse(text.encode("utf-8"), integers_only=what != "config", deepest=deepest)
        except (JsonFault, ValueError, TypeError, RecursionError) as fault:
            raise error("BCQ-E302", found=f"{what}: {escape(str(fault))}", expected="plain JSON") from None
        if what != "config" and back != value:
            raise error("BCQ-E302", found=f"{what} with keys or values that JSON changes", expected="plain JSON")
    if generator is not None and (
        set(generator) != {"name", "version"} or not all(isinstance(v, str) for v in generator.values())
    ):
        raise error("BCQ-E302", found="generator", expected="name and version, both strings")


def _check_paths(names: list[str]) -> None:
    """Refuse a file name that is the folder of another file."""
    folders = {name[:i] for name in names for i, character in enumerate(name) if character == "/"}
    for name in names:
        if not _encodable(name) or name in folders:
            found = "a name that is no text, or that is a folder too"
            raise error("BCQ-E302", name, found=found, expected="another name")


def _encodable(text: str) -> bool:
    try:
        return bool(text.encode("utf-8")) or not text
    except UnicodeEncodeError:
        return False


def _validated(path: Path) -> None:
    """Raise the first error that the validator finds in what was written."""
    for finding in validate(path).errors[:1]:
        refuse(finding._replace(file="" if finding.file == path.name else finding.file))


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
