"""GGUF files on the hub, named as owner/name:file.gguf: headers by range reads, then the file and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bcqfmt.cli.main import cli
from bcqfmt.converters import hub as client
from bcqfmt.errors import BcqError
from hub.samples import NAME, files
from hub.server import HubServer, loopback_hub
from sources.gguf_files import DATA, small

FILE = "model-Q4_K_M.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.chdir(tmp_path)
        large = small()
        large.tensor("c.weight", [4096, 1024], 0, bytes(4096 * 4096))
        content = {FILE: (DATA / "q4_k_m.gguf").read_bytes(), "large.gguf": large.bytes()}
        server.commit(NAME, {"README.md": b"# x", "sub/other.gguf": b"GGUF", **content})
        yield server


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_it_is_converted_and_nothing_else_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    done = run("convert", f"{NAME}:{FILE}", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    assert {seen.path.rpartition("/")[2] for seen in hub.asked("/resolve/")} == {FILE}
    assert run("verify", f"{NAME}:{FILE}", tmp_path / "out").exit_code == 0
    assert run("restore", tmp_path / "out", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back" / FILE).read_bytes() == (DATA / "q4_k_m.gguf").read_bytes()


def test_a_look_reads_the_header_only(hub: HubServer, tmp_path: Path) -> None:
    done = run("inspect", f"{NAME}:large.gguf", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["format"], found["dense"]) == ("gguf", 3)
    assert 0 < sum(seen.sent for seen in hub.asked(r"gguf$", "GET")) <= 1 << 21 < found["bytes"]
    dry = run("convert", f"{NAME}@main:{FILE}", tmp_path / "out", "--dry-run", "--json")
    assert json.loads(dry.stdout)["coverage"] > 99
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_and_models_without_a_name(hub: HubServer, tmp_path: Path) -> None:
    missing = run("convert", f"{NAME}:other.gguf", tmp_path / "out")
    assert (missing.exit_code, FILE in missing.stderr) == (3, True)
    bare = run("convert", NAME, tmp_path / "out", "--dry-run")
    assert bare.exit_code == 5
    assert "owner/name:FILE.gguf" in bare.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a/b:c.gguf", ("a/b", None)), ("a/b@v1:c.gguf", ("a/b", "v1")), ("a/b", ("a/b", None))],
)
def test_names(text: str, expected: tuple[str, str | None]) -> None:
    assert client.looks_like_hub_id(text)
    assert client.split_hub_id(text, file=True) == expected
    if ":" in text:
        with pytest.raises(BcqError):  # an upload goes to a repository, not to a file
            client.split_hub_id(text)


@pytest.mark.parametrize("text", ["a/b:c.bin", "a/b:../c.txt", "a:b/c.gguf"])
def test_other_texts_are_no_names(text: str) -> None:
    assert not client.looks_like_hub_id(text)


def test_a_checkpoint_of_safetensors_is_still_what_a_plain_name_means(hub: HubServer) -> None:
    hub.commit(NAME, files())
    assert not client.resolve(NAME).file
