"""Which weight gets which method: verdicts on a source, the user's patterns and rules, the method of every weight."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bcqfmt.container.strict_json import canonical
from bcqfmt.converters.methods.protocol import Method
from bcqfmt.converters.methods.registry import build_method
from bcqfmt.errors import BcqError, error, escape

from .dense import Verdict
from .rules import Rule, RuleFile, pattern_of


@dataclass(slots=True)
class Choice:
    """``methods``, each once; ``weights``: name -> position among them; ``dense``: name -> why it stays as it is.

    ``unused``: optional rules that match nothing.
    """

    methods: list[Method] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def method_of(self, name: str) -> Method:
        """The method that quantizes a weight."""
        return self.methods[self.weights[name]]

    def recipes(self) -> list[dict[str, Any]]:
        """Name and settings of every method, as plan and record state them."""
        return [_recipe(method) for method in self.methods]


def choose(
    verdicts: Mapping[str, Verdict],
    method: str | None,
    settings: Mapping[str, Any],
    rules: RuleFile | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Choice:
    """A method, or the reason to stay dense, for every tensor.

    ``method`` and ``settings`` come from the command line and win over the default of the rule file. ``exclude`` wins
    over everything; ``include`` takes tensors that would stay dense. BCQ-E625: a pattern that matches nothing.
    """
    file = rules or RuleFile()
    default = method or file.method
    base = {**(file.settings if file.method in (None, default) else {}), **settings}
    wanted = [pattern_of(text, "--include") for text in include]
    unwanted = [pattern_of(text, "--exclude") for text in exclude]
    _check_patterns(verdicts, wanted, unwanted)
    maker = _Maker(default, base, file.place)
    found = Choice(methods=maker.methods)
    used: set[int] = set()
    for name, verdict in verdicts.items():
        asked = any(pattern.search(name) for pattern in wanted)
        number = _first(file.rules, name, verdict, asked)
        if number is not None:
            used.add(number)
        rule = None if number is None else file.rules[number]
        reason = _reason(name, verdict, rule, asked, unwanted)
        if reason:
            found.dense[name] = reason
        else:
            found.weights[name] = maker.position(name, rule)
    found.unused = _unused(file.rules, used, verdicts)
    if not found.weights:
        reasons = sorted({reason for reason in found.dense.values() if reason})
        raise error(
            "BCQ-E625",
            found=f"no weight is left to quantize ({escape(', '.join(reasons))})",
            expected="at least one",
            hint="--include REGEX takes tensors that stay dense by default",
        )
    return found


class _Maker:
    """Builds each method once."""

    def __init__(self, default: str | None, base: dict[str, Any], file: str) -> None:
        self.default, self.base, self.file = default, base, file
        self.methods: list[Method] = []
        self._known: dict[str, int] = {}
        self._by_rule: dict[str, int] = {}
        if default is not None:
            build_method(default, base)  # refused now, even if rules leave it nothing to do

    def position(self, name: str, rule: Rule | None) -> int:
        """The position of the method that a rule asks for; without a rule that of the default one.

        ``name``: of the weight, for a message.
        """
        place = "" if rule is None else rule.place
        if place not in self._by_rule:
            wanted = rule.method if rule is not None and rule.method is not None else self.default
            if wanted is None:
                raise self._no_method(name, rule)
            inherited = self.base if wanted == self.default else {}
            own = {} if rule is None else rule.settings
            method = build_method(wanted, {**inherited, **own}, place)
            number = self._known.setdefault(canonical(_recipe(method)), len(self.methods))
            if number == len(self.methods):
                self.methods.append(method)
            self._by_rule[place] = number
        return self._by_rule[place]

    def _no_method(self, name: str, rule: Rule | None) -> BcqError:
        if rule is not None:
            found, more = "a rule without a method, and no default one", "`method` to the rule"
        else:
            found, more = "no rule matches it, and there is no default method", "a rule with dense = true for it"
        hint = f"add --method METHOD, [default] with method = METHOD to the file, or {more}"
        return error("BCQ-E620", rule.place if rule else self.file, name, found, "a method for every weight", hint)


def _recipe(method: Method) -> dict[str, Any]:
    return {"method": method.name, "settings": method.settings()}


def _first(rules: Sequence[Rule], name: str, verdict: Verdict, asked: bool) -> int | None:
    """The first rule that matches and may speak of this tensor."""
    for number, rule in enumerate(rules):
        open_to = rule.dense or (verdict.possible and (not verdict.reason or asked or rule.include))
        if open_to and rule.pattern.search(name):
            return number
    return None


def _reason(name: str, verdict: Verdict, rule: Rule | None, asked: bool, unwanted: Sequence[re.Pattern[str]]) -> str:
    """Why a tensor stays dense; empty when it is quantized."""
    if not verdict.possible:
        return verdict.reason
    if any(pattern.search(name) for pattern in unwanted):
        return "excluded"
    if rule is not None:
        return "left dense by a rule" if rule.dense else ""
    return "" if asked else verdict.reason


def _check_patterns(
    verdicts: Mapping[str, Verdict], wanted: Sequence[re.Pattern[str]], unwanted: Sequence[re.Pattern[str]]
) -> None:
    for option, patterns in (("--include", wanted), ("--exclude", unwanted)):
        for pattern in patterns:
            names = [name for name in verdicts if pattern.search(name)]
            possible = [name for name in names if verdicts[name].possible]
            if not possible:
                raise _nothing(option, pattern, names, verdicts)


def _unused(rules: Sequence[Rule], used: set[int], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Rules without a weight: refused unless they are optional."""
    unused = []
    for number, rule in enumerate(rules):
        if number in used:
            continue
        if not rule.optional:
            raise _nothing(rule.place, rule.pattern, [n for n in verdicts if rule.pattern.search(n)], verdicts)
        unused.append(f"{rule.place}: '{escape(rule.pattern.pattern)}' matches nothing")
    return unused


def _nothing(place: str, pattern: re.Pattern[str], names: Sequence[str], verdicts: Mapping[str, Verdict]) -> BcqError:
    """BCQ-E625, and what the pattern did match."""
    shown = escape(pattern.pattern)
    reasons = sorted({verdicts[name].reason for name in names})
    if not names:
        found = f"'{shown}' is in no tensor's name"
    elif reasons == [""]:
        found = f"earlier rules have taken all that '{shown}' matches"
    else:
        found = f"'{shown}' matches only what stays dense: {escape(names[0])} ({', '.join(filter(None, reasons))})"
    return error("BCQ-E625", place, found=found, expected="a tensor that can be quantized")
