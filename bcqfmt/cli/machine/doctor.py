"""``bcqfmt doctor``: what this machine has and lacks, and the command that fixes it."""

from __future__ import annotations

from typing import Any

from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.environment import Check, checks

_MARKS = {"ok": "ok", "missing": "--", "warning": "!!", "failed": "XX"}


@verb("doctor")
@json_option
def command(as_json: bool) -> int:
    """Show what this machine has and lacks, and what fixes it.

    Looks at Python, the packages, the GPU driver and the disk, and tries the core in a temporary folder. Optional
    packages may be missing: exit code 0 means that the core works, 1 that it does not.

    \b
    Example:
      bcqfmt doctor
      bcqfmt doctor --json
    """
    found = list(checks())
    works = all(check.status != "failed" for check in found)
    if as_json:
        render.emit_json({"works": works, "checks": [_data(check) for check in found]})
    else:
        render.echo(_text(found, works))
    return 0 if works else 1


def _data(check: Check) -> dict[str, Any]:
    return {**check._asdict(), "fix": check.fix or None}


def _text(found: list[Check], works: bool) -> list[str]:
    lines: list[str] = []
    width = max(len(check.name) for check in found)
    for group in dict.fromkeys(check.group for check in found):
        lines.append(group)
        for check in found:
            if check.group == group:
                lines.append(f"  {_MARKS[check.status]}  {check.name:<{width}}  {check.found}")
                if check.fix:
                    lines.append(f"      {'':<{width}}  fix: {check.fix}")
    missing = sum(check.status == "missing" for check in found)
    verdict = "the core works" if works else "the core does NOT work here"
    return [*lines, "", f"{verdict}; {render.count(missing, 'optional part')} missing"]
