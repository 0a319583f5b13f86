"""What users get: wheel and source archive installed into a clean environment, and from a clone without symlinks.

    python tests/install/clean_install.py [DIST]

DIST holds the wheel and the source archive that `make wheel` built. A new virtual environment gets the dependencies,
at the pinned versions, and then three times the package: from the wheel, from the source archive, and from a wheel that
was built in a clone whose symlinks are text files, as git makes them on Windows. Each time the command has to work, far
from the checkout: version, self-test, demo. Needs git and the network (or pip's cache).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("bcqfmt/converters", "bcqfmt/kernels")


def main(dist: Path) -> int:
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="bcqfmt-install-") as name:
        scratch = Path(name)
        python = new_environment(scratch / "venv")
        try_out(python, wheel, scratch)
        try_out(python, archive, scratch)
        plain = from_clone_without_symlinks(scratch)
        try_out(python, plain, scratch)
        compare(wheel, plain)
    return 0


def new_environment(place: Path) -> Path:
    """A virtual environment with the dependencies of the core and nothing else; its interpreter."""
    start = time.monotonic()
    run([sys.executable, "-m", "venv", place])
    python = place / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pip(python, "pip", "setuptools", "--constraint", ROOT / "constraints.txt")
    pip(python, *project["dependencies"], "--constraint", ROOT / "constraints.txt")
    say(f"clean environment with {len(project['dependencies'])} dependencies, pinned: {time.monotonic() - start:.0f} s")
    return python


def try_out(python: Path, package: Path, scratch: Path) -> None:
    """Install ``package`` in place of whatever was there, and use it."""
    pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", package)
    pip_says = run([python, "-m", "pip", "check"])
    program = python.parent / "bcqfmt"
    versions = json.loads(run([program, "--version", "--json"], scratch))
    found = run([python, "-P", "-c", "import bcqfmt; print(bcqfmt.__file__)"], scratch).strip()
    assert Path(found).is_relative_to(python.parents[1]), f"bcqfmt comes from {found}"
    assert json.loads(run([program, "doctor", "--json"], scratch))["works"]
    demo = run([program, "demo"], scratch)
    assert "all equal, bit for bit" in demo
    assert "BCQ-V606" in demo
    assert "No broken requirements" in pip_says
    say(f"{package.name}: bcqfmt {versions['bcqfmt']} installed, demo runs")


def from_clone_without_symlinks(scratch: Path) -> Path:
    """A wheel from a clone in which git wrote the symlinks as text files."""
    clone, out = scratch / "clone", scratch / "plain"
    run(["git", "-c", "core.symlinks=false", "clone", "--quiet", ROOT, clone])
    for link in LINKS:
        assert not (clone / link).is_symlink(), f"{link} is a symlink: nothing is tested"
        assert (clone / link).is_file(), f"{link} is missing"
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, clone])
    (wheel,) = out.glob("*.whl")
    return wheel


def compare(wheel: Path, plain: Path) -> None:
    """Both wheels have the same files with the same bytes; with changes that are not committed they cannot."""
    if run(["git", "-C", ROOT, "status", "--porcelain"]).strip():
        say("files are not compared: the checkout has changes that are not committed, a clone does not")
        return
    contents = []
    for path in (wheel, plain):
        with zipfile.ZipFile(path) as packed:
            contents.append({name: packed.read(name) for name in packed.namelist()})
    differing = sorted(
        name for name in contents[0].keys() | contents[1].keys() if contents[0].get(name) != contents[1].get(name)
    )
    assert not differing, f"the wheels differ in {differing[:5]}"
    say(f"same {len(contents[0])} files with and without symlinks")


def pip(python: Path, *arguments: str | Path) -> None:
    run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--quiet", *arguments])


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """The output of a command; everything it said when it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    sys.stdout.write(f"install: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("install: needs git (apt install git)")
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"))
