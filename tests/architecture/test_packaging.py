"""What gets installed is `bcqfmt` and nothing else, from a wheel and from a checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450  # above: is there a second idea in it?
MAX_FILES = 20  # in a folder
HEAVY = ("torch", "numba", "click", "transformers", "huggingface_hub")

# Runs in a child process. argv: a folder to put first on the path, or "" for the environment as it is.
# Prints where each name is found, without trusting the current folder.
PROBE = """
import importlib, importlib.util, json, sys
if sys.argv[1]:
    sys.path.insert(0, sys.argv[1])
packages = ("bcqfmt", "bcqfmt.converters", "bcqfmt.kernels")
inside = {name: importlib.import_module(name).__file__ for name in packages}
outside = {}
for name in ("converters", "kernels", "spec", "tests"):
    found = importlib.util.find_spec(name)
    outside[name] = [] if found is None else [found.origin, *(found.submodule_search_locations or [])]
print(json.dumps({"inside": inside, "outside": outside}))
"""


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command run with this interpreter, away from the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command[:3]} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


def probe(first_on_path: Path | str, cwd: Path) -> dict[str, Any]:
    return json.loads(run("-c", PROBE, str(first_on_path), cwd=cwd))


def assert_no_bare_names(found: dict[str, Any], *ours: Path) -> None:
    """Another distribution may own a name such as `kernels`; it must not come from one of our folders."""
    for name, places in found["outside"].items():
        strays = [place for place in places if place and any(Path(place).is_relative_to(own) for own in ours)]
        assert not strays, f"`import {name}` finds {strays}"


def source_files() -> list[Path]:
    folders = [ROOT / "bcqfmt", ROOT / "converters", ROOT / "kernels"]
    return [
        Path(folder) / name
        for top in folders
        for folder, _, names in os.walk(top)  # does not follow the symlinks: each file once
        for name in names
        if name.endswith(".py")
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy of the tree: the checkout gets no build folder, and gives none."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("bcqfmt", "converters", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_every_package_folder_is_listed() -> None:
    # setuptools drops a forgotten folder silently.
    settings = read_pyproject()["tool"]["setuptools"]
    folder_of = settings["package-dir"]
    expected = set()
    for path in source_files():
        if path.name == "__init__.py":
            parts = path.parent.relative_to(ROOT).parts
            inside = parts if parts[0] == "bcqfmt" else ("bcqfmt", *parts)
            expected.add(".".join(inside))
    assert sorted(settings["packages"]) == sorted(expected)
    assert folder_of == {
        "bcqfmt": "bcqfmt",
        "bcqfmt.converters": "converters",
        "bcqfmt.kernels": "kernels",
    }


@pytest.mark.parametrize("room", ["converters", "kernels"])
def test_editors_find_the_rooms_through_symlinks(room: str) -> None:
    link = ROOT / "bcqfmt" / room
    assert link.is_symlink(), f"bcqfmt/{room} must be a symlink to ../{room} (git config core.symlinks true)"
    assert link.readlink() == Path("..") / room


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    (dist_info,) = {top for top in tops if top.endswith(".dist-info")}
    assert tops == {"bcqfmt", dist_info}
    assert len(names) == len(set(names))


def test_wheel_has_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = sorted(name for name in archive.namelist() if name.endswith(".py"))
        assert "bcqfmt/py.typed" in archive.namelist()
    relative = [path.relative_to(ROOT).as_posix() for path in source_files()]
    expected = sorted(name if name.startswith("bcqfmt/") else f"bcqfmt/{name}" for name in relative)
    assert packed == expected
    assert {"bcqfmt/converters/__init__.py", "bcqfmt/kernels/__init__.py"} <= set(packed)


def test_installed_wheel_adds_bcqfmt_only(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    found = probe(target, cwd=tmp_path)
    for name, file in found["inside"].items():
        assert Path(file).is_relative_to(target), f"{name} comes from {file}, not from the wheel"
    assert_no_bare_names(found, target, ROOT)


def test_this_installation_adds_bcqfmt_only(tmp_path: Path) -> None:
    where = """
import json, importlib.metadata
installed = importlib.metadata.distribution("bcqfmt")
url = json.loads(installed.read_text("direct_url.json") or "{}")
editable = url.get("dir_info", {}).get("editable", False)
print(json.dumps({"editable": editable, "site": str(installed.locate_file(""))}))
"""
    installed = json.loads(run("-c", where, cwd=tmp_path))
    home = ROOT if installed["editable"] else Path(installed["site"]).resolve()
    found = probe("", cwd=tmp_path)
    for name, file in found["inside"].items():
        assert Path(file).resolve().is_relative_to(home), f"{name} comes from {file}, expected under {home}"
    assert_no_bare_names(found, ROOT)


def test_no_source_file_is_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_bytes().splitlines()) for path in source_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_folder_is_full() -> None:
    """A folder that needs no scrolling."""
    held = Counter(path.parent.relative_to(ROOT).as_posix() for path in source_files())
    assert {folder: files for folder, files in held.items() if files > MAX_FILES} == {}


def test_tests_are_not_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_importing_bcqfmt_stays_light(tmp_path: Path) -> None:
    listing = (
        "import sys, json, numpy as np, bcqfmt; [getattr(bcqfmt, name) for name in bcqfmt.__all__];"
        "w = bcqfmt.BcqWeight.from_affine(np.ones((2, 8), int), np.ones((2, 1), 'f2'), 1, group_size=8);"
        "bcqfmt.save('made', {'w.weight': w}); bcqfmt.validate('made', deep=True);"
        "bcqfmt.open('made')['w.weight'].dequantize(); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = {name.split(".")[0] for name in json.loads(run("-c", listing, cwd=tmp_path))}
    assert loaded & set(HEAVY) == set()
