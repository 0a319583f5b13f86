"""Reports on conversions: where it came from, and how far it is from the dense model."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

import bcqfmt
from bcqfmt.cli import render
from bcqfmt.cli.main import cli
from bcqfmt.converters.jobs.model_card import with_perplexity
from bcqfmt.converters.report import make_report
from bcqfmt.converters.report.html import report_html
from bcqfmt.converters.report.measure import measure
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.inspect.summary import summarize
from programs.verbs import tensors
from sources.conversions import convert
from sources.dense_samples import dense_folder
from sources.peers import PEERS

GPTQ = PEERS / "gptqmodel-gptq-4b-g32-asym" / "source"
DENSE = PEERS / "dense-fp16" / "source"
UP = "model.layers.0.mlp.up_proj"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="bcqfmt")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "bcq"
    convert(GPTQ, folder)
    return folder


def test_where_it_came_from(converted: Path) -> None:
    with bcqfmt.open(converted) as checkpoint:
        made = make_report(checkpoint)
    sizes = {path.name: path.stat().st_size for path in GPTQ.iterdir()}
    assert made.origin.files == sizes
    assert made.origin.format == made.source == "gptq"
    own = {path: path.stat().st_size for path in converted.rglob("*") if path.is_file()}
    archive = sum(size for path, size in own.items() if "bcq_source" in path.parts)
    assert (made.origin.restorable, made.origin.archive) == (True, archive)
    apart = (converted / "bcq_manifest.json", converted / "README.md")
    assert made.origin.folder == sum(size for path, size in own.items() if path not in apart)
    text = report_html(made).decode()
    assert "error against the source</dt><dd>none" in text
    assert f"gives all {len(sizes)} files back" in text


def test_without_provenance_nothing_is_promised(tmp_path: Path) -> None:
    convert(GPTQ, tmp_path / "bcq", provenance=False)
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        text = report_html(make_report(checkpoint)).decode()
    assert "files back" not in text
    assert "without what restores the files" in text


def test_a_lone_file_came_from_nowhere(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "x.safetensors", tensors())
    with bcqfmt.open(tmp_path / "x.safetensors") as checkpoint:
        text = report_html(make_report(checkpoint)).decode()
    assert "Source and result" not in text
    assert "against the source" not in text


def test_errors_are_those_of_plain_arithmetic(converted: Path) -> None:
    dense = load_file(DENSE / "model.safetensors")
    with bcqfmt.open(converted) as checkpoint:
        found = measure(checkpoint, open_source(DENSE))
        made = make_report(checkpoint, found, "dense")
        total = [0.0, 0.0]
        for name, weight in checkpoint.weights():
            w = dense[name].astype(np.float64)
            off = weight.dequantize().astype(np.float64) - w
            assert found[name].power == pytest.approx((w**2).sum(), rel=1e-12)
            assert found[name].noise == pytest.approx((off**2).sum(), rel=1e-12)
            total = [total[0] + (w**2).sum(), total[1] + (off**2).sum()]
    assert made.total["relative"] == pytest.approx(math.sqrt(total[1] / total[0]))
    assert made.total["sqnr_db"] == pytest.approx(10 * math.log10(total[0] / total[1]))
    errors = [row.relative for row in made.worst()]
    assert errors == sorted(errors, reverse=True)


def test_a_shifted_zero_point_stands_out(tmp_path: Path) -> None:
    """What the page on `!!!!` shows: the wrong reading of zero points is 9 dB worse and more."""
    found = {}
    for rule in ("v1-carry", "v2"):
        convert(GPTQ, tmp_path / rule, zero_point=rule)
        with bcqfmt.open(tmp_path / rule) as checkpoint:
            found[rule] = make_report(checkpoint, measure(checkpoint, open_source(DENSE)), "dense").total["sqnr_db"]
    assert found["v1-carry"] > 15
    assert found["v2"] < found["v1-carry"] - 9


def test_stacks_are_measured_row_block_by_row_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bcqfmt.converters.report import measure as report_measure

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, 10, 64), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.1, (3, 10, 2)).astype(np.float16)
    stack = bcqfmt.BcqWeight.from_affine(codes, scale, 8, group_size=32)
    dense = rng.standard_normal((3, 10, 64)).astype(np.float32)
    bcqfmt.save(tmp_path / "bcq", {"experts.gate_up": stack})
    source = open_source(dense_folder(tmp_path / "dense", {"experts.gate_up": dense}))
    monkeypatch.setattr(report_measure, "_BLOCK", 3 * 64 * 4)
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        (found,) = measure(checkpoint, source).values()
    off = stack.dequantize().astype(np.float64) - dense
    assert found.noise == pytest.approx((off**2).sum(), rel=1e-12)
    assert found.power == pytest.approx((dense.astype(np.float64) ** 2).sum(), rel=1e-12)
    assert found.size == dense.size


def test_infinite_errors_come_first_and_alone(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    shutil.copytree(GPTQ, sick)
    arrays = load_file(sick / "model.safetensors")
    arrays[f"{UP}.scales"][2, 5] = np.inf
    save_file(arrays, sick / "model.safetensors", metadata={"format": "pt"})
    convert(sick, tmp_path / "bcq", allow_nonfinite=True)
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        made = make_report(checkpoint, measure(checkpoint, open_source(DENSE)), "dense")
    assert made.worst()[0].name == f"{UP}.weight"
    assert made.worst()[0].endless
    assert made.total["sqnr_db"] > 15  # of the others
    assert "<td>infinite</td>" in report_html(made).decode()
    json.dumps(made.as_dict(), allow_nan=False)


def test_the_verb(converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = run("report", converted, "--against", DENSE, "--html", out)
    assert result.exit_code == 0, result.stderr
    assert "SQNR 17.02 dB" in result.stdout
    assert "Measured against the dense model" in out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["against"] == "source"
    table = run("report", converted, "--against", DENSE, "--top", "1").stdout
    assert "q_proj" in table
    assert "... and 6 more" in table


def test_another_model_is_refused(converted: Path, tmp_path: Path) -> None:
    other = dense_folder(tmp_path / "other", {"x.weight": np.zeros((8, 8), np.float16)})
    result = run("report", converted, "--against", other)
    assert result.exit_code == 2
    assert "BCQ-E301" in result.stderr
    assert "none of 7 weights" in result.stderr


def test_what_has_no_counterpart_is_told(converted: Path, tmp_path: Path) -> None:
    arrays = load_file(DENSE / "model.safetensors")
    del arrays[f"{UP}.weight"]
    result = run("report", converted, "--against", dense_folder(tmp_path / "part", arrays))
    assert result.exit_code == 0
    assert f"1 weight, {UP}.weight for one" in result.stderr


def test_the_page_has_the_figures_of_the_command_line(converted: Path, tmp_path: Path) -> None:
    """Coverage and size as `inspect` prints them; the title and the perplexity of the card."""
    folder = tmp_path / "model"
    shutil.copytree(converted, folder)
    card = (folder / "README.md").read_text()
    changed = with_perplexity(card, "12.3456 on wiki.txt (99 tokens)")
    assert changed is not None
    (folder / "README.md").write_text(changed)
    with bcqfmt.open(folder) as checkpoint:
        page = report_html(make_report(checkpoint)).decode()
    summary = summarize(folder)
    assert f"<dd>{render.percent(summary.coverage)}</dd>" in page
    assert f"<dd>{render.size(summary.file_bytes)}</dd>" in page
    assert "<dd>12.3456 on wiki.txt (99 tokens)</dd>" in page
    assert re.search(r"<h1>[^<]+</h1>", page)[0][4:-5] == re.search(r"^# (.+)$", card, re.MULTILINE)[1]  # type: ignore[index]
