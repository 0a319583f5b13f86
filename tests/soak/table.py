"""Render the table of docs/reliability.md from docs/reliability.json: ``python tests/soak/table.py``.

``python tests/soak/table.py fuzzing figures.json ...`` first takes in the figures of runs of tests/fuzz/run.py, summed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from pages.soak_figures import FIGURES, fuzz_figures, fuzz_runs, record, rendered


def main() -> None:
    """Take in figures if some are named, then render."""
    if len(sys.argv) > 2:
        found = [json.loads(Path(path).read_text()) for path in sys.argv[2:]]
        record(sys.argv[1], **(fuzz_figures(fuzz_runs(found)) if sys.argv[1] == "fuzzing" else found[0]))
    page = FIGURES.with_suffix(".md")
    page.write_text(rendered(page.read_text(), json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main()
