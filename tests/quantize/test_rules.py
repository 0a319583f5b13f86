"""Rule files and patterns: what they choose, and what they are refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters.quantize.choice import Choice, choose
from bcqfmt.converters.quantize.dense import Verdict
from bcqfmt.converters.quantize.rules import RuleFile, read_rules
from bcqfmt.errors import BcqError

Q, UP, DOWN = "layers.0.attn.q.weight", "layers.0.mlp.up.weight", "layers.1.mlp.down.weight"
HEAD, NORM = "lm_head.weight", "norm.weight"
VERDICTS = {
    Q: Verdict("", True),
    UP: Verdict("", True),
    DOWN: Verdict("", True),
    HEAD: Verdict("output head", True),
    NORM: Verdict("vector", False),
}
ROOT = Path(__file__).resolve().parents[2]


def rules(folder: Path, text: str) -> RuleFile:
    path = folder / "rules.toml"
    path.write_text(text)
    return read_rules(path)


def chosen(choice: Choice) -> dict[str, tuple[str, Any]]:
    """Weight -> method and bits."""
    found = {}
    for name in choice.weights:
        method = choice.method_of(name)
        found[name] = (method.name, method.settings()["bits"])
    return found


def refused(folder: Path, text: str) -> BcqError:
    with pytest.raises(BcqError) as caught:
        choose(VERDICTS, "rtn", {}, rules(folder, text))
    return caught.value


# ---------------------------------------------------------------------------------------------------- the choice
def test_without_rules_all_weights_get_the_same() -> None:
    choice = choose(VERDICTS, "rtn", {"bits": "3"})
    assert chosen(choice) == dict.fromkeys((Q, UP, DOWN), ("rtn", 3))
    assert choice.dense == {HEAD: "output head", NORM: "vector"}
    assert len(choice.methods) == 1


def test_the_first_rule_wins(tmp_path: Path) -> None:
    text = "[[rule]]\nmatch='attn'\nbits=5\n[[rule]]\nmatch='weight'\nmethod='bcq'\nbits=2\n"
    assert chosen(choose(VERDICTS, "rtn", {"bits": 4}, rules(tmp_path, text))) == {
        Q: ("rtn", 5), UP: ("bcq", 2), DOWN: ("bcq", 2),
    }  # fmt: skip


def test_rules_inherit_the_settings_of_their_own_method_only(tmp_path: Path) -> None:
    text = "[[rule]]\nmatch='attn'\nbits=5\n[[rule]]\nmatch='up'\nmethod='rtn'\nbits=6\n"
    text += "[[rule]]\nmatch='down'\nmethod='bcq'\n"
    choice = choose(VERDICTS, "rtn", {"bits": 4, "group_size": 64, "symmetric": True}, rules(tmp_path, text))
    assert choice.method_of(Q).settings()["group_size"] == choice.method_of(UP).settings()["group_size"] == 64
    assert choice.method_of(UP).settings()["symmetric"] is True
    assert choice.method_of(DOWN).settings()["group_size"] == 128  # of bcq itself


def test_the_default_of_the_file(tmp_path: Path) -> None:
    file = rules(tmp_path, "[default]\nmethod='bcq'\nbits=2\nrounds=3\n[[rule]]\nmatch='attn'\nbits=3\n")
    assert chosen(choose(VERDICTS, None, {}, file)) == {Q: ("bcq", 3), UP: ("bcq", 2), DOWN: ("bcq", 2)}
    over = choose(VERDICTS, "bcq", {"bits": 4}, file)  # the command line wins, setting by setting
    assert (over.method_of(UP).settings()["bits"], over.method_of(UP).settings()["rounds"]) == (4, 3)
    assert chosen(choose(VERDICTS, "rtn", {}, file))[UP] == ("rtn", 4)  # settings of another method do not apply
    plain = rules(tmp_path, "[default]\nbits=2\n")  # a default without a method is for whatever method is chosen
    assert chosen(choose(VERDICTS, "rtn", {}, plain))[UP] == ("rtn", 2)


def test_equal_recipes_are_one(tmp_path: Path) -> None:
    text = "[[rule]]\nmatch='attn'\nbits=4\n[[rule]]\nmatch='up'\nmethod='rtn'\ngroup_size='row'\n"
    choice = choose(VERDICTS, "rtn", {"bits": 4}, rules(tmp_path, text))
    assert len(choice.methods) == 2
    assert choice.weights[Q] == choice.weights[DOWN]


def test_dense_rules(tmp_path: Path) -> None:
    choice = choose(VERDICTS, "rtn", {}, rules(tmp_path, r"[[rule]]" + "\nmatch='layers\\.0'\ndense=true\n"))
    assert set(choice.weights) == {DOWN}
    assert choice.dense[Q] == choice.dense[UP] == "left dense by a rule"


def test_rules_may_take_what_stays_dense(tmp_path: Path) -> None:
    text = "[[rule]]\nmatch='head'\ninclude=true\nbits=8\n"
    assert chosen(choose(VERDICTS, "rtn", {}, rules(tmp_path, text)))[HEAD] == ("rtn", 8)
    everything = choose(VERDICTS, "rtn", {}, rules(tmp_path, "[[rule]]\nmatch='.'\ninclude=true\n"))
    assert everything.dense == {NORM: "vector"}  # nothing can be done about a vector


def test_include_and_exclude() -> None:
    assert set(choose(VERDICTS, "rtn", {}, include=["head", "norm|attn"]).weights) == {Q, UP, DOWN, HEAD}
    choice = choose(VERDICTS, "rtn", {}, exclude=[r"mlp\.up"], include=["mlp"])
    assert choice.dense[UP] == "excluded"
    assert set(choice.weights) == {Q, DOWN}


def test_exclude_wins_over_rules(tmp_path: Path) -> None:
    choice = choose(VERDICTS, "rtn", {}, rules(tmp_path, "[[rule]]\nmatch='attn'\nbits=8\n"), exclude=["attn"])
    assert choice.dense[Q] == "excluded"


# ------------------------------------------------------------------------------------------------ nothing matches
def test_a_rule_that_matches_nothing(tmp_path: Path) -> None:
    fault = refused(tmp_path, "# one\n[[rule]]\nmatch='atn'\nbits=3\n")
    assert (fault.code, fault.exit_code) == ("BCQ-E625", 2)
    assert "rules.toml, rule 1, line 2" in str(fault)
    assert "'atn' is in no tensor's name" in str(fault)


def test_a_rule_that_may_match_nothing(tmp_path: Path) -> None:
    choice = choose(VERDICTS, "rtn", {}, rules(tmp_path, "[[rule]]\nmatch='atn'\noptional=true\nbits=3\n"))
    assert choice.unused == ["rules.toml, rule 1, line 1: 'atn' matches nothing"]


def test_a_rule_for_what_stays_dense(tmp_path: Path) -> None:
    fault = refused(tmp_path, "[[rule]]\nmatch='head'\nbits=3\n")
    assert fault.code == "BCQ-E625"
    assert "only what stays dense: lm_head.weight (output head)" in str(fault)


def test_a_rule_that_others_leave_nothing(tmp_path: Path) -> None:
    fault = refused(tmp_path, "[[rule]]\nmatch='.'\nbits=3\n[[rule]]\nmatch='attn'\nbits=4\n")
    assert fault.code == "BCQ-E625"
    assert "rule 2, line 4" in str(fault)
    assert "earlier rules have taken all" in str(fault)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_patterns_that_match_nothing(option: str) -> None:
    for pattern in ("nowhere", "^norm"):
        with pytest.raises(BcqError, match=f"BCQ-E625 --{option}"):
            choose(VERDICTS, "rtn", {}, **{option: [pattern]})  # type: ignore[arg-type]
    with pytest.raises(BcqError, match=f"BCQ-E626 --{option}"):
        choose(VERDICTS, "rtn", {}, **{option: ["("]})  # type: ignore[arg-type]


def test_nothing_left() -> None:
    with pytest.raises(BcqError, match=r"BCQ-E625.*no weight is left"):
        choose(VERDICTS, "rtn", {}, exclude=["layers"])


# -------------------------------------------------------------------------------------------------------- methods
def test_no_method(tmp_path: Path) -> None:
    """The file and a weight are named, and what to add."""
    with pytest.raises(BcqError, match=r"BCQ-E620 rules\.toml: '.*mlp.*': .*no rule matches it") as caught:
        choose(VERDICTS, None, {}, rules(tmp_path, "[[rule]]\nmatch='attn'\nmethod='rtn'\n"))
    assert all(words in caught.value.hint for words in ("--method", "[default]", "dense = true"))
    with pytest.raises(
        BcqError, match=r"BCQ-E620 rules\.toml, rule 1, line 1: '.*attn.*': .*without a method"
    ) as caught:
        choose(VERDICTS, None, {}, rules(tmp_path, "[[rule]]\nmatch='attn'\nbits=3\n"))
    assert "`method` to the rule" in caught.value.hint


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("bits=9", "bits = 9"),
        ("bitz=3", "no setting `bitz`"),
        ("method='rtm'", "no method 'rtm'"),
        ("bits=nan", "bits = nan"),
        ("group_size=7", "group_size = 7"),
    ],
)
def test_settings_are_checked_with_their_place(tmp_path: Path, body: str, found: str) -> None:
    fault = refused(tmp_path, f"\n\n[[rule]]\nmatch='attn'\n{body}\n")
    assert (fault.code, fault.exit_code) == ("BCQ-E620", 2)
    assert "rules.toml, rule 1, line 3" in str(fault)
    assert found in str(fault)


def test_a_default_that_is_never_used_is_checked_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(BcqError, match="BCQ-E620"):
        choose(VERDICTS, "rtn", {"bits": 0}, rules(tmp_path, "[[rule]]\nmatch='.'\nmethod='bcq'\n"))


# ------------------------------------------------------------------------------------------------------ malformed
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[[rule]\nmatch='a'\n", 1),
        ("[[rule]]\nmatch='a'\nbits=\n", 3),
        ("[[rule]]\nmatch='a'\nmatch='b'\n", 3),
        ("[[rule]]\nbits=3\n", 1),
        ("[[rule]]\nmatch='a'\n\n[[rule]]\nbits=3\n", 4),
        ("[[rule]]\nmatch='('\n", 2),
        ("[[rule]]\nmatch=''\n", 2),
        ("[[rule]]\nmatch=3\n", 2),
        ("[[rule]]\nmatch='a'\ndense='yes'\n", 3),
        ("[[rule]]\nmatch='a'\ndense=true\nbits=3\n", 1),
        ("[[rule]]\nmatch='a'\ndense=true\nmethod='rtn'\n", 1),
        ("[[rule]]\nmatch='a'\nmethod=3\n", 3),
        ("[[rule]]\nmatch='a'\nbits=[3]\n", 3),
        ("[[rule]]\nmatch='a'\nsince=2024-01-01\n", 3),
        ("[rule]\nmatch='a'\n", 1),
        ("rules = 3\n", 1),
        ("# text\n\n[[rules]]\nmatch='a'\n", 3),
        ("default = 3\n", 1),
        ("[default]\nbits=[1]\n", 2),
        ("\n[default]\nmethod=[]\n", 3),
    ],
)
def test_malformed_files_name_the_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(BcqError) as caught:
        rules(tmp_path, text)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E626", 4)
    assert f"rules.toml: malformed rule file: line {line}: " in str(caught.value)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    with pytest.raises(BcqError, match="BCQ-E101"):
        read_rules(path)
    path.write_bytes(b"# one\n[[rule]]\nmatch = '\xff'\n")
    with pytest.raises(BcqError, match=r"BCQ-E626.*line 3: bytes that are no UTF-8"):
        read_rules(path)
    path.write_bytes(b"#" * 1_000_001)
    with pytest.raises(BcqError, match=r"BCQ-E626.*1000001 bytes"):
        read_rules(path)
    path.write_text("")
    assert read_rules(path) == RuleFile(place="rules.toml")


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        rules(tmp_path, '[[rule]]\nmatch="a"\n"\\u001b[2J" = [1]\n')
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["lut-gemm-mixed.toml", "nuqmm-mixed.toml"])
def test_the_examples_can_be_used(name: str) -> None:
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
              "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    verdicts = {f"model.layers.0.{layer}.weight": Verdict("", True) for layer in layers}
    choice = choose(verdicts, None, {}, read_rules(ROOT / "docs" / "examples" / name))
    assert len(choice.weights) == 7
    kinds = {name: choice.method_of(name).settings() for name in choice.weights}
    attention, network = (
        {(s["bits"], s["group_size"]) for n, s in kinds.items() if part in n} for part in ("attn", "mlp")
    )
    assert len(attention) == len(network) == 1  # one (q, g) per kind of sub-layer, as the papers have it
    assert attention != network
    assert all(q in (3, 4, 5) and g in (128, 256, 512, 2048) for q, g in attention | network)
