"""``bcqfmt`` and ``python -m bcqfmt``: the command line.

Loading takes a second. A signal within it ends the program at once, with the message that it would give later: nothing
has begun, and Python would print a traceback of its imports.
"""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """The program ``bcqfmt``."""
    signal.signal(signal.SIGTERM, _stop)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, under nohup
        signal.signal(signal.SIGINT, _stop)
    from bcqfmt.cli import main as program

    program.preload(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    program.main()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    how = "from the keyboard" if number == signal.SIGINT else f"by {signal.Signals(number).name}"
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"error: BCQ-E901: interrupted: stopped {how}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
