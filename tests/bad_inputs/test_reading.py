"""Every bad input: validated, read, given to the command line. The right code, no surprise, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import bcqfmt
from bad_files.table import CASES, Case, by_name, disturbed
from bcqfmt.cli.main import cli

REPOSITORY = Path(__file__).parents[2]
LIGHT = [case for case in CASES if not case.heavy]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_light_case = pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
Snapshot = dict[str, tuple[int, int, int]]


class Scene:
    """A bad input in a folder of its own, and the state of everything around it."""

    def __init__(self, case: Case, root: Path) -> None:
        self.root, self.case = root, case
        self.path = case.make(root)
        self.before = self.snapshot()

    def snapshot(self) -> Snapshot:
        """Name -> mode, size, modification time, of everything below the root, and the names in the working folder."""
        found = {}
        for top, folders, files in os.walk(self.root):
            for name in (".", *folders, *files):
                state = os.lstat(os.path.join(top, name))  # noqa: PTH118 - names may be no text
                found[os.path.join(top, name)] = (state.st_mode, state.st_size, state.st_mtime_ns)  # noqa: PTH118
        here = Path.cwd()
        if self.root not in here.parents and here != self.root:
            for file in here.iterdir():
                found[str(file)] = (file.lstat().st_mode, 0, 0)
        return found

    def check_untouched(self) -> None:
        """Nothing was created, changed or removed, but for what the case itself does."""
        if self.case.disturb is None:
            assert self.snapshot() == self.before
        else:
            assert self.snapshot().keys() <= self.before.keys()


@pytest.fixture
def scene(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """The input is below ``input``; the working folder is another one, and empty."""
    (tmp_path / "input").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = Scene(case, tmp_path / "input")
    yield made
    made.check_untouched()
    assert not list((tmp_path / "here").iterdir())


def touch(path: Path) -> None:
    """Open a checkpoint and read every number of it."""
    with bcqfmt.open(path) as checkpoint:
        for _, weight in checkpoint.weights():
            weight.dequantize()
        for _, tensor in checkpoint.dense():
            tensor.tobytes()


@every_case
def test_validate_reports(case: Case, scene: Scene) -> None:
    with disturbed(case, scene.path):
        report = bcqfmt.validate(scene.path, deep=True)
    found = {finding.code for finding in report.errors}
    if case.code:
        assert case.code in found, report.findings
    assert found <= {case.code} | case.also, "faults that the input does not have"
    assert report.exit_code == case.exit
    assert all(finding.place for finding in report.findings)
    json.dumps(report.as_dict(), ensure_ascii=False).encode("utf-8")


@every_light_case
def test_reader_refuses(case: Case, scene: Scene) -> None:
    with disturbed(case, scene.path):
        if not case.code or case.seen == "validator":
            touch(scene.path)
            return
        with pytest.raises(bcqfmt.BcqError) as caught:
            touch(scene.path)
    assert caught.value.code == case.code
    assert caught.value.exit_code == case.exit
    assert caught.value.finding.place, "an error says where"
    check_printable(str(caught.value))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert "Traceback" not in result.output
    assert "BCQ-E999" not in result.output, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    check_printable(result.stdout)
    check_printable(result.stderr)
    return result


def check_printable(text: str) -> None:
    """No control, no bidirectional override, no other line separator than the line feed."""
    wrong = {character for character in text if character != "\n" and not (character == " " or character.isprintable())}
    assert not wrong, f"{wrong!r} in {text!r}"


@every_light_case
def test_validate_on_the_command_line(case: Case, scene: Scene) -> None:
    with disturbed(case, scene.path):
        result = run("validate", "--deep", str(scene.path))
    assert result.exit_code == case.exit, result.output
    assert case.code in result.output
    assert case.place in result.output
    if case.code:
        lines = [line for line in result.output.splitlines() if case.code in line]
        assert any(case.place in line for line in lines), "the place is shown with the code"
        assert not any(line.startswith("BCQ-V000") for line in result.output.splitlines()), "a name forged a finding"


@every_light_case
def test_validate_as_json(case: Case, scene: Scene) -> None:
    with disturbed(case, scene.path):
        result = run("validate", "--deep", "--json", str(scene.path))
    assert result.exit_code == case.exit
    value = json.loads(result.stdout)
    assert value["exit_code"] == case.exit
    assert not case.code or case.code in {finding["code"] for finding in value["findings"]}


@every_light_case
def test_inspect_on_the_command_line(case: Case, scene: Scene) -> None:
    with disturbed(case, scene.path):
        result = run("inspect", "--modules", str(scene.path))
    assert result.exit_code in case.inspect_exits, result.output
    if result.exit_code != 0 and case.seen == "headers":
        assert case.code in result.stderr
        assert case.place in result.stderr
        assert not result.stdout


# -- real processes ---------------------------------------------------------------------------------------------

ALONE = [
    "05-2-to-63",
    "05-one-above-the-cap",
    "07-arrays",
    "07-never-closed",
    "26-up",
    "26-absolute",
    "29-pipe",
    "29-pipe-in-folder",
    "29-device",
    "37-shrinks-after-look-1",
]


@pytest.mark.parametrize("case", [by_name(name) for name in ALONE], ids=lambda case: case.name)
def test_as_a_process(case: Case, scene: Scene) -> None:
    program = ["bcqfmt"] if case.disturb is None else ["bad_files.table", case.name]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "support")])
    finished = subprocess.run(
        [sys.executable, "-m", *program, "validate", "--deep", str(scene.path)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
        text=True,
    )
    assert finished.returncode == case.exit, finished.stderr
    assert case.code in finished.stdout
    assert case.place in finished.stdout
    assert "Traceback" not in finished.stderr
    check_printable(finished.stdout + finished.stderr)


# -- nothing outside the folder is opened -----------------------------------------------------------------------

LEADING_OUT = [case for case in CASES if case.row in (26, 27, 28) and case.code in ("BCQ-V502", "BCQ-V507")]


@pytest.mark.parametrize("case", LEADING_OUT, ids=lambda case: case.name)
def test_what_lies_outside_is_never_opened(case: Case, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = os.open

    def watched(path: str, *arguments: int, **options: int) -> int:
        opened.append(os.path.realpath(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", watched)
    bcqfmt.validate(scene.path, deep=True)
    if case.seen != "validator":
        with pytest.raises(bcqfmt.BcqError):
            touch(scene.path)
    root = scene.path.resolve()
    inside = (root, root.parents[1] / "blobs") if root.parent.name == "snapshots" else (root,)
    assert opened, "the watch works"
    assert [path for path in opened if not any(Path(path).is_relative_to(place) for place in inside)] == []
