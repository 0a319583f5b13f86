"""Wrong decoders are told from the right one by the vectors: the list is current, and what it says is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages.soak_figures import record
from weights import samples
from wrong_decoders import verdicts as decoder_verdicts
from wrong_decoders.mutants import Mutant, mutants, planted
from wrong_decoders.reasons import EQUIVALENT, LEFT, reason
from wrong_decoders.verdicts import DECODER, Case

SCRIPT = Path(__file__).resolve().parents[1] / "soak" / "mutants.py"
LIST: dict[str, str] = json.loads((Path(__file__).parent / "mutants.json").read_text())
MUTANTS = mutants(DECODER.read_text("utf-8"))
BY_HAND = [mutant for mutant in MUTANTS if " -> " not in mutant.name]
OTHERS = [mutant for mutant in MUTANTS if " -> " in mutant.name]


def told(verdict: str) -> bool:
    return not verdict.startswith((EQUIVALENT, LEFT))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {case.name: case for case in decoder_verdicts.cases(tmp_path_factory.mktemp("vectors").resolve())}
    return {name: case for name, case in found.items() if not case.large}


def untold(chosen: list[Mutant], cases: dict[str, Case]) -> list[str]:
    """The mutants that the vector in the list does not tell; large vectors are left to the long run."""
    decoder = decoder_verdicts.load()
    result = []
    for mutant in chosen:
        verdict = LIST[mutant.name]
        if told(verdict) and verdict in cases:
            with planted(mutant, decoder):
                if decoder_verdicts.passes(cases[verdict], decoder):
                    result.append(mutant.name)
    return result


def test_the_list_is_about_this_decoder() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS)
    new, gone = names - LIST.keys(), LIST.keys() - names
    assert not new | gone, f"python tests/soak/mutants.py --write: new {sorted(new)[:3]}, gone {sorted(gone)[:3]}"


def test_every_mutant_is_told_or_has_a_reason() -> None:
    index = samples.vector_index()
    vectors = {entry["id"] for group in ("valid", "invalid") for entry in index[group]}
    vectors |= {f"numbers/{kind}" for kind in index["numbers"]}
    for name, verdict in LIST.items():
        assert verdict in vectors if told(verdict) else verdict == reason(name), name
    assert sum(map(told, LIST.values())) >= 2000
    assert sum(told(LIST[mutant.name]) for mutant in BY_HAND) >= 150


def test_the_right_decoder_is_not_told(cases: dict[str, Case]) -> None:
    decoder = decoder_verdicts.load()
    assert [
        name for name in sorted({LIST[m.name] for m in BY_HAND} & cases.keys()) if not cases[name].judge(decoder, True)
    ] == []


def test_likely_mistakes_are_told(cases: dict[str, Case]) -> None:
    assert untold(BY_HAND, cases) == []


def test_a_sample_of_the_others_is_told(cases: dict[str, Case]) -> None:
    # What loses an order loses another one in every process; the long run fixes it.
    assert untold([mutant for mutant in OTHERS if "sorted(" not in mutant.name][::25], cases) == []


@pytest.mark.soak
def test_all_wrong_decoders_against_all_vectors() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONHASHSEED": "0"}, timeout=6 * 3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    figures = re.fullmatch(r"(\d+) wrong decoders in (\d+) s: (.*)\n", done.stdout)
    assert figures is not None, done.stdout
    kinds = dict(part.rsplit(" ", 1) for part in figures[3].split(", "))
    index = samples.vector_index()
    record(
        "mutants",
        wrong_decoders=int(figures[1]),
        of_which_by_hand=len(BY_HAND),
        told=int(kinds["told"]),
        equivalent=int(kinds["equivalent"]),
        not_asked=int(kinds["not asked"]),
        survive=0,
        vectors=len(index["valid"]) + len(index["invalid"]),
        seconds=int(figures[2]),
    )
