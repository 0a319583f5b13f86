"""Run a command; print its wall time, peak memory and exit code as one line of JSON, then its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        child = subprocess.Popen(sys.argv[1:], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    print(json.dumps({"seconds": seconds, "peak": usage.ru_maxrss * 1024, "code": child.returncode}), flush=True)
    sys.stdout.buffer.write(text)


if __name__ == "__main__":
    main()
