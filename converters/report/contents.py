"""What a report on a BCQ checkpoint says: sizes, bits, where it came from, and errors.

Errors are those that `bcqfmt quantize` has recorded, or those measured against a dense model. What was converted from
another layout has none against its source: the conversion rebuilt and compared every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.manifest import Manifest
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.shards import natural
from bcqfmt.container.files import read_small
from bcqfmt.converters.jobs.model_card import perplexity_in
from bcqfmt.converters.methods.errors import Sums
from bcqfmt.converters.quantize.record import QuantizationRecord, read_record
from bcqfmt.converters.source.front_matter import CARD
from bcqfmt.errors import BcqError
from bcqfmt.version import __version__
from bcqfmt.weight.describe import PART_KINDS, part_kind, scheme_text

_CARD_BYTES = 1 << 20


@dataclass(slots=True)
class WeightRow:
    """One quantized weight; the errors are None where nothing is known, or where they are infinite (``endless``)."""

    name: str
    kind: str
    shape: list[int]
    dtype: str
    scheme: str
    bytes: int
    bits_per_weight: float
    recipe: int | None = None
    mse: float | None = None
    relative: float | None = None
    sqnr_db: float | None = None
    endless: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class DenseRow:
    """One tensor that is stored as it is; ``reason`` is empty where nothing is recorded."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    reason: str = ""


@dataclass(slots=True)
class SourceFacts:
    """``format`` is empty where no source is recorded, ``dense`` for a quantized model; sizes are in bytes."""

    format: str = ""
    files: dict[str, int] = field(default_factory=dict)
    restorable: bool = False  # everything of the source comes back, byte for byte
    archive: int = 0  # what that costs, in files of its own
    folder: int = 0  # the BCQ folder, manifest and documentation apart

    @property
    def converted(self) -> bool:
        """Whether this came, without loss, from another quantized layout."""
        return self.format not in ("", "dense")

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


@dataclass(slots=True)
class Report:
    """Everything; ``weights`` and ``dense`` in natural order of their names."""

    name: str
    version: str
    source: str
    features: list[str]
    parts: dict[str, int]
    weights: list[WeightRow]
    dense: list[DenseRow]
    recipes: list[dict[str, Any]] = field(default_factory=list)
    total: dict[str, Any] = field(default_factory=dict)
    title: str = ""  # the heading of the model card, where that is ours; else the folder's name
    perplexity: str = ""  # as `bcqfmt eval --card` has put it into the card
    kinds: list[dict[str, Any]] = field(default_factory=list)
    origin: SourceFacts = field(default_factory=SourceFacts)
    against: str = ""  # the dense model that errors were measured against; empty: they are the recorded ones

    @property
    def has_errors(self) -> bool:
        """Whether errors are known."""
        return bool(self.recipes or self.against)

    def worst(self) -> list[WeightRow]:
        """The weights, those furthest off first; the largest first where no error is known."""
        if self.has_errors:
            return sorted(self.weights, key=lambda row: (-_off(row), natural(row.name)))
        return sorted(self.weights, key=lambda row: (-row.bytes, natural(row.name)))

    def as_dict(self) -> dict[str, Any]:
        return {"generator": {"name": "bcqfmt", "version": __version__}, **asdict(self)}


def make_report(checkpoint: Checkpoint, measured: Mapping[str, Sums] | None = None, against: str = "") -> Report:
    """Read the headers of a BCQ folder or file, and the record of its quantization where there is one.

    ``measured``: errors found by :func:`bcqfmt.converters.report.measure.measure`, in place of the recorded ones.
    """
    record = read_record(checkpoint.path) if checkpoint.path.is_dir() else None
    parts: dict[str, int] = dict.fromkeys(PART_KINDS, 0)
    weights = []
    for name, weight in checkpoint.weights():
        for suffix, part in weight.parts().items():
            parts[part_kind(suffix)] += part.nbytes
        row = WeightRow(
            name, kind_of(name), list(weight.shape), weight.dtype, scheme_text(weight.scheme), weight.nbytes,
            weight.bits_per_weight,
        )  # fmt: skip
        weights.append(row)
    sums = _sums(weights, record) if measured is None else dict(measured)
    for row in weights:
        _add_errors(row, record, sums, recorded=measured is None)
    reasons = record.dense if record is not None else {}
    dense = [
        DenseRow(name, tensor.dtype, list(tensor.shape), tensor.nbytes, reasons.get(name, ""))
        for name, tensor in checkpoint.dense()
    ]
    weights.sort(key=lambda row: natural(row.name))
    dense.sort(key=lambda row: natural(row.name))
    origin = _source_facts(checkpoint.manifest)
    title, perplexity = _card(checkpoint.path)
    return Report(
        name=checkpoint.path.name or checkpoint.path.resolve().name,
        title=title,
        perplexity=perplexity,
        version=checkpoint.version,
        source=origin.format,
        features=checkpoint.features,
        parts={kind: size for kind, size in parts.items() if size},
        weights=weights,
        dense=dense,
        recipes=record.recipes if record is not None else [],
        total={"file_bytes": sum(file.source.size for file in checkpoint.files()), **_total(weights, dense, sums)},
        kinds=_kinds(weights, sums),
        origin=origin,
        against=against,
    )


def _card(path: Path) -> tuple[str, str]:
    """Title and perplexity from the model card of a folder, each empty where there is none."""
    try:
        text = read_small(path / CARD, _CARD_BYTES, CARD, "BCQ-V511").decode(errors="replace")
    except BcqError:
        return "", ""
    heading = next((line[2:].strip() for line in text.split("\n") if line.startswith("# ")), "")
    return heading, perplexity_in(text)


def _source_facts(manifest: Manifest | None) -> SourceFacts:
    """The facts; without a manifest (a lone file) nothing is known."""
    if manifest is None:
        return SourceFacts()
    archived = {path: record.size for path, record in manifest.files.items() if path.startswith(f"{SOURCE}/")}
    source = manifest.source or {}
    return SourceFacts(
        format=str(source.get("format", "")),
        files={path: entry["size"] for path, entry in source.get("files", {}).items()},
        restorable=bool(archived),
        archive=sum(archived.values()),
        folder=sum(record.size for record in manifest.files.values()),
    )


def kind_of(name: str) -> str:
    """What a weight is called within its layer: ``q_proj``, ``experts.down_proj``."""
    words = [word for word in name.removesuffix(".weight").split(".") if not word.isdecimal()]
    return ".".join(words[-2:]) if len(words) > 1 and "expert" in words[-2] else words[-1] if words else name


def _sums(rows: Iterable[WeightRow], record: QuantizationRecord | None) -> dict[str, Sums]:
    """What is recorded of these weights, if it is of their shape."""
    found = {}
    for row in rows:
        entry = record.weights.get(row.name) if record is not None else None
        if entry is not None and entry["shape"] == row.shape:
            found[row.name] = Sums(entry["power"], entry["noise"], row.size)
    return found


def _add_errors(row: WeightRow, record: QuantizationRecord | None, sums: Mapping[str, Sums], recorded: bool) -> None:
    entry = record.weights.get(row.name) if record is not None else None
    if entry is not None and entry["shape"] == row.shape:
        row.recipe = entry["recipe"]
    if row.name not in sums:
        return
    own = entry if recorded and entry is not None else _figures([row], sums)
    row.mse, row.relative, row.sqnr_db = own["mse"], own["relative"], own["sqnr_db"]
    row.endless = math.isinf(sums[row.name].noise)


def _total(weights: list[WeightRow], dense: list[DenseRow], measured: Mapping[str, Sums]) -> dict[str, Any]:
    size, nbytes = sum(row.size for row in weights), sum(row.bytes for row in weights)
    others, other_bytes = sum(math.prod(row.shape) for row in dense), sum(row.bytes for row in dense)
    return {
        "weights": len(weights),
        "dense": len(dense),
        "parameters": size + others,
        "quantized_parameters": size,
        "weight_bytes": nbytes,
        "dense_bytes": other_bytes,
        "bits_per_weight": nbytes * 8 / size if size else None,
        "overall_bits": (nbytes + other_bytes) * 8 / (size + others) if size + others else None,
        **_figures(weights, measured),
    }


def _kinds(weights: list[WeightRow], measured: Mapping[str, Sums]) -> list[dict[str, Any]]:
    """The same by kind of layer."""
    found = []
    for kind in sorted({row.kind for row in weights}, key=natural):
        rows = [row for row in weights if row.kind == kind]
        size, nbytes = sum(row.size for row in rows), sum(row.bytes for row in rows)
        counts = {"kind": kind, "weights": len(rows), "parameters": size, "bytes": nbytes}
        found.append({**counts, "bits_per_weight": nbytes * 8 / size, **_figures(rows, measured)})
    return found


def _figures(rows: Iterable[WeightRow], measured: Mapping[str, Sums]) -> dict[str, Any]:
    """Of several weights together; those whose error is infinite are left out."""
    sums = Sums(0.0, 0.0, 0)
    for row in rows:
        own = measured.get(row.name)
        if own is not None and math.isfinite(own.noise):
            sums += own
    return dict(sums.figures()) if sums.size else {"mse": None, "relative": None, "sqnr_db": None}


def _off(row: WeightRow) -> float:
    """How far off, for sorting: an error that is not known is -1, an infinite one comes first."""
    if row.mse is None:
        return math.inf if row.endless else -1.0
    return math.inf if row.relative is None and row.mse else row.relative or 0.0
