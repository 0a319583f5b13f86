"""How far nested planes (`multi`) are from planes of their own (`bcq`).

    python tests/benchmarks/models/nested.py [--model NAME=FOLDER ...] [--write]

For numbers drawn from three distributions and for rows of the models given (folders with model.safetensors), for groups
of 32 to 512, with and without a bias: the mean squared error of the first 2, 3 and all 4 planes of `multi`, with and
without `--nested joint`, over that of `bcq` with as many planes. For the third plane under those of `bcq` branch and
bound (tests/support/methods/nested_bound.py) finds the least error that any plane and scales can have, on some of the
groups. Seeds are fixed; --write makes nested.json and nested.md in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "support"))

import numpy as np
from nested_page import page
from safetensors import safe_open

from bcqfmt.converters.methods.bcq import Bcq
from bcqfmt.converters.methods.errors import decoded_square_sums
from bcqfmt.converters.methods.multi import Multi
from bcqfmt.converters.methods.protocol import Job
from bcqfmt.version import __version__
from methods.nested_bound import least_error

PAGES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
GOALS = {2: 1.1, 3: 1.1, 4: 1.25}  # of the joint search: mean squared error over that of planes of their own
NEAR = 1.03  # times the bound: the goal for three planes under those of `bcq`
GROUPS = (32, 64, 128, 512)
ROWS, COLUMNS = 64, 4096  # of drawn matrices
SAMPLED = 64  # rows of each layer of a model
EXACT = 1e-3  # how far the proven bound may be below an error that is reached
BOUNDED = 24  # groups
LINEAR = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.weight$")
EMBEDDING = "model.embed_tokens.weight"


def main() -> int:
    """Measure and print; 1 if an error is above its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER", help="weights of a Llama model")
    parser.add_argument("--write", action="store_true", help="make the page and its figures")
    options = parser.parse_args()
    begun = time.perf_counter()
    cells = []
    for name, weight, dtype in sources(options.model):
        for group in GROUPS:
            for bias in (False, True) if group <= weight.shape[1] else ():
                cells.append({"weights": name, **measured(weight, dtype, group, bias)})
                print(line_of(cells[-1]), flush=True)
    if options.write:
        names = [name.partition("=")[0] for name in options.model]
        record = {
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "command": " ".join(
                ["python tests/benchmarks/models/nested.py", *(f"--model {n}={n}" for n in names), "--write"]
            ),
            "with": {"Python": platform.python_version(), "numpy": np.__version__, "bcqfmt": __version__},
            "minutes": round((time.perf_counter() - begun) / 60, 1),
            "goals": GOALS,
            "near": NEAR,
            "cells": cells,
        }
        (PAGES / "nested.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (PAGES / "nested.md").write_text(page(record), encoding="utf-8")
    return int(any(cell["joint"][p] > goal for cell in cells for p, goal in GOALS.items()))


def sources(models: list[str]) -> Iterator[tuple[str, Any, str]]:
    """(name, float32 [rows, in], type) of everything that is measured."""
    drawn = np.random.default_rng(0)
    for name, numbers in (
        ("normal", drawn.normal(size=(ROWS, COLUMNS))),
        ("Student's t, 5 degrees", drawn.standard_t(5, size=(ROWS, COLUMNS))),
        ("Laplace", drawn.laplace(size=(ROWS, COLUMNS))),
    ):
        yield name, (0.02 * numbers).astype(np.float16).astype(np.float32), "F16"
    for given in models:
        name, _, folder = given.partition("=")
        yield from model_rows(name, Path(folder) / "model.safetensors")


def model_rows(model: str, file: Path) -> Iterator[tuple[str, Any, str]]:
    """Every type of projection, rows drawn from the first, middle and last layer; and the embedding."""
    with safe_open(file, "np") as opened:
        found = [match for name in opened.keys() if (match := LINEAR.search(name))]  # noqa: SIM118 - no mapping
        layers = sorted({int(match[1]) for match in found})
        chosen = (layers[0], layers[len(layers) // 2], layers[-1])
        for kind in ("q", "k", "v", "o", "gate", "up", "down"):
            names = [match.string for match in found if match[2] == kind and int(match[1]) in chosen]
            yield f"{model}, {kind}", *rows_of(opened, sorted(names))
        yield f"{model}, embedding", *rows_of(opened, [EMBEDDING])


def rows_of(opened: Any, names: list[str]) -> tuple[Any, str]:
    drawn, parts = np.random.default_rng(0), []
    for name in names:
        tensor = opened.get_tensor(name)
        kept = np.sort(drawn.permutation(len(tensor))[: SAMPLED * 3 // len(names)])
        parts.append(tensor[kept].astype(np.float32))
    return np.concatenate(parts), opened.get_slice(names[0]).get_dtype()


def measured(weight: Any, dtype: str, group: int, bias: bool) -> dict[str, Any]:
    """A cell: by planes the ratios of both kinds of nesting, and the third plane's over its bound."""

    def made(method: Any, bits: int, **given: Any) -> Any:
        settings = {"bits": bits, "group_size": group, "bias": bias, **given}
        return method.build(settings).quantize(Job("w", weight, dtype, threads=os.cpu_count() or 1)).weight

    alone = {p: made(Bcq, p) for p in GOALS}
    nested = {nesting: made(Multi, max(GOALS), nested=nesting) for nesting in ("joint", "seed")}
    errors = {p: decoded_square_sums(weight, one)[1] for p, one in alone.items()}
    cell: dict[str, Any] = {"group_size": group, "bias": bias}
    for nesting, one in nested.items():
        cell[nesting] = {p: round(decoded_square_sums(weight, one, p)[1] / errors[p], 4) for p in GOALS}
    cell["over_bound"] = over_bound(
        weight, alone[2].codes(), nested["seed"].dequantize("float32", planes=3), group, bias
    )
    return cell


def over_bound(weight: Any, codes: Any, values: Any, group: int, bias: bool) -> float:
    """Errors of three planes over the least there can be under the two of ``codes``, on some groups."""
    whole = weight.shape[1] // group
    places = np.random.default_rng(0).permutation(len(weight) * whole)[:BOUNDED]

    def one(place: int) -> tuple[float, float]:
        row, run = place // whole, slice(place % whole * group, place % whole * group + group)
        found = float(np.square(weight[row, run] - values[row, run].astype(np.float64)).sum())
        return found, least_error(weight[row, run], codes[row, run], 1, bias, found, EXACT)[0]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found, least = np.array(list(pool.map(one, places.tolist()))).sum(axis=0)
    return round(found / least, 4)


def line_of(cell: dict[str, Any]) -> str:
    """A cell for people."""
    bias = "with" if cell["bias"] else "without"
    parts = [f"{nesting} {' '.join(f'{one:.3f}' for one in cell[nesting].values())}" for nesting in ("joint", "seed")]
    shown = "; ".join([*parts, f"over bound {cell['over_bound']:.3f}"])
    return f"{cell['weights']:24} groups of {cell['group_size']:3} {bias:>7} bias: {shown}"


if __name__ == "__main__":
    sys.exit(main())
