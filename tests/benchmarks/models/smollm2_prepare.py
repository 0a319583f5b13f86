"""What comes before a row is run: calibration, `bcqfmt quantize` (or a peer and `bcqfmt convert`), sizes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from smollm2_rows import CALIBRATION, Row

import bcqfmt

__all__ = ["CommandFailed", "Prepared", "Workshop", "linears"]


class CommandFailed(Exception):
    """A verb ended badly; the last of what it said."""


class Prepared(NamedTuple):
    """``values``: the folder that is run; ``folder``: the BCQ folder, the same or behind it, if there is one."""

    values: Path
    folder: Path | None
    sizes: dict[str, Any]
    seconds: dict[str, float]


class Workshop:
    """Prepares rows of one model, several at a time; every command is a process of its own."""

    def __init__(self, model: Path, work: Path, calibration: Path, device: str, workers: int, peers: Path) -> None:
        """``peers``: the Python that has the other tools."""
        self.model, self.work = model, work
        self._calibration, self._device, self._workers, self._peers = calibration, device, workers, peers
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def prepare(self, row: Row) -> Prepared:
        """Folders that rows share, and the statistics, are made once."""
        if not row.options:
            return Prepared(self.model, None, sizes_of(row, self.model, None), {})
        inputs: list[object] = []
        if row.layers:
            inputs = ["--text", self._calibration, "--token-weights", row.weighting, "--device", self._device]
            inputs += ["-n", CALIBRATION["rows"], "--context", CALIBRATION["seq"], "--train-scales", row.train]
        elif row.stats:
            inputs = ["--stats", self._stats(row.weighting)]
        folder = self.work / (row.folder or row.name)
        start = time.perf_counter()
        with self._lock(folder.name):
            if row.peer and not folder.is_dir():
                self._other_tool(row, folder)
            elif not folder.is_dir():
                workers = ["--workers", self._workers]
                _bcqfmt("quantize", self.model, folder, *row.options, *inputs, *workers, "--overwrite")
        seconds, values = {"quantize": time.perf_counter() - start}, folder
        if row.atom:  # its outliers are put into dense weights
            values = self.work / f"{row.name}-dense"
            _bcqfmt("export", folder, values, "--to", "dense", "--overwrite")
        sizes = sizes_of(row, self.model, folder)
        if row.peer:
            told = json.loads(_told_by_tool(folder).read_text())
            sizes["version"], seconds["quantize"] = told["version"], told["seconds"]
        return Prepared(values, folder, sizes, seconds)

    def clear(self, ready: Prepared) -> None:
        """Dense values are large and soon made again."""
        if ready.values not in (self.model, ready.folder):
            shutil.rmtree(ready.values)

    def _other_tool(self, row: Row, folder: Path) -> None:
        """Its checkpoint, converted."""
        theirs = folder.with_name(f"{folder.name}-source")
        script = Path(__file__).with_name("smollm2_peers.py")
        words = ["--tool", row.peer, "--device", self._device, *row.options]
        said = _run([self._peers, script, self.model, self._calibration, theirs, *words])
        _told_by_tool(folder).write_text([line for line in said.splitlines() if line.startswith('{"version"')][-1])
        _bcqfmt("convert", theirs, folder, "--overwrite")

    def _stats(self, weighting: str) -> Path:
        stats = self.work / f"stats-{weighting}.safetensors"
        with self._lock(stats.name):
            if not stats.is_file():
                options = ["-n", CALIBRATION["rows"], "--context", CALIBRATION["seq"], "--seed", CALIBRATION["seed"]]
                where = ["--device", self._device, "--weighting", weighting, "--out", stats]
                _bcqfmt("calibrate", self.model, "--text", self._calibration, *options, *where)
        return stats

    def _lock(self, name: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())


def _told_by_tool(folder: Path) -> Path:
    """What `smollm2_peers.py` told of a row: the tool's version and the seconds it took."""
    return folder.with_name(f"{folder.name}-told.json")


def linears(model: Path) -> dict[str, Any]:
    """The weights of the layers as they are in the source, float32."""
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(model / "model.safetensors").items() if "_proj." in name}


def _shapes(model: Path) -> dict[str, tuple[int, int]]:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if "_proj." in name}  # noqa: SIM118


def sizes_of(row: Row, model: Path, folder: Path | None) -> dict[str, Any]:
    """Bits per weight of the linear layers, their bytes, and those of all model files; SQNR where it was recorded."""
    from bcqfmt.converters.quantize.record import read_record

    shapes = _shapes(model)
    size = sum(rows * columns for rows, columns in shapes.values())
    rest = (model / "model.safetensors").stat().st_size - 2 * size
    if folder is not None and row.peer:
        stored = sum(weight.nbytes for _, weight in bcqfmt.open(folder).weights())
        files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return {"bits": 8 * stored / size, "linear_bytes": stored, "bytes": files}
    if folder is not None and row.atom != "outliers":
        record = read_record(folder)
        assert record is not None
        stored = sum(entry["bytes"] for entry in record.weights.values())
        stored += sum(2 * rows * columns for name, (rows, columns) in shapes.items() if name not in record.weights)
        return {
            "bits": 8 * stored / size,
            "linear_bytes": stored,
            "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "sqnr_db": record.sums().figures()["sqnr_db"],
            "settings": record.recipes[0]["settings"],
        }
    if row.atom:
        from smollm2_atom import bits_of

        bits = bits_of(list(shapes.values()), 128 if row.atom == "outliers" else 0)
        return {"bits": bits, "linear_bytes": round(bits * size / 8), "bytes": round(bits * size / 8) + rest}
    return {"bits": 16.0, "linear_bytes": 2 * size, "bytes": rest + 2 * size}


def _bcqfmt(*words: object) -> None:
    """A verb of the command line; its last words are shown if it fails."""
    _run([sys.executable, "-m", "bcqfmt", *words])


def _run(words: list[object]) -> str:
    command = [str(word) for word in words]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, check=False, capture_output=True, text=True, env=quiet)
    if made.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with {made.returncode}:\n{made.stderr[-2000:]}")
    return made.stdout
