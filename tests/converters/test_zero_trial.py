"""Zero points that can be read in several ways: rules that the width allows, and the one that fits a dense model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from bcqfmt.cli.main import cli
from bcqfmt.converters.convert.zero_trial import try_rules
from bcqfmt.converters.layouts.gptq_zeros import choose_rule, rules_of
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.peers import PEERS

SOURCE = PEERS / "gptqmodel-gptq-3b-g32-asym" / "source"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_only_legal_rules_are_offered(bits: int) -> None:
    with pytest.raises(BcqError) as caught:
        choose_rule("auto", "gptq", bits, None, True)
    offered = caught.value.hint.partition("--zero-point ")[2].partition(";")[0].split(" or ")
    assert set(offered) == set(rules_of({bits})) - {"v2"}
    assert ("v1-carry" in offered) == (bits != 3)
    assert ("v1-gptqmodel-3bit" in offered) == (bits == 3)


def test_widths_together_leave_the_rules_of_all() -> None:
    assert rules_of({3, 4}) == ["v2", "v1-nowrap", "v1-wrap", "v1-gptqmodel-3bit"]
    assert rules_of({4}) == ["v2", "v1-nowrap", "v1-wrap", "v1-carry"]


@pytest.mark.parametrize("rule", ["v1-wrap", "v1-nowrap"])
def test_the_rule_that_fits_is_shown(rule: str, tmp_path: Path) -> None:
    """A folder whose writer is not on record, with fields of all ones; the dense model is what ``rule`` makes of it."""
    folder, bcq, dense = tmp_path / "gptq", tmp_path / "bcq", tmp_path / "dense"
    folder.mkdir()
    tensors = load_file(SOURCE / "model.safetensors")
    for name, words in tensors.items():
        if name.endswith("qzeros"):
            words[0, :3] = -1  # 32 fields of 3 bits
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in SOURCE.glob("*.json"):
        text = json.loads(file.read_text())
        for found in (text, text.get("quantization_config", {})):
            found.pop("meta", None)
        (folder / file.name).write_text(json.dumps(text))
    run(["convert", folder, bcq, "--zero-point", rule], 0)
    run(["export", bcq, dense, "--to", "dense"], 0)
    trials = try_rules(open_source(folder), open_source(dense))
    assert [trial.rule for trial in trials if trial.relative == 0] == [trials[0].rule] == [rule]
    assert {trial.rule for trial in trials} == set(rules_of({3}))
    words = ["convert", str(folder), str(tmp_path / "out"), "--against", str(dense)]
    said = run(words, 4)
    assert f"BCQ-E605 {folder}:" in said
    best = said.partition("the best: bcqfmt ")[2].split()
    assert best == [*words, "--zero-point", rule]
    run(best, 0)
    run(["diff", bcq, tmp_path / "out"], 0)


def run(words: Sequence[object], exit_code: int) -> str:
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == exit_code, result.stderr
    return result.stderr
