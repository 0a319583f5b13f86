"""Tables of docs/benchmarks/kernels*.md from the JSON that `kernels.py` writes; a test compares them.

python tests/benchmarks/gpu/kernel_tables.py        # prints every table under the name of its page
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    found: list[Row] = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return found


def products() -> str:
    """One to eight vectors: time, share of the floor, and how many times as fast as each peer."""
    peers = ("cuBLAS fp16", "tinygemm int4", "LUT-GEMM")
    lines = _head("weight", "rows x columns", "bits", "group", "vectors", "us", "of floor", *peers)
    for row in rows_of("kernels"):
        kind = row["kernel"].partition(", ")[2]
        cells = [kind, _shape(row), row["bits"], row["group_size"], row["batch"]]
        lines.append(_line(*cells, f"{row['microseconds']:.2f}", _floor(row), *(_times(row, peer) for peer in peers)))
    return "\n".join(lines)


def sweep() -> str:
    """Planes by group sizes: us and share of the floor."""
    rows = {(row["bits"], row["group_size"]): row for row in rows_of("kernels_sweep")}
    groups = sorted({group for _, group in rows})
    names = [f"g = {group}" if group < 12288 else "row" for group in groups]
    lines = _head("planes", *names)
    for planes in sorted({bits for bits, _ in rows}):
        cells = [f"{rows[planes, group]['microseconds']:.1f} ({_floor(rows[planes, group])})" for group in groups]
        lines.append(_line(planes, *cells))
    return "\n".join(lines)


def outliers() -> str:
    """One vector with outliers: in the same launch, and in a launch of their own."""
    return _with_outliers("kernels_outliers", "bits, affine")


def outliers_of_several() -> str:
    """2, 4 and 8 vectors of the large shape."""
    rows = {
        (row["batch"], row["kernel"].partition(", affine")[2]): row["microseconds"]
        for row in rows_of("kernels_outliers")
        if row["rows"] == 28672
    }
    names = ["", ", 0.5 % outliers", ", 0.5 % outliers, two launches"]
    names += [", 1.5 % outliers", ", 1.5 % outliers, two launches"]
    lines = _head("vectors", "no outliers", "0.5 %, one launch", "two launches", "1.5 %, one launch", "two launches")
    for batch in (2, 4, 8):
        lines.append(_line(batch, *(f"{rows[batch, n]:.1f}" if (batch, n) in rows else "-" for n in names)))
    return "\n".join(lines)


def mixed() -> str:
    """2/4-bit weights."""
    return _with_outliers("kernels_mixed", "mixed")


def atom() -> str:
    """W4A4 against cuBLAS."""
    lines = _head("tokens", "4096 x 4096: fp16", "W4A4", "", "11008 x 4096: fp16", "W4A4", "")
    rows = {(row["rows"], row["batch"]): row for row in rows_of("kernels_atom") if row["kernel"] == "W4A4"}
    for tokens in sorted({batch for _, batch in rows}):
        cells: list[str] = []
        for size in (4096, 11008):
            row = rows[size, tokens]
            cells += [f"{row['peers']['cuBLAS fp16']:.1f}", f"{row['microseconds']:.1f}", _times(row, "cuBLAS fp16")]
        lines.append(_line(tokens, *cells))
    return "\n".join(lines)


def norms() -> str:
    """RMSNorm, reordering and quantization."""
    peers = ("two launches", "three launches", "torch, norm and gather alone", "fused, not reordered")
    lines = _head("tokens", "fused", *peers)
    for row in rows_of("kernels_atom"):
        if row["kernel"].startswith("norm"):
            cells = [f"{value:.2f}" for value in (row["microseconds"], *(row["peers"][peer] for peer in peers))]
            lines.append(_line(row["batch"], *cells))
    return "\n".join(lines)


def attention() -> str:
    """Decode attention over an INT4 cache."""
    lines = _head("query / key-value heads", "batch", "torch SDPA fp16", "INT4", "")
    for row in rows_of("kernels_atom"):
        if row["kernel"].startswith("INT4 attention"):
            heads = row["kernel"].removeprefix("INT4 attention, ").removesuffix(" heads").replace("/", " / ")
            times = [f"{row['peers']['SDPA fp16']:.1f}", f"{row['microseconds']:.1f}", _times(row, "SDPA fp16")]
            lines.append(_line(heads, row["batch"], *times))
    return "\n".join(lines)


def many_vectors() -> str:
    """Many vectors with 4 bits: us of the chosen kernel, of Marlin and of cuBLAS."""
    lines = _head("vectors", *(f"{rows} x {columns}" for rows, columns in _MANY))
    found = {
        (row["rows"], row["vectors"]): row
        for row in rows_of("gemm")
        if (row["formula"], row["bits"]) == ("affine", 4) and row["vectors"].bit_count() == 1
    }
    for count in sorted({count for _, count in found}):
        cells = []
        for rows, _ in _MANY:
            row = found.get((rows, count))
            cells.append(" / ".join(_us(row, name) for name in ("microseconds", "marlin", "cublas")))
        lines.append(_line(count, *cells))
    return "\n".join(lines)


def older_gpus() -> str:
    """Builds for older GPUs with 4-bit affine weights: us for compute_80, compute_89 and sm_90, of Marlin."""
    lines = _head("vectors", *(f"{rows} x {columns}" for rows, columns in _MANY))
    found = {
        (row["rows"], row["vectors"]): row
        for row in rows_of("older_gpus")
        if (row["formula"], row["bits"]) == ("affine", 4)
    }
    for count in sorted({count for _, count in found}):
        cells = []
        for rows, _ in _MANY:
            row = found[rows, count]
            cells.append(" / ".join([*_builds(row), _us(row, "marlin")]))
        lines.append(_line(count, *cells))
    return "\n".join(lines)


def older_gpus_others() -> str:
    """One vector of other weights: us of the three builds, share of the floor of compute_80, and LUT-GEMM."""
    lines = _head("weight", "bits", "rows x columns", "compute_80", "compute_89", "sm_90", "of floor", "LUT-GEMM", "")
    for row in rows_of("older_gpus"):
        if row["vectors"] == 1:
            taken, peer = row["compute_80"]["microseconds"], row.get("lut_gemm")
            share = f"{row['floor'] / taken:.0%}".replace("%", " %")
            faster = f"{peer / taken:.2f}x" if peer else "-"
            cells = [row["formula"], row["bits"], _shape(row), *_builds(row), share, _us(row, "lut_gemm"), faster]
            lines.append(_line(*cells))
    return "\n".join(lines)


def _builds(row: Row) -> list[str]:
    return [f"{row[build]['microseconds']:.1f}" for build in ("compute_80", "compute_89", "sm_90")]


def between() -> str:
    """Numbers of vectors between powers of two: how many times as fast as cuBLAS the chosen kernel is."""
    lines = _head("vectors", *(f"{rows} x {columns}" for rows, columns in _MANY))
    found = {(row["rows"], row["vectors"]): row for row in rows_of("gemm") if row["vectors"].bit_count() > 1}
    for count in sorted({count for rows, count in found if rows == _MANY[-1][0]}):
        timed = [found[rows, count] for rows, _ in _MANY]
        lines.append(_line(count, *(f"{row['cublas'] / row['microseconds']:.2f}x" for row in timed)))
    return "\n".join(lines)


def other_weights() -> str:
    """The same with other weights of the smallest and the largest shape: us of the chosen kernel; LUT-GEMM with one."""
    found: dict[tuple[str, int], dict[tuple[int, int], Row]] = {}
    for row in rows_of("gemm"):
        found.setdefault((row["formula"], row["bits"]), {})[row["rows"], row["vectors"]] = row
    small, large = _MANY[0][0], _MANY[-1][0]
    lines = _head("weight", "bits", "4096 x 4096: 8", "16", "28672 x 8192: 1", "16", "64", "LUT-GEMM, 1")
    for (formula, bits), rows in found.items():
        places = ((small, 8), (small, 16), (large, 1), (large, 16), (large, 64))
        cells = (_us(rows.get(place), "microseconds") for place in places)
        lines.append(_line(formula, bits, *cells, _us(rows[large, 1], "lut_gemm")))
    return "\n".join(lines)


def one_sequence() -> str:
    """A whole model, one token after the other."""
    lines = _head("model", "weights", "bits per weight", "ms per token", "tokens/s", "against float16", "goal")
    names = {"llama-2-7b": "Llama-2-7B shape", "smollm2-135m": "SmolLM2-135M shape"}
    goals = {("llama-2-7b", "bcq 4"): 1.8, ("llama-2-7b", "affine 4"): 1.8, ("llama-2-7b", "bcq 3"): 2.2}
    dense: Row = {}
    for row in rows_of("tokens_per_second"):
        model, weights, ratio = row["model"], row["weights"], row["speedup"]
        if first := weights == "float16":
            dense = row
        bits = 16 * row["linear_bytes"] / dense["linear_bytes"]
        goal = goals.get((model, weights))
        lines.append(
            _line(
                names[model] if first else "",
                weights if first else weights.replace(" ", ", ") + " planes",
                16 if first else f"{bits:.2f}",
                f"{row['milliseconds']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{ratio:.2f}x",
                f"{goal}x: {'met' if ratio >= goal else 'not met'}" if goal else "",
            )
        )
    return "\n".join(lines)


def served() -> str:
    """A whole model: a prompt, and several sequences at once."""
    lines = _head("", "layers", "float16", "affine, 4 planes", "", "goal")
    rows = rows_of("tokens_of_prompts")
    for dense, ours in zip(rows[::2], rows[1::2], strict=True):
        layers = ("joined" if ours["joined"] else "single") + (", early" if ours.get("early") else "")
        if ours["prompt"] > 1:
            ratio, goal = ours["milliseconds"] / dense["milliseconds"], 1.05
            figures = [f"{row['milliseconds']:.1f}" for row in (dense, ours)]
            what, shown, met = f"a prompt of {ours['prompt']} tokens, ms", f"{ratio:.2f}x the time", ratio <= goal
        else:
            ratio, goal = ours["tokens_per_second"] / dense["tokens_per_second"], 2
            figures = [f"{row['tokens_per_second']:,.0f}" for row in (dense, ours)]
            what = f"{ours['sequences']} sequences of {ours['context']} tokens, tokens/s"
            shown, met = f"{ratio:.2f}x", ratio >= goal
        lines.append(_line(what, layers, *figures, shown, f"{goal}x: {'met' if met else 'not met'}"))
    return "\n".join(lines)


_MANY = ((4096, 4096), (11008, 4096), (28672, 8192))
TABLES: dict[str, list[Callable[[], str]]] = {
    "gemm": [many_vectors, other_weights],
    "gemm_tiles": [between],
    "older_gpus": [older_gpus, older_gpus_others],
    "kernels": [products],
    "kernels_sweep": [sweep],
    "kernels_outliers": [outliers, outliers_of_several, mixed],
    "kernels_atom": [atom, norms, attention],
    "tokens_per_second": [one_sequence, served],
}


def _with_outliers(name: str, kernel: str) -> str:
    rows = {(row["rows"], row["kernel"]): row for row in rows_of(name) if row["batch"] == 1}
    lines = _head("rows x columns", "outliers", "us", "of floor", "cuBLAS fp16", "outliers cost", "own launch")
    for (size, what), row in rows.items():
        share = what.removeprefix(kernel).removeprefix(", ")
        if not what.startswith(kernel) or "two launches" in share or "no overlap" in share:
            continue
        two = rows.get((size, f"{what}, two launches"))
        cost = row["microseconds"] / rows[size, kernel]["microseconds"] - 1
        lines.append(
            _line(
                _shape(row),
                share.replace(" outliers", "") or "none",
                f"{row['microseconds']:.2f}",
                _floor(row),
                _times(row, "cuBLAS fp16"),
                f"{cost:.0%}".replace("%", " %") if share else "-",
                f"{two['microseconds']:.1f}" if two else "-",
            )
        )
    return "\n".join(lines)


def _shape(row: Row) -> str:
    return f"{row['rows']} x {row['columns']}"


def _floor(row: Row) -> str:
    return f"{row['floor'] / row['microseconds']:.0%}".replace("%", " %")


def _times(row: Row, peer: str) -> str:
    return f"{row['peers'][peer] / row['microseconds']:.2f}x" if peer in row["peers"] else "-"


def _us(row: Row | None, name: str) -> str:
    return f"{row[name]:.1f}" if row and name in row else "-"


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*names: str) -> list[str]:
    return [_line(*names), "|---" * len(names) + "|"]


if __name__ == "__main__":
    for page, tables in TABLES.items():
        for table in tables:
            print(f"{page}.md, {table.__doc__}\n\n{table()}\n")
