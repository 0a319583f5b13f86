"""``bcqfmt push``, and ``--push`` of convert and quantize: the same upload, and the command that goes on."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import bcqfmt
from hub.handler import Seen
from hub.server import HubServer, loopback_hub
from programs.verbs import ROOT, Run
from sources.dense_samples import dense_folder

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
DEMO = ROOT / "bcqfmt" / "data" / "demo"
REPO = "me/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home", logged_in=True) as server:
        yield server


def names(hub: HubServer, branch: str = "main") -> set[str]:
    return set(hub.repos[REPO].commits[hub.repos[REPO].refs[branch]]) - {".gitattributes"}


def test_push(hub: HubServer, run: Run, folder: Path) -> None:
    result = run("push", folder, REPO, "--private", "--message", "first")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"pushed: {hub.url}/{REPO}/commit/")
    assert "every rule and every digest" in result.stderr
    assert (hub.repos[REPO].access, hub.messages) == ("private", ["first"])
    assert names(hub) == {path.name for path in folder.iterdir()}


def test_json(hub: HubServer, run: Run, folder: Path) -> None:
    found = json.loads(run("push", folder, REPO, "--create-pr", "--json").stdout)
    assert found.keys() == {"folder", "repo", "url", "files", "bytes"}
    assert (found["url"], found["files"]) == (f"{hub.url}/{REPO}/discussions/1", 3)
    failed = json.loads(run("push", folder, "me", "--json").stdout)["error"]
    assert (failed["code"], failed["exit_code"]) == ("BCQ-E302", 2)


def test_dry_run_sends_nothing(hub: HubServer, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")  # to look one need not be logged in
    result = run("push", folder, REPO, "--dry-run")
    assert result.exit_code == 0
    for path in folder.iterdir():
        assert path.name in result.stdout
    assert "3 files" in result.stdout
    found = json.loads(run("push", folder, REPO, "--dry-run", "--json").stdout)
    assert found["files"] == {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "bcq_manifest.json").unlink()
    assert run("push", folder, REPO, "--dry-run").exit_code == 4
    for wrong in (("no-owner",), (f"{REPO}@main", "--revision", "dev"), (REPO, "--revision", "bad ref..")):
        assert run("push", folder, *wrong, "--dry-run").exit_code == 2
    assert hub.log == []


def test_nobody_is_told_that_a_folder_is_complete_before_it_was_looked_at(
    hub: HubServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    result = run("push", tmp_path, REPO)  # an empty folder
    assert result.exit_code == 8
    assert "complete" not in result.stderr
    assert "checking" not in result.stderr
    assert result.stderr.endswith(f", then: bcqfmt push {tmp_path} {REPO}\n")


@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_after_a_conversion(hub: HubServer, run: Run, tmp_path: Path, verb: str) -> None:
    source = DEMO if verb == "convert" else dense_folder(tmp_path / "dense")
    more = () if verb == "convert" else ("--method", "rtn", "--group-size", "32")
    target = tmp_path / "bcq"
    result = run(verb, source, target, *more, "--push", REPO, "--private")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"pushed: {hub.url}/{REPO}/commit/")
    assert hub.repos[REPO].access == "private"
    assert names(hub) == {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert f'name = "{REPO}"' in (target / "README.md").read_text()


@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_a_failed_push_says_the_command_that_goes_on(hub: HubServer, run: Run, tmp_path: Path, verb: str) -> None:
    source = DEMO if verb == "convert" else dense_folder(tmp_path / "dense")
    more = () if verb == "convert" else ("--method", "rtn", "--group-size", "32")
    hub.fail("drop", "/up/")
    result = run(verb, source, tmp_path / "a model", *more, "--push", REPO, "--private", "--create-pr")
    assert result.exit_code == 8
    assert "weights" in result.stdout  # what the conversion made is told all the same
    command = f"bcqfmt push '{tmp_path / 'a model'}' {REPO} --private --create-pr"
    assert result.stderr.rstrip().endswith(command)
    assert "Secret0" not in result.output
    hub.faults.clear()
    assert run("push", tmp_path / "a model", REPO, "--private", "--create-pr").exit_code == 0
    assert "model.safetensors" in names(hub, "refs/pr/1")


@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_what_cannot_be_pushed_is_known_before_the_work(
    hub: HubServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    more = () if verb == "convert" else ("--method", "rtn")
    for options, status in (
        (("--push", REPO), 8),
        (("--push", "no-owner"), 2),
        (("--push", REPO, "--dry-run"), 2),
        (("--private",), 2),
        (("--create-pr",), 2),
    ):
        assert run(verb, DEMO, tmp_path / "bcq", *more, *options).exit_code == status
    assert not (tmp_path / "bcq").exists()


def test_an_interrupt_says_the_command_that_goes_on(hub: HubServer, run: Run, folder: Path) -> None:
    def interrupt(seen: Seen) -> bool:
        if "/up/" in seen.path:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    hub.fail("status", "/up/", times=1).match = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it
    try:
        result = run("push", folder, REPO, "--revision", "dev", "--message", "two words", "--overwrite")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert f"bcqfmt push {folder} {REPO} --revision dev --message 'two words' --overwrite" in result.stderr
    assert "BCQ-E901" in result.stderr
    assert names(hub) == set()


def test_contradictions(run: Run, folder: Path) -> None:
    assert run("push", folder, REPO, "--create-pr", "--revision", "dev").exit_code == 2


def test_a_folder_that_is_damaged_stays_here(hub: HubServer, run: Run, folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    result = run("push", folder, REPO)
    assert (result.exit_code, hub.log) == (6, [])
    assert "BCQ-V606" in result.stderr


def test_a_folder_of_any_origin(hub: HubServer, run: Run, tmp_path: Path) -> None:
    """Not only what convert and quantize write: a folder of :func:`bcqfmt.save`, sharded, without a card."""
    from programs.verbs import tensors

    bcqfmt.save(tmp_path / "own", tensors(), max_shard_size=1000)
    assert run("push", tmp_path / "own", REPO).exit_code == 0
    assert "model.safetensors.index.json" in names(hub)
