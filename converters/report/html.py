"""A report as one HTML page: no script, nothing fetched, every foreign name escaped, light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date
from html import escape as html_escape
from typing import Any

from bcqfmt.errors import escape
from bcqfmt.version import __version__

from .contents import Report, WeightRow
from .svg import STYLE, Mark, Series, bars, scatter

_ROWS = 1000  # of the table; the JSON report has all of them
_POINTS = 4000  # of a plot; those furthest off are always among them
_SERIES = 8
_UNITS = ("B", "kB", "MB", "GB", "TB")
_PAGE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--panel:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6e9ed;--soft:#9aa4af;--line:#30363d;--panel:#161b22}}
*{box-sizing:border-box} body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:70rem;margin:0 auto;padding:2rem 1rem 4rem} h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem} p{margin:.3rem 0;color:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:1.2rem 0}
dl div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}
dt{color:var(--soft);font-size:.8rem} dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto} table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:9rem}
td code{display:inline-block;min-width:14rem} td small{display:block;color:var(--soft)}
.wide .plot{min-width:34rem} .wrap{display:block;white-space:normal;text-align:left;min-width:12rem}
code{font:.86em ui-monospace,monospace} summary{cursor:pointer;color:var(--soft)}
"""


def report_html(report: Report) -> bytes:
    """The page."""
    body = [
        f"<h1>{_text(report.title or report.name)}</h1>",
        f"<p>{_lead(report)}</p>",
        _facts(report),
        *_section("Source and result", *_origin(report)),
        *_error_plot(report),
        *_section("Size by part", _parts(report)),
        *_section("Kinds of layers", _kind_bars(report), _kind_table(report)),
        *_section("Recipes", _recipes(report)),
        *_section("Weights, " + ("worst first" if report.has_errors else "largest first"), *_weights(report)),
        *_section("Left dense", _dense(report)),
        f"<p>Written by bcqfmt {__version__} on {date.today().isoformat()}.</p>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{_text(report.name)} - bcqfmt report</title><style>{_PAGE}{STYLE}</style>"
    )
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n' + "\n".join(body)
    return f"{page}\n</main></body></html>\n".encode()


def _lead(report: Report) -> str:
    origin = {"": "written without its source", "dense": "quantized from a dense checkpoint"}
    origin["auto"] = "converted without loss"  # from a layout that no configuration names
    said = origin.get(report.source, f"converted without loss from {report.source}")
    features = ", ".join(report.features) or "plain affine"
    folder = f"{report.name}: " if report.title else ""
    return f"{_text(folder)}BCQ {_text(report.version)}, {_text(said)}; features: {_text(features)}"


def _facts(report: Report) -> str:
    total = report.total
    covered = 100 * total["quantized_parameters"] / total["parameters"] if total["parameters"] else 0.0
    origin = report.origin
    facts = [
        ("weights", f"{total['weights']:,}"),
        ("bits per weight", _digits(total["bits_per_weight"], 3)),
        ("bits over everything", _digits(total["overall_bits"], 3)),
        ("model files", _size(total["file_bytes"])),
        ("parameters quantized", f"{math.floor(covered * 100) / 100:.2f} %"),
    ]
    if report.perplexity:
        facts.append(("perplexity", _text(report.perplexity)))
    if origin.converted:
        facts.append(("error against the source", "none"))
    if report.has_errors:
        label = "error against the dense model" if report.against else "relative error"
        facts += [(label, _percent(total["relative"])), ("SQNR", _decibels(total["sqnr_db"]))]
    return "<dl>" + "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts) + "</dl>"


def _origin(report: Report) -> list[str]:
    """Of a conversion: what it was, what it weighs now, and why nothing is lost."""
    origin = report.origin
    if not origin.converted:
        return []
    proof = (
        "Every tensor of the source was rebuilt from these parts and compared, bit for bit, when it was converted."
        f" <code>bcqfmt verify</code> proves it, <code>bcqfmt restore</code> gives all {len(origin.files):,} files back"
        if origin.restorable
        else "Codes, scales and zero points are those of the source. It was converted without what restores the files"
    )
    total = report.total
    sizes = [
        ("source", origin.nbytes),
        ("BCQ folder", origin.folder),
        ("its weights", total["weight_bytes"]),
        ("its dense tensors", total["dense_bytes"]),
        ("to restore the source", origin.archive),
    ]
    rows = [(label, float(size), _size(size)) for label, size in sizes if size]
    files = [[f"<code>{_text(path)}</code>", _size(size)] for path, size in sorted(origin.files.items())][:_ROWS]
    every = f"<details><summary>files of the source</summary>{_table(['file', 'size'], files)}</details>"
    return [f"<p>{proof}.</p>", f"<div class=wide>{bars('Source and result', rows)}</div>", every]


def _error_plot(report: Report) -> list[str]:
    rows = [row for row in report.worst() if row.sqnr_db is not None][:_POINTS]
    if not rows:
        return []
    order = {row.name: i for i, row in enumerate(report.weights)}
    numbered = all(_layer(row.name) is not None for row in rows)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.kind] = counts.get(row.kind, 0) + 1
    kept = sorted(sorted(counts), key=lambda kind: -counts[kind])[: _SERIES - 1 if len(counts) > _SERIES else _SERIES]
    grouped: dict[str, list[Mark]] = {kind: [] for kind in kept}
    for row in sorted(rows, key=lambda row: order[row.name]):
        place = _layer(row.name) if numbered else order[row.name]
        tip = f"{row.name}: {_decibels(row.sqnr_db)}, {row.bits_per_weight:.3f} bits"
        mark = Mark(float(place or 0), row.sqnr_db or 0.0, tip)
        grouped.setdefault(row.kind if row.kind in kept else "others", []).append(mark)
    labels = ("layer" if numbered else "weight", "SQNR (dB)")
    series = [Series(kind, marks) for kind, marks in grouped.items()]
    plot = scatter("Signal to quantization noise of every weight", series, labels)
    note = f" Measured against the dense model <code>{_text(report.against)}</code>." if report.against else ""
    text = f"<p>Higher is better; a bit is worth about 6 dB.{note}</p>"
    return _section("Error of every weight", f"{text}<div class=wide>{plot}</div>")


def _parts(report: Report) -> str:
    sizes = {**report.parts, "dense tensors": report.total["dense_bytes"]}
    total = sum(sizes.values()) or 1
    rows = [(kind, float(size), f"{_size(size)}, {100 * size / total:.1f} %") for kind, size in sizes.items() if size]
    return f"<div class=wide>{bars('Size by part', rows)}</div>" if rows else ""


def _kind_bars(report: Report) -> str:
    rows = [
        (kind["kind"], kind["bits_per_weight"], f"{kind['bits_per_weight']:.3f} bits") for kind in report.kinds[:40]
    ]
    return f"<div class=wide>{bars('Bits per weight by kind of layer', rows)}</div>" if rows else ""


def _kind_table(report: Report) -> str:
    header = ["layer", "weights", "parameters", "bits", "size", *(_ERRORS if report.has_errors else ())]
    rows = []
    for kind in report.kinds:
        cells = [_text(kind["kind"]), f"{kind['weights']:,}", f"{kind['parameters']:,}"]
        cells += [_digits(kind["bits_per_weight"], 3), _size(kind["bytes"])]
        rows.append(cells + (_errors(kind["mse"], kind["relative"], kind["sqnr_db"]) if report.has_errors else []))
    return _table(header, rows) if rows else ""


def _recipes(report: Report) -> str:
    rows = []
    for i, recipe in enumerate(report.recipes):
        count = sum(row.recipe == i for row in report.weights)
        settings = ", ".join(f"{key} = {_shown(value)}" for key, value in sorted(recipe["settings"].items()))
        rows.append(
            [f"<code>{_text(recipe['method'])}</code>", f"{count:,}", f"<span class=wrap>{_text(settings)}</span>"]
        )
    return _table(["method", "weights", "settings"], rows) if rows else ""


def _weights(report: Report) -> list[str]:
    header = ["weight", "shape", "bits", "size", *(_ERRORS if report.has_errors else ())]
    rows = [_weight_cells(row, report.has_errors) for row in report.worst()[:_ROWS]]
    more = len(report.weights) - len(rows)
    note = [f"<p>{more:,} more are in the JSON file.</p>"] if more > 0 else []
    return [_table(header, rows), *note] if rows else []


def _weight_cells(row: WeightRow, errors: bool) -> list[str]:
    named = f"<code>{_text(row.name)}</code><small>{_text(row.scheme)}</small>"
    cells = [named, _shape(row.shape), _digits(row.bits_per_weight, 3)]
    figures = ["infinite", "-", "-"] if row.endless else _errors(row.mse, row.relative, row.sqnr_db)
    return [*cells, _size(row.bytes), *(figures if errors else [])]


def _dense(report: Report) -> str:
    if not report.dense:
        return ""
    reasons: dict[str, list[int]] = {}
    for row in report.dense:
        reasons.setdefault(row.reason or "as in the source", []).append(row.bytes)
    rows = [[_text(reason), f"{len(sizes):,}", _size(sum(sizes))] for reason, sizes in sorted(reasons.items())]
    listed = [
        [
            f"<code>{_text(row.name)}</code>",
            row.dtype,
            _shape(row.shape),
            _size(row.bytes),
        ]
        for row in report.dense[:_ROWS]
    ]
    every = _table(["tensor", "type", "shape", "size"], listed)
    return f"{_table(['reason', 'tensors', 'size'], rows)}<details><summary>all of them</summary>{every}</details>"


_ERRORS = ("MSE", "relative error", "SQNR")


def _errors(mse: float | None, relative: float | None, sqnr: float | None) -> list[str]:
    return ["-" if mse is None else f"{mse:.3g}", _percent(relative), _decibels(sqnr, exact=mse == 0)]


def _section(title: str, *parts: str) -> list[str]:
    kept = [part for part in parts if part]
    return [f"<h2>{_text(title)}</h2>", *kept] if kept else []


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are markup already."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shape(shape: Sequence[int]) -> str:
    return "&times;".join(map(str, shape)) or "scalar"


def _layer(name: str) -> int | None:
    found = re.search(r"\.([0-9]{1,6})\.", name)
    return int(found[1]) if found else None


def _digits(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _decibels(value: float | None, exact: bool = False) -> str:
    return ("exact" if exact else "-") if value is None else f"{value:.2f} dB"


def _size(nbytes: float) -> str:
    power = 0
    while nbytes >= 999.995 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.0f} B" if not power else f"{nbytes:.2f} {_UNITS[power]}"


def _text(text: Any) -> str:
    """Foreign text: one printable line without markup."""
    return html_escape(escape(str(text), 512))
