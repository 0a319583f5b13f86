"""Publishing: a BCQ folder goes to a repository on the hub, checked first, through the library's own upload.

Checked before anything is sent: every rule of the format and every digest of the manifest (as ``validate --deep``
does). A repository that holds another model's files is refused; the hub itself looks at the front matter of the card.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bcqfmt.checkpoint.folder import CONFIG, MANIFEST, file_list, is_documentation, read_config
from bcqfmt.checkpoint.validation import validate
from bcqfmt.container.durable import write_file
from bcqfmt.container.files import inside
from bcqfmt.converters.source.front_matter import CARD
from bcqfmt.errors import BcqError, error, escape, refuse
from bcqfmt.version import __version__

from .errors import address, attempt, library
from .repo import is_revision, split_hub_id

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOGIN = "hf auth login, with a token that may write (https://huggingface.co/settings/tokens)"
Card = Callable[[str, str], str]


class Pushed(NamedTuple):
    """What was sent, path -> bytes, and where it is now."""

    url: str
    files: dict[str, int]


def check_target(repo_id: str, revision: str | None = None) -> str:
    """The name of a repository to push to; BCQ-E302 if it, or the branch, cannot be one."""
    name, named = split_hub_id(repo_id, hint="for example me/model-bcq, with your name on the hub")
    if named is not None:
        expected = "a name without revision; --revision names a branch"
        raise error("BCQ-E302", name, found=f"@{escape(named)}", expected=expected, hint=f"push to {name}")
    if revision is not None and not is_revision(revision):
        found, hint = f"revision '{escape(revision)}'", "for example --revision dev"
        raise error("BCQ-E302", name, found=found, expected="a branch, or refs/pr/N", hint=hint)
    return name


def check_push(repo_id: str, token: str | None = None, revision: str | None = None) -> tuple[str, str]:
    """Name and token, before long work whose result is to be pushed: BCQ-E302, E702, E705."""
    name = check_target(repo_id, revision)
    hub = library()
    if hub.constants.HF_HUB_OFFLINE:
        raise error("BCQ-E705", name, found="HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    known = token or hub.get_token()
    if not known:
        raise error("BCQ-E702", name, found="no token: nobody is logged in", hint=_LOGIN)
    return name, str(known)


def files_to_push(folder: Path, progress: Callable[[int], object] | None = None) -> dict[str, int]:
    """Check a folder and list what would be sent, path -> bytes; files whose names begin with a dot stay here.

    Refused with the code of the fault: what is no folder, not BCQ, unfinished or damaged.
    """
    _check_kind(folder)
    report = validate(folder, deep=True, progress=progress)
    for finding in report.errors:
        if finding.file != CARD:  # the card is its publisher's to edit
            refuse(finding)
    names = library().utils.filter_repo_objects(file_list(folder), ignore_patterns=_ignored())
    return {name: inside(folder, name).stat().st_size for name in names}  # no link may lead out of the folder


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    overwrite: bool = False,
    card: Card | None = None,
    token: str | None = None,
    progress: bool = False,
    hashed: Callable[[int], object] | None = None,
) -> Pushed:
    """Check a BCQ folder and upload it; where it is now is the address of the commit or of the pull request.

    The repository is made if it is not there. ``revision``: a branch, made if need be, or refs/pr/N of a pull request.
    ``overwrite``: delete the files of the repository that the folder does not have. ``card``: called with the text of
    the model card and the name of the repository, gives the text to publish.
    """
    name, known = check_push(repo_id, token, revision)
    if create_pr and revision is not None:
        found = f"a new pull request and revision '{escape(revision)}'"
        raise error("BCQ-E302", name, found=found, expected="one of them", hint="leave one of them out")
    files = files_to_push(folder, hashed)
    if card is not None and CARD in files:
        text = (folder / CARD).read_bytes().decode("utf-8", "surrogateescape")
        made = card(text, name).encode("utf-8", "surrogateescape")
        if made != text.encode("utf-8", "surrogateescape"):
            write_file(folder / CARD, made)
            files[CARD] = len(made)
    hub = library()
    api: Any = hub.HfApi(token=known, library_name="bcqfmt", library_version=__version__)
    text = message or f"Upload BCQ checkpoint with bcqfmt {__version__}"

    def send() -> str:
        api.create_repo(name, private=private or None, exist_ok=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(name, branch=revision, exist_ok=True)
        strange = _strange(api, name, revision, private, files)
        if strange and not overwrite:
            shown = escape(", ".join(strange[:5]).replace(known, "***")) + (" ..." if len(strange) > 5 else "")
            hint = "name another repository, or delete them there with --overwrite"
            found = f"{len(strange)} files that this folder does not have: {shown}"
            raise error("BCQ-E709", name, found=found, expected="a repository of this model", hint=hint)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=text,
            create_pr=create_pr,
            revision=revision,
            ignore_patterns=_ignored(),
            delete_patterns=[glob.escape(one) for one in strange] or None,
        )
        return _where(name, done, create_pr)

    with _quiet(hub, progress):
        try:
            return Pushed(attempt(send, name, pauses=()), files)  # the library repeats what may be repeated
        except BcqError as fault:
            problem = _in_words(fault, name)
    raise problem


def _check_kind(folder: Path) -> None:
    """The mistakes that a validator would explain in terms of its rules."""
    if not folder.is_dir():
        if os.path.lexists(f"{folder}.partial"):
            hint = "finish it: the command that began it, with --resume"
            raise error("BCQ-V601", str(folder), found="an unfinished one", expected="a BCQ folder", hint=hint)
        found = "a file" if os.path.lexists(folder) else "no such folder"
        raise error("BCQ-E101", str(folder), found=found, expected="a BCQ folder")
    if os.path.lexists(folder / MANIFEST):
        return
    config = read_config(folder, lambda _: None)
    stated = config.get("quantization_config") if config is not None else None
    if folder.name.endswith(".partial") or (isinstance(stated, dict) and stated.get("quant_method") == "bcq"):
        raise error("BCQ-V601", str(folder), found=f"no {MANIFEST}", expected="a finished BCQ folder")
    hint = "convert or quantize a model first: bcqfmt convert SRC OUT"
    if os.path.lexists(folder / CONFIG):
        hint = f"convert it first: {shlex.join(['bcqfmt', 'convert', str(folder), 'OUT'])}"
    found = f"no {MANIFEST}: this is no BCQ folder"
    raise error("BCQ-V601", str(folder), found=found, expected="a BCQ folder", hint=hint)


def _strange(api: Any, name: str, revision: str | None, private: bool, files: dict[str, int]) -> list[str]:
    """Files of the repository that the folder does not have; documentation is not counted."""
    info = api.model_info(name, revision=revision)
    if private and info.private is not True:
        hint = f"make it private on {address()}/{name}/settings, or push without --private"
        raise error("BCQ-E709", name, found="it is public already", expected="a private one", hint=hint)
    there = [str(entry.rfilename) for entry in info.siblings or ()]
    return sorted(name for name in there if name not in files and not is_documentation(name))


def _where(name: str, done: Any, create_pr: bool) -> str:
    """Put together from our own words: what a server answers is not printed."""
    number, commit = getattr(done, "pr_num", None), str(getattr(done, "oid", ""))
    if create_pr and type(number) is int:
        return f"{address()}/{name}/discussions/{number}"
    return f"{address()}/{name}/commit/{commit}" if _COMMIT.fullmatch(commit) else f"{address()}/{name}"


def _in_words(fault: BcqError, name: str) -> BcqError:
    """Errors of reading, in the words of someone who wants to write."""
    if fault.code == "BCQ-E701":
        found = "no such account or repository, or none that this token may write to"
        hint = "check the name; `hf auth whoami` shows the account and its organisations"
        return error("BCQ-E701", name, found=found, hint=hint)
    hint = _LOGIN if fault.code == "BCQ-E702" else fault.hint
    finding = fault.finding
    return error(fault.code, finding.file, finding.tensor, finding.found, finding.expected, hint)


def _ignored() -> list[str]:
    return [".*", *library().utils.DEFAULT_IGNORE_PATTERNS]


@contextlib.contextmanager
def _quiet(hub: ModuleType, progress: bool) -> Iterator[None]:
    """No text of a server in warnings and logs, and bars only where they are wanted."""
    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not hub.utils.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if not progress and bars:
        hub.utils.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if not progress and bars:
            hub.utils.enable_progress_bars()
