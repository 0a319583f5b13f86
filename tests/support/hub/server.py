"""A model hub on loopback that speaks the protocol of huggingface_hub, and fails on demand.

Two listeners, as in reality: the hub, and a store for large files on another origin, to which the hub redirects.
Nothing but the loopback address is ever bound or named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from types import TracebackType
from typing import Any

import pytest

from bcqfmt.errors import BcqError
from hub.handler import Fault, Handler, Seen

TOKEN = "hf_" + "Secret0" * 5
_clients: list[object] = []
_HERE = ("HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH")


@dataclass
class Repo:
    """Commits by sha, branches and tags by name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    access: str = "public"  # or private, gated


class HubServer:
    """``with HubServer() as hub:``; ``hub.url`` is what HF_ENDPOINT is set to."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.writers = {"me"}  # accounts in which a known token may make repositories
        self.messages: list[str] = []  # of commits
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.uploads: dict[str, bytes] = {}
        self.naps: list[float] = []  # what the client would have slept
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self._servers = [_Listener(self, store) for store in (False, True)]
        ports = [server.server_address[1] for server in self._servers]
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.store_url = (
            f"http://localhost:{ports[1]}"  # another name: version 1 of the client compares names, not ports
        )

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def commit(self, repo_id: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit with exactly these files, to which the branch moves; its sha."""
        repo = self.repos.setdefault(repo_id, Repo())
        text = json.dumps([repo_id, len(repo.commits), sorted(files)])
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        repo.commits[sha] = dict(files)
        repo.refs[branch] = sha
        return sha

    def fail(self, kind: str, pattern: str = "", *, method: str = "", times: int | None = None, **more: Any) -> Fault:
        """Requests whose path matches ``pattern`` (and method) go wrong: status, half, slow, loop, garbage, ...

        ``status`` answers with ``status=`` and ``headers=``; ``half`` sends half the body and closes; ``slow`` says
        nothing until the test is over; ``loop`` redirects to itself; ``ignore_range`` sends whole files; ``shrunk`` has
        a file of another size; ``commit`` names another commit; ``gzip`` claims a compressed body; ``wrong_range``
        sends other bytes; ``garbage`` answers with a web page; ``drop`` closes without a word; ``echo`` denies access
        and repeats the token in every text that the client might show; ``flood`` and ``long`` send 200 MB without and
        with a length, ``bomb`` says that they are compressed; ``pages`` lists without an end, ``elsewhere`` goes on at
        the store.
        """

        def match(seen: Seen) -> bool:
            return re.search(pattern, seen.path) is not None and method in ("", seen.method)

        fault = Fault(kind, match, times, **more)
        self.faults.append(fault)
        return fault

    def take(self, seen: Seen) -> Fault | None:
        """The fault that applies to a request, counted down."""
        with self.lock:
            for fault in self.faults:
                if fault.times != 0 and fault.match(seen):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def asked(self, pattern: str = "", method: str = "") -> list[Seen]:
        """The requests so far whose path matches."""
        return [seen for seen in self.log if re.search(pattern, seen.path) and method in ("", seen.method)]

    def count(self, pattern: str, expected: int) -> int:
        """How many requests whose path matches; a busy server sees them after an impatient client has given them up."""
        for _ in range(600):
            if len(self.asked(pattern)) >= expected:
                break
            self.stopping.wait(0.05)
        return len(self.asked(pattern))


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub: HubServer, store: bool) -> None:
        self.hub, self.store = hub, store
        super().__init__(("127.0.0.1", 0), Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without HTTPServer's look-up of the host's name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def loopback_hub(patch: pytest.MonkeyPatch, home: Path, *, logged_in: bool = False) -> Iterator[HubServer]:
    """A hub, and a huggingface_hub in this process that knows no other hub, no cache but ``home``, and never sleeps.

    ``logged_in``: with a token that the hub takes.
    """
    import huggingface_hub
    from huggingface_hub import constants

    for name in os.environ:
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            patch.delenv(name)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in (*_HERE, "AGENT_HARNESSES_PATH"):
        if hasattr(constants, name):
            patch.setattr(constants, name, str(home / name.lower()))
    hub = HubServer()
    if logged_in:
        patch.setenv("HF_TOKEN", TOKEN)
        hub.tokens.add(TOKEN)
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DOWNLOAD_TIMEOUT": 5,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
    }
    for name, value in settings.items():
        patch.setattr(constants, name, value)
    patch.setattr(time, "sleep", hub.naps.append)
    if not _clients:  # one without proxies, made once: loading certificates takes longer than most tests
        huggingface_hub.close_session()
        _clients.append(huggingface_hub.get_session())
    with hub:
        yield hub


def failure(call: Callable[[], object]) -> BcqError:
    """The error that ``call`` ends with; neither it nor anything chained to it knows the token."""
    with pytest.raises(BcqError) as caught:
        call()
    fault: BaseException | None = caught.value
    told = [
        "".join(traceback.format_exception(caught.value)),
        caught.value.hint,
        json.dumps(caught.value.finding.as_dict()),
    ]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    while fault is not None:
        told += [str(fault), repr(fault), repr(vars(fault))]
        fault = fault.__cause__ or fault.__context__
    assert not any(TOKEN in text or "Secret0" in text for text in told)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value
