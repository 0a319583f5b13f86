"""Run pytest as if the processor had nothing beyond what its architecture asks for: ``make portable``.

    python tests/install/portable.py [OPTIONS AND TESTS OF PYTEST]

Every library here chooses its code by what the processor can do, and every one has a variable that takes choices away.
tests/architecture/test_portable.py, which runs along, asks each library what it chose. Compiled loops get a cache of
their own.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

# By architecture: OpenBLAS (numpy, torch on ARM), MKL (torch on x86-64), oneDNN (torch), OpenSSL (hashlib).
_CAPS = {
    "x86_64": {
        "OPENBLAS_CORETYPE": "Prescott",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENSSL_ia32cap": "0:0",
    },
    "aarch64": {
        "OPENBLAS_CORETYPE": "ARMV8",
        "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD",
        "OPENSSL_armcap": "0",
    },
}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def numpy_features() -> list[str]:
    """What numpy would use on this machine beyond its baseline; it complains of any other name."""
    from numpy._core import _multiarray_umath as numpy

    return [name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__.get(name)]


def caps() -> dict[str, str]:
    """The variables that take the choices away, for this machine."""
    machine = platform.machine().lower()
    found = {"BCQFMT_PORTABLE": "1", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    found |= {"ATEN_CPU_CAPABILITY": "default", **_CAPS.get(_NAMES.get(machine, machine), {})}
    if features := numpy_features():
        found["NPY_DISABLE_CPU_FEATURES"] = ",".join(features)
    return found


def main() -> None:
    """Say what is set, then become pytest."""
    chosen = caps()
    print("portable:", *(f"{name}={value!r}" for name, value in chosen.items()), flush=True)  # noqa: T201
    chosen["NUMBA_CACHE_DIR"] = str(Path(sys.prefix).resolve() / "numba-portable")
    command = [sys.executable, "-P", "-m", "pytest", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | chosen)


if __name__ == "__main__":
    main()
