"""What the benchmarks run in processes of their own: ``python workers.py NAME ARGUMENTS`` prints one line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_bcqfmt() -> dict[str, Any]:
    """Seconds of ``import bcqfmt`` once numpy is there, bare and with every public name; the heavy packages loaded."""
    import numpy  # noqa: F401, ICN001

    start = time.perf_counter()
    import bcqfmt

    middle = time.perf_counter()
    for name in bcqfmt.__all__:  # names are loaded on first use
        getattr(bcqfmt, name)
    stop = time.perf_counter()
    heavy = [name for name in ("torch", "numba", "click", "tqdm", "transformers") if name in sys.modules]
    return {"bare": middle - start, "all": stop - start, "heavy": heavy}


def nothing() -> dict[str, Any]:
    """numpy alone: the base of the import benchmark."""
    import numpy  # noqa: F401, ICN001

    return {}


def save_again(source: str, target: str) -> dict[str, Any]:
    """Write a folder again from its files, as one shard; the memory at the peak before and after."""
    import bcqfmt

    with bcqfmt.open(source) as checkpoint:
        tensors = {name: checkpoint[name] for name in checkpoint}
        before = _peak()
        bcqfmt.save(target, tensors, max_shard_size=1 << 50)
    return {"before": before, "after": _peak(), "shards": len(list(Path(target).glob("*.safetensors")))}


def open_file(path: str) -> dict[str, Any]:
    """Open one file: seconds, growth of the peak, and the code when it is refused."""
    import bcqfmt

    opening, refusal = bcqfmt.open, bcqfmt.BcqError  # loaded on first use: before the clock starts
    before, code, tensors = _peak(), "", 0
    start = time.perf_counter()
    try:
        tensors = len(opening(path))
    except refusal as fault:
        code = fault.code
    return {"seconds": time.perf_counter() - start, "grown": _peak() - before, "code": code, "tensors": tensors}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (import_bcqfmt, nothing, save_again, open_file)
}

if __name__ == "__main__":
    print(json.dumps(WORKERS[sys.argv[1]](*sys.argv[2:])))
