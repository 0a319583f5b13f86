"""Types of options (sizes, parts, devices), and the settings of quantization methods as options of a verb."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bcqfmt.errors import escape
from bcqfmt.system import cores

from . import render
from .command import command_words, usage_error

if TYPE_CHECKING:
    from click import ParamType

    from bcqfmt.converters.methods.protocol import Parameter
else:

    class ParamType(click.ParamType):
        """``ParamType[int]`` is ``ParamType``: the oldest supported click has no type arguments."""

        def __class_getitem__(cls, given: Any) -> type:
            return cls


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_LEAST = 1000  # bytes: less than that is a forgotten unit
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEST = "setting_"
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_CONTEXT = 512  # tokens at a time, where nothing else is asked for
_F = TypeVar("_F", bound=Callable[..., Any])


class _Size(ParamType[int]):
    """Bytes: ``5GB`` is decimal, ``5GiB`` binary."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", value.strip().lower())
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
        if match is None or size < 1:
            self.fail(f"'{value}' is no size; write 5GB, 512MiB or a number of bytes.", param, ctx)
        if size < _LEAST and not match[2]:
            self.fail(f"'{value}' is {size} bytes; write {value}GB if that is meant.", param, ctx)
        return size


class _Part(ParamType[tuple[int, int]]):
    """``2/8``: the second of eight parts."""

    name = "i/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"'{value}' is no part; write 2/8 for the second of eight.", param, ctx)
        return int(match[1]), int(match[2])


class Device(ParamType[str]):
    """``cpu``, ``cuda``, ``cuda:1``, and what else a verb takes."""

    name = "device"

    def __init__(self, *others: str) -> None:
        self.others = others
        self.known = ", ".join((*others, "cpu", "cuda or cuda:N"))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Unchanged, if it may name a device of torch."""
        if value not in self.others and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
            self.fail(f"{value!r} is none of {self.known}.", param, ctx)
        return value


class Items(ParamType[tuple[str, ...]]):
    """Values separated by commas."""

    name = "list"

    def __init__(self, pattern: str, what: str) -> None:
        self.pattern, self.what = re.compile(pattern), what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        found = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        for part in found:
            if not self.pattern.fullmatch(part):
                self.fail(f"'{part}' is no {self.what}.", param, ctx)
        return found


class _Regex(ParamType[str]):
    """A regular expression, as text."""

    name = "regex"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Unchanged, if Python takes it."""
        if not value:
            self.fail("it is empty; expected a regular expression.", param, ctx)
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as fault:
            self.fail(f"'{value}' is no regular expression: {fault}.", param, ctx)
        return value


SIZE, PART, REGEX = _Size(), _Part(), _Regex()


def model_options(command: _F) -> _F:
    """``--dtype``, ``--exact``, ``--planes`` and ``--device``: how a model is run."""
    where: dict[str, Any] = {"type": Device("mps"), "default": "cpu", "metavar": "cpu|cuda[:N]|mps"}
    dtype: dict[str, Any] = {"type": click.Choice(_DTYPES), "default": "auto"}
    kinds = "Type of the activations; auto: float32 on a CPU, else that of the checkpoint."
    exact = "Multiply with the exact dense matrices instead of using the kernels."
    command = click.option("--device", **where, show_default=True, help="Where it is run.")(command)
    planes = click.option("--planes", type=click.IntRange(1, 8), help="Use only the first planes of every weight.")
    command = click.option("--exact", is_flag=True, help=exact)(planes(command))
    return click.option("--dtype", **dtype, show_default=True, help=kinds)(command)


def check_model_options(dense: bool, options: Mapping[str, Any]) -> None:
    """A usage error where options that are about planes are given for a dense model."""
    if dense and (options["exact"] or options["planes"] is not None):
        raise usage_error("--exact and --planes are for BCQ folders; this is a dense one.")


def default_workers() -> int:
    """Threads where ``--workers`` is not given: one per core that this process may use, at most four."""
    return min(4, cores())


class WithSettings(click.Command):
    """A verb that takes every setting of every method; the methods are loaded when it is called."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_options()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options, presets where there are any, settings: those of the method that is named, else all, with names."""
        own = [param for param in super().get_params(ctx) if isinstance(param, click.Option)]
        method = _method_named(command_words(ctx))
        settings = ("Settings of methods [default: methods]", _options())
        if method is not None:
            settings = (f"Settings of {method} [default]", _options(method))
        for title, options in (("Options", own), settings):
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
            if any(option.name == "preset" for option in options):
                with formatter.section("Presets [what came out on SmolLM2-135M; FP16: perplexity 25.5]"):
                    formatter.write_dl(_presets())


def _presets() -> list[tuple[str, str]]:
    from bcqfmt.converters.quantize.presets import PRESETS

    rows = []
    for name, one in PRESETS.items():
        needs = f"; needs {one.inputs}" if one.inputs else ""
        rows.append((name, f"{one.purpose}: {one.options()}{needs}" + (f" [{one.measured}]" if one.measured else "")))
    return rows


def given_settings(asked: dict[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """Take the settings out of a verb's arguments; ``pairs``: ``name=value`` texts of ``--set``."""
    found = {name.removeprefix(_DEST): asked.pop(name) for name in list(asked) if name.startswith(_DEST)}
    settings = {name: value for name, value in found.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise usage_error(f"--set takes name=value, not '{pair}'.")
        key, value = name.strip().replace("-", "_"), value.strip()
        if key in settings and str(settings[key]).lower() != value.lower():
            said = f"--{key.replace('_', '-')} {settings[key]} and --set {key}={value}"
            raise usage_error(f"{said} contradict each other: give one of them.")
        settings[key] = value
    return settings


def _method_named(words: Sequence[str]) -> str | None:
    """The method on a command line, if it is a known one; ``--help`` may stand before or after it."""
    from bcqfmt.converters.methods.registry import method_names

    given = [word.partition("=")[2] for word in words if word.startswith("--method=")]
    given += [after for word, after in itertools.pairwise(words) if word == "--method"]
    return next((name for name in given if name in method_names()), None)


@functools.cache
def _options(only: str | None = None) -> tuple[click.Option, ...]:
    from bcqfmt.converters.methods.registry import METHODS, find_method

    found: dict[str, list[tuple[str, Parameter]]] = {}
    for method in METHODS if only is None else (only,):
        for parameter in find_method(method).parameters():
            found.setdefault(parameter.name, []).append((method, parameter))
    return tuple(_option(name, users, named=only is None) for name, users in found.items())


def _option(name: str, users: list[tuple[str, Parameter]], *, named: bool) -> click.Option:
    """One option for all methods that have the setting; the method itself checks the value. ``named``: say which."""
    first, spelled = users[0][1], name.replace("_", "-")
    texts: dict[str, dict[str, list[str]]] = {}
    for method, parameter in users:
        texts.setdefault(parameter.help, {}).setdefault(_shown(parameter), []).append(method)
    notes = {
        text: "; ".join(f"{default}: {', '.join(methods)}" if named else default for default, methods in rows.items())
        for text, rows in texts.items()
    }
    help_text = ". ".join(f"{text} [{note}]" for text, note in notes.items())
    if all(parameter.kind is bool for _, parameter in users):
        return click.Option([f"--{spelled}/--no-{spelled}", _DEST + name], default=None, help=help_text)
    choices = list(dict.fromkeys(str(choice) for _, parameter in users for choice in parameter.choices))
    metavar = "|".join(choices) if all(parameter.choices for _, parameter in users) else _METAVARS.get(first.kind, "X")
    return click.Option([f"--{spelled}", _DEST + name], default=None, metavar=metavar, help=help_text)


def _shown(parameter: Parameter) -> str:
    """A default as users would write it."""
    return {True: "yes", False: "no"}[parameter.default] if parameter.kind is bool else str(parameter.default)


def context_option(name: str, what: str) -> Callable[[_F], _F]:
    """``--context``; ``what`` has that many tokens: "window", "piece". None where it is not given."""
    return click.option(
        "--context", name, type=click.IntRange(2, 1 << 20), metavar="N",
        help=f"Tokens per {what}; {_CONTEXT}, or what the model has positions for.",
    )  # fmt: skip


def fitting_context(asked: int | None, models: Mapping[Path, int | None], what: str) -> int:
    """The tokens asked for, BCQ-E302 if a model has fewer positions; or as many as all have, at most 512.

    ``models``: folders, and their positions where they are known.
    """
    from bcqfmt.integrations.model_folder import check_length

    found = asked or _CONTEXT
    for folder, longest in models.items():
        if asked is not None:
            check_length(folder, longest, asked, f"--context sets the tokens of a {what}")
        elif longest is not None and 2 <= longest < found:
            render.say(f"{what}s of {longest} tokens: {escape(str(folder))} has positions for no more")
            found = longest
    return found
