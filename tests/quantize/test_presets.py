"""Presets: what they stand for, on the command line, in the help and in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bcqfmt.cli.main import cli
from bcqfmt.converters.methods.registry import build_method
from bcqfmt.converters.quantize.presets import PRESETS
from sources.peers import PEERS

DENSE = PEERS / "dense-fp16" / "source"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantizing.md"


def dry_run(out: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["quantize", str(DENSE), str(out), "--dry-run", "--json", *words])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_method_with_settings(name: str) -> None:
    preset = PRESETS[name]
    method = build_method(preset.method, preset.settings)
    assert {key: method.settings()[key] for key in preset.settings} == dict(preset.settings)
    assert bool(preset.inputs) == (method.needs_stats() is not None)


def test_the_page_and_the_help_have_every_preset() -> None:
    rows = dict(re.findall(r"^\| .* \| `(\w+)` \| `(--method .*?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {name: preset.options() for name, preset in PRESETS.items()}
    shown = " ".join(CliRunner().invoke(cli, ["quantize", "--help"], terminal_width=400).output.split())
    for name, preset in PRESETS.items():
        assert f"{name} {preset.purpose}: {preset.options()}" in shown


def test_what_is_given_wins_and_the_method_cannot_be(tmp_path: Path) -> None:
    made = dry_run(tmp_path / "bcq", "--preset", "plain", "--bits", "3")
    (recipe,) = json.loads(made.stdout)["recipes"]
    assert (recipe["method"], recipe["settings"]["bits"], recipe["settings"]["group_size"]) == ("rtn", 3, 32)
    refused = dry_run(tmp_path / "bcq", "--preset", "plain", "--method", "rtn")
    assert refused.exit_code == 2
    assert "leave --method out" in refused.output
    unknown = dry_run(tmp_path / "bcq", "--preset", "5bit")
    assert unknown.exit_code != 0
    assert "no preset '5bit'; expected one of 4bit, 3bit" in unknown.output
    assert dry_run(tmp_path / "bcq", "--preset", "4bit").exit_code != 0
    assert "BCQ-E623" in dry_run(tmp_path / "bcq", "--preset", "4bit").output
    assert not list(tmp_path.iterdir())
