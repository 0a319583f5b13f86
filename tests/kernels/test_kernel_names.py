"""The kernels by their names in `bcqfmt.kernels`, which imports nothing until one is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from bcqfmt import kernels


def _program(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_importing_the_room_imports_nothing_else() -> None:
    said = _program(
        "import sys\nbefore = set(sys.modules)\nimport bcqfmt\nplain = set(sys.modules)\nimport bcqfmt.kernels\n"
        "print(sorted(set(sys.modules) - plain))\n"
        "from bcqfmt.kernels import lut_gemv\nprint('numba' in sys.modules)\n"
    )
    assert said.splitlines() == ["['bcqfmt.kernels']", "False"]


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_name_is_the_object_of_its_module(name: str) -> None:
    module = importlib.import_module(f"bcqfmt.kernels.{kernels._MODULES[name]}")
    found = getattr(kernels, name)
    assert found is getattr(module, name)
    assert found.__module__.startswith("bcqfmt.kernels.")


def test_the_names_are_those_of_the_table() -> None:
    assert sorted(kernels.__all__) == sorted(kernels._MODULES) == dir(kernels)


def test_modules_stay_modules() -> None:
    from bcqfmt.kernels import bits as bit_gemv
    from bcqfmt.kernels import matmul, mixed

    assert [module.__name__ for module in (bit_gemv, matmul, mixed)] == [
        "bcqfmt.kernels.bits", "bcqfmt.kernels.matmul", "bcqfmt.kernels.mixed",
    ]  # fmt: skip
    assert not set(kernels.__all__) & {"bit_gemv", "matmul"}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"'bcqfmt\.kernels' has no attribute 'gemv'"):
        _ = kernels.gemv
    with pytest.raises(ImportError):
        importlib.import_module("bcqfmt.kernels.gemv")


def test_without_numba() -> None:
    said = _program(
        "import sys\nsys.modules['numba'] = None\nimport bcqfmt.kernels\n"
        "try:\n    from bcqfmt.kernels import w4a4\n"
        "except Exception as fault:\n    print(fault, '|', fault.hint)\n"
    )
    assert said.startswith("BCQ-E306")
    assert "pip install 'numba-cuda[cu13]>=" in said
    assert "Traceback" not in said
