"""Reports of checkpoints: where they may be written, the files, and the table on the screen."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bcqfmt.container.durable import OutputFile, refuse_existing_file, refuse_overlap, reported, write_file
from bcqfmt.errors import OutputError, error, escape
from bcqfmt.system import absolute_path

from . import render
from .command import command_line, usage_error
from .sources import Inputs, keep_inputs

if TYPE_CHECKING:
    from bcqfmt.converters.report import Report, WeightRow


def check_report_path(path: Path, bcq: Path, overwrite: bool, inputs: Inputs) -> None:
    """Before any work: a page that can be written, and not into a model's folder or in place of an input."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise usage_error(f"'{path}' should end in .html.")
    place = absolute_path(bcq)
    for file in (path, path.with_suffix(".json")):
        for home in (place, place.with_name(f"{place.name}.partial")):
            refuse_overlap(file, home, "a model's folder", "choose a place outside of it")
        check_output(file, overwrite, inputs)


def check_output(path: Path, overwrite: bool, inputs: Inputs) -> None:
    """BCQ-E401 and BCQ-E402 for a file that cannot be written, or that would touch what the verb reads."""
    keep_inputs(path, inputs)
    place = path.absolute()
    if not place.parent.is_dir():
        hint = f"make it ({command_line('mkdir', '-p', path.parent)}), or choose another place"
        raise error("BCQ-E402", str(path), found="no such folder", expected="a folder that is there", hint=hint)
    refuse_existing_file(path, overwrite=overwrite)
    with reported(path), contextlib.suppress(FileNotFoundError):
        place.lstat()  # refuses a name that is too long
    OutputFile(path).discard()  # the folder takes a file


def write_report(report: Report, path: Path, made: Path | None = None) -> list[str]:
    """The page and the JSON file; their paths. ``made``: the folder that was just written, complete without them."""
    from bcqfmt.converters.report.html import report_html

    data = json.dumps(report.as_dict(), indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    try:
        write_file(path, report_html(report))
        write_file(path.with_suffix(".json"), data.encode("ascii"))
    except OutputError as fault:
        if made is not None:
            words = command_line("bcqfmt", "report", made, "--html", "FILE.html")
            fault.hint = f"{escape(str(made))} is complete; write the report elsewhere: {words}"
        raise
    return [str(path), str(path.with_suffix(".json"))]


def table(report: Report, most: int | None = None) -> list[str]:
    """The weights, those furthest off first."""
    rows = report.worst()
    kept = rows if most is None else rows[:most]
    header = ["weight", "shape", "bits", "size"]
    header += ["MSE", "relative error", "SQNR"] if report.has_errors else []
    lines = render.table(header, [_cells(row, report.has_errors) for row in kept])
    return lines + ([f"  ... and {len(rows) - len(kept):,} more"] if len(rows) > len(kept) else [])


def total_line(report: Report) -> str:
    """Everything in one line."""
    total = report.total
    words = [
        render.count(total["weights"], "weight"),
        "" if total["bits_per_weight"] is None else f"{total['bits_per_weight']:.3f} bits per weight",
        f"{render.size(total['weight_bytes'])} and {render.size(total['dense_bytes'])} dense",
    ]
    if report.has_errors:
        words += [f"relative error {_percent(total['relative'])}", f"SQNR {_decibels(total['sqnr_db'], total['mse'])}"]
    return ", ".join(filter(None, words))


def _cells(row: WeightRow, errors: bool) -> list[str]:
    cells = [escape(row.name, 512), "x".join(map(str, row.shape)), f"{row.bits_per_weight:.3f}", render.size(row.bytes)]
    if not errors:
        return cells
    mse = "infinite" if row.endless else "-" if row.mse is None else f"{row.mse:.3g}"
    return [*cells, mse, _percent(row.relative), _decibels(row.sqnr_db, row.mse)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _decibels(value: float | None, mse: float | None) -> str:
    return ("exact" if mse == 0 else "-") if value is None else f"{value:.2f} dB"
