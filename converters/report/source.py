"""Where a BCQ folder came from and what it weighs, as its manifest tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.manifest import Manifest

__all__ = ["SourceFacts", "source_facts"]


@dataclass(slots=True)
class SourceFacts:
    """``format`` is empty where no source is recorded, ``dense`` for a quantized model; sizes are in bytes."""

    format: str = ""
    files: dict[str, int] = field(default_factory=dict)
    restorable: bool = False  # everything of the source comes back, byte for byte
    archive: int = 0  # what that costs, in files of its own
    folder: int = 0  # the whole BCQ folder

    @property
    def converted(self) -> bool:
        """Whether this came, without loss, from another quantized layout."""
        return self.format not in ("", "dense")

    @property
    def nbytes(self) -> int:
        """All files of the source."""
        return sum(self.files.values())


def source_facts(manifest: Manifest | None) -> SourceFacts:
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
