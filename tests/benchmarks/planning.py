"""Planning the conversion of a 671B model: time of the whole process, and memory against the number of files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from measure import MIB, Result, rounded, run_child, spread
from sparse_source import LAYERS, sparse_source

_SHARDS = 1500
# what a run does before its first shard: as the dry run, and the digests of headers, and g_idx of every module
_BEFORE_A_RUN = """
import sys
from pathlib import Path
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
print(Conversion(open_source(Path(sys.argv[1])), ConvertOptions()).plan.digest)
"""


def plan(quick: bool, work: Path) -> list[Result]:
    """`bcqfmt convert --dry-run`, and the plan of a run."""
    layers, shards, rounds = (6, _SHARDS // 10, 1) if quick else (LAYERS, _SHARDS, 3)
    many, few = work / "many", work / "few"
    for folder, count in ((many, shards), (few, shards // 10)):
        folder.mkdir()
        parameters, tensors, size = sparse_source(folder, count, layers)
    run_child(["-m", "bcqfmt", "convert", str(few), str(work / "bcq"), "--dry-run"])  # compiles the word packers
    dry = [run_child(["-m", "bcqfmt", "convert", str(many), str(work / "bcq"), "--dry-run"]) for _ in range(rounds)]
    whole = [run_child(["-c", _BEFORE_A_RUN, str(many)]) for _ in range(rounds)]
    fewer = run_child(["-m", "bcqfmt", "convert", str(few), str(work / "bcq"), "--dry-run", "--json"])
    for child in (*dry, *whole, fewer):
        assert child.code == 0, child.output[-2000:]
    assert json.loads(fewer.output)["input_bytes"] > size
    model = f"{parameters / 1e9:.0f}B parameters, {tensors:,} tensors in {shards:,} files, {size / 1e9:.0f} GB"
    seconds, before = [child.seconds for child in dry], [child.seconds for child in whole]
    peak = max(child.peak for child in dry)
    return [
        Result(
            f"`bcqfmt convert --dry-run` of {model}: wall time of the process",
            f"{spread(seconds)} s",
            "at most 15 s",
            statistics.median(seconds) <= 15,
            {"seconds": rounded(seconds), "parameters": parameters, "tensors": tensors, "bytes": size},
        ),
        Result(
            "the same plan as a run makes it, with digests of all headers and a look at every `g_idx`",
            f"{spread(before)} s",
            "at most 15 s",
            statistics.median(before) <= 15,
            {"seconds": rounded(before)},
        ),
        Result(
            f"the dry run, peak memory; the same model in {shards // 10:,} files",
            f"{peak / MIB:.0f} MiB; {fewer.peak / MIB:.0f} MiB",
            "flat in the number of files: at most 10 % apart, below 512 MiB",
            abs(peak - fewer.peak) <= 0.1 * peak and peak < 512 * MIB,
            {"peak_bytes": peak, "fewer_files_peak_bytes": fewer.peak},
        ),
    ]
