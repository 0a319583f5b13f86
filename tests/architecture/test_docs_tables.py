"""What the documents list is what there is: verbs, make targets, the version."""

import re
from pathlib import Path

import click
import pytest

import bcqfmt
from bcqfmt.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands() -> dict[str, click.Command]:
    context = click.Context(cli, info_name="bcqfmt")
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None and not command.hidden}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.MULTILINE))


def test_readme_lists_every_verb() -> None:
    rows = re.findall(r"^\| `bcqfmt ([a-z]+)[^`]*` \|", read("README.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(commands())
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_make_targets_in_documents_exist(document: str) -> None:
    text = read(document)
    named = set(re.findall(r"`make ([a-z-]+)`", text)) | set(
        re.findall(r"^\$ make ([a-z-]+)", text, flags=re.MULTILINE)
    )
    assert named, f"{document} names no make target"
    assert named <= make_targets()


def test_make_help_lists_the_targets_of_the_project() -> None:
    helped = set(re.findall(r"^([a-z]+):.*## ", read("Makefile"), flags=re.MULTILINE))
    assert {"demo", "test", "check", "docs", "bench", "soak", "clean"} <= helped


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert versions[0] == bcqfmt.__version__


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", read(document))
    assert [target for target in targets if not (ROOT / target).exists()] == []
