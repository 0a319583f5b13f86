"""Other projects' packers of one 4-bit layer, timed in a Python of their own (`packers.py` starts it).

    PYTHON tests/benchmarks/peer_packing.py ROWS COLUMNS

The first line it writes is JSON: which packers are there, with their versions. Then, for every name it reads, it packs
the layer once and writes the seconds that took. Nothing of bcqfmt is imported here.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable

Packer = Callable[[], object]
GROUP = 128


def compressed_tensors(rows: int, columns: int) -> Packer:
    """pack_to_int32 of codes -8..7."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    return lambda: pack_to_int32(codes, 4)


def gptqmodel(rows: int, columns: int) -> Packer:
    """A linear layer's pack: from weights, scales and zeros to words, the only way it has."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    linear = torch.nn.Linear(columns, rows, bias=False, dtype=torch.float32)
    scales = torch.full((rows, columns // GROUP), 0.01)
    zeros = torch.full((rows, columns // GROUP), 8.0)
    g_idx = torch.arange(columns, dtype=torch.int32) // GROUP
    packed = TorchLinear(4, GROUP, True, False, columns, rows, register_buffers=False)
    return lambda: packed.pack(linear, scales, zeros, g_idx)


PACKERS = {"compressed-tensors": compressed_tensors, "gptqmodel": gptqmodel}


def main() -> None:
    rows, columns = (int(word) for word in sys.argv[1:])
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries greet the user on stdout
    found: dict[str, Packer] = {}
    versions: dict[str, str] = {}
    for name, make in PACKERS.items():
        try:
            found[name] = make(rows, columns)
            found[name]()
            versions[name] = importlib.metadata.version(name)
        except Exception as fault:  # noqa: BLE001 - what keeps a foreign package from working is reported
            versions[name] = f"not usable: {type(fault).__name__}: {fault}"[:200]
            found.pop(name, None)
    print(json.dumps({"packers": sorted(found), "versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        found[line.strip()]()
        print(time.perf_counter() - begun, file=answers, flush=True)


if __name__ == "__main__":
    main()
