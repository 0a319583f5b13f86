"""Bounds on what a hub answers: listings, errors and small files are read up to a limit, and nothing without one.

The library reads answers whole, however long they are. Its client therefore gets two hooks (through the library's own
``set_client_factory``), which act only while a call of ours runs: requests ask for plain bytes, and the bytes of every
answer are counted. Files have the limit that the listing states; everything else shares ``ANSWERS`` bytes per call.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urljoin, urlsplit

from bcqfmt.errors import BcqError, error

ANSWERS = 100_000_000  # bytes of answers that are no files, to one call; 100,000 files are listed in 30 MB
REFUSAL = 1_000_000  # bytes of an answer that refuses or redirects, or that a store gives to an upload
_EACH = 10_000  # bytes that an answer counts at least: pages without an end have one, too
_KIND = "bcqfmt.kind"  # of a request; a redirected request inherits it
_lock = threading.Lock()
_running: list[_Call] = []


class _Call:
    """A call of ours: how large a file may be, and how many bytes of other answers are left."""

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes, self.left = file_bytes, ANSWERS

    def spend(self, nbytes: int) -> None:
        """Count bytes of an answer that is no file; BCQ-E708 when there are too many."""
        self.left -= nbytes
        if self.left < 0:
            raise _too_much(f"more than {ANSWERS:,} bytes where a listing or a short answer was expected")


@contextlib.contextmanager
def limited(hub: ModuleType, file_bytes: int = 0) -> Iterator[None]:
    """While the block runs no answer is longer than allowed: BCQ-E708. ``file_bytes``: of the largest file wanted."""
    _install(hub)
    call = _Call(file_bytes)
    with _lock:
        _running.append(call)
    try:
        yield
    finally:
        with _lock:
            _running.remove(call)


def _install(hub: ModuleType) -> None:
    """Give the library's client our hooks; a client that is made later has them too."""
    http: Any = importlib.import_module("huggingface_hub.utils._http")
    with _lock:
        factory = getattr(http, "_GLOBAL_CLIENT_FACTORY", http.default_client_factory)
        if not isinstance(factory, _Factory):
            hub.set_client_factory(_Factory(hub, factory))


class _Factory:
    """Makes the client that another factory makes, with two hooks more."""

    def __init__(self, hub: ModuleType, inner: Callable[[], Any]) -> None:
        self.hub, self.inner = hub, inner

    def __call__(self) -> Any:
        client = self.inner()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self.before],
            "response": [*hooks["response"], self.after],
        }
        return client

    def before(self, request: Any) -> None:
        if _running:
            request.headers["Accept-Encoding"] = "identity"  # a compressed answer has no size before it is unpacked
            request.extensions.setdefault(_KIND, "file" if self.is_file(str(request.url)) else "answer")

    def after(self, response: Any) -> None:
        """An answer begins; nothing of its body has been read."""
        with _lock:
            running = list(_running)
        if not running or response.request.method == "HEAD":
            return
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise error("BCQ-E704", found="a compressed answer to a request for plain bytes", hint="check HF_ENDPOINT")
        if response.status_code >= 300:
            limit, spend = REFUSAL, None
        elif response.request.extensions.get(_KIND) == "file":
            limit, spend = max(REFUSAL, *(call.file_bytes for call in running)), None
        else:
            limit, spend = ANSWERS, running[-1].spend
            spend(_EACH)
            following = response.links.get("next", {}).get("url")
            if following is not None and self.is_file(urljoin(str(response.request.url), following)):
                raise error("BCQ-E704", found="a listing that goes on elsewhere", hint="check HF_ENDPOINT")
        stated = response.headers.get("Content-Length", "")
        if stated.isdigit() and int(stated) > limit:
            raise _too_much(f"an answer of {stated[:24]} bytes; at most {limit:,} were expected")
        response.stream = _counted(response, limit, spend)

    def is_file(self, url: str) -> bool:
        """Whether a request is for the content of a file: at the hub, or on another host, where hubs keep content."""
        place, hub = urlsplit(url), urlsplit(str(self.hub.constants.ENDPOINT))
        return "/resolve/" in place.path or (place.hostname, place.port) != (hub.hostname, hub.port)


def _counted(response: Any, limit: int, spend: Callable[[int], None] | None) -> Any:
    """The stream of an answer, which ends with an error when it is longer than ``limit``."""
    layer = sys.modules[type(response).__module__.partition(".")[0]]  # httpx or httpx2

    class Counted(layer.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[bytes]:
            seen = 0
            for chunk in self.inner:
                seen += len(chunk)
                if spend is not None:
                    spend(len(chunk))
                if seen > limit:
                    raise _too_much(f"more than the {limit:,} bytes that were expected")
                yield chunk

        def close(self) -> None:
            self.inner.close()

    return Counted(response.stream)


def _too_much(found: str) -> BcqError:
    return error("BCQ-E708", found=found)
