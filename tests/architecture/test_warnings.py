"""Only warnings of our own code fail a test: a child run with the settings of this project, one case each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# `as_if` runs code as if it stood in the module or file named. Every test that starts with `ours` has to fail.
CASES = r"""
import threading
import warnings

import numpy as np
import pytest

ROOT = {root!r}


def as_if(module, code, **names):
    space = {{"__name__": module, "warnings": warnings, **names}}
    exec(compile(code, "f.py", "exec"), space)
    return space


def as_if_compiled_from(file):
    warnings.warn_explicit("slow loop", UserWarning, file, 1)


@pytest.mark.parametrize("module", ["bcqfmt", "bcqfmt.cli.main", "bcqfmt.converters.words", "bcqfmt.kernels.cpu"])
@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning])
def test_ours(module, kind):
    as_if(module, "warnings.warn('w', kind)", kind=kind)


def test_ours_a_library_that_warns_its_caller():
    library = as_if("torch.nn", "def call(): warnings.warn('deprecated', FutureWarning, stacklevel=2)")
    as_if("bcqfmt.integrations.torch", "call()", call=library["call"])


def test_ours_numpy_at_a_line_of_ours():
    as_if("bcqfmt.weight.decode", "values * values", values=np.array([3e38], np.float32))


@pytest.mark.parametrize("file", [ROOT + "/converters/words/loop.py", ROOT + "/kernels/cpu/lut.py",
                                  "/usr/lib/python3/site-packages/bcqfmt/kernels/cpu/lut.py"])
def test_ours_by_file(file):
    as_if_compiled_from(file)


def test_ours_a_file_left_open():
    as_if("bcqfmt.container.files", "def leak(path): open(path).readline()")["leak"](__file__)


def test_ours_a_file_left_open_by_the_caller():
    opened = [as_if("bcqfmt.container.files", "def give(path): return open(path)")["give"](__file__)]
    as_if("tests.format.test_reader", "opened.clear()", opened=opened)


def test_ours_a_thread_that_dies():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def test_ours_returns_something():
    return 1


@pytest.mark.parametrize("module", ["torch.nn.modules.linear", "transformers", "numpy", "bcqfmt_of_another", __name__])
@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning])
def test_foreign(module, kind):
    as_if(module, "warnings.warn('w', kind)", kind=kind)


def test_foreign_numpy_in_a_test():
    values = np.array([3e38], np.float32)
    values * values


@pytest.mark.parametrize("file", ["/usr/lib/python3/site-packages/peft/kernels/a.py", "/usr/lib/python3/heapq.py"])
def test_foreign_by_file(file):
    as_if_compiled_from(file)


def test_foreign_resource():
    as_if("huggingface_hub.utils", "warnings.warn('unclosed socket', ResourceWarning)")
"""


def test_only_our_own_warnings_fail_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES.format(root=str(ROOT)), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rA", "-q", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    found = {
        name: verdict
        for verdict, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*?::([^ \n]+)", done.stdout, re.MULTILINE)
    }
    assert len(found) == 49, done.stdout + done.stderr
    wrong = {name: verdict for name, verdict in found.items() if (verdict == "PASSED") != ("test_foreign" in name)}
    assert wrong == {}, done.stdout
