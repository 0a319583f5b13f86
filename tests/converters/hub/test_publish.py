"""Pushing a folder to the hub: what is checked first, what is sent, and everything that can go wrong on the way.

The hub is a real HTTP server on loopback and the client is huggingface_hub itself.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bcqfmt
from bcqfmt.converters import hub as client
from bcqfmt.converters.jobs.model_card import NAME_LINE, with_name
from hub.server import TOKEN, HubServer, failure, loopback_hub
from programs.verbs import UP, tensors

# the library's own way of sending files
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "me/new-model"
CARD = f"---\nlicense: mit\n---\n# New\n\n```python\n{NAME_LINE}\n```\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home", logged_in=True) as server:
        yield server


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder = tmp_path / "finished"
    bcqfmt.save(folder, tensors(), config={"model_type": "test"}, files={"README.md": CARD.encode()})
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("not ours")
    return folder


def there(hub: HubServer, branch: str = "main", repo: str = REPO) -> dict[str, bytes]:
    return hub.repos[repo].commits[hub.repos[repo].refs[branch]]


def here(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_folder_arrives_whole(hub: HubServer, finished: Path) -> None:
    done = client.push(finished, REPO, private=True)
    sha = hub.repos[REPO].refs["main"]
    assert done.url == f"{hub.url}/{REPO}/commit/{sha}"
    assert there(hub) == {**here(finished), ".gitattributes": b"*.safetensors filter=lfs"}
    assert done.files == {name: len(data) for name, data in here(finished).items()}
    assert hub.repos[REPO].access == "private"
    steps = r"/(repos/create|preupload|objects/batch|up|commit)(/|$)"
    order = [found[1] for seen in hub.log if (found := re.search(steps, seen.path))]
    assert order == ["repos/create", "preupload", "objects/batch", "up", "commit"]
    assert {seen.token for seen in hub.log if seen.store} == {""}
    assert hub.messages == [f"Upload BCQ checkpoint with bcqfmt {bcqfmt.__version__}"]


def test_pull_requests_branches_and_messages(hub: HubServer, finished: Path) -> None:
    client.push(finished, REPO)
    before = dict(there(hub))
    assert client.push(finished, REPO, create_pr=True).url == f"{hub.url}/{REPO}/discussions/1"
    assert client.push(finished, REPO, create_pr=True, message="x").url == f"{hub.url}/{REPO}/discussions/2"
    client.push(finished, REPO, revision="refs/pr/2", message="goes on")
    assert client.push(finished, REPO, revision="dev").url.startswith(f"{hub.url}/{REPO}/commit/")
    assert there(hub) == there(hub, "refs/pr/2") == there(hub, "dev") == before
    assert hub.messages[2:4] == ["x", "goes on"]
    assert failure(lambda: client.push(finished, REPO, create_pr=True, revision="dev")).code == "BCQ-E302"


def test_the_card_gets_the_name_of_the_repository(hub: HubServer, finished: Path) -> None:
    client.push(finished, REPO, card=with_name)
    told = NAME_LINE.replace('"."', f'"{REPO}"')
    assert there(hub)["README.md"].decode() == CARD.replace(NAME_LINE, told)
    client.push(finished, "me/other", card=with_name)
    assert 'name = "me/other"' in there(hub, repo="me/other")["README.md"].decode()
    assert (finished / "README.md").read_bytes() == there(hub, repo="me/other")["README.md"]


# ------------------------------------------------------------------------------------------------- what is refused
def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def no_longer_bcq(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


FAULTS: dict[str, tuple[Any, str, int]] = {
    "a flipped bit": (flip, "BCQ-V606", 6),
    "another config.json": (no_longer_bcq, "BCQ-V512", 4),
    "no manifest": (lambda folder: (folder / "bcq_manifest.json").unlink(), "BCQ-V601", 4),
    "a missing file": (lambda folder: (folder / "model.safetensors").unlink(), "BCQ-V503", 3),
    "a card that is a link": (
        lambda folder: (folder / "README.md").rename(folder.parent / "y")
        and (folder / "README.md").symlink_to(folder.parent / "y"), "BCQ-V507", 4,
    ),
    "a link to elsewhere": (
        lambda folder: (folder / "model.safetensors").rename(folder.parent / "x")
        and (folder / "model.safetensors").symlink_to(folder.parent / "x"), "BCQ-V507", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_folder_is_checked_before_anything_is_sent(hub: HubServer, finished: Path, name: str) -> None:
    change, code, status = FAULTS[name]
    change(finished)
    fault = failure(lambda: client.push(finished, REPO))
    assert (fault.code, fault.exit_code, hub.log) == (code, status, [])


def test_what_is_no_bcq_folder(hub: HubServer, finished: Path, tmp_path: Path) -> None:
    assert failure(lambda: client.push(tmp_path / "nothing", REPO)).code == "BCQ-E101"
    assert "a file" in str(failure(lambda: client.push(finished / "config.json", REPO)))
    other = tmp_path / "gptq"
    other.mkdir()
    (other / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    fault = failure(lambda: client.push(other, REPO))
    assert (fault.code, fault.hint) == ("BCQ-V601", f"convert it first: bcqfmt convert {other} OUT")
    (tmp_path / "new.partial").mkdir()
    assert "--resume" in failure(lambda: client.push(tmp_path / "new", REPO)).hint
    assert hub.log == []


@pytest.mark.parametrize("name", ["model", "me/", "/x", "me/x/y", "me/x@v1", "me/../x", "-x/y", "me/x.git", ""])
def test_names_that_no_repository_has(hub: HubServer, finished: Path, name: str) -> None:
    assert failure(lambda: client.push(finished, name)).code == "BCQ-E302"
    assert hub.log == []


def test_without_a_token_or_offline(hub: HubServer, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    fault = failure(lambda: client.push(finished, REPO))
    assert (fault.code, "hf auth login" in fault.hint) == ("BCQ-E702", True)
    client.push(finished, REPO, token=TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert failure(lambda: client.push(finished, REPO, token=TOKEN)).code == "BCQ-E705"


def test_rights(hub: HubServer, finished: Path) -> None:
    fault = failure(lambda: client.push(finished, REPO, token="hf_unknown"))
    assert (fault.code, fault.exit_code, "may write" in fault.hint) == ("BCQ-E702", 8, True)
    fault = failure(lambda: client.push(finished, "somebody-else/model"))
    assert fault.code == "BCQ-E702"
    hub.fail("status", "/repos/create", status=404)
    fault = failure(lambda: client.push(finished, REPO))
    assert (fault.code, "whoami" in fault.hint) == ("BCQ-E701", True)
    assert hub.repos == {}


def test_a_repository_with_files_of_another_model(hub: HubServer, finished: Path) -> None:
    welcome = {"README.md": b"old", "logo.png": b"p", "LICENSE": b"l", "docs/a.md": b"a", ".gitattributes": b"g"}
    strange = {"model-00001-of-00002.safetensors": b"w", "x[1].bin": b"q", "tokenizer.model": b"t"}
    hub.commit(REPO, {**welcome, **strange})
    fault = failure(lambda: client.push(finished, REPO))
    assert (fault.code, fault.exit_code, "--overwrite" in fault.hint) == ("BCQ-E709", 8, True)
    assert "3 files" in fault.finding.found
    assert there(hub) == {**welcome, **strange}
    client.push(finished, REPO, overwrite=True)
    assert there(hub) == {**welcome, **here(finished)}


def test_names_that_a_hub_lists_do_not_show_the_token(hub: HubServer, finished: Path) -> None:
    hub.commit(REPO, {f"{TOKEN}.bin": b""})
    assert failure(lambda: client.push(finished, REPO)).code == "BCQ-E709"


def test_a_public_repository_stays_unused_when_a_private_one_is_wanted(hub: HubServer, finished: Path) -> None:
    hub.commit(REPO, {})
    assert failure(lambda: client.push(finished, REPO, private=True)).code == "BCQ-E709"
    assert there(hub) == {}


@pytest.mark.parametrize("front", ["license: wrong", "license: [mit", "- a"])
def test_a_card_that_the_hub_refuses(
    hub: HubServer, finished: Path, capfd: pytest.CaptureFixture[str], front: str
) -> None:
    (finished / "README.md").write_text(f"---\n{front}\n---\n")
    fault = failure(lambda: client.push(finished, REPO))  # the server's own words hold the token
    assert fault.code == "BCQ-E631"
    assert not hub.asked("/preupload/|/up/|/commit/")
    assert "Secret0" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("kind", "pattern", "code"),
    [("status 401", "/commit/", "BCQ-E702"), ("status 403", "/preupload/", "BCQ-E702"),
     ("status 429", "/commit/", "BCQ-E703"), ("status 500", "/objects/batch", "BCQ-E704"),
     ("status 413", "/commit/", "BCQ-E704"), ("drop", "/up/", "BCQ-E704"), ("drop", "/commit/", "BCQ-E704"),
     ("drop", "/repos/create", "BCQ-E704"), ("status 403", "/up/", "BCQ-E702"), ("echo", "/commit/", "BCQ-E702"),
     ("echo", "/repos/create", "BCQ-E702"), ("garbage", "/commit/", "BCQ-E704"),
     ("garbage", "/preupload/", "BCQ-E704")],
)  # fmt: skip
def test_what_breaks_off_can_be_repeated(
    hub: HubServer, finished: Path, capfd: pytest.CaptureFixture[str], kind: str, pattern: str, code: str
) -> None:
    name, _, status = kind.partition(" ")
    hub.fail(name, pattern, status=int(status or 500))
    fault = failure(lambda: client.push(finished, REPO))
    assert (fault.code, fault.exit_code) == (code, 8)
    assert "Secret0" not in "".join(capfd.readouterr())
    assert REPO not in hub.repos or there(hub).keys() <= {".gitattributes"}
    hub.faults.clear()
    client.push(finished, REPO)
    assert there(hub).items() >= here(finished).items()


def test_what_was_sent_is_what_was_read(hub: HubServer, finished: Path, tmp_path: Path) -> None:
    """There and back: a model that was pushed is downloaded, and every weight is the same."""
    client.push(finished, REPO)
    folder = client.download(client.resolve(REPO))
    with bcqfmt.open(folder) as new, bcqfmt.open(finished) as old:
        assert (new.weight(UP).dequantize() == old.weight(UP).dequantize()).all()
