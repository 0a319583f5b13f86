"""A hostile hub, or a hostile repository on it: no other repository is asked, no token is told, nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.outcomes import Failed

from bcqfmt.converters import hub as client
from bcqfmt.converters.hub import errors as hub_errors
from bcqfmt.converters.hub import repo as hub_repo
from bcqfmt.converters.source import checkpoint
from hub.samples import NAME, files
from hub.server import TOKEN, HubServer, failure, loopback_hub
from security.mutation import Edit, without

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
OTHER = "other-org/private"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.commit(NAME, files())
        server.commit(OTHER, files(5))
        yield server


def another_repository(hub: HubServer) -> None:
    """An index that names a shard of another repository: it is never asked for."""
    (commit,) = hub.repos[OTHER].commits
    for name in (f"../../../../{OTHER}/resolve/{commit}/{FIRST}", f"/{OTHER}/resolve/main/{FIRST}", f"{hub.url}/x"):
        weight_map = {"layer0.qweight": FIRST, "layer1.qweight": name}
        index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        hub.commit(NAME, {**files(), INDEX: index})
        hub.log.clear()
        fault = failure(lambda: client.remote_headers(client.resolve(NAME)))
        assert fault.code == "BCQ-V502"
        assert not hub.asked("other-org|private")


def names_in_a_listing(hub: HubServer) -> None:
    """They become paths in the cache."""
    for name in ("../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", "x\n.json"):
        hub.commit(NAME, {**files(), name: b"{}"})
        assert failure(lambda: client.resolve(NAME)).code == "BCQ-E704"


def token_in_an_error(hub: HubServer) -> None:
    """A server that repeats the token in every text; ``failure`` looks through the whole chain of exceptions."""
    hub.fail("echo", "resolve/.*/config")
    assert failure(lambda: client.remote_headers(client.resolve(NAME))).code == "BCQ-E702"


def token_in_a_message(hub: HubServer) -> None:
    """A password in the address of the hub is not repeated."""
    import huggingface_hub

    hub.fail("drop")
    address = huggingface_hub.constants.ENDPOINT
    huggingface_hub.constants.ENDPOINT = address.replace("://", f"://user:{TOKEN}@")
    try:
        assert "127.0.0.1" in str(failure(lambda: client.resolve(NAME)))
    finally:
        huggingface_hub.constants.ENDPOINT = address


GUARDS: dict[str, tuple[Callable[[HubServer], None], Edit]] = {
    "another repository": (
        another_repository,
        (checkpoint._model_names, "if not SHARD_NAME.fullmatch(name):", "if False:"),
    ),
    "names in a listing": (names_in_a_listing, (hub_repo._check_name, "parts = ", "return\n    parts = ")),
    "no exception with the token is chained": (
        token_in_an_error,
        (
            hub_errors.attempt,
            "problem = explain(fault, repo_id, file, tries) if wait is None else None",
            "raise explain(fault, repo_id, file, tries)",
        ),
    ),
    "what the server says is not repeated": (
        token_in_an_error,
        (hub_errors._denied, 'found=f"HTTP {status}: {found}"', "found=str(sys.exc_info()[1])"),
    ),
    "the address is shown without its password": (
        token_in_a_message,
        (hub_errors._host, "try:", "return str(library().constants.ENDPOINT)\n    try:"),
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_the_attack_comes_to_nothing(hub: HubServer, name: str) -> None:
    GUARDS[name][0](hub)


@pytest.mark.parametrize("name", GUARDS)
def test_without_its_guard_the_attack_is_noticed(hub: HubServer, name: str) -> None:
    attack, edit = GUARDS[name]
    noticed = False
    with without(edit):
        try:
            attack(hub)
        except (Exception, Failed):  # noqa: BLE001 - a test that fails, in whatever way
            noticed = True
    assert noticed, "the test passes without the guard: it proves nothing"
