"""Run as a program: ``bcqfmt`` with a signal sent to itself at the n-th system call that changes the disk.

``interrupted.py SIGNAL N ARGS...``; with N = 0 nothing is sent and the number of calls is written to stderr at the end.
The moment of the signal (the system's monotonic clock) is written to stderr before it is sent.
"""

import os
import signal
import sys
import threading
import time

from bcqfmt.cli.main import main

_CALLS = ("write", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "posix_fallocate")


def watch(number: int, at: int) -> list[int]:
    """Count the calls; at call ``at`` send the signal before the call is made."""
    count, lock = [0], threading.Lock()
    again = 3 if number == signal.SIGHUP else 0  # a shell and the kernel send one each; also while it cleans up

    def wrap(original):  # type: ignore[no-untyped-def]
        def call(*args, **options):  # type: ignore[no-untyped-def]
            with lock:
                count[0] += 1
                now = 0 < at <= count[0] <= at + again
            if now:
                sys.stderr.write(f"signalled {time.monotonic()}\n")
                sys.stderr.flush()
                os.kill(os.getpid(), number)
            return original(*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    return count


if __name__ == "__main__":
    counted = watch(int(sys.argv[1]), int(sys.argv[2]))
    at = int(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        main()
    finally:
        if at == 0:
            sys.stderr.write(f"calls {counted[0]}\n")
