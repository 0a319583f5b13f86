"""Run as a program: conversions that kill themselves at a random change of the disk, each in a forked process.

``killed_many.py SOURCE PLAIN SIZE CALLS TURNS``: PLAIN is what an undisturbed run has made, SIZE the bytes per shard,
CALLS how often a run changes the disk. Every kill is followed by a look at what has a final name, and by a resumed run
that must give the same bytes. Prints figures as JSON; a broken promise is an AssertionError.
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
from conversions import tree
from fault_case import Case
from interrupted import watch


def run_and_die(case: Case, target: Path, at: int) -> int:
    """The program in a child, with SIGKILL at its ``at``-th change of the disk; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        watch(signal.SIGKILL, at)
        sys.argv = ["bcqfmt", "convert", str(case.source), str(target), "--max-shard-size", str(case.size)]
        sys.argv += ["--workers", "2"]
        try:
            program()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, os.WEXITSTATUS(status)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main() -> None:
    """All turns, then the figures."""
    source, plain, size, calls, turns = sys.argv[1:]
    case = Case(Path(source), tree(Path(plain)), int(size))
    rng, kills, unfinished = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        case.run(Path(scratch) / "warm" / "bcq")  # loads and compiles; the threads of it are gone afterwards
        while kills < int(turns):
            target = Path(scratch) / str(kills) / "bcq"
            target.parent.mkdir()
            if run_and_die(case, target, rng.randint(1, int(calls))) == signal.SIGKILL:
                kills += 1
                unfinished += not target.exists()
            case.check_names(target)
            case.finish(target)
            shutil.rmtree(target.parent)
    sys.stdout.write(json.dumps({"kills": kills, "left_unfinished": unfinished}) + "\n")


if __name__ == "__main__":
    main()
