"""Settings of the quantization methods as options of a verb: what the methods declare is what `--help` lists."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from bcqfmt.converters.methods.protocol import Parameter

__all__ = ["WithSettings", "given_settings"]

_DEST = "setting_"
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class WithSettings(click.Command):
    """A verb that takes every setting of every method; the methods are loaded when it is called."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters and the settings."""
        return [*super().get_params(ctx), *_options()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Two lists: options, then settings with the methods that have them."""
        own = [param for param in super().get_params(ctx) if isinstance(param, click.Option)]
        for title, options in (("Options", own), ("Settings of methods [default: methods]", _options())):
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)


def given_settings(asked: dict[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """Take the settings out of a verb's arguments; ``pairs``: ``name=value`` texts of ``--set``, which come last."""
    found = {name.removeprefix(_DEST): asked.pop(name) for name in list(asked) if name.startswith(_DEST)}
    settings = {name: value for name, value in found.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"--set takes name=value, not '{pair}'.", click.get_current_context())
        settings[name.strip().replace("-", "_")] = value.strip()
    return settings


@functools.cache
def _options() -> tuple[click.Option, ...]:
    from bcqfmt.converters.methods.registry import METHODS, find_method

    found: dict[str, list[tuple[str, Parameter]]] = {}
    for method in METHODS:
        for parameter in find_method(method).parameters():
            found.setdefault(parameter.name, []).append((method, parameter))
    return tuple(_option(name, users) for name, users in found.items())


def _option(name: str, users: list[tuple[str, Parameter]]) -> click.Option:
    """One option for all methods that have the setting; the method itself checks the value."""
    first, spelled = users[0][1], name.replace("_", "-")
    texts: dict[str, dict[str, list[str]]] = {}
    for method, parameter in users:
        texts.setdefault(parameter.help, {}).setdefault(_shown(parameter), []).append(method)
    notes = {
        text: "; ".join(f"{default}: {', '.join(methods)}" for default, methods in defaults.items())
        for text, defaults in texts.items()
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
