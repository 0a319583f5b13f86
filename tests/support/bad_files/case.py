"""What a bad input is, and the list that the functions making them enter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Make = Callable[[Path], Path]


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table of bad inputs, or one variant of it.

    ``make`` writes the input into an empty folder and returns the path to give to bcqfmt. ``code`` is what has to be
    reported (empty: the input is legal) and ``exit`` the exit code. ``also`` are codes that may come with it, because
    the same fault breaks those rules too. ``place`` has to be in the message.

    ``seen`` says who notices: ``headers`` (everyone who opens it), ``values`` (who reads the values) or ``validator``;
    ``why`` is the reason when it is not everyone. ``disturb`` (row 37) is what happens to the file, and when.
    """

    row: int
    id: str
    make: Make
    code: str
    exit: int
    place: str = "model.safetensors"
    also: frozenset[str] = frozenset()
    seen: str = "headers"
    why: str = ""
    disturb: tuple[str, int] | None = None
    heavy: bool = False

    @property
    def name(self) -> str:
        return f"{self.row:02d}-{self.id}"

    @property
    def inspect_exits(self) -> set[int]:
        """What ``inspect``, which reads headers only and shows safetensors of any kind, may exit with."""
        if self.disturb is not None and self.seen != "headers":
            return {0, 3, 4}  # done before the change, or it opens the file once more and finds another one
        return {self.exit if self.seen == "headers" and self.code != "BCQ-V201" else 0}


CASES: list[Case] = []


def case(
    row: int,
    id: str,
    code: str,
    exit: int,
    *,
    place: str = "model.safetensors",
    also: tuple[str, ...] = (),
    seen: str = "headers",
    why: str = "",
    disturb: tuple[str, int] | None = None,
    heavy: bool = False,
) -> Callable[[Make], Make]:
    """Enter the decorated function as a case."""

    def enter(make: Make) -> Make:
        assert seen == "headers" or why, "say why not everyone sees it"
        assert f"{row:02d}-{id}" not in {known.name for known in CASES}
        CASES.append(Case(row, id, make, code, exit, place, frozenset(also), seen, why, disturb, heavy))
        return make

    return enter


def legal(row: int, id: str) -> Callable[[Make], Make]:
    """Enter an input that looks odd and is none the less legal."""
    return case(row, id, "", 0, place="")
