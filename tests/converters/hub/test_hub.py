"""Models on the hub: pinned, listed, downloaded, checked, pushed; and every way in which a hub can fail.

The hub is a real HTTP server on loopback and the client is huggingface_hub itself. What happens while files come in,
and pushing, is in test_hub_transfer.py; reading headers without a download in test_hub_remote.py.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bcqfmt.converters import hub as client
from bcqfmt.converters.hub import errors as hub_errors
from bcqfmt.converters.source.checkpoint import open_source
from hub.samples import NAME, WANTED, files, shard
from hub.server import TOKEN, HubServer, failure, loopback_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.commit(NAME, files())
        yield server


@pytest.mark.parametrize("text", ["a/b", "A_1/b.c-d", "Qwen/Qwen2.5-7B@main", "a/b@refs/pr/3", "a/b@v1.0"])
def test_names_of_models(text: str) -> None:
    assert client.looks_like_hub_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "gpt2", "./a/b", "/a/b", "a/b/c", "../a", "a/..", "-a/b", "a/b-", "a/b.git", "a--b/c", "a..b/c", "a/b@",
     "a/b\n", "a/b@../x", "a/b@-x", "https://x/y", "C:\\a", "a\\b", "a/b?x", "a/b#x", "a b/c", "a/é", "~/a",
     "a/" + "b" * 96],
)  # fmt: skip
def test_what_is_no_name_of_a_model(text: str) -> None:
    assert not client.looks_like_hub_id(text)


def test_what_lies_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not client.looks_like_hub_id("a/b")
    assert client.looks_like_hub_id("a/c")


def test_resolve_pins_the_commit_and_lists_sizes_and_digests(hub: HubServer) -> None:
    old = hub.repos[NAME].refs["main"]
    hub.commit(NAME, files(4), branch="v2")
    repo = client.resolve(NAME)
    assert (repo.repo_id, repo.revision, repo.commit) == (NAME, "main", old)
    assert {name: file.size for name, file in repo.files.items()} == {name: len(data) for name, data in files().items()}
    assert len(repo.files["model-00001-of-00002.safetensors"].sha256) == 64
    assert len(repo.files["config.json"].git_sha1) == 40
    assert sorted(repo.needed()) == WANTED
    assert client.resolve(NAME + "@v2").commit == client.resolve(NAME, "v2").commit == hub.repos[NAME].refs["v2"]
    assert client.resolve(NAME, old).commit == old
    assert len(hub.asked("/api/models/")) == 4  # one request each


def test_download_takes_the_checkpoint_and_nothing_else(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    folder = client.download(repo)
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == WANTED
    assert all((folder / name).read_bytes() == files()[name] for name in WANTED)
    assert sorted(open_source(folder).models) == sorted(name for name in WANTED if name.endswith(".safetensors"))
    assert not any(re.search(r"\.(py|bin|gguf|msgpack)$|original", seen.path) for seen in hub.log)
    assert {seen.token for seen in hub.log if seen.store} == {""}  # the store is another origin
    assert {seen.token for seen in hub.log if "/resolve/" in seen.path} == {f"Bearer {TOKEN}"}
    before = len(hub.asked("/resolve/"))
    assert client.download(repo) == folder
    assert len(hub.asked("/resolve/")) == before


def test_a_branch_that_moves_meanwhile_changes_nothing(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    hub.commit(NAME, files(4))
    folder = client.download(repo)
    remote = client.remote_headers(repo)
    assert folder.name == repo.commit
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == shard(0)
    assert "layer0.qweight" in remote.headers["model-00001-of-00002.safetensors"].tensors
    later = hub.asked("/resolve/|/tree/")
    assert later
    assert all(f"/{repo.commit}" in seen.path for seen in later)


def test_offline_after_one_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = client.resolve(NAME)
    folder = client.download(repo)
    before = len(hub.log)
    again = client.resolve(NAME, offline=True)
    assert (again.commit, again.offline) == (repo.commit, True)
    assert again.needed() == repo.needed()
    assert client.download(again) == folder
    assert failure(lambda: client.remote_headers(again)).code == "BCQ-E705"
    assert failure(lambda: client.resolve(NAME, "other", offline=True)).code == "BCQ-E705"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert client.resolve(NAME).commit == repo.commit
    assert client.download(repo) == folder
    assert len(hub.log) == before


def test_offline_without_a_download(hub: HubServer) -> None:
    fault = failure(lambda: client.resolve(NAME, offline=True))
    assert (fault.code, fault.exit_code) == ("BCQ-E705", 8)
    assert f"hf download {NAME}" in fault.hint
    repo = client.resolve(NAME)
    before = len(hub.log)
    assert failure(lambda: client.download(repo, offline=True)).code == "BCQ-E705"
    assert len(hub.log) == before


def test_interrupted_snapshot(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    folder = client.download(repo)
    weights = folder / "model-00002-of-00002.safetensors"
    weights.unlink()
    assert failure(lambda: client.download(repo, offline=True)).code == "BCQ-E706"
    assert failure(lambda: client.resolve(NAME, offline=True)).exit_code == 8
    client.download(repo)
    blob = Path(os.path.realpath(weights))
    blob.write_bytes(blob.read_bytes()[:-100])
    fault = failure(lambda: client.download(repo, offline=True))
    assert fault.code == "BCQ-E706"
    assert "--force-download" in fault.hint
    client.download(repo)  # online, the short file is fetched once more
    assert weights.read_bytes() == shard(1)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_content_is_compared_with_the_listing(hub: HubServer, name: str) -> None:
    repo = client.resolve(NAME)
    path = Path(os.path.realpath(client.download(repo) / name))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"!")
    fault = failure(lambda: client.download(repo, offline=True))
    assert (fault.code, fault.exit_code, fault.finding.file) == ("BCQ-E706", 8, f"{NAME}/{name}")
    assert "digest" in fault.finding.found
    assert "--force-download" in fault.hint
    client.download(repo)  # online, it is fetched once more
    assert path.read_bytes() == good


def test_access(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"private": "BCQ-E701", "gated": "BCQ-E702"}
    for access, code in expected.items():
        hub.repos[NAME].access = access
        fault = failure(lambda: client.resolve(NAME))
        assert (fault.code, fault.exit_code) == (code, 8)
        assert "hf auth login" in fault.hint
    assert f"https://huggingface.co/{NAME}" in fault.hint
    monkeypatch.delenv("HF_TOKEN")
    assert failure(lambda: client.resolve(NAME)).code == "BCQ-E702"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)
    assert client.download(client.resolve(NAME)).is_dir()
    assert failure(lambda: client.resolve("some-org/other")).code == "BCQ-E701"
    fault = failure(lambda: client.resolve(NAME, "v9"))
    assert (fault.code, fault.exit_code) == ("BCQ-E707", 8)
    assert not hub.naps


STATUS = {401: ("BCQ-E702", 1), 403: ("BCQ-E702", 1), 404: ("BCQ-E701", 1), 400: ("BCQ-E704", 1), 429: ("BCQ-E703", 6),
          500: ("BCQ-E704", 6), 502: ("BCQ-E704", 6), 503: ("BCQ-E704", 6), 504: ("BCQ-E704", 6)}  # fmt: skip


@pytest.mark.parametrize("status", STATUS)
def test_statuses(hub: HubServer, status: int) -> None:
    hub.fail("status", "/api/models/", status=status)
    fault = failure(lambda: client.resolve(NAME))
    assert (fault.code, len(hub.asked("/api/models/")), fault.exit_code) == (*STATUS[status], 8)
    assert hub.naps == list(hub_errors.PAUSES)[: STATUS[status][1] - 1]


@pytest.mark.parametrize(
    ("kind", "code", "requests", "says"),
    [("half", "BCQ-E704", 6, "closed the connection"), ("drop", "BCQ-E704", 6, "closed the connection"),
     ("slow", "BCQ-E704", 6, "no answer"), ("loop", "BCQ-E704", 21, "in circles"),
     ("garbage", "BCQ-E704", 1, "does not answer like a hub"), ("echo", "BCQ-E702", 1, "403")],
)  # fmt: skip
def test_faults(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, kind: str, code: str, requests: int, says: str
) -> None:
    if kind == "slow":  # the others must not run out of time on a busy machine
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.fail(kind, "/api/models/")
    fault = failure(lambda: client.resolve(NAME))
    assert (fault.code, hub.count("/api/models/", requests)) == (code, requests)
    assert says in fault.finding.found


def test_a_hub_that_is_not_there(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://user:Secret0@127.0.0.1:9")
    fault = failure(lambda: client.resolve(NAME))
    assert (fault.code, fault.exit_code, len(hub.naps)) == ("BCQ-E704", 8, 5)
    assert "no connection to 127.0.0.1:9 (6 tries)" in fault.finding.found


def test_retries_end_when_the_hub_is_back(hub: HubServer) -> None:
    hub.fail("status", "/api/models/", times=2, status=503)
    hub.fail("status", "/api/models/", times=2, status=429, headers={"Retry-After": "7"})
    hub.fail("drop", "/api/models/", times=1)
    assert client.resolve(NAME).commit
    assert hub.naps == [0.5, 1.0, 7.0, 7.0, 8.0]


def test_a_long_wait_is_told_not_slept(hub: HubServer) -> None:
    hub.fail("status", "/api/models/", status=429, headers={"Retry-After": "3600"})
    fault = failure(lambda: client.resolve(NAME))
    assert (fault.code, hub.naps) == ("BCQ-E703", [])
    assert "3600 s" in fault.finding.found
