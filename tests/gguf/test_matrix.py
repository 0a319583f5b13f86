"""The table of docs/gguf.md is what the exporters do."""

from __future__ import annotations

from pages import export_matrix


def test_every_cell_of_the_page_is_what_the_exporters_say() -> None:
    made = export_matrix.table()
    assert export_matrix.PAGE.read_text(encoding="utf-8") == export_matrix.page_with(made), (
        "run: python tests/support/pages/export_matrix.py"
    )
    assert len(made.splitlines()) > 38
    assert "To HQQ: impossible from every row: `--to hqq` is a usage error (exit code 2)" in made
