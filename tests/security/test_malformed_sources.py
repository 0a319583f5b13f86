"""Sources that are wrong in one place: refused with a code, or converted and proved; no traceback, nothing left."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from bcqfmt.cli.main import cli
from pages.soak_figures import record
from sources import malformed_sources

_SAMPLE = 100
_SECONDS = 5  # for all commands on one source, in the soak


def ended(*args: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(map(str, args)))
    return done.exit_code, done.output


def tried(made: malformed_sources.Source, place: Path) -> Counter[str]:
    """How a source fares in convert or quantize, inspect and a dry run; what was written is verified."""
    source, target = made.write(place / "source"), place / "bcq"
    dense = made.what.startswith("dense")
    work = ("quantize", target, "--method", "rtn", "--group-size", "32") if dense else ("convert", target)
    ends: Counter[str] = Counter()
    for verb, *options in ((*work, "--dry-run"), ("inspect", "--modules"), work):
        code, output = ended(verb, source, *options)
        other = code == 2 and any(f"BCQ-E{n}" in output for n in (610, 625, 627))  # nothing there for this verb
        assert code in (0, 3, 4, 5, 6, 7, 8, 9) or other, (made.what, verb, code, output)
        ends[f"{verb} {code}"] += 1
    assert target.exists() == (code == 0), made.what
    if code == 0:
        code, output = ended("validate", "--deep", target) if dense else ended("verify", source, target)
        assert code == 0, (made.what, output)
    shutil.rmtree(place)
    return ends


@pytest.mark.parametrize("layout", malformed_sources.BASES)
def test_the_sound_ones_are_converted(layout: str, tmp_path: Path) -> None:
    ends = tried(malformed_sources.sound(layout), tmp_path / "x")
    assert ends == {"quantize 0" if layout == "dense" else "convert 0": 2, "inspect 0": 1}


def test_a_sample_of_what_can_be_wrong(tmp_path: Path) -> None:
    everything = list(malformed_sources.malformed())
    ends: Counter[str] = Counter()
    for made in everything[:: len(everything) // _SAMPLE]:
        ends += tried(made, tmp_path / "x")
    assert ends.total() >= 3 * _SAMPLE
    assert min(ends["convert 0"], ends["convert 4"], ends["convert 5"]) > 5


@pytest.mark.soak
def test_everything_that_can_be_wrong(tmp_path: Path) -> None:
    ends: Counter[str] = Counter()
    count, slowest = 0, 0.0
    for made in malformed_sources.malformed():
        start = time.monotonic()
        ends += tried(made, tmp_path / "x")
        slowest = max(slowest, time.monotonic() - start)
        assert slowest < _SECONDS, made.what
        count += 1
    assert count >= 2000
    refused = sum(number for end, number in ends.items() if not end.endswith(" 0"))
    figures = {"sources": count, "commands": ends.total(), "refused": refused, "unexpected_errors": 0}
    record("malformed", **figures, slowest_s=round(slowest, 2))
