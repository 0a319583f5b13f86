"""The check that `make kernels-check` runs: it knows every kernel, and it notices what it is there to notice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_check", Path(__file__).with_name("compile_check.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_factory_of_kernels_has_cases(check: ModuleType) -> None:
    found = check.factories()
    assert {"lut.kernel.gemv", "atom.kernel.w4a4_kernel", "outliers.csr_outliers_kernel"} <= set(found)
    assert not [name for name in found if not check.cases().get(name)], "add them to the table in compile_check.py"
    assert not [name for name in check.cases() if name not in found]
    assert set(check.LEAST) | set(check.UNWANTED) <= {name.rpartition(".")[0] for name in found}


def test_a_factory_without_cases_is_found(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "other" / "kernel.py"
    module.parent.mkdir()
    module.write_text("def new_kernel(q: int) -> Kernel: ...\ndef _hidden() -> Kernel: ...\ndef shape() -> int: ...\n")
    monkeypatch.setattr(check, "KERNELS", tmp_path)
    check.functions.cache_clear()
    try:
        assert check.factories() == ["other.kernel.new_kernel"]
    finally:
        check.functions.cache_clear()


GOOD = """ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 57 registers, used 1 barriers, 16384 bytes smem, 380 bytes cmem[0]
"""


def test_reports_are_read(check: ModuleType) -> None:
    assert check.read_report(GOOD) == (57, 0, 0, 16384, "")
    assert "spilled" in check.read_report(GOOD.replace("0 bytes spill loads", "12 bytes spill loads")).fault
    assert "local memory" in check.read_report(GOOD.replace("0 bytes stack", "64 bytes stack")).fault
    waiting = "ptxas info    : (C7517) wgmma.wait_group is injected in around line 3170 by compiler\n"
    assert "injected" in check.read_report(waiting + GOOD).fault
    assert "ptxas" in check.read_report("ptxas fatal   : Unresolved extern function").fault
    assert "ptxas" in check.read_report("").fault
