"""The compiled C reader. These tests carry the marker `cc`: they need a C compiler and belong to `make check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs import c_reader
from programs.c_reader import Runner

# The same program under everything that could change a value or a verdict. C99 is the language of the header; the
# third and fourth would change values if the code relied on what a compiler does by default.
VARIANTS: dict[str, tuple[str, ...]] = {
    "sanitized": ("-std=c99", *c_reader.SANITIZERS),
    "soft-float": ("-std=c99", "-O1", "-DBCQ_SOFT_FLOAT", "-DBCQ_USE_MMAP"),
    "fused": ("-std=gnu11", "-O3", "-ffp-contract=fast", "-march=native"),
    "fast-math": ("-std=gnu11", "-O3", "-ffast-math"),
    "standard-c": ("-std=c99", "-O1", "-DBCQ_NO_POSIX"),
    "c++": ("-x", "c++", "-std=c++17", "-O1"),
}  # fmt: skip


class Builds:
    """Programs by name, each compiled once however often it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Runner] = {}

    def __getitem__(self, name: str) -> Runner:
        if name not in self.made:
            command = c_reader.compiler("c++") if name == "c++" else None
            program = c_reader.compile_c("runner.c", self.folder / name, *VARIANTS[name], command=command)
            self.made[name] = Runner(program)
        return self.made[name]


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("c_reader"))


@pytest.fixture(scope="session")
def runner(builds: Builds) -> Runner:
    """The runner under AddressSanitizer and UndefinedBehaviorSanitizer; the first finding ends it."""
    return builds["sanitized"]


@pytest.fixture(params=[name for name in VARIANTS if name != "sanitized"])
def variant(request: pytest.FixtureRequest, builds: Builds) -> tuple[str, Runner]:
    """Every other way to compile it."""
    return request.param, builds[request.param]
