"""The table in docs/reliability.md is the one that its figures give."""

from __future__ import annotations

import json

from pages import soak_figures
from pages.soak_figures import FIGURES, RUNS, rendered
from programs.verbs import ROOT


def test_the_table_is_that_of_the_figures() -> None:
    assert ROOT / "docs" / "reliability.json" == FIGURES
    page = FIGURES.with_suffix(".md").read_text()
    assert rendered(page, json.loads(FIGURES.read_text())) == page


def test_figures_of_fuzzing_keep_no_inputs() -> None:
    figures = {"executions": 7, "per_second_and_core": 3, "accepted": 1, "what": "files", "cpu_s": 2}
    found = {"executions": 7, "targets": {"files": {**figures, "findings": {"a": 2, "b": 1}, "inputs": {"a": "eJw"}}}}
    kept = soak_figures.fuzz_figures(found)
    assert kept["findings"] == 3
    assert "inputs" not in kept["targets"]["files"]
    assert "| files | 7 | 3 | 1 | 3 |" in soak_figures.fuzz_table(kept)


def test_figures_of_several_runs_are_added_up() -> None:
    one = {"what": "files", "executions": 7, "accepted": 1, "cpu_s": 2, "slowest_s": 0.5, "per_second_and_core": 4}
    one |= {"findings": {"a": 2}, "codes_seen": ["x"], "inputs": {}}
    other = {**one, "executions": 13, "cpu_s": 3, "slowest_s": 0.25, "findings": {"a": 1}, "codes_seen": ["y"]}
    runs = [{"jobs": 2, "seconds": 5, "executions": 7, "targets": {"files": one}},
            {"jobs": 4, "seconds": 6, "executions": 13, "targets": {"files": other}}]  # fmt: skip
    added = soak_figures.fuzz_runs(runs)
    assert (added["runs"], added["jobs"], added["seconds"], added["executions"]) == (2, 4, 11, 20)
    total = soak_figures.fuzz_figures(added)["targets"]["files"]
    assert total == {"what": "files", "executions": 20, "accepted": 2, "slowest_s": 0.5, "per_second_and_core": 4,
                     "findings": 3, "codes_seen": 2}  # fmt: skip


def test_figures_of_nothing_are_not_invented() -> None:
    text = soak_figures.table({})
    assert text.count("not run yet") == len(RUNS)
