"""Publishing a folder from the command line: what `push`, `convert --push` and `quantize --push` share."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bcqfmt.errors import BcqError

from . import render
from .command import command_line, usage_error
from .progress import folder_bar


def check_push_options(push: str | None, private: bool, create_pr: bool, *, whole: bool) -> None:
    """Before any work: options that go together, a name that can be one, somebody who is logged in."""
    if push is None:
        if private or create_pr:
            raise usage_error("--private and --create-pr go with --push.")
        return
    if not whole:
        raise usage_error("--push needs a complete folder.")
    from bcqfmt.converters.hub import check_push

    check_push(push)


def publish(folder: Path, repo: str, **options: Any) -> dict[str, Any]:
    """Check and upload a folder; whatever stops it, the user is told the command that goes on.

    ``options``: what `hub.push` and the verb `push` call alike, private to overwrite.
    """
    from bcqfmt.converters import hub
    from bcqfmt.converters.jobs.model_card import with_name

    words: list[str | Path] = ["bcqfmt", "push", folder, repo]
    for name, value in options.items():
        if value:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    again = command_line(*words)
    try:  # told before anything is read
        hub.check_push(repo, revision=options.get("revision"))
    except BcqError as fault:
        if fault.exit_code == 8:
            fault.hint = f"{fault.hint}, then: {again}"
        raise
    render.say(f"checking {folder}: every rule and every digest, then uploading to {repo}")
    try:
        with ExitStack() as stack:
            done = hub.push(
                folder,
                repo,
                **options,
                card=with_name,
                progress=sys.stderr is not None and sys.stderr.isatty(),
                hashed=folder_bar(stack, folder, "checking"),
            )
    except BcqError as fault:
        if fault.exit_code == 8:  # the folder is as it should be; what is missing is the upload
            fault.hint = f"{fault.hint}; the folder is complete, then go on with: {again}"
        raise
    except BaseException:
        render.say(f"nothing is lost; go on with: {again}")
        raise
    return {"repo": repo, "url": done.url, "files": len(done.files), "bytes": sum(done.files.values())}
