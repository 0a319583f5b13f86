"""Files on their way from the hub (to it: test_publish.py): every fault, recovery, no secrets in any output.

The hub is a real HTTP server on loopback and the client is huggingface_hub itself.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.converters import hub as client
from bcqfmt.converters.source.checkpoint import open_source
from hub.samples import NAME, WANTED, files
from hub.server import TOKEN, HubServer, failure, loopback_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.commit(NAME, files())
        yield server


def check_content(folder: Path) -> None:
    assert all((folder / name).read_bytes() == files()[name] for name in WANTED)


@pytest.mark.parametrize(
    ("kind", "pattern", "code"),
    [("status 403", "/resolve/", "BCQ-E702"), ("status 404", "/resolve/", "BCQ-E701"),
     ("status 429", "/resolve/", "BCQ-E703"), ("status 429", "/store/", "BCQ-E703"),
     ("status 500", "/resolve/", "BCQ-E704"), ("status 500", "/store/", "BCQ-E704"),
     ("status 500", "/tree/", "BCQ-E704"), ("status 416", "/store/", "BCQ-E704"), ("drop", "/store/", "BCQ-E704"),
     ("drop", "/resolve/", "BCQ-E704"), ("slow", "/store/", "BCQ-E704"), ("loop", "/resolve/", "BCQ-E704"),
     ("shrunk", "/store/", "BCQ-E706"), ("garbage", "/tree/", "BCQ-E704"), ("echo", "/resolve/", "BCQ-E702")],
)  # fmt: skip
def test_downloads_that_fail(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    pattern: str,
    code: str,
) -> None:
    repo = client.resolve(NAME)
    if kind == "slow":  # the others must not run out of time on a busy machine
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    name, _, status = kind.partition(" ")
    hub.fail(name, pattern, status=int(status or 500))
    fault = failure(lambda: client.download(repo))
    assert (fault.code, fault.exit_code) == (code, 8)
    assert "Secret0" not in "".join(capfd.readouterr())
    repeated = Counter((seen.method, seen.path) for seen in hub.log)
    assert (
        max(repeated.values()) <= 7 or kind == "loop"
    )  # the library asks for a file's size once, then backs off 5 times
    hub.faults.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 10)
    check_content(client.download(repo))  # no half of a file lies in the way


@pytest.mark.parametrize(("kind", "pattern"), [("half", "/store/"), ("status", "/store/"), ("status", "/resolve/")])
def test_downloads_that_recover(hub: HubServer, kind: str, pattern: str) -> None:
    repo = client.resolve(NAME)
    hub.fail(kind, pattern, times=2, status=503)
    check_content(client.download(repo))


def test_full_disk(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = client.resolve(NAME)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    fault = failure(lambda: client.download(repo))
    assert (fault.code, fault.exit_code) == ("BCQ-E402", 7)


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", "x\n.json"])
def test_names_in_a_listing_are_foreign_input(hub: HubServer, name: str) -> None:
    hub.commit(NAME, {**files(), name: b"{}"})
    assert failure(lambda: client.resolve(NAME)).code == "BCQ-E704"


def test_the_environment_alone(hub: HubServer, tmp_path: Path) -> None:
    """A process as a user starts it, chatty as can be: no token in what it prints, nothing outside HF_HOME."""
    script = (
        "import sys; from bcqfmt.converters import hub\n"
        "from bcqfmt.errors import BcqError\n"
        f"repo = hub.resolve('{NAME}'); print(hub.download(repo, progress=True))\n"
        "print(hub.remote_headers(repo).bytes_read)\n"
        "try: hub.resolve('some-org/echo')\n"
        "except BcqError as fault: print(fault, fault.hint, repr(fault)); raise\n"
    )
    hub.fail("echo", "some-org/echo")
    hub.fail("status", "/store/", times=1, status=429)
    home = tmp_path / "child"
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(tmp_path / "nobody"), "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_XET": "1", "HF_DEBUG": "1", "PATH": os.environ["PATH"], "NO_PROXY": "*",
                "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BCQ-E702" in done.stdout
    assert str(home / "hub") in done.stdout
    assert "Secret0" not in done.stdout + done.stderr
    assert "huggingface.co" not in "".join(seen.path for seen in hub.log)
    assert not (tmp_path / "nobody").exists()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(bcqfmt.BcqError) as caught:
        client.resolve(NAME)
    assert caught.value.code == "BCQ-E306"
    assert "pip install" in caught.value.hint


def test_blobs_that_repositories_share(hub: HubServer) -> None:
    """Version 2 of the library keeps xet files once for all repositories: a blob is a link to the shared store."""
    folder = client.download(client.resolve(NAME))
    blob = folder / (folder / "model-00001-of-00002.safetensors").readlink()
    shared = folder.parents[2] / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert len(open_source(folder).models) == 2
    assert client.resolve(NAME, offline=True).files["model-00001-of-00002.safetensors"].sha256 == blob.name
