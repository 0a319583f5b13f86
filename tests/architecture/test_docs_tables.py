"""What the documents list is what there is: verbs, make targets, files, the version."""

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


def test_the_readme_is_short_and_names_verbs_that_exist() -> None:
    text = read("README.md")
    rows = re.findall(r"^\| `bcqfmt ([a-z]+)[^`]*` \|", text, flags=re.MULTILINE)
    assert len(rows) == len(set(rows)) == 6
    assert set(rows) < set(commands())
    assert len(text.splitlines()) <= 150


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/releasing.md"])
def test_make_targets_in_documents_exist(document: str) -> None:
    text = read(document)
    named = set(re.findall(r"`make ([a-z-]+)`", text)) | set(
        re.findall(r"^\$ make ([a-z-]+)", text, flags=re.MULTILINE)
    )
    assert named, f"{document} names no make target"
    assert named <= make_targets()


def test_no_document_installs_a_name_that_is_not_on_the_index() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "spec").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if re.search(r"pip install '?bcqfmt(?!\[\w+\] @ )", line)]
    assert [line for line in found if "change to" not in line and "X.Y.Z" not in line] == []  # of docs/releasing.md


def test_make_help_lists_the_targets_of_the_project() -> None:
    helped = set(re.findall(r"^([a-z]+):.*## ", read("Makefile"), flags=re.MULTILINE))
    assert {"demo", "test", "check", "docs", "bench", "soak", "clean"} <= helped


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert versions[0] == bcqfmt.__version__


def test_the_table_of_kernels_has_every_folder_and_module() -> None:
    text = read("kernels/__init__.py")
    named = re.findall(r"(?<!`)`([a-z0-9_]+)`(?!`)", text[text.index("=====") : text.rindex("=====")])
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "kernels").glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(folders | modules)


@pytest.mark.parametrize("room", ["spec", "spec/c"])
def test_every_file_of_the_spec_is_in_its_table(room: str) -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \|", read(f"{room}/README.md").split("\n## ")[0], flags=re.MULTILINE))
    there = {path.name + "/" * path.is_dir() for path in (ROOT / room).iterdir() if path.name != "__pycache__"}
    assert listed == there - {"README.md"}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/releasing.md"])
def test_links_to_files_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", read(document))
    home = (ROOT / document).parent
    assert [target for target in targets if not (home / target).exists()] == []


def test_the_architecture_page_names_files_and_functions_that_exist() -> None:
    text = re.sub(r"^```.*?^```", "", read("docs/architecture.md"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    paths = [span for span in spans if re.fullmatch(r"[\w./-]+(/|\.py|\.toml)", span)]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for room in ("bcqfmt", "converters", "kernels")
        for path in sorted((ROOT / room).rglob("*.py"))
    )
    names = [span.removesuffix("()") for span in spans if re.fullmatch(r"\w+\(\)|[A-Z][a-z]+[A-Z]\w+", span)]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"^\s*(def|class) {name}\b", source, flags=re.MULTILINE)] == []
