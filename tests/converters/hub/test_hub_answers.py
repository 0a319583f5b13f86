"""Answers of a hub have a limit: whatever it sends, little is read and nothing large is written.

The hub is a real HTTP server on loopback that sends 200 MB where a few bytes were asked for; the limits are lowered, so
that a client without them takes all of it and fails here.
"""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

import bcqfmt
from bcqfmt.converters import hub as client
from bcqfmt.converters.hub import answers
from hub.handler import FLOOD
from hub.samples import NAME, WANTED, files
from hub.server import TOKEN, HubServer, failure, loopback_hub
from programs.verbs import tensors

TAKEN = 20_000_000  # bytes: the limit, and what the system's buffers swallow


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(answers, "ANSWERS", 1_000_000)
        monkeypatch.setattr(answers, "REFUSAL", 100_000)
        server.tokens.add(TOKEN)
        server.commit(NAME, files())
        yield server


def taken(hub: HubServer) -> int:
    return sum(seen.sent for seen in hub.log)


@pytest.mark.parametrize("status", [200, 302, 404, 500])
@pytest.mark.parametrize("kind", ["flood", "long", "bomb"])
def test_listings(hub: HubServer, kind: str, status: int) -> None:
    hub.fail(kind, "/api/models/", status=status, headers={"Location": "/x"} if status == 302 else {})
    fault = failure(lambda: client.resolve(NAME))
    assert (fault.code, fault.exit_code) == ("BCQ-E704" if kind == "bomb" else "BCQ-E708", 8)
    assert fault.finding.file == NAME
    assert taken(hub) < TAKEN < FLOOD


@pytest.mark.parametrize("kind", ["flood", "long"])
@pytest.mark.parametrize("name", ["config.json", "README.md"])
def test_small_files(hub: HubServer, tmp_path: Path, kind: str, name: str) -> None:
    """A small file may not be as large as the model that it belongs to."""
    hub.commit(NAME, {**files(), "model-00001-of-00002.safetensors": bytes(FLOOD // 2)})
    repo = client.resolve(NAME)
    hub.log.clear()
    hub.fail(kind, f"/resolve/.*/{name}", method="GET", status=200)
    assert failure(lambda: client.download(repo)).code == "BCQ-E708"
    assert taken(hub) < TAKEN
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < TAKEN
    hub.faults.clear()
    hub.commit(NAME, files())
    assert {path.name for path in client.download(client.resolve(NAME)).iterdir()} == set(WANTED)


@pytest.mark.parametrize("kind", ["flood", "long"])
def test_model_files_have_the_size_of_the_listing(hub: HubServer, tmp_path: Path, kind: str) -> None:
    repo = client.resolve(NAME)
    hub.fail(kind, "/store/", method="GET", status=200)
    assert failure(lambda: client.download(repo)).code == "BCQ-E708"
    assert taken(hub) < TAKEN


@pytest.mark.parametrize(("kind", "code"), [("pages", "BCQ-E708"), ("elsewhere", "BCQ-E704"), ("flood", "BCQ-E708")])
def test_listings_in_pages(hub: HubServer, kind: str, code: str) -> None:
    repo = client.resolve(NAME)
    hub.fail(kind, "/tree/", status=200)
    assert failure(lambda: client.download(repo)).code == code
    assert len(hub.asked("/tree/")) <= 101
    assert not hub.asked("/more")
    assert taken(hub) < TAKEN


def test_headers_that_are_read_by_ranges(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    hub.fail("flood", "/resolve/", method="GET", status=200)
    assert failure(lambda: client.remote_headers(repo)).exit_code == 8
    assert taken(hub) < TAKEN


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize(
    "pattern", ["/repos/create", "/api/models/", "/validate-yaml", "/objects/batch", "/commit/", "/up/"]
)
def test_answers_to_a_push(hub: HubServer, tmp_path: Path, pattern: str) -> None:
    bcqfmt.save(tmp_path / "bcq", tensors(), files={"README.md": b"# x\n"})
    hub.fail("flood", pattern, status=200)
    assert failure(lambda: client.push(tmp_path / "bcq", "me/new")).code == "BCQ-E708"
    assert taken(hub) < TAKEN


def test_clients_that_are_made_anew_have_the_limits(hub: HubServer) -> None:
    client.resolve(NAME)
    huggingface_hub.close_session()  # as the library does after a lost connection
    hub.fail("flood", "/api/models/", status=200)
    assert failure(lambda: client.resolve(NAME)).code == "BCQ-E708"
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)  # a user's own
    assert failure(lambda: client.resolve(NAME)).code == "BCQ-E708"


def test_nobody_elses_requests_are_touched(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client.resolve(NAME)
    monkeypatch.setattr(answers, "ANSWERS", 10)
    assert huggingface_hub.HfApi().model_info(NAME).id == NAME
    assert failure(lambda: client.resolve(NAME)).code == "BCQ-E708"
