"""Run as a program: ``quantized_trees.py SOURCE STATS TARGET WORKERS`` quantizes with every method, a folder each."""

import sys
from pathlib import Path
from typing import Any

from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.quantize.stats import open_stats
from bcqfmt.converters.source.checkpoint import open_source

SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 4, "group_size": 32},
    "bcq": {"bits": 3, "group_size": 32, "rounds": 3},
    "multi": {"bits": 4, "group_size": 32, "rounds": 2, "starts": 1},
    "mixed24": {"four_bit_group_size": 32, "sensitivity": "hessian"},
    "atom": {"group_size": 32, "outliers": 32},
    "gptq": {"bits": 4, "group_size": 32, "static_groups": False},
}


def main(source: str, stats: str, target: str, workers: str) -> None:
    """One folder for every method."""
    for method, settings in SETTINGS.items():
        options = QuantizeOptions(
            method=method, settings=settings, stats=open_stats(Path(stats)), workers=int(workers), max_shard_size=70_000
        )
        Quantization(open_source(Path(source)), options).run(Path(target) / method)


if __name__ == "__main__":
    main(*sys.argv[1:])
