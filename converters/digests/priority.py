"""Whoever converts gives way to the thread that hashes: a source's digests take longest of all, and must not stop."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["give_way"]

_BY = 5  # enough for most of a processor; with 10 conversions stand still


def give_way() -> None:
    """Be nicer than other threads of this process, as those will be that this one starts; only Linux knows how."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _BY))
