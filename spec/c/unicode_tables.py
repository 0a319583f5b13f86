"""Writes the Unicode tables of bcq.h (rule BCQ-V120) from those that Python carries.

    python spec/c/unicode_tables.py            prints them
    python spec/c/unicode_tables.py --write    puts them between their marks in bcq.h

Later versions of Unicode add characters and change none that is there, so tables of an older version stay right for
every name that was possible then.
"""

import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

HEADER = Path(__file__).resolve().parent / "bcq.h"
BEGIN, END = "/* unicode tables: begin */", "/* unicode tables: end */"
HANGUL = range(0xAC00, 0xD7A4)  # composed by arithmetic, in no table
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def decomposition(c: int) -> list[int]:
    """The canonical decomposition of one character, one step of it; empty where there is none."""
    text = unicodedata.decomposition(chr(c))
    return [] if not text or text[0] == "<" else [int(field, 16) for field in text.split()]


def class_ranges() -> list[int]:
    """first, last, combining class of every run of characters that have one."""
    rows: list[list[int]] = []
    for c in CODE_POINTS:
        combining = unicodedata.combining(chr(c))
        if combining and rows and rows[-1][1:] == [c - 1, combining]:
            rows[-1][1] = c
        elif combining:
            rows.append([c, c, combining])
    return [number for row in rows for number in row]


def fold_ranges(simple: dict[int, int]) -> list[int]:
    """first, last, step, difference: every step-th character of a run folds to itself plus the difference."""
    rows: list[list[int]] = []
    for c, folded in simple.items():
        difference = folded - c
        if rows and rows[-1][3] == difference:
            first, last, step, _ = rows[-1]
            if c - last in (1, 2) and (first == last or c - last == step):
                rows[-1][1:3] = [c, c - last]
                continue
        rows.append([c, c, 1, difference])
    return [number for row in rows for number in row]


def array(name: str, kind: str, width: int, numbers: Iterable[int]) -> str:
    """A C array, `width` numbers making one entry; lines break between entries."""
    flat = list(numbers)
    entries = [",".join(map(str, flat[i : i + width])) + "," for i in range(0, len(flat), width)]
    lines, line = [], ""
    for entry in entries:
        if len(line) + len(entry) > 116:
            lines.append(line)
            line = ""
        line += entry
    lines.append(line.rstrip(","))
    return f"static const {kind} {name}[{len(flat)}] = {{\n" + "\n".join("    " + line for line in lines) + "\n};\n"


def tables() -> str:
    """The text between the marks."""
    steps = {c: decomposition(c) for c in CODE_POINTS}
    ones = {c: step[0] for c, step in steps.items() if len(step) == 1}
    pairs = {c: step for c, step in steps.items() if len(step) == 2 and c not in HANGUL}
    folds = {c: [ord(letter) for letter in chr(c).casefold()] for c in CODE_POINTS}
    simple = {c: fold[0] for c, fold in folds.items() if len(fold) == 1 and fold[0] != c}
    full = {c: fold for c, fold in folds.items() if len(fold) > 1}
    # A pair composes unless the character is excluded from composition; normalization itself says which.
    order = sorted(pairs, key=lambda c: pairs[c])
    composing = [c for c in order if unicodedata.normalize("NFC", "".join(map(chr, pairs[c]))) == chr(c)]
    position = {c: i for i, c in enumerate(pairs)}
    texts = [
        f'#define BCQ__UNICODE "{unicodedata.unidata_version}"\n',
        "/* character, its decomposition into one */\n" + array("bcq__ones", "uint32_t", 2, _flat(ones)),
        "/* character, its decomposition into two */\n" + array("bcq__pairs", "uint32_t", 3, _flat(pairs)),
        "/* positions in bcq__pairs of those that compose again, by decomposition */\n"
        + array("bcq__composing", "uint16_t", 1, [position[c] for c in composing]),
        "/* first, last, canonical combining class */\n" + array("bcq__classes", "uint32_t", 3, class_ranges()),
        "/* first, last, step, difference of the folded character */\n"
        + array("bcq__folds", "int32_t", 4, fold_ranges(simple)),
        "/* character, what it folds to (0: nothing more) */\n"
        + array("bcq__full_folds", "uint32_t", 4, [n for c, f in full.items() for n in [c, *f, 0, 0][:4]]),
    ]
    return "\n".join(texts)


def _flat(table: dict[int, int] | dict[int, list[int]]) -> list[int]:
    result = []
    for c, value in table.items():
        result += [c, *(value if isinstance(value, list) else [value])]
    return result


def main(arguments: list[str]) -> int:
    """Prints or writes the tables."""
    if arguments == ["--write"]:
        text = HEADER.read_text("ascii")
        head, rest = text.split(BEGIN, 1)
        HEADER.write_text(f"{head}{BEGIN}\n{tables()}{END}{rest.split(END, 1)[1]}", "ascii")
    elif not arguments:
        print(tables(), end="")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
