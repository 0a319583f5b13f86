"""Settings of a method: declared once as a frozen dataclass, checked when the method is built.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        bits: int = setting(4, "bits per weight", low=1, high=8)
        clip: str = setting("none", "how ranges are chosen", choices=("none", "search"))

    class Rtn(MethodBase[Settings]):
        name, settings_type = "rtn", Settings

    Rtn.build({"bits": 3})

A value may be of the declared type or its text: rule files are typed, command lines are not.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from bcqfmt.errors import BcqError, error, escape

from .protocol import Parameter

ROW = -1  # the group size that makes each row one group
SCALE_DTYPE = "type of the scales; `source`: that of the model, without which only dense exports are possible"
GROUP_SIZE = "columns that share their numbers: 8 or more, or `row`"

_TEXTS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
    words: Mapping[str, Any] | None = None,
) -> Any:
    """A field of a settings dataclass. ``low`` and ``high`` are inclusive; ``words``: texts that stand for values.

    A value that ``words`` can stand for is allowed whatever the range says: ``words={"row": -1}, low=8``.
    """
    rules = {"help": help, "low": low, "high": high, "choices": choices, "words": dict(words or {})}
    return dataclasses.field(default=default, metadata=rules)


def declared(settings: type[Any]) -> tuple[Parameter, ...]:
    """The fields as :class:`Parameter`, in the order of their declaration."""
    kinds = typing.get_type_hints(settings)
    return tuple(
        Parameter(field.name, kinds[field.name], field.default, field.metadata["help"], field.metadata["choices"])
        for field in dataclasses.fields(settings)
    )


def built(settings: type[T], given: Mapping[str, Any], method: str) -> T:
    """An instance with the given values, the rest by default; BCQ-E620 for a name or a value that does not fit."""
    fields = {field.name: field for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(settings)
    values = {}
    for name, value in given.items():
        plain = str(name).replace("-", "_")
        if plain not in fields:
            raise _unknown(method, str(name), list(fields))
        values[plain] = _checked(f"{method}: {plain}", kinds[plain], fields[plain].metadata, value)
    return settings(**values)


class MethodBase(Generic[T]):
    """What the :class:`Method` protocol asks for, from a dataclass of settings; a method adds ``quantize``."""

    name: str
    settings_type: type[T]  # the dataclass

    def __init__(self, settings: T) -> None:
        self._settings = settings

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        return declared(cls.settings_type)

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Self:
        """The method with these settings; BCQ-E620 names a setting that is unknown or out of range."""
        return cls(built(cls.settings_type, given, cls.name))

    def needs_stats(self) -> str | None:
        """None: works without calibration."""
        return None

    def check_shape(self, name: str, shape: tuple[int, int]) -> None:
        """Any matrix fits that the format can hold."""

    @property
    def lower_precisions(self) -> tuple[int, ...]:
        """None: one precision, or the same inputs for all."""
        return ()

    def settings(self) -> dict[str, Any]:
        """The settings in force, as plan and report record them."""
        return dataclasses.asdict(self._settings)  # type: ignore[call-overload, no-any-return]


def _unknown(method: str, name: str, known: list[str]) -> BcqError:
    near = difflib.get_close_matches(name.replace("-", "_"), known, 1, 0.5)
    expected = f"`{near[0]}`, perhaps" if near else f"one of {', '.join(known)}"
    return error("BCQ-E620", found=f"{method}: no setting `{escape(name)}`", expected=expected)


def _checked(what: str, kind: type, rules: Mapping[str, Any], given: Any) -> Any:
    words: dict[str, Any] = rules["words"]
    if isinstance(given, str) and given in words:
        return words[given]
    expected = _expected(kind, rules)
    value = _typed(kind, given)
    if value is not None and value in words.values():
        return value
    low, high, choices = rules["low"], rules["high"], rules["choices"]
    fits = value is not None and (not choices or value in choices)
    if not fits or (low is not None and value < low) or (high is not None and value > high):
        raise error("BCQ-E620", found=f"{what} = {escape(str(given))}", expected=expected)
    return value


def _typed(kind: type, given: Any) -> Any:
    """The value as ``kind``, or None."""
    if kind is str or kind is bool:
        if kind is bool and isinstance(given, str):
            return {"true": True, "false": False}.get(given.lower())
        return given if isinstance(given, kind) else None
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        number = kind(given)
    except (ValueError, OverflowError):
        return None
    exact = isinstance(given, str) or number == given
    return number if exact and math.isfinite(number) else None


def _expected(kind: type, rules: Mapping[str, Any]) -> str:
    low, high = rules["low"], rules["high"]
    if rules["choices"]:
        text = "one of " + ", ".join(str(choice) for choice in rules["choices"])
    elif low is not None and high is not None:
        text = f"{_TEXTS[kind]} in {low}..{high}"
    elif low is not None:
        text = f"{_TEXTS[kind]}, {low} or more"
    elif high is not None:
        text = f"{_TEXTS[kind]}, {high} or less"
    else:
        text = _TEXTS[kind]
    return text + "".join(f", or `{word}`" for word in rules["words"])
