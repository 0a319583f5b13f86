"""The group ``bcqfmt``: verbs, loaded when they are called, and how every error leaves the program."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from bcqfmt.errors import BcqError, error, escape
from bcqfmt.version import __version__, pip_install

from . import render
from .command import CONTEXT, VERBS, Terminated, debug_option, verb_module

# words for one thing, in other tools or in other verbs; which of them a verb has is its own business
_SAME = (
    ("--html", "--report", "--out", "--output", "--output-file", "--plot", "-o"),
    ("--context", "--seq", "--seqlen", "--seq-len", "--ctx-size", "--max-length", "--window"),
    ("--max-tokens", "--tokens", "--max-new-tokens", "--n-predict", "--limit"),
    ("--group-size", "--groups", "--groupsize", "--q-group-size", "--block-size"),
    ("--bits", "--wbits", "--w-bit", "--q", "--planes"),
    ("--lowest-bits", "--seed-precision", "--min-bits"),
    ("--workers", "--threads", "--jobs", "--num-workers", "-j"),
    ("--overwrite", "--force", "--yes", "-f", "-y"),
    ("--to", "--format", "--layout", "--from", "--type"),
    ("--text", "--dataset", "--corpus", "--file", "--data"),
    ("--reference", "--against", "--baseline", "--compare"),
    ("--tasks", "--task", "--benchmarks"),
    ("--task-folder", "--include-path"),
    ("--stats", "--calibration", "--imatrix", "--hessian"),
    ("--zero-point", "--zeros", "--zero-points"),
    ("--dtype", "--torch-dtype", "--precision"),
    ("--device", "--gpu", "--cuda", "--device-map"),
    ("--temperature", "--temp", "-t"),
    ("--prompt", "-p", "--input"),
    ("--deep", "--full", "--strict"),
    ("--version", "-v", "-V"),
    ("--debug", "--verbose", "-v"),
    ("--revision", "--branch", "--commit"),
    ("--resume", "--continue"),
    ("--exclude", "--ignore", "--skip"),
    ("-n", "--rows", "--samples", "--nsamples"),
)
_MEANT = {  # what other tools call it
    "run": "generate", "chat": "generate", "perplexity": "eval", "ppl": "eval", "evaluate": "eval", "compare": "diff",
    "info": "inspect", "show": "inspect", "ls": "inspect", "check": "validate", "test": "validate", "import": "convert",
    "dequantize": "export", "upload": "push", "publish": "push", "tour": "demo", "benchmark": "bench", "env": "doctor",
}  # fmt: skip


class Group(click.Group):
    """Loads verbs on demand and turns every failure into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which one needs them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = verb_module(cmd_name).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of verbs, without loading them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs, without loading them, and the options."""
        verbs = [CompletionItem(name, help=text) for name, text in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """An unknown verb is answered with the nearest one."""
        name = args[0]
        if name in VERBS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name == "help":  # of a verb, or of all
            if args[1:]:
                return self.resolve_command(ctx, [args[1], "--help"])
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        if name == "version":
            _show_version(ctx, as_json="--json" in args)
        near = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, VERBS, 1, 0.6)
        rest = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(VERBS)}"
        raise click.UsageError(f"No such verb '{escape(name, 60)}'; {rest}", ctx)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The words of the command line are kept with it: messages repeat them (`command.command_words`)."""
        return super().make_context(info_name, args, parent, obj=tuple(args), **extra)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit with its code; a verb returns its exit code or None."""
        given = list(sys.argv[1:] if args is None else args)
        if not standalone_mode:
            return super().main(given, prog_name, complete_var, standalone_mode, **extra)
        options = given[: given.index("--")] if "--" in given else given
        outcome = _Outcome("--json" in options, "--debug" in options)
        inner = super().main
        sys.exit(outcome.run(lambda: inner(given, prog_name, complete_var, False, **extra)))


class _Outcome:
    """Turns what a verb returned or raised into messages and an exit code."""

    def __init__(self, as_json: bool, debug: bool) -> None:
        self.as_json, self.debug = as_json, debug

    def run(self, verb: Callable[[], Any]) -> int:
        """Call the verb, report its errors, return the exit code."""
        try:
            code = verb()
            render.flush()
        except SystemExit:  # click exits when the reader of its help or version has gone
            return 0
        except (click.exceptions.Abort, KeyboardInterrupt):  # the former is click's word for an interrupt
            return self.fault(error("BCQ-E901", found="stopped from the keyboard"), 130)
        except Terminated as signalled:
            return self.fault(error("BCQ-E901", found=f"stopped by {signalled.name}"), signalled.exit_code)
        except click.ClickException as fault:
            return self.usage(fault)
        except BcqError as fault:
            cause = fault.__cause__
            return self.fault(fault, cause.exit_code if isinstance(cause, Terminated) else fault.exit_code)
        except OSError as fault:
            return self.system(fault)
        except Exception as fault:  # noqa: BLE001 - the last line of defence: no traceback reaches a user
            missing = str(fault.name).partition(".")[0] if isinstance(fault, ModuleNotFoundError) else ""
            if missing in ("torch", "transformers"):  # every verb that runs models needs both
                hint = pip_install("transformers")
                return self.fault(error("BCQ-E306", found=f"{missing} is not installed", hint=hint), 2)
            broken = _broken_package(fault)
            if broken:
                hint = "`bcqfmt doctor` shows what is installed, and what fixes it"
                found = f"{broken} cannot be imported: {escape(str(fault))}"
                return self.fault(error("BCQ-E306", found=found, hint=hint), 2)
            return self.fault(error("BCQ-E999", found=f"{type(fault).__name__}: {escape(str(fault))}"), 1)
        return code if isinstance(code, int) else 0

    def fault(self, fault: BcqError, code: int) -> int:
        """``error:`` and ``hint:`` on stderr, an object on stdout for scripts."""
        trace = traceback.format_exc().rstrip("\n")
        if self.debug and trace != "NoneType: None":
            render.say(trace)
        render.say(f"error: {fault}")
        if fault.hint:
            render.say(f"hint: {fault.hint}")
        self._json({**fault.finding.as_dict(), "hint": fault.hint, "exit_code": code})
        return code

    def usage(self, fault: click.ClickException) -> int:
        """A command line that cannot be understood: how it should look, then why."""
        if isinstance(fault, click.exceptions.NoArgsIsHelpError):
            render.say(fault.format_message())
            return fault.exit_code
        if isinstance(fault, click.UsageError) and fault.ctx is not None:
            render.say(fault.ctx.get_usage())
            render.say(f"Try '{fault.ctx.command_path} --help' for help and an example.")
            fault = _nearest(fault, fault.ctx)
        said = " ".join(fault.format_message().split())  # click lists choices on lines of their own
        render.say(f"error: {said}")
        self._json({"code": "usage", "found": escape(said), "exit_code": fault.exit_code})
        return fault.exit_code

    def system(self, fault: OSError) -> int:
        """The operating system refused something: our output, or an input."""
        found = fault.strerror or str(fault)
        if fault.filename is None and _nowhere():
            hint = "go to a folder that exists (cd), then try again"
            return self.fault(error("BCQ-E102", ".", found="the working folder was removed", hint=hint), 3)
        if fault.filename is None:  # a write to stdout: a full disk, a quota
            render.discard()
            return self.fault(error("BCQ-E402", "stdout", found=found), 7)
        return self.fault(error("BCQ-E102", str(fault.filename), found=found), 3)

    def _json(self, value: dict[str, Any]) -> None:
        if not self.as_json:
            return
        try:
            render.emit_json({"error": value})
            render.flush()
        except OSError:  # stdout itself is what failed; stderr has the message
            render.discard()


def _broken_package(fault: Exception) -> str:
    """The package whose import raised ``fault``, where it was no import of our own modules; else an empty text."""
    if not isinstance(fault, ImportError):
        return ""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(fault.__traceback__)]
    names = [name.partition(".")[0] for name in [*frames, fault.name or ""]]
    names = [name for name in names if name != "importlib"]
    ours = max((i for i, name in enumerate(names) if name == "bcqfmt"), default=-1)
    return next(iter(names[ours + 1 :]), "")


def _nowhere() -> bool:
    """Whether the working folder is gone."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _nearest(fault: click.UsageError, ctx: click.Context) -> click.UsageError:
    """For an option that the verb does not have: the same with one that means the same, if there is one."""
    if not isinstance(fault, click.NoSuchOption):
        return fault
    mine = {word for param in ctx.command.get_params(ctx) if isinstance(param, click.Option) for word in param.opts}
    alike = [word for same in _SAME if fault.option_name in same for word in same if word in mine]
    near = " or ".join(f"'{word}'" for word in alike)
    return click.UsageError(f"No such option '{fault.option_name}'. Did you mean {near}?", ctx) if near else fault


def _version_option(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        _show_version(ctx, as_json=bool(ctx.params.get("as_json")))


def _show_version(ctx: click.Context, *, as_json: bool) -> NoReturn:
    """``--version``, as text or, for scripts and bug reports, with what it runs on."""
    if not as_json:
        render.echo(f"bcqfmt {__version__}")
        ctx.exit()
    import platform
    from importlib.metadata import version

    from bcqfmt.checkpoint.descriptor import VERSION

    packages = {name: version(name) for name in ("numpy", "safetensors", "ml_dtypes", "numba", "click")}
    render.emit_json({
        "bcqfmt": __version__, "format": VERSION, "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}", "packages": packages,
    })  # fmt: skip
    ctx.exit()


@click.group(cls=Group, subcommand_metavar="VERB ...", context_settings=CONTEXT)
@click.option("--version", is_flag=True, expose_value=False, callback=_version_option, help="Show the version.")
@click.option("--json", "as_json", is_flag=True, is_eager=True, help="With --version: print JSON.")
@debug_option
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> None:
    """Quantized language-model weights as bit planes, in safetensors files (format BCQ 1.0).

    Results go to stdout, messages to stderr. Exit codes: 0 ok, 1 bug (of doctor: the core does not work), 2 usage,
    3 input missing, 4 malformed, 5 valid but not supported, 6 a difference or a wrong digest, 7 output problem,
    8 network or hub, 9 refused for its size.

    \b
    Example:
      bcqfmt demo
      bcqfmt convert model-gptq/ model-bcq/
      bcqfmt generate model-bcq/ --prompt "Once upon a time"
      bcqfmt verify model-gptq/ model-bcq/
    """
    if as_json:
        raise click.UsageError("--json goes after the verb, or with --version.", ctx)


def preload(words: Sequence[str]) -> None:
    """Import the verb that a command line begins with; what is wrong with it shows when it is called."""
    name = next((word for word in words if word in VERBS), None)
    if name is not None:
        with contextlib.suppress(Exception):
            verb_module(name)


def main() -> NoReturn:
    """The program ``bcqfmt``."""
    signal.signal(signal.SIGTERM, _terminate)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode still shows every name
    cli.main(prog_name="bcqfmt")
    raise AssertionError("cli.main exits")


def _terminate(number: int, frame: FrameType | None) -> None:
    if hasattr(signal, "SIGHUP"):  # kernel and shell send one each: the second must not stop the cleaning up
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise Terminated(number)
