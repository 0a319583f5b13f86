"""``--context`` of verbs that run a model on a text: what it has positions for, or a refusal before it is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bcqfmt.cli.main import cli
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.quantize.stats import open_stats

POSITIONS = 64  # of the model
_QUANTIZE = "bcqfmt.converters.quantize"
# verb -> its options, the module that loads a model
VERBS = {
    "calibrate": (("--rows", "1", "--device", "cpu", "--out"), f"{_QUANTIZE}.calibration"),
    "quantize": (
        ("--method", "gptq", "--group-size", "16", "--rows", "1", "--device", "cpu"),
        f"{_QUANTIZE}.sequential",
    ),
    "sweep": (("--bits", "2", "--group-size", "32", "--out"), "bcqfmt.integrations.transformers.run"),
}


def run(verb: str, model: Path, text: Path, out: Path, *more: str) -> Result:
    words = [verb, model, *([out] if verb == "quantize" else []), "--text", text, *VERBS[verb][0]]
    words += [] if verb == "quantize" else [out]
    return CliRunner().invoke(cli, [str(word) for word in [*words, *more]])


@pytest.mark.parametrize("verb", VERBS)
def test_pieces_are_no_longer_than_the_model_allows(verb: str, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    made = run(verb, model, text, out)
    assert made.exit_code == 0, made.output
    what = "windows" if verb == "sweep" else "pieces"
    assert f"{what} of {POSITIONS} tokens: {model} has positions for no more" in made.stderr
    if verb == "calibrate":
        assert open_stats(out).record["seq"] == POSITIONS
    elif verb == "quantize":
        record = read_record(out)
        assert record is not None
        assert record.text is not None
        assert record.text["seq"] == POSITIONS
    else:
        assert json.loads(out.read_text())["text"]["context"] == POSITIONS


@pytest.mark.parametrize("verb", VERBS)
def test_a_context_beyond_the_model_is_refused_before_it_is_loaded(
    verb: str, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, VERBS[verb][1], None)  # importing it fails
    refused = run(verb, model, text, tmp_path / "out.json", "--context", str(POSITIONS + 1))
    assert refused.exit_code == 2
    assert (
        f"BCQ-E302 {model.name}: argument out of range: {POSITIONS + 1} tokens; expected at most {POSITIONS}"
        in refused.stderr
    )
    assert "hint: --context sets" in refused.stderr
    assert not list(tmp_path.iterdir())
