"""What every kind of checkpoint becomes in every layout that bcqfmt writes: the table of docs/gguf.md.

``python tests/support/pages/export_matrix.py`` writes it into the page; tests/gguf/test_matrix.py compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.export import TARGETS, export
from bcqfmt.converters.export.awq import to_awq
from bcqfmt.converters.export.compressed_tensors import to_compressed
from bcqfmt.converters.export.gguf.choice import choose
from bcqfmt.converters.export.gguf.encode import Error, encoded
from bcqfmt.converters.export.gptq import to_gptq
from bcqfmt.converters.export.target import uniform
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.converters.layouts.registry import layouts
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from bcqfmt.weight.weight import BcqWeight

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "gguf.md"
BEGIN, END = "<!-- made by tests/support/pages/export_matrix.py -->\n", "<!-- end -->\n"
LAYOUTS = tuple(layout for layout in TARGETS if layout != "dense")
PEERS = {
    "GPTQ, 4 bits, symmetric, groups of 32": "gptqmodel-gptq-4b-g32-sym-sharded",
    "GPTQ, 4 bits, asymmetric, groups of 32": "gptqmodel-gptq-4b-g32-asym",
    "GPTQ, 4 bits, groups of 128, the last one shorter": "autoround-auto_gptq-4b-g128-sym-ragged",
    "GPTQ, 4 bits, act order": "gptqmodel-gptq-4b-g32-sym-desc_act",
    "GPTQ, 4 bits, BF16 scales": "autogptq-gptq-4b-g32-asym-bf16scales",
    "GPTQ, 2 bits, asymmetric": "gptqmodel-gptq-2b-g32-asym",
    "GPTQ, 3 bits, asymmetric": "autogptq-gptq-3b-g64-asym",
    "GPTQ, 6 bits, symmetric": "gptqmodel-gptq_p-6b-g32-sym",
    "GPTQ, 8 bits, one group a row": "gptqmodel-gptq-8b-g-1-sym",
    "AWQ GEMM, asymmetric": "autoawq-gemm-4b-g32-asym",
    "AWQ GEMV, asymmetric": "autoawq-gemv-4b-g64-asym-rtn",
    "AWQ GEMV-fast, asymmetric": "autoawq-gemv_fast-4b-g64-asym-rtn",
    "AWQ GEMM, symmetric": "autoround-auto_awq-4b-g64-sym",
    "compressed-tensors, 4 bits, asymmetric": "llmcompressor-pack_quantized-4b-g32-asym",
    "compressed-tensors, 4 bits, symmetric, BF16": "llmcompressor-pack_quantized-4b-g64-sym-bf16",
    "compressed-tensors, 4 bits, act order": "compressedtensors0.12-pack_quantized-4b-g32-sym-actorder_group",
    "compressed-tensors, 3 bits, asymmetric": "llmcompressor-pack_quantized-3b-g32-asym",
    "compressed-tensors, 8 bits, one group a row": "llmcompressor-pack_quantized-8b-g-1-sym",
    "compressed-tensors, INT8 with activations": "llmcompressor-int_quantized-8b-g-1-sym-w8a8",
    "HQQ, 4 bits, groups of 64": "hqq-hqq-4b-g64-asym-axis1",
    "HQQ, 3 bits, groups of 64": "hqq-hqq-3b-g64-asym-axis1",
}
MODULE = "mlp.down_proj"
KNOWN = tuple(layouts().values())
_OTHERS = {"awq": to_awq, "compressed-tensors": to_compressed}
_BITS = {kind.name: 8 * kind.nbytes / kind.elements for kind in TYPES.values()}


def table() -> str:
    """The whole table in Markdown."""
    head = ["source", *LAYOUTS, "gguf"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row, weight, own in rows():
        cells = [_layout(weight, layout) for layout in LAYOUTS]
        lines.append(f"| {' | '.join([row, *cells, _gguf(weight, own)])} |")
    return "\n".join([*lines, "", _to_hqq()]) + "\n"


def _to_hqq() -> str:
    """Why the table has no column for HQQ, in the words of the exporter."""
    nowhere: Any = SimpleNamespace(path=ROOT)  # the layout is looked at first
    try:
        export(nowhere, ROOT, "hqq")
    except BcqError as fault:
        said = f"raises {fault.code}: {fault.finding.found}; expected {fault.finding.expected} or gguf"
    return (
        "To HQQ: impossible from every row: `--to hqq` is a usage error (exit code 2), `export` of "
        f"`bcqfmt.converters.export` {said}. Its own files are pickles, which run code when they are loaded, "
        "and the folders that transformers writes are read only."
    )


def rows() -> list[tuple[str, BcqWeight, str]]:
    """Name of the row, one weight of a real checkpoint, and its type if it is GGUF's."""
    found = []
    for row, kind in PEERS.items():
        weights = _weights(ROOT / "tests/data/peers" / kind / "source", MODULE)
        found.append((row, weights[""], ""))
    kinds: dict[str, BcqWeight] = {}
    for path in sorted((ROOT / "tests/data/gguf").glob("*.gguf")):
        if path.name != "iq_grids.gguf":  # refused on the way in
            kinds = {**_weights(path, ""), **kinds}
    return found + [(f"GGUF {kind}", kinds[kind], kind) for kind in _BITS if kind in kinds]


def _weights(path: Path, part: str) -> dict[str, BcqWeight]:
    """Type of GGUF, or empty -> the first weight of it."""
    found: dict[str, BcqWeight] = {}
    source = open_source(path)
    for layout, module in [(known, module) for known in KNOWN for module in known.modules(source, Options())]:
        kind = module.settings.get("type", "")
        if part in module.name and kind not in found:
            found[kind] = layout.convert(module, Options()).weight
    return found


def _layout(weight: BcqWeight, layout: str) -> str:
    """Exact, or why not: what the exporter of the layout itself decides about this weight."""
    try:
        one = uniform(weight)
        to_gptq([one], [], was_v2=False) if layout == "gptq" else _OTHERS[layout]([one], [])
    except BcqError as fault:
        if fault.code != "BCQ-E616":
            raise
        return f"no: {fault.finding.found}"
    return "exact"


def _gguf(weight: BcqWeight, own: str) -> str:
    choice, counted = choose(weight, own), Error()
    for _ in encoded(weight, choice, 0, counted):  # raises unless exact types give the values back
        pass
    if not choice.exact:
        return f"{choice.type}, error {np.format_float_scientific(counted.relative, 1, exp_digits=1)}: {choice.found}"
    bits, before = _BITS[choice.type], weight.bits_per_weight
    larger = f", larger: {bits:g} bits, not {before:.2f}" if bits > 1.02 * before else ""
    return f"{choice.type}, exact{larger}"


def page_with(made: str) -> str:
    """The page with this table in its place."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + made + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: written\n")
