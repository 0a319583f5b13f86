"""Outputs never take the place of what a verb reads, ``--overwrite`` or not, nor of folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from programs.verbs import Run
from sources.conversions import tree
from sources.dense_samples import dense_folder
from sources.peers import PEERS

DENSE = str(PEERS / "dense-fp16" / "source")
GPTQ = str(PEERS / "gptqmodel-gptq-4b-g32-asym" / "source")
RTN = ("--method", "rtn", "--group-size", "32")
ANOTHER = "expected a new file\nhint: choose another name\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bcq(run: Run, place: Path) -> Path:
    assert run("quantize", DENSE, "bcq", *RTN).exit_code == 0
    return place / "bcq"


def refused(run: Run, place: Path, words: tuple[str, ...], code: str, text: str) -> None:
    """With ``--overwrite`` and without; nothing has changed afterwards."""
    before = tree(place)
    for more in ((), ("--overwrite",)):
        result = run(*words, *more)
        assert result.exit_code == 7, result.stderr
        assert code in result.stderr
        assert text in result.stderr
    assert tree(place) == before


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(
    ("words", "option", "file"),
    [
        (("calibrate", DENSE, "--out", "in.txt"), "--text", "in.txt"),
        (("sweep", DENSE, "--out", "in.json"), "--text", "in.json"),
        (("sweep", DENSE, "--plot", "in.svg"), "--stats", "in.svg"),
        (("quantize", DENSE, "new", *RTN, "--html", "in.html"), "--text", "in.html"),
        (("quantize", DENSE, "new", *RTN, "--html", "in.html"), "--text", "in.json"),
        (("quantize", DENSE, "new", "--html", "in.html"), "--rules", "in.html"),
        (("quantize", DENSE, "new", *RTN, "--html", "in.html"), "--stats", "in.html"),
        (("quantize", DENSE, "in.txt", *RTN), "--text", "in.txt"),
        (("convert", GPTQ, "new", "--html", "in.html"), "--against", "in.html"),
        (("report", "bcq", "--html", "in.html"), "--against", "in.json"),
    ],
)
def test_a_file_that_is_read_is_not_replaced(
    run: Run, place: Path, words: tuple[str, ...], option: str, file: str, link: bool
) -> None:
    (place / file).write_text("mine")
    (place / "link").symlink_to(file)
    refused(run, place, (*words, option, "link" if link else file), "BCQ-E402", f"it is what {option} names")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("quantize", DENSE, "bcq", *RTN), "--text"),
        (("quantize", DENSE, "bcq", *RTN), "--stats"),
        (("quantize", DENSE, "bcq"), "--rules"),
        (("convert", GPTQ, "bcq"), "--against"),
    ],
)
def test_a_folder_that_holds_what_is_read_is_not_replaced(
    run: Run, place: Path, bcq: Path, words: tuple[str, ...], option: str
) -> None:
    if option == "--against":
        dense_folder(bcq / "in")
    else:
        (bcq / "in").write_text("mine")
    refused(run, place, (*words, option, "bcq/in"), "BCQ-E402", f"it holds what {option} names")
    shutil.move(bcq / "in", place / "in")
    bcq.rename(place / "bcq.partial")  # a new run drops this one
    (place / "in").rename(place / "bcq.partial" / "in")
    refused(run, place, (*words, option, "bcq.partial/in"), "BCQ-E402", f"it holds what {option} names")


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (("calibrate", DENSE, "--text", "a.txt", "--out", "folder"), "folder"),
        (("report", "bcq", "--html", "r.html"), "r.html"),
        (("report", "bcq", "--html", "r.html"), "r.json"),
        (("sweep", DENSE, "--out", "s.json"), "s.json"),
        (("sweep", DENSE, "--plot", "s.svg"), "s.svg"),
        (("convert", GPTQ, "new", "--html", "r.html"), "r.html"),
    ],
)
def test_a_folder_is_no_place_for_a_file(run: Run, place: Path, words: tuple[str, ...], folder: str) -> None:
    (place / folder).mkdir()
    refused(run, place, words, "BCQ-E401", f" {folder}: output exists: it is a folder; {ANOTHER}")


def test_a_link_that_leads_nowhere_is_not_told_to_be_overwritten(run: Run, place: Path, bcq: Path) -> None:
    (place / "r.html").symlink_to("nowhere")
    refused(run, place, ("report", "bcq", "--html", "r.html"), "BCQ-E401", f"no file; {ANOTHER}")


@pytest.mark.parametrize("target", ["new/folder", "r.html"])
@pytest.mark.parametrize("verb", [("convert", GPTQ), ("quantize", DENSE)])
def test_a_report_never_goes_into_a_folder_that_is_still_to_be_made(
    run: Run, place: Path, verb: tuple[str, ...], target: str
) -> None:
    more = RTN if verb[0] == "quantize" else ()
    page = "r.html" if target == "r.html" else f"{target}/r.html"
    refused(run, place, (*verb, target, *more, "--html", page), "BCQ-E402", "a model's folder; expected")
