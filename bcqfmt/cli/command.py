"""What every verb is made of: the list of verbs, the decorator that makes one, the options that several share."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from bcqfmt.errors import BcqError, error, escape

# The one-line help stands here, so that `bcqfmt --help` loads no verb; a test compares it with the verbs' own.
VERBS = {
    "inspect": "Show what is in a checkpoint.",
    "validate": "Check a checkpoint against the specification.",
    "seal": "Renew the manifest after files were changed on purpose.",
    "convert": "Convert a quantized checkpoint (GPTQ, AWQ, GGUF, ...) to BCQ.",
    "calibrate": "Run a model on text and keep statistics of its inputs.",
    "quantize": "Quantize a dense checkpoint (F16, BF16, F32) to BCQ.",
    "sweep": "Try bits and group sizes on a model: size against error.",
    "report": "Sum up a BCQ checkpoint as a table or a web page.",
    "verify": "Prove that a BCQ folder holds all of its source.",
    "restore": "Rebuild the source of a converted folder, byte for byte.",
    "finalize": "Close a conversion that was done in parts.",
    "export": "Write a BCQ checkpoint in another layout, without loss.",
    "push": "Publish a BCQ folder on the hub, checked first.",
    "generate": "Generate text with a BCQ or a dense checkpoint.",
    "eval": "Measure a BCQ or a dense checkpoint: perplexity, tasks.",
    "diff": "Compare two checkpoints, tensor by tensor.",
    "bench": "Measure the kernels on this machine's GPU.",
    "doctor": "Show what this machine has and lacks, and what fixes it.",
    "completion": "Print a script that lets a shell complete bcqfmt.",
    "demo": "Take a short tour: convert, prove, write, read, break.",
}
_MACHINE = {"bench", "doctor", "completion", "demo"}  # about this machine and this program, in a folder of their own
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_F = TypeVar("_F", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path as `Path`. An empty one, of a variable that is not set, is refused: it would be the working folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_not_empty(self, value, param, ctx), param, ctx)


class Number(click.FloatRange):
    """A number in a range, never NaN, which no comparison refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value} is not a number.", param, ctx)
        return found


def verb_module(name: str) -> Any:
    """The module of a verb, loaded now."""
    return importlib.import_module(f"bcqfmt.cli.{'machine' if name in _MACHINE else 'verbs'}.{name}")


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; like an interrupt it unwinds the stack, so that temporary files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name, self.exit_code = signal.Signals(number).name, 128 + number


class _PathOrHubId(click.types.StringParamType):
    """An argument that may be a path or a hub id: text, not empty, that a shell completes like a path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(_not_empty(self, value, param, ctx), param, ctx)
        return f"./{found}" if found.startswith("-") else found  # for the commands that name it in messages

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def _not_empty(kind: Any, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if value == "":
        kind.fail("it is empty; expected a path.", param, ctx)
    return value


def verb(name: str, cls: type[click.Command] = click.Command) -> Callable[[Callable[..., Any]], click.Command]:
    """A verb: a click command with the options that all of them have."""

    def wrap(function: Callable[..., Any]) -> click.Command:
        made = click.command(name, cls=cls, short_help=VERBS[name], context_settings=CONTEXT)(debug_option(function))
        for param in made.params:
            if isinstance(param, click.Argument) and param.type is click.STRING:
                param.type = _PathOrHubId()
        return made

    return wrap


def debug_option(command: _F) -> _F:
    """``--debug``, accepted before and after the verb; the group reads it from the command line itself."""
    help_text = "Show a traceback when something fails."
    return click.option("--debug", is_flag=True, expose_value=False, help=help_text)(command)


def json_option(command: _F) -> _F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text.")(command)


def html_option(command: _F) -> _F:
    """``--html``, of the verbs that can write a report."""
    kind = FilePath()
    help_text = "Write a report as a web page, and its numbers to FILE.json."
    return click.option("--html", type=kind, metavar="FILE.html", help=help_text)(command)


def hub_options(command: _F) -> _F:
    """``--revision`` and ``--offline``, of the verbs whose source may be a model on the hub."""
    command = click.option("--offline", is_flag=True, help="Take a hub id from the cache; send nothing.")(command)
    return click.option("--revision", help="Branch, tag or commit of a hub id.")(command)


def push_options(command: _F) -> _F:
    """``--push``, ``--private`` and ``--create-pr``, of the verbs whose result can be published at once."""
    command = click.option("--create-pr", is_flag=True, help="Upload as a pull request.")(command)
    command = click.option("--private", is_flag=True, help="Make that repository private.")(command)
    help_text = "Upload the result to this repository on the hub; `bcqfmt push` does it later."
    return click.option("--push", metavar="REPO", help=help_text)(command)


def command_words(ctx: click.Context | None = None) -> tuple[str, ...]:
    """The words after ``bcqfmt`` on the command line that is being run; empty outside of one."""
    found = ctx or click.get_current_context(silent=True)
    words = None if found is None else found.find_root().obj
    return words if isinstance(words, tuple) else ()


def command_line(*words: str | Path) -> str:
    """A command to type, quoted for a shell; a path that begins with a hyphen is no option."""
    return shlex.join(f"./{word}" if isinstance(word, Path) and str(word)[0] == "-" else str(word) for word in words)


def _again(*, resume: bool) -> str:
    """The command that is being run, as it has to be typed to go on after it was stopped."""
    words = list(command_words())
    if resume and "--resume" not in words and "--part" not in words:
        words.insert(words.index("--") if "--" in words else len(words), "--resume")
    return command_line("bcqfmt", *words)


def is_given(name: str) -> bool:
    """Whether the running command line has this option, named as the parameter of its function."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def usage_error(text: str) -> click.UsageError:
    """A command line that contradicts itself; exit code 2, with the usage of the running verb."""
    return click.UsageError(text, click.get_current_context(silent=True))


@contextlib.contextmanager
def stoppable(target: Path, *, resumed: bool) -> Iterator[None]:
    """Around the work on ``target``: an interrupt, SIGTERM or SIGHUP says what is left of it and how to go on.

    ``resumed``: the work grows in ``target.partial`` and can be resumed, after a full disk as well; otherwise nothing
    of it is kept.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        yield
    except BcqError as fault:
        if resumed and fault.code == "BCQ-E402" and partial.exists():
            fault.hint += f"; then go on with what is in {escape(partial.name)}: {_again(resume=True)}"
        raise
    except (KeyboardInterrupt, Terminated) as fault:
        by = f"by {fault.name}" if isinstance(fault, Terminated) else "from the keyboard"
        kept = resumed and partial.exists()
        left = f"what is done is in {partial.name}" if kept else "nothing is left of it"
        hint = f"{'go on' if kept else 'start again'} with: {_again(resume=kept)}"
        raise error("BCQ-E901", str(target), found=f"stopped {by}; {left}", hint=hint) from fault
