"""Patterns of a configuration: equal to Python's `re` where they are understood, and never without an end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters.source.patterns import Patterns
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import BcqError, UnsupportedError

_PIECES = [
    "a",
    "b",
    "ab",
    ".",
    "*",
    "+",
    "?",
    "{2}",
    "{1,2}",
    "{,2}",
    "{1,}",
    "{,}",
    "{}",
    "{",
    "}",
    "(",
    "(?:",
    "(?=",
    "(?!",
    ")",
    ")",
    "|",
    "^",
    "$",
    "\\b",
    "\\B",
    "\\A",
    "\\Z",
    "\\d",
    "\\D",
    "\\w",
    "\\s",
    "\\.",
    "\\-",
    "-",
    "[ab]",
    "[^a]",
    "[a-c.]",
    "[]",
    "[^]a]",
    "[\\d.]",
    "]",
    "*?",
    "+?",
    "??",
    "{1}?",
    "*+",
    "\\1",
    "\\n",
    "(?P<x>",
    "(?i)",
    "(?<=",
    "[a",
    "[z-a]",
    "\n",
    "é",
]
_NAMES = st.text("ab.c1-é\n", max_size=8)


def _pieces() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(_PIECES), min_size=1, max_size=9).map("".join)


@settings(max_examples=600, deadline=None)
@given(_pieces(), st.lists(_NAMES, min_size=1, max_size=6))
def test_what_is_understood_means_the_same_in_re(pattern: str, names: list[str]) -> None:
    ours = Patterns("x")
    try:
        ours.fits(pattern, "")
    except UnsupportedError:
        return
    theirs = re.compile(pattern)  # nothing is understood that `re` refuses
    for name in names:
        assert ours.fits(pattern, name) == (theirs.match(name) is not None)
        assert ours.fits(pattern, name, anywhere=True) == (theirs.search(name) is not None)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r".*\.18\..*gate.*", "model.layers.18.mlp.gate_proj", "model.layers.17.mlp.gate_proj"),
        (r"model\.layers\.(0|1|[2-9][0-9])\..*", "model.layers.45.mlp.up", "model.layers.5.mlp.up"),
        (r"^(?!.*mlp\.experts).*$", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"),
        (r".*self_attn\.(q|k|v|o)_proj$", "a.self_attn.q_proj", "a.self_attn.q_proj.x"),
        (r".*mlp\.experts(?:\..*)?$", "a.mlp.experts", "a.mlp.expertsx"),
        (r"lm_head", "lm_head", "model.lm_head"),
    ],
)
def test_patterns_of_published_checkpoints(pattern: str, yes: str, no: str) -> None:
    ours = Patterns("x")
    assert (ours.fits(pattern, yes), ours.fits(pattern, no)) == (True, False)
    assert (re.match(pattern, yes) is None, re.match(pattern, no) is None) == (False, True)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*$",
        "(a|aa)+$",
        "(a*)*b",
        "(.*a){20}$",
        "((((a*)*)*)*)*b",
        "(?:a?){30}a{30}b",
        "(.*)*(.*)*(.*)*b",
    ],
)
def test_patterns_that_would_run_for_ever(pattern: str) -> None:
    assert not Patterns("x").fits(pattern, "a" * 50 + "!")  # years in `re`, for most of them


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 4000,
        "(" * 31 + ")" * 31,
        "a{99999999999}",
        "a{1001}",
        "a" * 4001,
        "(",
        ")",
        "[",
        "*",
        "a**",
        r"\1",
        "(?i)a",
    ],
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="BCQ-E618 model: "):
        Patterns("model").fits(pattern, "a")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("(?:(?:(?:.?){999}){999}){999}b", ["a" * 400]),  # one match
        (".*" * 1000, [f"{i}" * 50 for i in range(200)]),  # many
        ("a", ["a" * 1_000_000]),  # a long name
    ],
)
def test_the_work_of_a_checkpoint_is_bounded(pattern: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcqfmt.converters.source.patterns._STEPS", 100_000)
    ours = Patterns("model")
    with pytest.raises(UnsupportedError, match="takes more than 100,000 steps"):
        all(ours.fits(pattern, name) for name in [*names, *names])


def test_settings_of_a_module() -> None:
    rules = {".*up": {"bits": 3}, "-:.*skip.*": None, "+:.*": {"bits": 8, "sym": None}}
    found = Settings(bits=4, raw={"dynamic": rules})
    assert [found.of(name)["bits"] for name in ("a.up", "skip.up", "other")] == [3, 4, 8]
    rules = {"a.up": {"bits": 16}, "up": {"bits": 2, "group_size": 64}}
    found = Settings(bits=4, group_size=32, raw={"extra_config": rules})
    assert [found.of(name)["group_size"] for name in ("a.up", "b.up", "b.down")] == [32, 64, 32]


@pytest.mark.parametrize(
    "raw",
    [{key: {".*": value}} for key in ("dynamic", "extra_config") for value in (5, None, [], "x", {"bits": "4"})]
    + [{"dynamic": {".*": {"group_size": 32.0}}}, {"extra_config": {"m": {"sym": 1}}}],
)
def test_settings_of_another_type(raw: dict[str, object]) -> None:
    with pytest.raises(BcqError, match="BCQ-E602"):
        Settings(raw=raw).of("m")
