"""Run as a program: ``bcqfmt`` with a signal sent to itself at the n-th import of a module.

``stopped_import.py SIGNAL N ARGS...``; with N = 0 nothing is sent and the number of imports is written to stderr.
"""

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from bcqfmt.__main__ import main


class Watch(MetaPathFinder):
    """Counts what is imported."""

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at, self.count = number, at, 0

    def find_spec(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)


if __name__ == "__main__":
    watch = Watch(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv[1:] = sys.argv[3:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.meta_path.insert(0, watch)
    try:
        main()
    finally:
        if watch.at == 0:
            sys.stderr.write(f"imports {watch.count}\n")
