"""``bcqfmt completion``: a script that lets bash, zsh or fish complete verbs, options and paths."""

from __future__ import annotations

import os
from pathlib import PurePath

import click
from click.shell_completion import get_completion_class

from bcqfmt.cli import render
from bcqfmt.cli.command import usage_error, verb

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_BCQFMT_COMPLETE"  # the name that click reads when the script calls bcqfmt back


@verb("completion")
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
def command(shell: str | None) -> None:
    """Print a script that lets a shell complete bcqfmt.

    SHELL is bash (4.4 or newer), zsh or fish; without it, the one that $SHELL names. Let your shell read the script
    when it starts.

    \b
    Example:
      bcqfmt completion bash >> ~/.bashrc
      bcqfmt completion zsh >> ~/.zshrc
      bcqfmt completion fish > ~/.config/fish/completions/bcqfmt.fish
    """
    context = click.get_current_context()
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    found = get_completion_class(chosen) if chosen in _SHELLS else None
    if found is None:
        raise usage_error(f"Say which shell: {', '.join(_SHELLS)}.")
    render.echo(found(context.find_root().command, {}, "bcqfmt", _VARIABLE).source().splitlines())
