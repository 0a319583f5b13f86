"""How far nested planes (`multi`) are from planes of their own (`bcq`), and how much of that no solver could remove.

    python tests/benchmarks/models/nested.py [--model NAME=FOLDER ...] [--write]

For numbers drawn from three distributions and for rows of the models given (folders with model.safetensors), for groups
of 32 to 512, with and without a bias: the mean squared error of the first 3 and all 4 planes of `multi` over that of
`bcq` with 3 and 4 planes, both as `bcqfmt quantize` makes them. Where that is above its goal, branch and bound
(tests/support/methods/nested_bound.py) finds the least error that any planes and scales under the same first two can
have, on some of the groups. Seeds are fixed; --write makes nested.json and nested.md in docs/benchmarks.
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
GOALS = {3: 1.15, 4: 1.5}  # mean squared error over that of planes of their own
GROUPS = (32, 64, 128, 512)
ROWS, COLUMNS = 64, 4096  # of drawn matrices
SAMPLED = 64  # rows of each layer of a model
EXACT = {3: 1e-3, 4: 0.02}  # by planes: how far the proven bound may be below an error that is reached
BOUNDED = {(3, False): 32, (3, True): 16, (4, False): 16, (4, True): 4}  # by planes and bias: groups that are bounded
LINEAR = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.weight$")
EMBEDDING = "model.embed_tokens.weight"


def main() -> int:
    """Measure and print; 1 if an error is above its goal and could be lower."""
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
            "cells": cells,
        }
        (PAGES / "nested.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (PAGES / "nested.md").write_text(page(record), encoding="utf-8")
    return int(any(found["verdict"] == "missed" for cell in cells for found in cell["planes"].values()))


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
    """A cell: by planes the ratio, the verdict and, where the goal is missed, what is possible."""

    def made(method: Any, bits: int) -> Any:
        settings = {"bits": bits, "group_size": group, "bias": bias}
        return method.build(settings).quantize(Job("w", weight, dtype, threads=os.cpu_count() or 1)).weight

    nested, seed = made(Multi, max(GOALS)), made(Bcq, 2)
    planes = {}
    for p, goal in GOALS.items():
        alone = made(Bcq, p)
        ratio = decoded_square_sums(weight, nested, p)[1] / decoded_square_sums(weight, alone)[1]
        found: dict[str, Any] = {"ratio": round(ratio, 4), "verdict": "met"}
        if ratio > goal:
            squares = [
                np.square(weight - one.dequantize("float32", planes=p).astype(np.float64)) for one in (nested, alone)
            ]
            found |= bounded(weight, seed.codes(), squares, group, p, bias)
            found["least"] = round(ratio * found["proven"], 4)
            found["verdict"] = "missed" if found["least"] <= goal else "out of reach"
        planes[p] = found
    return {"group_size": group, "bias": bias, "planes": planes}


def bounded(weight: Any, codes: Any, squares: list[Any], group: int, p: int, bias: bool) -> dict[str, Any]:
    """On some groups: the error of `multi` over `bcq`'s, and what is proven to be the least of it, as a share."""
    whole = weight.shape[1] // group
    places = np.random.default_rng(0).permutation(len(weight) * whole)[: BOUNDED[p, bias]]

    def one(place: int) -> tuple[float, float, float]:
        row, run = place // whole, slice(place % whole * group, place % whole * group + group)
        found, alone = (float(square[row, run].sum()) for square in squares)
        proven, _ = least_error(weight[row, run], codes[row, run], p - 2, bias, found, EXACT[p])
        return proven, found, alone

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        proven, found, alone = np.array(list(pool.map(one, places.tolist()))).sum(axis=0)
    return {"groups": len(places), "groups_ratio": round(found / alone, 4), "proven": round(proven / found, 4)}


def line_of(cell: dict[str, Any]) -> str:
    """A cell for people."""
    bias = "with" if cell["bias"] else "without"
    parts = []
    for p, found in cell["planes"].items():
        least = f", least {found['least']:.3f}" if "least" in found else ""
        parts.append(f"{p} planes {found['ratio']:.3f} {found['verdict']}{least}")
    return f"{cell['weights']:24} groups of {cell['group_size']:3} {bias:>7} bias: " + "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
