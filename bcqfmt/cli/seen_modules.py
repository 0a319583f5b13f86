"""The modules of a checkpoint that is not BCQ, as the converter sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bcqfmt.errors import BcqError, escape

from . import render
from .forecast import scheme_words

__all__ = ["module_rows", "module_table"]


def module_rows(path: Path) -> tuple[list[dict[str, Any]], str]:
    """A row for every module that would be converted, and why there is none if the converter refuses the source."""
    from bcqfmt.converters.layouts.protocol import Options
    from bcqfmt.converters.layouts.registry import find_modules
    from bcqfmt.converters.source.checkpoint import open_source

    try:
        source = open_source(path)
        _, modules = find_modules(source, Options(allow_nonfinite=True))
    except BcqError as fault:
        return [], str(fault)
    rows = []
    for module in modules:
        settings = module.settings
        shape = settings.get("shape") or (settings["n"], settings["k"])
        files = sorted({source.home[tensor.name] for tensor in module.tensors.values()})
        rows.append(
            {
                "name": module.name,
                "layout": module.layout,
                "shape": [int(dim) for dim in shape],
                "scheme": scheme_words(settings),
                "tensors": sorted(module.tensors),
                "bytes": module.nbytes,
                "files": files,
            }
        )
    return rows, ""


def module_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table."""
    cells = [
        (
            escape(row["name"], 512),
            "x".join(map(str, row["shape"])),
            row["layout"],
            row["scheme"],
            render.size(row["bytes"]),
            escape(", ".join(row["files"])),
        )
        for row in rows
    ]
    return render.table(("module", "shape", "layout", "scheme", "size", "files"), cells, left=(0, 2, 3, 5))
