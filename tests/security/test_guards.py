"""Every guard stops its attack, and without the guard the attack's test fails: no guard is there by accident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bcqfmt import errors
from bcqfmt.checkpoint import folder, manifest, validation
from bcqfmt.cli import render
from bcqfmt.container import durable, files, header
from bcqfmt.container import header_json as header_text
from bcqfmt.converters.hub import repo as hub_repo
from bcqfmt.converters.jobs import model_card as card
from bcqfmt.converters.jobs import paths
from bcqfmt.converters.layouts import rebuild
from bcqfmt.converters.report import html as report_html
from bcqfmt.converters.source import checkpoint, patterns
from bcqfmt.converters.source import front_matter as front
from bcqfmt.weight import checks
from security import attacks
from security.mutation import Edit, without


class Guard(NamedTuple):
    """What it stops, and what to take out of the program so that it is not there."""

    attack: Callable[[Path], None]
    edits: tuple[Edit, ...]


GUARDS = {
    "a pickle is recognised by its bytes": Guard(
        attacks.pickle_by_another_name,
        ((header._raw_header, 'other = other_kind(head, "a safetensors file")', "other = None"),),
    ),
    "a folder of pickles is refused (reader)": Guard(
        attacks.only_pickles, ((folder._no_model, "if pickles:", "if False:"),)
    ),
    "a folder of pickles is refused (source)": Guard(
        attacks.only_pickles, ((checkpoint._nothing, "if shown:", "if False:"),)
    ),
    "pickles are not handed on": Guard(
        attacks.pickles_beside_the_model, ((checkpoint.foreign_files, "name.endswith(FOREIGN)", "False"),)
    ),
    "code is not fetched": Guard(
        attacks.code_on_the_hub, ((hub_repo.needed, "ignore_patterns=list(SKIP)", "ignore_patterns=[]"),)
    ),
    "names in an index (reader)": Guard(
        attacks.index_of_a_bcq_folder, ((folder._shard_names, "if not SHARD_NAME.fullmatch(name)", "if False"),)
    ),
    "names in an index (source)": Guard(
        attacks.index_of_a_source, ((checkpoint._model_names, "if not SHARD_NAME.fullmatch(name)", "if False"),)
    ),
    "links stay in the folder": Guard(
        attacks.link_out_of_the_folder,
        ((files.inside, "path = folder / name", "path = folder / name\n    return path"),),
    ),
    "paths in a manifest": Guard(
        attacks.manifest_path, ((manifest.check_files, "if not relative_path(path):", "if False:"),)
    ),
    "paths in the record of the source": Guard(
        attacks.restored_path, ((manifest.check_files, "if not relative_path(path):", "if False:"),)
    ),
    "the record of the source is ours": Guard(
        attacks.record_of_its_own, ((paths.check_paths, "first in own", "False"),)
    ),
    "rules of a record": Guard(
        attacks.rule_that_no_converter_writes, ((rebuild.check_rule, "not in allowed", "is None"),)
    ),
    "only checkpoints are replaced": Guard(
        attacks.folder_that_is_no_checkpoint,
        ((durable.refuse_other_things, "if fnmatch.filter(names, like) and", "if True or"),),
    ),
    "a time that was set back": Guard(
        attacks.time_that_was_set_back, ((files.file_state, "status.st_mtime_ns, status.st_ctime_ns", ""),)
    ),
    "names on a terminal": Guard(
        attacks.names_on_a_terminal,
        (
            (render.safe, "line if line.isprintable() else escape(line, _LONGEST)", "line"),
            (errors.escape, "safe = []", "return text"),
        ),
    ),
    "lines on a terminal": Guard(
        attacks.lines_on_a_terminal,
        ((render.safe, "line if line.isprintable() else escape(line, _LONGEST)", "line"),),
    ),
    "names in findings": Guard(attacks.names_in_findings, ((errors.escape, "safe = []", "return text"),)),
    "names in JSON": Guard(attacks.names_in_json, ((render.emit_json, "ensure_ascii=True", "ensure_ascii=False"),)),
    "names in the HTML report": Guard(
        attacks.names_in_the_report,
        ((report_html._text, "html_escape(escape(str(text), 512))", "escape(str(text), 512)"),),
    ),
    "names in the model card": Guard(
        attacks.names_in_the_card,
        (
            (
                card._words,
                're.sub(r"([\\\\`<>\\[\\]|*]|:(?=//)|(?<=www)\\.)", r"\\\\\\1", escape(text))',
                "escape(text)",
            ),
        ),
    ),
    "lines of the source's card": Guard(
        attacks.names_in_the_card,
        (
            (front.front_matter, "escape(value.strip(), _LENGTH)", "value.strip()"),
            (front._scalar, "escape(text, _LENGTH)", "text"),
        ),
    ),
    "the length of a header": Guard(
        attacks.header_too_long,
        ((header._raw_header, "if not 2 <= length <= limits.MAX_HEADER_BYTES:", "if length < 2:"),),
    ),
    "a header longer than its file": Guard(
        attacks.header_longer_than_the_file, ((header._raw_header, "elif 8 + length > file.size:", "elif False:"),)
    ),
    "a tensor larger than its bytes": Guard(
        attacks.tensor_larger_than_the_file, ((header._right_size, "if size != nbytes * 8:", "if False:"),)
    ),
    "the number of elements": Guard(
        attacks.too_many_elements, ((header._right_size, "if count >= limits.MAX_ELEMENTS:", "if False:"),)
    ),
    "the number of tensors": Guard(
        attacks.too_many_tensors,
        (
            (header_text._plain_run, "or len(names) >= room", ""),
            (header_text.scan_header, "> limits.MAX_TENSORS:", "> 10**9:"),
        ),
    ),
    "the depth of a header": Guard(
        attacks.nested_deeply,
        ((header_text._value, "except RecursionError", "except KeyError"),),
    ),
    "the size of config.json": Guard(
        attacks.configuration_too_large, ((files.read_small, "if opened.size > limit:", "if False:"),)
    ),
    "the work of patterns": Guard(
        attacks.patterns_without_end, ((patterns.Patterns.spend, "if self._left < 0:", "if False:"),)
    ),
    "the number of findings": Guard(
        attacks.findings_without_number,
        ((validation._Run.sink, "if self.counts[finding.code] <= _KEPT:", "if True:"),),
    ),
    "the number of files of a source": Guard(
        attacks.files_without_number, ((checkpoint._check_number, "if number > most:", "if False:"),)
    ),
    "the size of a weight": Guard(
        attacks.weight_too_large, ((checks.check_spec, "> limits.MAX_WEIGHT_BITS:", "> 10**30:"),)
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_the_attack_comes_to_nothing(name: str, tmp_path: Path) -> None:
    GUARDS[name].attack(tmp_path)


@pytest.mark.parametrize("name", GUARDS)
def test_without_its_guard_the_attack_is_noticed(name: str, tmp_path: Path) -> None:
    guard = GUARDS[name]
    noticed = False
    with without(*guard.edits):
        try:
            guard.attack(tmp_path)
        except Exception:  # noqa: BLE001 - a test that fails, in whatever way
            noticed = True
    assert noticed, "the test passes without the guard: it proves nothing"


def test_taking_a_guard_out_is_undone() -> None:
    before = errors.escape("\x1b")
    with without((errors.escape, "safe = []", "return text")):
        assert errors.escape("\x1b") == "\x1b"
    assert errors.escape("\x1b") == before == "\\x1b"
