"""Source archive and wheel, byte for byte the same from the same commit; and, asked for, checked, signed and uploaded.

    python tests/install/release.py build DIST      what `make wheel` does
    python tests/install/release.py publish DIST    what `make release` does: twice built and compared, signed, uploaded

Times in the archives are that of the commit (or SOURCE_DATE_EPOCH), owners and modes are fixed, names are sorted, and
the wheel is built from the source archive. `publish` wants a clean checkout at the tag vX.Y.Z, gpg, and twine.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Output of a program; its words on failure."""
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def build(dist: Path) -> list[Path]:
    """Both archives, new in ``dist``."""
    os.umask(0o022)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct")
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    build_one = (sys.executable, "-m", "build", "--no-isolation")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        run(*build_one, "--sdist", "--outdir", scratch, ROOT, SOURCE_DATE_EPOCH=epoch)
        (made,) = scratch.glob("*.tar.gz")
        with tarfile.open(made) as archive:
            archive.extractall(scratch / "tree", filter="data")
        source = dist / made.name
        pack(scratch / "tree", source, int(epoch))
        (tree,) = (scratch / "tree").iterdir()
        run(*build_one, "--wheel", "--outdir", dist.resolve(), tree, SOURCE_DATE_EPOCH=epoch)
    return [source, *dist.glob("*.whl")]


def pack(tree: Path, target: Path, epoch: int) -> None:
    """A folder as tar.gz whose bytes depend on names and contents only."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = epoch
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(tree.rglob("*")):
            archive.add(path, path.relative_to(tree), recursive=False, filter=plain)


def digests(paths: list[Path]) -> str:
    """Lines as sha256sum writes them."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(paths))


def publish(dist: Path) -> None:
    """All or nothing of a release; the upload comes last."""
    version = tomllib.loads(
        f"version = {(ROOT / 'bcqfmt/version.py').read_text().split('__version__ = ')[1]}".split("\n")[0]
    )
    tag = f"v{version['version']}"
    if run("git", "status", "--porcelain") or run("git", "describe", "--tags", "--always") != tag:
        raise SystemExit(f"not a clean checkout of the tag {tag}: git tag -s {tag}, then again")
    missing = [tool for tool in ("gpg", "twine") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)} (twine: pip install twine)")
    first = digests(build(dist))
    with tempfile.TemporaryDirectory() as name:
        if digests(build(Path(name) / "again")) != first:
            raise SystemExit("two builds differ: nothing was uploaded")
    run(sys.executable, "tests/install/clean_install.py", dist)
    files = sorted(dist.iterdir())
    run("twine", "check", "--strict", *files)
    (dist / "SHA256SUMS").write_text(first)
    run("gpg", "--armor", "--detach-sign", dist / "SHA256SUMS")
    run("twine", "upload", "--non-interactive", *files)
    sys.stdout.write(f"{first}uploaded {tag}; publish SHA256SUMS and SHA256SUMS.asc with the tag\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("build", "publish"):
        raise SystemExit(__doc__)
    place = Path(sys.argv[2])
    if sys.argv[1] == "publish":
        publish(place)
    else:
        sys.stdout.write(digests(build(place)))
