"""What can go wrong between here and the hub: one error per cause, a sentence and the command to type.

Nothing a server sends ends up in a message, and no exception of the library stays chained to ours: a request
carries the user's token in its headers, and a hostile server may send it back as text.

``huggingface_hub`` is imported inside functions only. Version 1 stands on httpx and version 2 on httpx2, so the
exceptions of that layer are told apart by the names of their classes, which are the same in both.
"""

from __future__ import annotations

import errno
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bcqfmt.errors import BcqError, error

from .answers import limited

PAUSES: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before the first, second, ... retry
LONGEST_WAIT = 60  # seconds; a hub that asks for a longer wait is an error
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG}
_RESET = re.compile(r";\s*t\s*=\s*(\d{1,9})")
Result = TypeVar("Result")


def library() -> ModuleType:
    """``huggingface_hub`` with the parts of it that are used here, or what to install."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        hint = "pip install 'huggingface_hub>=1.31,<3', or give a local folder"
        raise error("BCQ-E306", found="huggingface_hub", hint=hint) from None
    return huggingface_hub


def attempt(
    call: Callable[[], Result],
    repo_id: str,
    file: str = "",
    again: Callable[[BaseException], bool] | None = None,
    pauses: Sequence[float] | None = None,
    file_bytes: int = 0,
) -> Result:
    """The result of ``call``; after a failure that may pass it is called again, at most once per pause.

    ``file_bytes``: of the largest file that the call fetches; answers that are longer are refused (`answers`).
    """
    waits = PAUSES if pauses is None else tuple(pauses)
    hub = library()
    for tries in range(1, len(waits) + 2):
        try:
            with limited(hub, file_bytes):
                return call()
        except BcqError as fault:
            problem: BcqError | None = _anew(fault, repo_id)
        except _caught() as fault:
            wait = _wait(fault, waits[tries - 1]) if tries <= len(waits) and (again or may_help)(fault) else None
            problem = explain(fault, repo_id, file, tries) if wait is None else None
        if problem is not None:
            raise problem  # not inside the handler: the library's exception holds the request, and so the token
        time.sleep(wait or 0.0)
    raise AssertionError("unreachable")


def may_help(fault: BaseException) -> bool:
    """Whether the same request may succeed a little later: 429, 408, 5xx, a lost or refused connection."""
    status = status_of(fault)
    if status:
        return status in (408, 429) or status >= 500
    return bool(_names(fault) & {"TimeoutException", "NetworkError", "RemoteProtocolError"})


def status_of(fault: BaseException) -> int:
    """The HTTP status that an exception of the library carries; 0 without one."""
    return int(getattr(getattr(fault, "response", None), "status_code", 0) or 0)


def explain(fault: BaseException, repo_id: str, file: str = "", tries: int = 1) -> BcqError:
    """The error of ours for an exception of the library; ``file`` is the file of the repository that was asked for."""
    if isinstance(fault, ValueError) and str(fault).startswith("Invalid metadata in README.md"):
        return error("BCQ-E631", "README.md", found="the hub does not accept its front matter", hint=_FRONT)
    fault = _root(fault)
    if isinstance(fault, BcqError):
        return _anew(fault, repo_id)
    names, status = _names(fault), status_of(fault)
    place = f"{repo_id}/{file}" if file else repo_id
    fetch = f"hf download {repo_id}"
    if names & {"IncompleteSnapshotError"}:
        return error(
            "BCQ-E706", repo_id, found="the copy in the cache lacks files", hint=f"finish it while online: {fetch}"
        )
    if names & {"OfflineModeIsEnabled", "LocalEntryNotFoundError"}:
        found = "this revision has not been downloaded completely before"
        return error("BCQ-E705", place, found=found, hint=f"without --offline and HF_HUB_OFFLINE, or once: {fetch}")
    if "RevisionNotFoundError" in names:
        hint = f"list them: git ls-remote https://huggingface.co/{repo_id}"
        return error("BCQ-E707", repo_id, found="no such branch, tag or commit", hint=hint)
    if names & {"GatedRepoError", "DisabledRepoError"} or status in (401, 402, 403, 451):
        if names & {"RepositoryNotFoundError"} and "GatedRepoError" not in names:
            return _not_found(repo_id)
        return _denied(repo_id, "GatedRepoError" in names, status)
    if names & {"EntryNotFoundError"} or (file and status in (404, 416) and "RepositoryNotFoundError" not in names):
        found = f"HTTP {status or 404}: the hub no longer has what its listing of this commit says"
        return error("BCQ-E706", place, found=found, hint="try again later")
    if "RepositoryNotFoundError" in names or status == 404:
        return _not_found(repo_id)
    if status == 429:
        asked = _asked_wait(fault)
        found = f"HTTP 429 after {_count(tries)}" + (f"; it asks to wait {asked} s" if asked is not None else "")
        wait = f"wait {asked} s" if asked else "wait some minutes"
        return error(
            "BCQ-E703", place, found=found, hint=f"{wait}, then try again; limits are wider after: hf auth login"
        )
    if status:
        return error("BCQ-E704", place, found=f"HTTP {status} from {_host()} after {_count(tries)}", hint=_LATER)
    return _without_answer(fault, names, place, tries)


def _anew(fault: BcqError, repo_id: str) -> BcqError:
    """An error of ours that was raised inside the library, without anything of the library that hangs on it."""
    found = fault.finding
    return error(fault.code, found.file or repo_id, found.tensor, found.found, found.expected, fault.hint)


_LATER = "try again later; https://status.huggingface.co tells whether the hub is down"
_FRONT = "compare it with https://huggingface.co/docs/hub/model-cards#model-card-metadata"
_CONNECTION = "check the connection, the proxy and HF_ENDPOINT, then try again"


def _without_answer(fault: BaseException, names: set[str], place: str, tries: int) -> BcqError:
    """Errors without an HTTP status: the network, the disk, an answer that makes no sense."""
    found = ""
    if "TimeoutException" in names:
        found = f"no answer from {_host()} in time"
    elif "TooManyRedirects" in names:
        found = f"{_host()} redirects in circles"
    elif "ProxyError" in names:
        found = "the proxy refuses the connection"
    elif "ConnectError" in names:
        found = f"no connection to {_host()}"
    elif names & {"NetworkError", "RemoteProtocolError"}:
        found = f"{_host()} closed the connection before the end"
    elif names & {"HTTPError", "InvalidURL"}:
        found = f"{type(fault).__name__} while talking to {_host()}"
    if found:
        return error("BCQ-E704", place, found=f"{found} ({_count(tries)})", hint=_CONNECTION)
    if isinstance(fault, OSError) and fault.errno in _DISK:
        hint = "free some space there, or point HF_HOME at another disk"
        return error("BCQ-E402", "the hub's cache", found=fault.strerror or type(fault).__name__, hint=hint)
    if isinstance(fault, OSError) and "FileMetadataError" not in names and fault.errno is None:
        return error("BCQ-E706", place, found="what came is not of the size that the hub announced")
    if isinstance(fault, ValueError) or "FileMetadataError" in names:
        return error("BCQ-E704", place, found=f"{_host()} does not answer like a hub", hint=_CONNECTION)
    return error("BCQ-E704", place, found=f"the transfer failed ({type(fault).__name__})", hint=_CONNECTION)


def _not_found(repo_id: str) -> BcqError:
    hint = "check the spelling; for a private or gated model: hf auth login"
    return error("BCQ-E701", repo_id, found="neither a folder here nor a model on the hub that you can see", hint=hint)


def _denied(repo_id: str, gated: bool, status: int) -> BcqError:
    if gated:
        page = f"https://huggingface.co/{repo_id}"
        found = "the model is gated, and this account has no access"
        return error("BCQ-E702", repo_id, found=found, hint=f"ask for access on {page}, then: hf auth login")
    found = "no token, or one that is not accepted" if status == 401 else "this account may not do that"
    return error("BCQ-E702", repo_id, found=f"HTTP {status}: {found}", hint="log in with another token: hf auth login")


def _caught() -> tuple[type[BaseException], ...]:
    """What the library raises: its own classes, those of its HTTP layer, of the system, and of the xet client."""
    errors: Any = library().errors
    http: Any = errors.HfHubHTTPError.__mro__[1]  # httpx.HTTPError or httpx2.HTTPError
    layer = sys.modules[http.__module__.partition(".")[0]]
    extra = [getattr(errors, name, None) for name in ("EntryNotFoundError", "XetDownloadError")]
    found = [http, getattr(layer, "InvalidURL", None), *extra, OSError, ValueError, RuntimeError]
    return tuple(kind for kind in found if isinstance(kind, type))


def _root(fault: BaseException) -> BaseException:
    """The exception behind the ones by which the library only says that it failed, or that its cache is empty."""
    cause = fault.__cause__
    if isinstance(cause, BcqError):  # what our hooks raise in a thread of the library
        return cause
    wrapped = isinstance(fault, ValueError | RuntimeError) or type(fault).__name__ == "LocalEntryNotFoundError"
    return _root(cause) if wrapped and cause is not None and isinstance(cause, _caught()) else fault


def _names(fault: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(fault).__mro__}


def _wait(fault: BaseException, pause: float) -> float | None:
    """Seconds until the next try; None when the hub asks for more than LONGEST_WAIT."""
    asked = _asked_wait(fault)
    if asked is None:
        return pause
    return max(pause, float(asked)) if asked <= LONGEST_WAIT else None


def _asked_wait(fault: BaseException) -> int | None:
    headers: Any = getattr(getattr(fault, "response", None), "headers", {})
    text = str(headers.get("Retry-After", "")).strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    reset = _RESET.search(str(headers.get("ratelimit", "")))
    return int(reset[1]) if reset and status_of(fault) == 429 else None


def address() -> str:
    """The hub's address, without user and password."""
    scheme = str(library().constants.ENDPOINT).partition("://")[0]
    return f"{scheme if scheme in ('http', 'https') else 'https'}://{_host()}"


def _host() -> str:
    """Where requests go, without user, password or path."""
    try:
        parts = urlsplit(str(library().constants.ENDPOINT))
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "the hub"
    return f"{parts.hostname}{port}" if parts.hostname else "the hub"


def _count(tries: int) -> str:
    return "1 try" if tries == 1 else f"{tries} tries"
