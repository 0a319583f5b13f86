"""``bcqfmt doctor``: what this machine has and lacks (Python, packages, GPU, disk), and the command that fixes it."""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.errors import BcqError, escape
from bcqfmt.version import __version__, pip_install

# What pyproject.toml asks for; a test compares the two.
MINIMUM = {
    "numpy": (2, 0),
    "safetensors": (0, 8),
    "ml_dtypes": (0, 5),
    "click": (8, 2),
    "tqdm": (4, 66),
    "numba": (0, 61),
    "huggingface_hub": (1, 31),
}
_OPTIONAL = {  # package: the extra that brings it, or none; what for
    "torch": ("torch", "to_torch() and BcqLinear"),
    "numba-cuda": ("cuda", "the CUDA kernels"),
    "transformers": ("transformers", "generate, eval, calibrate, and loading models"),
    "lm_eval": ("eval", "eval --tasks"),
    "vllm": ("", "serving models"),
    "ray": ("ray", "convert --executor ray; several machines do without it: --part"),
}
_LITTLE_SPACE = 1_000_000_000
_HASHED = 1 << 25
_PROC = Path("/proc/driver/nvidia/version")
_MARKS = {"ok": "ok", "missing": "--", "warning": "!!", "failed": "XX"}


class Check(NamedTuple):
    """One line: ``status`` is ``ok``, ``missing`` (optional), ``warning`` or ``failed`` (the core is affected)."""

    group: str
    name: str
    status: str
    found: str
    fix: str = ""


@verb("doctor")
@json_option
def command(as_json: bool) -> int:
    """Show what this machine has and lacks, and what fixes it.

    Looks at Python, the packages, the GPU driver and the disk, and tries the core in a temporary folder. Optional
    packages may be missing: exit code 0 means that the core works, 1 that it does not.

    \b
    Example:
      bcqfmt doctor
      bcqfmt doctor --json
    """
    found = list(checks())
    works = all(check.status != "failed" for check in found)
    data = [{**check._asdict(), "fix": check.fix or None} for check in found]
    render.show(as_json, {"works": works, "checks": data}, _text(found, works))
    return 0 if works else 1


def _text(found: list[Check], works: bool) -> list[str]:
    lines: list[str] = []
    width = max(len(check.name) for check in found)
    for group in dict.fromkeys(check.group for check in found):
        lines.append(group)
        for check in found:
            if check.group == group:
                lines.append(f"  {_MARKS[check.status]}  {check.name:<{width}}  {check.found}")
                if check.fix:
                    lines.append(f"      {'':<{width}}  fix: {check.fix}")
    missing = sum(check.status == "missing" for check in found)
    verdict = "the core works" if works else "the core does NOT work here"
    return [*lines, "", f"{verdict}; {render.count(missing, 'optional part')} missing"]


def checks() -> Iterator[Check]:
    """Everything, one after the other."""
    yield from _system()
    sound = True
    for name, minimum in MINIMUM.items():
        check = _required(name, minimum, load=sound)
        sound = sound and check.status == "ok"
        yield check
    for name, (extra, purpose) in _OPTIONAL.items():
        version = _version(name)
        if version is None:
            fix = pip_install(extra) if extra else f"pip install {name}"
            yield Check("optional", name, "missing", f"not installed; for {purpose}", fix)
        else:
            yield Check("optional", name, "ok", version)
    yield from _gpu()
    yield from _disk()
    yield _hash_speed()
    yield _guarded("core", "self-test", _self_test)


def _system() -> Iterator[Check]:
    version = f"{platform.python_version()} ({platform.python_implementation()})"
    yield Check("system", "python", "ok", f"{version}, {escape(sys.executable)}")
    yield Check("system", "platform", "ok", f"{platform.platform()}, {os.cpu_count()} processors")
    yield Check("core", "bcqfmt", "ok", f"{__version__}, {Path(__file__).resolve().parents[2]}")


def _required(name: str, minimum: tuple[int, ...], *, load: bool) -> Check:
    """``load``: import it too; not after another failed, numpy for example, without which others print tracebacks."""
    version = _version(name)
    wanted = ".".join(map(str, minimum))
    fix = f"pip install '{name}>={wanted}'"
    if version is None:
        return Check("core", name, "failed", "not installed", fix)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < minimum:
        return Check("core", name, "failed", f"{version}, older than {wanted}", fix)
    try:
        if load:
            importlib.import_module(name)  # all of these together take half a second
    except Exception as fault:  # noqa: BLE001 - a package that does not fit the others raises what it likes
        found = f"{version}, cannot be imported: {type(fault).__name__}: {escape(str(fault))}"
        return Check("core", name, "failed", found, f"pip install --force-reinstall '{name}>={wanted}'")
    return Check("core", name, "ok", version)


def _version(name: str) -> str | None:
    """From the package's metadata: importing torch to ask for its version takes seconds."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> Iterator[Check]:
    driver = ctypes.util.find_library("cuda")
    if driver is None and not _PROC.exists():
        yield Check(
            "gpu", "CUDA driver", "missing", "no libcuda, no NVIDIA driver; CPU only", "install the NVIDIA driver"
        )
        return
    yield Check("gpu", "CUDA driver", "ok", driver or f"kernel module only ({_PROC})")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Check("gpu", "nvidia-smi", "missing", "not on the path", "install the NVIDIA driver's tools")
        return
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        yield Check("gpu", "nvidia-smi", "warning", escape(str(fault)), "see whether `nvidia-smi` works by itself")
        return
    found = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not found:
        said = (done.stdout or done.stderr).strip().partition("\n")[0]
        yield Check(
            "gpu", "nvidia-smi", "warning", escape(said) or "no GPU", "see whether `nvidia-smi` works by itself"
        )
    for i, line in enumerate(found if not done.returncode else ()):
        yield Check("gpu", f"GPU {i}", "ok", escape(line))


def _disk() -> Iterator[Check]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    text = f"{escape(folder)}, {free / 1e9:.1f} GB free"
    if free < _LITTLE_SPACE:
        yield Check("disk", "temporary folder", "warning", text, "set TMPDIR to a folder with more space")
    else:
        yield Check("disk", "temporary folder", "ok", text)
    mask = os.umask(0)
    os.umask(mask)
    if mask & 0o700:
        yield Check("disk", "umask", "warning", f"{mask:04o}: new files are closed to their owner", "umask 022")
    else:
        yield Check("disk", "umask", "ok", f"{mask:04o}: new files get mode {0o666 & ~mask:04o}")
    yield _guarded("disk", "symbolic links", _links, "warning")


def _links() -> str:
    with tempfile.TemporaryDirectory(prefix="bcqfmt-doctor-") as folder:
        target = Path(folder, "target")
        target.write_bytes(b"x")
        Path(folder, "link").symlink_to(target)
        assert Path(folder, "link").read_bytes() == b"x"
    return "work in the temporary folder"


def _hash_speed() -> Check:
    data = bytes(_HASHED)
    start = time.perf_counter()
    hashlib.sha256(data).digest()
    speed = _HASHED / (time.perf_counter() - start) / 1e6
    return Check("core", "SHA-256", "ok", f"{speed:,.0f} MB/s; the speed of `validate --deep` is near that")


def _self_test() -> str:
    import numpy as np

    import bcqfmt

    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 16
    scale = np.array([[0.5], [-0.25]], np.float16)
    with tempfile.TemporaryDirectory(prefix="bcqfmt-doctor-") as folder:
        place = Path(folder, "model")
        bcqfmt.save(place, {"test.weight": bcqfmt.BcqWeight.from_affine(codes, scale, 8, group_size=32)})
        report = bcqfmt.validate(place, deep=True)
        assert report.valid, report.findings
        with bcqfmt.open(place) as checkpoint:
            values = checkpoint.weight("test.weight").dequantize()
    wanted = (scale.astype(np.float64) * (codes.astype(np.float64) - 8)).astype(np.float16)
    assert values.tobytes() == wanted.tobytes(), "decoded values differ from the formula"
    return "a weight was written, validated and decoded, bit for bit"


def _guarded(group: str, name: str, action: Callable[[], str], status: str = "failed") -> Check:
    try:
        return Check(group, name, "ok", action())
    except (BcqError, OSError, AssertionError, ImportError, ValueError) as fault:
        found = f"{type(fault).__name__}: {escape(str(fault))}"
        return Check(group, name, status, found, "check the temporary folder (TMPDIR), then install again")
