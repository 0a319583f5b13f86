"""Settings of methods: defaults, texts, and one bad value per rule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from bcqfmt.converters.methods.bcq import Bcq
from bcqfmt.converters.methods.multi import Multi
from bcqfmt.converters.methods.parameters import built, declared, setting
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.errors import BcqError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    bits: int = setting(4, "bits", low=1, high=8)
    group_size: int = setting(128, "columns", low=8, words={"row": -1})
    ratio: float = setting(0.25, "share", low=0.0, high=1.0)
    bias: bool = setting(True, "z")
    clip: str = setting("none", "how", choices=("none", "search"))


def test_defaults_and_the_order_of_declaration():
    assert asdict(built(Sample, {}, "m")) == {
        "bits": 4, "group_size": 128, "ratio": 0.25, "bias": True, "clip": "none",
    }  # fmt: skip
    assert [(p.name, p.kind, p.default, p.choices) for p in declared(Sample)] == [
        ("bits", int, 4, ()),
        ("group_size", int, 128, ()),
        ("ratio", float, 0.25, ()),
        ("bias", bool, True, ()),
        ("clip", str, "none", ("none", "search")),
    ]
    assert all(p.help for p in declared(Sample))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"bits": 3}, "bits", 3),
        ({"bits": "3"}, "bits", 3),
        ({"bits": 3.0}, "bits", 3),
        ({"group-size": 64}, "group_size", 64),
        ({"group_size": "row"}, "group_size", -1),
        ({"group_size": -1}, "group_size", -1),
        ({"group_size": "-1"}, "group_size", -1),
        ({"ratio": 1}, "ratio", 1.0),
        ({"ratio": "0.5"}, "ratio", 0.5),
        ({"bias": False}, "bias", False),
        ({"bias": "False"}, "bias", False),
        ({"clip": "search"}, "clip", "search"),
    ],
)
def test_values_and_their_texts(given: dict[str, Any], name: str, value: Any):
    found = asdict(built(Sample, given, "m"))[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        ({"group_sise": 64}, "m: no setting `group_sise`", "`group_size`, perhaps"),
        ({"xyz": 1}, "m: no setting `xyz`", "one of bits, group_size, ratio, bias, clip"),
        ({"x\x1b[2J": 1}, "m: no setting `x\\x1b[2J`", "one of bits, group_size, ratio, bias, clip"),
        ({"bits": 9}, "m: bits = 9", "a whole number in 1..8"),
        ({"bits": 0}, "m: bits = 0", "a whole number in 1..8"),
        ({"bits": 2.5}, "m: bits = 2.5", "a whole number in 1..8"),
        ({"bits": "four"}, "m: bits = four", "a whole number in 1..8"),
        ({"bits": True}, "m: bits = True", "a whole number in 1..8"),
        ({"bits": None}, "m: bits = None", "a whole number in 1..8"),
        ({"bits": float("inf")}, "m: bits = inf", "a whole number in 1..8"),
        ({"group_size": 7}, "m: group_size = 7", "a whole number, 8 or more, or `row`"),
        ({"group_size": -2}, "m: group_size = -2", "a whole number, 8 or more, or `row`"),
        ({"ratio": 1.5}, "m: ratio = 1.5", "a number in 0.0..1.0"),
        ({"ratio": "nan"}, "m: ratio = nan", "a number in 0.0..1.0"),
        ({"bias": 1}, "m: bias = 1", "true or false"),
        ({"bias": "yes"}, "m: bias = yes", "true or false"),
        ({"clip": "serch"}, "m: clip = serch", "one of none, search"),
        ({"clip": 1}, "m: clip = 1", "one of none, search"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], found: str, expected: str):
    with pytest.raises(BcqError) as caught:
        built(Sample, given, "m")
    assert caught.value.code == "BCQ-E620"
    assert caught.value.exit_code == 2
    assert (caught.value.finding.found, caught.value.finding.expected) == (found, expected)


@pytest.mark.parametrize("method", [Rtn, Bcq, Multi])
def test_methods_say_what_they_can_be_told(method: Any):
    parameters = {p.name: p for p in method.parameters()}
    made = method.build({})
    assert made.settings() == {name: p.default for name, p in parameters.items()}
    assert made.needs_stats() is None
    assert method.build({"bits": 3, "group_size": "row"}).settings()["group_size"] == -1
    with pytest.raises(BcqError, match=f"{method.name}: no setting `bit`; expected `bits`"):
        method.build({"bit": 3})


def test_the_lowest_precision_of_multi_is_within_its_bits():
    with pytest.raises(BcqError, match="multi: lowest_bits = 4; expected at most bits, which is 3"):
        Multi.build({"bits": 3, "lowest_bits": 4})
