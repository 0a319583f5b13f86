"""Run as a program: jobs that kill themselves at a random change of the disk, each in a forked process.

``killed_many.py SOURCE PLAIN SIZE CALLS TURNS VERB OPTIONS...``: PLAIN is what an undisturbed run has made, SIZE the
bytes per shard, CALLS how often a run changes the disk. Every kill is followed by a look at what has a final name, and
by a run that is resumed, or for verbs without that repeated, and must give the same bytes. Prints figures as JSON; a
broken promise is an AssertionError.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from bcqfmt.cli.main import main as program
from faults.fault_case import Case
from faults.interrupted import watch
from sources.conversions import tree


def run(case: Case, target: Path, options: list[str]) -> int:
    """The program in this process; its exit code."""
    sys.argv = ["bcqfmt", case.verb, str(case.source), str(target), *options]
    try:
        program()
    except SystemExit as end:
        return int(end.code or 0)


def run_and_die(case: Case, target: Path, at: int, options: list[str]) -> int:
    """The program in a child, with SIGKILL at its ``at``-th change of the disk; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        watch(signal.SIGKILL, at)
        code = 99
        try:
            code = run(case, target, options)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, os.WEXITSTATUS(status)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main() -> None:
    """All turns, then the figures."""
    source, plain, size, calls, turns, verb, *options = sys.argv[1:]
    case = Case(Path(source), tree(Path(plain)), int(size), verb)
    rng, kills, unfinished = random.Random(0), 0, 0
    name = "bcq.gguf" if "gguf" in options else "bcq"
    with tempfile.TemporaryDirectory() as scratch:
        run(case, Path(scratch) / "warm" / name, options)  # loads and compiles; the threads of it are gone afterwards
        while kills < int(turns):
            target = Path(scratch) / str(kills) / name
            target.parent.mkdir()
            if run_and_die(case, target, rng.randint(1, int(calls)), options) == signal.SIGKILL:
                kills += 1
                unfinished += not target.exists()
            case.check_names(target)
            if verb in ("convert", "quantize"):
                case.finish(target)
            elif not target.exists():
                assert run_and_die(case, target, 0, options) == 0
                assert tree(target) == case.plain
            shutil.rmtree(target.parent)
    sys.stdout.write(json.dumps({"kills": kills, "left_unfinished": unfinished}) + "\n")


if __name__ == "__main__":
    main()
