"""The source is cut, grows, is replaced, rewritten or removed at any read: refused, or converted as it was
before or after, never as a mixture.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters.jobs.source_files import source_state
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from faults.fault_case import Case
from faults.os_faults import OsFaults, count
from pages.soak_figures import record
from sources.conversions import convert, tree


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """By another file of the same length."""
    other = path.with_name("other")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    os.utime(other, ns=(1, 1))
    other.replace(path)


def rewritten(path: Path) -> None:
    """In place, one bit of the last byte; the time of writing tells."""
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(1, 1))


def disguised(path: Path) -> None:
    """In place, and its time set back; the time of the inode tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of file systems are coarse
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def removed(path: Path) -> None:
    path.unlink()


CHANGES: list[Callable[[Path], None]] = [cut, emptied, grown, replaced, rewritten, disguised, removed]


def changed_at(case: Case, scratch: Path, change: Callable[[Path], None], at: int, file: str) -> str:
    """Change the file just before the ``at``-th read; the code of the refusal, or ``converted``."""
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / case.source.name
    shutil.copytree(case.source, source)

    def act(kind: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        change(source / file)
        return real(*args, **options)

    faults = OsFaults((source,), ("read",), at, act)
    refused: BcqError | None = None
    with faults.installed():
        try:
            convert(source, scratch / "bcq", max_shard_size=case.size)
        except BcqError as fault:
            refused = fault
    if refused is not None:
        assert refused.exit_code in (3, 4), refused
        assert not (scratch / "bcq").exists()
        case.check_names(scratch / "bcq")
        return refused.code
    if tree(scratch / "bcq") != case.plain:  # changed before it was looked at for the first time: all of it is new
        convert(source, scratch / "changed", max_shard_size=case.size)
        assert tree(scratch / "bcq") == tree(scratch / "changed")
    return "converted"


def sweep(case: Case, scratch: Path, step: int) -> Counter[str]:
    total = count((case.source,), ("read",), lambda: convert(case.source, scratch / "n", max_shard_size=case.size))
    assert total > 20
    ends: Counter[str] = Counter()
    for change in CHANGES:
        for file in ("model.safetensors", "tokenizer.json"):
            for at in range(1 + len(change.__name__) % step, total + 1, step):
                ends[changed_at(case, scratch / "x", change, at, file)] += 1
    return ends


def test_now_and_then(small: Case, tmp_path: Path) -> None:
    ends = sweep(small, tmp_path, 17)
    assert ends["BCQ-E103"] > 3
    assert not {code for code in ends if code.startswith("BCQ-E9")}


def test_a_time_that_was_set_back(small: Case, tmp_path: Path) -> None:
    """While it is read, and before it is resumed."""
    total = count((small.source,), ("read",), lambda: convert(small.source, tmp_path / "n", max_shard_size=small.size))
    assert changed_at(small, tmp_path / "x", disguised, total // 2, "model.safetensors") == "BCQ-E103"
    source = tmp_path / "source"
    shutil.copytree(small.source, source)
    before = source_state(open_source(source))
    disguised(source / "model.safetensors")
    assert source_state(open_source(source)) != before


@pytest.mark.soak
def test_at_every_read(small: Case, tmp_path: Path) -> None:
    ends = sweep(small, tmp_path, 1)
    converted = ends.pop("converted", 0)
    record(
        "source_changes", changes=sum(ends.values()) + converted, refused=dict(ends), converted=converted, mixtures=0
    )
