"""Run as a program, in a mount namespace of its own: conversions onto a tmpfs of growing size.

``unshare --mount python full_disk.py SOURCE PLAIN SIZE FIRST STEP``: PLAIN is the folder that an undisturbed run has
made, SIZE the bytes per shard. The disk has FIRST pages, then STEP more, until a conversion needs no second try; every
failed one is resumed once there is room. Prints figures as JSON; any broken promise is an AssertionError.
"""

import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bcqfmt.errors import BcqError
from faults.fault_case import Case
from sources.conversions import tree

PAGE = 4096


def mount(folder: Path, pages: int, *more: str) -> None:
    """A tmpfs of that many pages; with ``remount`` the one that is there gets another size."""
    options = ",".join([*more, f"size={pages * PAGE}"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def one(case: Case, folder: Path, pages: int) -> str:
    """Convert onto a disk of that size, go on with a larger one; the outcome of the first try."""
    mount(folder, pages)
    try:
        fault: BcqError | None = None
        try:
            case.run(folder / "bcq")
        except BcqError as caught:
            fault = caught
            assert fault.exit_code == 7, fault
            assert not (folder / "bcq").exists()
        case.check_names(folder / "bcq")
        strays = list(folder.rglob(".*.tmp"))
        assert not strays, strays
        mount(folder, 100_000, "remount")
        case.finish(folder / "bcq")
        return "complete" if fault is None else fault.code
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # read descriptors are closed later


def main() -> None:
    """Sweep, print."""
    source, plain, size, first, step = sys.argv[1:]
    case = Case(Path(source), tree(Path(plain)), int(size))
    found: collections.Counter[str] = collections.Counter()
    pages = int(first)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            outcome = one(case, Path(folder), pages)
            found[outcome] += 1
            if outcome == "complete":
                break
            pages += int(step)
    sys.stdout.write(json.dumps({"sizes": sum(found.values()), "outcomes": found, "pages_needed": pages}))


if __name__ == "__main__":
    main()
