"""Checkpoints that are wrong in very many places, or large where a checkpoint is small: work and memory are bounded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt.checkpoint.model_file import _begins_with
from bcqfmt.checkpoint.validation import Report
from bcqfmt.cli.main import cli


def file_with(path: Path, descriptor: dict[str, Any], tensors: int = 0) -> Path:
    """A safetensors file with this descriptor and some parts that belong to no weight."""
    stated = {"version": "1.0", "features": [], **descriptor}
    meta = {"format": "pt", "bcqfmt": json.dumps(stated, sort_keys=True, separators=(",", ":"))}
    entries = {f"x{i}.bcq_y": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(tensors)}
    header = json.dumps({"__metadata__": meta, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(tensors))
    return path


def counted(report: Report, code: str) -> int:
    return sum(finding.code == code for finding in report.findings)


def test_schemes_without_number(tmp_path: Path) -> None:
    report = bcqfmt.validate(file_with(tmp_path / "a.safetensors", {"schemes": [0] * 50_000, "weights": {}}))
    assert (counted(report, "BCQ-V208"), counted(report, "BCQ-V209"), report.more) == (1000, 1, 1)
    assert "50,000 schemes for 0 weights" in report.errors[-1].found


def test_weights_without_number(tmp_path: Path) -> None:
    weights = {f"w{i}": 0 for i in range(50_000)}
    report = bcqfmt.validate(file_with(tmp_path / "a.safetensors", {"schemes": [], "weights": weights}))
    assert (len(report.findings), report.more) == (1000, 1)  # the rest is not looked at


def test_findings_are_kept_up_to_a_number_and_counted_beyond(tmp_path: Path) -> None:
    path = file_with(tmp_path / "a.safetensors", {"schemes": [], "weights": {}}, tensors=3000)
    report = bcqfmt.validate(path)
    assert (counted(report, "BCQ-V302"), report.more) == (1000, 2000)
    assert report.as_dict()["findings_total"] == 3000
    shown = CliRunner().invoke(cli, ["validate", str(path)])
    assert "... and 2,950 more findings" in shown.stdout
    assert "INVALID, at least 1,000 errors" in shown.stdout


@given(st.lists(st.sampled_from(["a", ".bcq_", "_bcq_", "bcq_bcq_", "s0"]), max_size=6).map("".join), st.data())
def test_names_of_parts(name: str, data: st.DataObject) -> None:
    """Looked up in a set, as there may be 200,000 names and as many prefixes."""
    prefixes = data.draw(st.sets(st.sampled_from(["a.bcq_", "aa.bcq_", "a_bcq_", "bcq_bcq_", "s0.bcq_"])))
    assert _begins_with(name, prefixes) == name.startswith(tuple(prefixes))


@pytest.mark.parametrize("names", [["a/b", "a"], ["a", "a/b/c"], ["a/b", "a/b/c"]])
def test_a_file_that_is_a_folder_too(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(bcqfmt.BcqError, match="BCQ-E302"):
        bcqfmt.save(tmp_path / "m", {}, config={}, files=dict.fromkeys(names, b""))
