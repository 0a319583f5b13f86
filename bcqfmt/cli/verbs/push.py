"""``bcqfmt push``: a BCQ folder goes to a repository on the hub."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, json_option, usage_error, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.progress import folder_bar
from bcqfmt.cli.publish import publish
from bcqfmt.errors import escape


@verb("push")
@click.argument("dst", type=FilePath())
@click.argument("repo", type=click.STRING)
@click.option("--private", is_flag=True, help="Make the repository private; one that is public already is refused.")
@click.option("--create-pr", is_flag=True, help="Upload as a pull request.")
@click.option("--revision", metavar="BRANCH", help="Upload to this branch, or to refs/pr/N, an open pull request.")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option("--overwrite", is_flag=True, help="Delete the files of the repository that DST does not have.")
@click.option("--dry-run", is_flag=True, help="Check DST, list what would be sent, and send nothing.")
@json_option
def command(dst: Path, repo: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Publish a BCQ folder on the hub, checked first.

    DST is any complete BCQ folder; REPO is owner/name, and is made if it is not there. First every rule of the format
    and every digest is checked, as `bcqfmt validate --deep` does. Files whose names begin with a dot are not sent. The
    snippets of the model card get the name of the repository. After a failure the same command goes on. The token is
    that of `hf auth login`, or HF_TOKEN.

    \b
    Example:
      bcqfmt push model-bcq/ me/model-bcq --dry-run
      bcqfmt push model-bcq/ me/model-bcq --private
    """
    if options["create_pr"] and options["revision"] is not None:
        raise usage_error("--create-pr opens a new pull request, --revision goes on with one: choose one.")
    if dry_run:
        with expected_bcq(dst):
            _show(dst, repo, options["revision"], as_json)
        return
    with expected_bcq(dst):
        done = publish(dst, repo, **options)
    line = f"pushed: {done['url']} ({render.count(done['files'], 'file')}, {render.size(done['bytes'])})"
    render.show(as_json, {"folder": str(dst), **done}, line)


def _show(dst: Path, repo: str, revision: str | None, as_json: bool) -> None:
    from bcqfmt.converters.hub import check_target, files_to_push

    check_target(repo, revision)
    with ExitStack() as stack:
        files = files_to_push(dst, folder_bar(stack, dst, "checking"))
    total = sum(files.values())
    if as_json:
        render.emit_json({"folder": str(dst), "repo": repo, "files": files, "bytes": total})
        return
    rows = [(escape(name), render.size(size)) for name, size in files.items()]
    render.echo(render.table(("file", "size"), rows))
    render.echo(f"{escape(str(dst))} -> {repo}: {render.count(len(files), 'file')}, {render.size(total)}; nothing sent")
