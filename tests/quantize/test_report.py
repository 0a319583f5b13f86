"""Reports: numbers that fit the folder, a page that is safe and well formed."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from bcqfmt.converters.report import Report, kind_of, make_report
from bcqfmt.converters.report.html import report_html
from bcqfmt.converters.report.svg import Mark, Series, bars, scatter, standalone
from programs.verbs import tensors
from sources.conversions import convert, gptq_folder
from sources.dense_samples import dense_folder, dense_tensors, quantize

VOID = {"meta", "br"}
HOSTILE = "a<script>alert(1)</script>.weight"


class Page(html.parser.HTMLParser):
    """Tags in order; every one that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(report: Report) -> Page:
    parsed = Page()
    parsed.feed(report_html(report).decode())
    parsed.close()
    assert parsed.open == []
    return parsed


def report_on(path: Path) -> Report:
    with bcqfmt.open(path) as checkpoint:
        return make_report(checkpoint)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    quantize(dense_folder(folder / "model", dense_tensors(3)), folder / "bcq")
    return folder / "bcq"


def test_numbers_fit_the_folder(quantized: Path) -> None:
    report = report_on(quantized)
    with bcqfmt.open(quantized) as checkpoint:
        weights, dense = dict(checkpoint.weights()), dict(checkpoint.dense())
    assert [row.name for row in report.weights] != []
    assert {row.name: row.bytes for row in report.weights} == {name: w.nbytes for name, w in weights.items()}
    assert {row.name: row.bytes for row in report.dense} == {name: t.nbytes for name, t in dense.items()}
    assert sum(report.parts.values()) == report.total["weight_bytes"] == sum(w.nbytes for w in weights.values())
    elements = sum(w.size for w in weights.values())
    assert report.total["bits_per_weight"] == report.total["weight_bytes"] * 8 / elements
    assert sum(kind["weights"] for kind in report.kinds) == len(weights)
    assert {row.reason for row in report.dense} == {"embedding", "output head", "router", "vector"}
    assert report.source == "dense"


def test_totals_are_weighted_by_elements(quantized: Path) -> None:
    """The error of the whole is not the mean of the errors."""
    record = json.loads((quantized / "bcq_quantization.json").read_text())["weights"]
    noise, power = (sum(entry[key] for entry in record.values()) for key in ("noise", "power"))
    assert report_on(quantized).total["relative"] == pytest.approx((noise / power) ** 0.5)


def test_the_worst_come_first(quantized: Path) -> None:
    errors = [row.relative or 0.0 for row in report_on(quantized).worst()]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) > 3


def test_weights_are_in_natural_order(quantized: Path) -> None:
    layers = [int(found[1]) for row in report_on(quantized).weights if (found := re.search(r"layers\.(\d+)", row.name))]
    assert layers == sorted(layers)


def test_a_converted_folder_has_no_errors(tmp_path: Path) -> None:
    convert(gptq_folder(tmp_path / "gptq"), tmp_path / "bcq")
    report = report_on(tmp_path / "bcq")
    assert not report.has_errors
    assert report.total["relative"] is None
    assert [row.bytes for row in report.worst()] == sorted((row.bytes for row in report.weights), reverse=True)
    text = report_html(report).decode()
    assert "converted without loss from gptq" in text
    assert "SQNR" not in text


def test_a_lone_file(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "x.safetensors", tensors())
    report = report_on(tmp_path / "x.safetensors")
    assert report.total["weights"] == 2
    page(report)


def test_the_page_is_well_formed_and_fetches_nothing(quantized: Path) -> None:
    report = report_on(quantized)
    parsed = page(report)
    assert "svg" in parsed.tags
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(parsed.tags)
    names = {name for name, _ in parsed.attributes}
    assert not {"href", "src", "srcset", "action", "onload", "onclick", "style"} & names
    text = report_html(report).decode()
    assert "url(" not in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    for row in report.weights:
        assert row.name in text


def test_the_plots_are_well_formed(quantized: Path) -> None:
    text = report_html(report_on(quantized)).decode()
    plots = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert len(plots) == 3
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.find("title") is not None
    circles = ET.fromstring(plots[0]).findall("circle")
    assert len([circle for circle in circles if circle.find("title") is not None]) == 13  # a point for every weight


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    """A weight of the format cannot bear such a name, but a dense tensor can, and so can a folder."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    arrays = {HOSTILE: np.zeros(8, np.float16), "b\x1b[2J\u202e&amp;": np.zeros(8, np.float16), "up.weight": tensors()[
        "model.layers.0.mlp.up_proj.weight"]}  # fmt: skip
    bcqfmt.save(folder, arrays)
    report = report_on(folder)
    text = report_html(report).decode()
    parsed = page(report)
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert HOSTILE in "".join(parsed.text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", text)


def test_hostile_records_cannot_become_markup(quantized: Path, tmp_path: Path) -> None:
    """Whatever the file beside the weights says is text."""
    import shutil

    folder = tmp_path / "bcq"
    shutil.copytree(quantized, folder)
    value = json.loads((folder / "bcq_quantization.json").read_text())
    value["recipes"][0] = {"method": "<script>", "settings": {"<b>": "</table><script>"}}
    value["dense"] = dict.fromkeys(value["dense"], "<script>x</script>")
    (folder / "bcq_quantization.json").write_text(json.dumps(value))
    assert "script" not in page(report_on(folder)).tags


def test_json_is_complete(quantized: Path) -> None:
    value = json.loads(json.dumps(report_on(quantized).as_dict(), allow_nan=False))
    assert len(value["weights"]) == 13
    assert {"name", "bytes", "bits_per_weight", "mse", "relative", "sqnr_db"} <= value["weights"][0].keys()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "q_proj"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", "experts.down_proj"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts.gate_up_proj"),
        ("weight", "weight"),
        ("0.weight", "0.weight"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# --------------------------------------------------------------------------------------------------------- drawing
def test_points_are_where_the_axes_say() -> None:
    """The numbers of the ticks and the places of the points follow one line."""
    marks = [Mark(float(x), x * 10.0 + 5, f"p{x}") for x in range(1, 9)]
    root = ET.fromstring(scatter("t", [Series("s", marks)], ("x", "y")))
    placed = {circle[0].text: float(circle.attrib["cx"]) for circle in root.findall("circle")}
    steps = {round(placed[f"p{x + 1}"] - placed[f"p{x}"], 1) for x in range(1, 8)}
    assert max(steps) - min(steps) <= 0.2
    ticks = {float(t.text or ""): float(t.attrib["x"]) for t in root.findall("text") if t.attrib.get("y") == "312"}
    for value, at in ticks.items():
        if f"p{value:.0f}" in placed:
            assert at == pytest.approx(placed[f"p{value:.0f}"], abs=0.11)
    assert len(ticks) >= 3


@pytest.mark.parametrize(
    "values", [[], [0.0], [5.0], [-3.0, -3.0], [1e-9, 1e9], [0.0, 1e-300], [1e300, 1.0], [2.0, 3.0, 2.5]]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_numbers_can_be_drawn(values: list[float], log: bool) -> None:
    series = [Series("<s>", [Mark(value, value, "&") for value in values], joined=True)]
    ET.fromstring(scatter("<t>", series, ("<x>", "&y"), log_y=log, front=series[0].marks, heading=True))


def test_a_file_of_its_own() -> None:
    root = ET.fromstring(standalone(bars("t", [("a<b", 3.0, "3"), ("c", 0.0, "0")])).decode())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme" in (root[0].text or "")
