"""Kernels and the dense model predict the same on twenty passages of text (benchmarks/models/kernel_agreement.py)."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bcqfmt
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.export import export
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.integrations.torch.processor import dense_products, multiplies

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "benchmarks"
DEMO = Path(bcqfmt.__file__).parent / "data" / "demo"


def script() -> Any:
    place = ROOT / "tests" / "benchmarks" / "models" / "kernel_agreement.py"
    spec = importlib.util.spec_from_file_location("kernel_agreement_under_test", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that ships with the project, and its dense export."""
    work = tmp_path_factory.mktemp("agreement")
    Conversion(open_source(DEMO), ConvertOptions()).run(work / "bcq")
    with bcqfmt.open(work / "bcq") as checkpoint:
        export(checkpoint, work / "dense", "dense")
    return work / "bcq", work / "dense"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products of a tiny model take less time than waking a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows(folders: tuple[Path, Path]) -> dict[tuple[Any, Any], dict[str, Any]]:
    """Every comparison, by what was compared. 64 tokens at once are too many for tables: rows are decoded."""
    found: list[dict[str, Any]] = []
    for way, tokens in (("whole", 64), ("one by one", 6)):
        with dense_products(torch.bfloat16):
            some = script().measured(*folders, ROOT / "spec" / "bcq-1.0.md", ways=[way], tokens=tokens)
        assert all((row["passages"], row["tokens"]) == (20, 20 * tokens) for row in some)
        found += some
    return {(row["found"], row["against"]): row for row in found}


@pytest.mark.parametrize("way", ["whole", "one by one"])
def test_the_goal_is_met_in_float32(rows: dict[tuple[Any, Any], dict[str, Any]], way: str) -> None:
    row = rows[("kernels float32", way), ("dense float32", way)]
    assert row["goal"]
    assert row["met"]
    assert row["kl"] <= 1e-4
    assert row["top1"] >= 0.995


@pytest.mark.parametrize("way", ["whole", "one by one"])
def test_what_is_left_in_float32_is_the_rounding_of_the_values(
    rows: dict[tuple[Any, Any], dict[str, Any]], way: str
) -> None:
    row = rows[("kernels float32", way), ("unrounded", way)]
    assert row["largest"] <= 1e-8
    assert row["differing"] == 0


@pytest.mark.parametrize("way", ["whole", "one by one"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits_the_kernels_are_as_near_to_the_truth_as_the_dense_model(
    rows: dict[tuple[Any, Any], dict[str, Any]], dtype: str, way: str
) -> None:
    """Top-1 is left out: logits of the dtype tie, and another order of additions decides (docs, kernel_agreement)."""
    kernels, dense = (rows[(f"{name} {dtype}", way), ("dense float32", way)]["kl"] for name in ("kernels", "dense"))
    assert kernels <= 1.5 * dense
    assert rows[(f"kernels {dtype}", way), (f"dense {dtype}", way)]["kl"] <= 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits_a_whole_passage_gets_the_dense_model_s_logits(
    rows: dict[tuple[Any, Any], dict[str, Any]], dtype: str
) -> None:
    """Where torch multiplies in the dtype; elsewhere, those of its weights and float32 sums, rounded once."""
    row = rows[(f"kernels {dtype}", "whole"), (f"dense {dtype}", "whole")]
    if multiplies(getattr(torch, dtype)):
        assert (row["met"], row["kl"], row["largest"], row["differing"]) == (True, 0, 0, 0)
    else:
        wide = rows[(f"wide sums {dtype}", "whole"), (f"dense {dtype}", "whole")]
        assert row["met"]
        # a product from the planes would be 2e-8 (float16) and 2e-6 (bfloat16) away from the dense model
        assert row["kl"] == pytest.approx(wide["kl"], rel=0.1, abs=1e-10)


def test_a_comparison_against_sums_by_hand() -> None:
    """KL, ties and margins of three tokens and three words; probabilities that can be added up on paper."""
    tally = script().Tally()
    wanted = torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.4, 0.2], [0.6, 0.3, 0.1]]).double().log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.4, 0.4], [0.6, 0.3, 0.1]]).double().log()
    tally.add(wanted + 3, found - 5)  # logits are probabilities up to a constant
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    second = 0.4 * math.log(2) - 0.2 * math.log(2)
    assert tally.kl == pytest.approx(first + second)
    assert tally.largest == pytest.approx(first)
    assert tally.margin == pytest.approx(math.log(2))
    assert (tally.differing, tally.tied, tally.tokens) == (2, 1, 3)


def test_a_missed_goal_is_an_exit_code(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = script()
    given = ["x", *map(str, folders), str(ROOT / "spec" / "bcq-1.0.md"), "--dtype", "float32", "--way", "whole"]
    monkeypatch.setattr("sys.argv", [*given, "--tokens", "24", "--json", str(tmp_path / "rows.json")])
    assert measure.main() == 0
    assert "goal: met" in capsys.readouterr().out
    monkeypatch.setattr(measure, "KL", 0.0)
    assert measure.main() == 1
    assert "goal: missed" in capsys.readouterr().out
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["met"] for row in written["rows"] if row["goal"]] == [False]


@pytest.mark.parametrize("name", sorted(path.name for path in PAGES.glob("kernel_agreement*.json")))
def test_the_page_shows_what_was_measured(name: str) -> None:
    """The rows with a goal are on the page as a table, to the last digit; of the CPU also the limits."""
    measure = script()
    found = json.loads((PAGES / name).read_text(encoding="utf-8"))["rows"]
    page = (PAGES / "kernel_agreement.md").read_text(encoding="utf-8")
    assert measure.results_of(found)
    assert measure.table_of(measure.results_of(found)) in page
    if "cuda" not in name:
        assert measure.table_of(measure.limits_of(found)) in page
