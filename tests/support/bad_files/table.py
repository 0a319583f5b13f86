"""Bad inputs: rows 1-37 and 55-68 of the table in the research notes, each made on demand.

``CASES`` lists them. :func:`disturb` makes a file change while it is being read (row 37);
``python -m bad_files.table NAME ...`` is ``python -m bcqfmt ...`` under the disturbance of the case NAME, and
``python -m bad_files.table --make FOLDER`` makes all inputs below a folder and prints what to expect of them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bad_files import container, content, folder, names  # noqa: F401 - importing the four fills the list
from bad_files.case import CASES, Case

__all__ = ["CASES", "Case", "by_name", "disturb", "disturbed"]

CASES.sort(key=lambda case: case.row)


def by_name(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def _change(path: Path, what: str) -> None:
    if what == "shrinks":
        os.truncate(path, path.stat().st_size - 1)
    elif what == "emptied":
        os.truncate(path, 0)
    elif what == "grows":
        with path.open("ab") as file:
            file.write(b"more")
    elif what == "replaced":
        copy = path.with_name("copy")
        shutil.copy2(path, copy)
        copy.rename(path)
    elif what == "removed":
        path.unlink()
    elif what == "touched":
        os.utime(path, ns=(0, 0))
    else:
        raise ValueError(what)


def disturb(path: Path, what: str, looks: int) -> Any:
    """Change ``path`` right after bcqfmt's ``looks``-th look at its state; the function that was replaced.

    The first look is at the opening, then one follows each read: 64 bytes, the header, the data.
    """
    original = os.fstat
    inode = path.stat().st_ino
    left = looks

    def fstat(descriptor: int) -> os.stat_result:
        nonlocal left
        found = original(descriptor)
        if found.st_ino == inode:
            left -= 1
            if left == 0:
                _change(path, what)
        return found

    os.fstat = fstat
    return original


@contextlib.contextmanager
def disturbed(case: Case, path: Path) -> Iterator[None]:
    """Within this context the case's disturbance, if it has one, is in force."""
    if case.disturb is None:
        yield
        return
    original = disturb(path, *case.disturb)
    try:
        yield
    finally:
        os.fstat = original


def _make_all(root: Path) -> None:
    found = []
    for case in CASES:
        where = root / case.name
        where.mkdir(parents=True)
        path = case.make(where)
        what = {"name": case.name, "code": case.code, "exit": case.exit, "disturb": bool(case.disturb)}
        found.append({**what, "path": str(path)})
    json.dump(found, sys.stdout)


def _main() -> None:
    name = sys.argv.pop(1)
    if name == "--make":
        _make_all(Path(sys.argv[1]))
        return
    from bcqfmt.cli.main import main

    case = by_name(name)
    assert case.disturb is not None
    disturb(Path(sys.argv[-1]), *case.disturb)
    main()


if __name__ == "__main__":
    _main()
