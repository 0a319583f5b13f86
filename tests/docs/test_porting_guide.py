"""What the porting guide names is there: features, vectors, rules, sections, files, functions of the C reader."""

import json
import re
from pathlib import PurePath

import pytest

from bcqfmt.codes import CODES
from bcqfmt.weight.scheme import FEATURES
from programs.verbs import ROOT

GUIDE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
INDEX = json.loads((ROOT / "spec" / "vectors" / "index.json").read_text(encoding="utf-8"))


def section(title: str) -> str:
    return GUIDE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_feature_has_its_line() -> None:
    named = set(re.findall(r"`([a-z0-9-]+)`", section("What you need to support")))
    assert set(FEATURES) <= named


def test_vectors_exist() -> None:
    names = {entry["id"] for entry in INDEX["valid"]}
    for pattern in re.findall(r"`valid/([a-z0-9*-]+)`", GUIDE):
        assert [name for name in names if PurePath(name).match(pattern)], pattern


def test_rules_exist() -> None:
    for number in re.findall(r"\bV(\d{3})\b", GUIDE):
        assert f"BCQ-V{number}" in CODES


def test_sections_exist() -> None:
    text = (ROOT / "spec" / "bcq-1.0.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", text, re.MULTILINE))
    rows = re.findall(r"^\| \d+\. [^|]*\| ([\d., ]+) \|", GUIDE, re.MULTILINE)
    assert len(rows) == 10
    for row in rows:
        assert set(row.strip().split(", ")) <= there, row


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:spec|tests)/[\w./]+)`", GUIDE))))
def test_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("page", ["docs/porting.md", "spec/c/README.md"])
def test_names_of_the_c_reader(page: str) -> None:
    header = (ROOT / "spec" / "c" / "bcq.h").read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:bcq|BCQ)_[A-Za-z]\w+", text))
    assert {name for name in named if not re.search(rf"\b{name}", header)} == set()
