"""``make portable`` takes away what a processor has beyond its architecture: every library is asked what it chose.

In any other run a child process is asked, so that the settings are never believed without proof.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PORTABLE = Path(__file__).resolve().parents[1] / "install" / "portable.py"

# Asked in the process whose surroundings are to be proved; None where a build of a library cannot be asked.
ASK = r"""
import ctypes, json, _hashlib
from pathlib import Path
import numpy, torch
from numba.core import registry
from numpy._core import _multiarray_umath as umath
from bcqfmt.kernels import cpu

def answer(library, name):
    try:
        function = getattr(ctypes.CDLL(str(library)), name)
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_char_p
    said = function(1008) if name == "OPENSSL_info" else function()  # 1008: the settings of the processor
    return said.decode().lower() if said else None

blas = [*(Path(numpy.__file__).parents[1] / "numpy.libs").glob("*openblas*")]
print(json.dumps({
    "numba": registry.cpu_target.target_context.codegen().magic_tuple()[1:],
    "numpy": [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)],
    "torch": torch.backends.cpu.get_cpu_capability(),
    "openssl": answer(_hashlib.__file__, "OPENSSL_info"),
    "openblas": answer(blas[0], "scipy_openblas_get_corename64_") if blas else None,
    "look-ups": cpu.target(),
}))
"""


def portable() -> Any:
    spec = importlib.util.spec_from_file_location("portable", PORTABLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(**more: str) -> dict[str, Any]:
    """What libraries chose in a process that inherits the surroundings of this one."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", ASK],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_library_uses_more_than_the_architecture_has() -> None:
    inherited = os.environ.get("BCQFMT_PORTABLE") == "1"
    found = ask() if inherited else ask(**portable().caps())
    assert found["numba"] == ["generic", ""]
    assert found["numpy"] == []
    assert found["torch"] in ("DEFAULT", "NO AVX")
    if found["openssl"] is not None:
        first, *others = (int(word, 16) for word in found["openssl"].partition(" ")[0].partition("=")[2].split(":"))
        assert first & ~0x400 == 0  # a bit that OpenSSL sets itself on x86-64, about no instruction
        assert not any(others)
    assert found["openblas"] in (None, "armv8", "prescott", "katmai")  # the last two are one and the same
    assert found["look-ups"] == "portable"


def test_a_machine_without_extras_needs_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy takes an empty list for a mistake."""
    module = portable()
    monkeypatch.setattr(module, "numpy_features", list)
    assert "NPY_DISABLE_CPU_FEATURES" not in module.caps()


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64"])
def test_caps_of_every_architecture(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = portable()
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    found = module.caps()
    assert found["NUMBA_CPU_NAME"] == "generic"
    assert ("OPENSSL_ia32cap" in found, "OPENSSL_armcap" in found) == {
        "x86_64": (True, False),
        "AMD64": (True, False),
        "aarch64": (False, True),
        "arm64": (False, True),
    }.get(machine, (False, False))
