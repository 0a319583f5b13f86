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
from bcqfmt.converters.source.checkpoint import open_source
from security.attacks import peak
from sources.conversions import gptq_folder


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


@pytest.mark.parametrize(
    ("limit", "most", "found"),
    [("_MAX_FILES", 5, "files"), ("_MAX_TENSORS", 19, "tensors")],
)
def test_a_source_with_too_much_in_it(
    tmp_path: Path, limit: str, most: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gptq_folder(tmp_path / "source", layers=4)  # 20 tensors
    (source / "more").mkdir()
    for i in range(3):
        (source / "more" / f"{i}.txt").write_text("")
    monkeypatch.setattr(f"bcqfmt.converters.source.checkpoint.{limit}", most)
    with pytest.raises(bcqfmt.ResourceError, match=f"BCQ-E803 source: .*: more than {most} {found}"):
        open_source(source)


def test_an_index_with_too_much_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted before it is parsed."""
    source = gptq_folder(tmp_path / "source", layers=1)
    index = source / "model.safetensors.index.json"
    index.write_text('{"weight_map" :' + '{"a" : "model.safetensors", ' * 100)
    with pytest.raises(bcqfmt.FormatError, match="BCQ-V501"):
        open_source(source)
    monkeypatch.setattr("bcqfmt.converters.source.checkpoint._MAX_TENSORS", 50)
    with pytest.raises(bcqfmt.ResourceError, match=r"BCQ-E803 .*: more than 50 entries"):
        open_source(source)


def test_shards_without_number_that_are_not_there(tmp_path: Path) -> None:
    """Names are looked up in the folder's listing; 60,000 searches in lists of 60,000 names would take a minute."""
    names = [f"m{i}.safetensors" for i in range(60_000)]
    weight_map = {f"t{i}": name for i, name in enumerate(names)} | {f"b{i}": f"/{i}" for i in range(60_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    report = bcqfmt.validate(tmp_path)
    assert (counted(report, "BCQ-V502"), counted(report, "BCQ-V503"), report.more) == (1000, 1, 59_000)


@pytest.mark.parametrize("inner", ["[],", "{},", '"a":{},'])
@pytest.mark.parametrize("place", ['{"a":%s}', '{"__metadata__":{"a":%s}}', '{"__metadata__":%s}'])
def test_an_entry_of_millions_of_values_is_refused_unparsed(tmp_path: Path, place: str, inner: str) -> None:
    """Parsed first, it would cost hundreds of bytes for every value."""
    body = inner * 500_000
    value = f"{{{body[:-1]}}}" if '"' in inner else f"[{body[:-1]}]"
    header = (place % value).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    expected = "BCQ-V109" if place.startswith('{"a"') else "BCQ-V118"
    codes: list[str] = []

    def read() -> None:
        codes.extend(finding.code for finding in bcqfmt.validate(path).errors)

    assert peak(read) < 8 * len(header)
    assert codes == [expected]


def test_deep_and_wide(tmp_path: Path) -> None:
    header = ('{"a":' + "[" * 17 + "[]," * 500_000 + "[]" + "]" * 17 + "}").encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert peak(lambda: bcqfmt.validate(path)) < 8 * len(header)
    assert [finding.code for finding in bcqfmt.validate(path).errors] == ["BCQ-V106"]
