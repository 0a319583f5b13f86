"""What a program may do wrong, what a system may refuse, and arithmetic without doubles."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from programs import c_reader
from programs.c_reader import Runner
from weights import samples

pytestmark = pytest.mark.cc

IO, ARGUMENT = -1, -3  # BCQ_ERROR_*
STARVED = (
    "stack",
    "segments",
    "second-order",
    "table",
    "aligned64",
    "outliers-add",
    "multi-precision",
    "names",
    "perm",
    "dense",
)
FOLDERS = ("folder-provenance", "folder-shards", "folder-side-files")


def vector(name: str) -> tuple[str, Path]:
    entry = next(entry for entry in samples.vector_index()["valid"] if entry["id"] == name)
    return entry["kind"], samples.VECTORS / entry["path"]


@pytest.mark.parametrize("name", [*STARVED, *FOLDERS])
def test_every_failing_allocation_is_an_error_code(name: str, runner: Runner) -> None:
    """With the n-th allocation failing, for every n: the code for memory, no leak, no access; and then success."""
    kind, path = vector(name)
    ((line,),) = runner.ask([f"starve\t{kind}\t{path}"])
    what, failures, code = line.split("\t")
    assert (what, code) == ("starved", "0")
    assert int(failures) > 10


def test_wrong_calls_are_error_codes(runner: Runner) -> None:
    _, path = vector("stack")
    _, (line,) = runner.ask([f"file\t{path}", "misuse"])
    assert line.split() == [str(ARGUMENT)] * 8 + ["0", "0", "0", "0", "0", "0", "?"]


def test_what_is_no_file(runner: Runner, tmp_path: Path) -> None:
    """Nothing there, a folder, a pipe without a writer, a file that may not be read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    names = ("nothing", "folder", "pipe", "loop")
    commands = [f"file\t{tmp_path / name}" for name in names] + [f"folder\t{tmp_path / 'nothing'}"]
    commands.append(f"folder\t{vector('bcq')[1]}")
    codes = [c_reader.opened(answer).code for answer in runner.ask(commands)]
    assert codes == [IO, 508, 508, IO, IO, IO]


def test_messages_are_one_line_of_ascii(runner: Runner) -> None:
    """Whatever a name holds: control characters, an escape sequence, 512 bytes of it."""
    for name in ("a\n\x1b[31mb", "é" * 250, "\\'", "x" * 512):
        entry = '{"dtype":"F16","shape":[1],"data_offsets":[0,3]}'
        text = f"{{{c_json(name)}:{entry}}}".encode()
        data = struct.pack("<Q", len(text)) + text + b"\0\0\0"
        found = c_reader.opened(runner.ask([f"memory\t{data.hex()}"])[0])
        assert found.code == 112
        assert found.message.isascii()
        assert found.message.isprintable()
        assert len(found.message) < 240


def c_json(text: str) -> str:
    return '"' + "".join(c if c.isalnum() else f"\\u{ord(c):04x}" for c in text) + '"'


def numbers(rng: random.Random) -> list[float]:
    special = [0.0, -0.0, 1.0, -1.0, 5e-324, 2.0**-1022, 1.7976931348623157e308, float("inf"), float("nan"), 0.1, 3.0]
    special += [-x for x in special] + [2.0**-1074 * 3, 2.0**53 + 2, 1 + 2.0**-52, 1 - 2.0**-53]
    anything = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(300)]
    near = [rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-60, 60) for _ in range(300)]
    tiny = [rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-1074, -1000) for _ in range(100)]
    return special + anything + near + tiny


def bits(x: float) -> str:
    return struct.pack(">d", x).hex()


def test_arithmetic_is_that_of_binary64(runner: Runner, variant: tuple[str, Runner]) -> None:
    """Sums and products, with doubles and with integers, against Python's; ties, overflow and subnormals included."""
    rng = random.Random(64)
    pool = numbers(rng)
    pairs = [(x, y) for x in pool[:26] for y in pool[:26]] + [(rng.choice(pool), rng.choice(pool)) for _ in range(6000)]
    pairs += [(x, -x * (1 + rng.choice((0, 1, 2)) * 2.0**-52)) for x in pool[26:]]
    wanted = [("add", x, y, x + y) for x, y in pairs] + [("mul", x, y, x * y) for x, y in pairs]
    commands = [f"{what}\t{bits(x)}\t{bits(y)}" for what, x, y, _ in wanted]
    for name, program in (("sanitized", runner), variant):
        for (what, x, y, result), (line,) in zip(wanted, program.ask(commands), strict=True):
            (found,) = struct.unpack(">d", bytes.fromhex(line))
            same = line == bits(result) or (result != result and found != found)
            assert same, (name, what, x, y)
