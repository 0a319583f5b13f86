"""A page of docs/benchmarks from the figures of one run: results, how they are measured, how to repeat them."""

from __future__ import annotations

from typing import Any

TITLES = {
    "format": "Reading, validating and decoding",
    "conversion": "Conversion",
    "gguf": "GGUF files",
    "scaling": "Large models",
    "quantizing": "Speed of quantizing",
    "cpu_kernels": "Products on the CPU",
}
HIDDEN = {"cpu_kernels": "torch "}  # rows that begin so are in the JSON only: torch compared with itself

_ROUNDS = """\
What is compared runs in turn in one process, after one round to warm up, and a ratio is taken within each round. A
figure is the median of the rounds, with the lowest and the highest in brackets. All files are in the page cache."""

_CONVERSION = f"""\
{_ROUNDS}

- **Compilation.** Import and first calls in a new process with an empty numba cache, less the same with a filled one;
  each three times, medians. Python's own byte code is there, as after an installation.
- **Packers.** One layer of 11008 x 4096, two threads. The floor is `np.copyto` of as many bytes as go in and come out.
  The packers of other tools run in a Python of their own (`BCQFMT_PEER_PYTHON`) in the same rounds: `pack_to_int32` of
  compressed-tensors from int8 codes, `pack` of GPTQModel from weights, scales and zeros.
- **`convert`, `verify`, `restore`.** Random words in the GPTQ layout, four output shards, two workers, fsync included.
  The copy is `cp -r --reflink=never` and `sync -f`. The output of the round before is removed before the clock starts,
  for all of them. A conversion reads the source twice (to convert, to hash), packs every layer, rebuilds its words from
  the planes and compares them while both are in the cache, writes once, and hashes twice with hashlib: the source's
  files and the new ones. `verify` rebuilds, compares and hashes every file once; `restore` rebuilds, hashes and writes
  ([decision 15](../decisions/0015-libraries-instead-of-own-code.md)).

Where the time of `convert` goes: ms of one Neoverse-N1 core per MB, by `perf`, on a busy machine. *Least*: the same
alone in a loop, the shortest run.

| stage | GPTQ | Q4_0 | least |
|---|---|---|---|
| two SHA-256 | 1.26 | 1.28 | 1.28 |
| packing, rebuilding | 0.61 | 0.52 | 0.42 |
| reading twice | 0.26 | 0.31 | 0.16 |
| writing | 0.44 | 0.33 | 0.24 |
| Python, numpy | 0.23 | 0.25 | |
| the rest | 0.12 | 0.16 | |
| sum | 2.9 | 2.9 | 2.1 |

Writing takes 0.4 ms per MB with calls of 128 KiB, 1.0 with 1 MiB: larger pages, in no cache.

0.4 x of a copy at 1600 MB/s are 1.56 ms per MB: 3.1 ms of a core, with both cores never idle.

The copy itself takes 1.3 to 2.6 s from run to run: compare ratios, not times.
"""

_GGUF = f"""\
{_ROUNDS}

- **`convert` and `restore`.** One matrix of random blocks, 4096 x 4096, again and again in one file; four output
  shards, two workers, fsync included. The copy is `cp --reflink=never` and `sync -f`.
- **Decoding.** `kernels.cpu`, bit for bit the normative decoder, from planes to F32; gguf-py from blocks to F32. One
  thread each, in turn, processor time; the values must have the same bits.

A conversion reads a file twice (to convert, to hash), the blocks once more for scales where those in progress exceed
64 MiB; it packs some rows, rebuilds their blocks and compares them while they are in the cache, hashes twice, writes.
Where the time goes: [Conversion](conversion.md).

Where other processes share the cores, a copy waits less than a conversion: ratios of wall times are lower than on an
idle machine and vary; processor times hold. Q8_0 is one product a value in gguf-py too: filling the result takes 0.2 ns
a value, gguf-py 1.9, this decoder 0.6.
"""

_SCALING = """\
`tests/benchmarks/sparse_source.py` makes a GPTQ checkpoint with the names and shapes of a mixture of experts of 671
billion parameters. Headers, index and configuration are real; the data are holes, so 353 GB take 40 MB of disk. All
headers are read and checked, every zero point is read, every tensor is assigned to a file. Times are those of whole
processes, start-up included. Memory is the peak of the process as the kernel counts it: about 1.7 kB per tensor,
independent of the number of files and the size of the data. A real disk adds the time to read headers and zero points
once (here 21 MB and 2.6 GB).

**One conversion in three ways.** Random words in the GPTQ layout, 8 output shards, fsync included; whole commands in
turn, after one round to warm up, all files in the page cache. All three write the same manifest, which is checked. They
share the same two cores, so the rows show what each way costs, not how it scales. `finalize` hashes every shard again;
a run in one process and a run on Ray do not. Ray's processes and its driver share the two cores with the work.
"""

_QUANTIZING = """\
One weight of 4096 x 4096, normal numbers rounded to F16. Loops are compiled before the clock starts; compilation has
rows of its own.

- **rtn.** One thread; the variants run in turn, after one round to warm up. A figure is the median of the rounds, with
  the lowest and the highest in brackets. Input counts as F16, two bytes per weight.
- **bcq.** `tests/benchmarks/published_bcq.py` is the published algorithm for torch, written again: greedy start,
  conjugate gradients on all groups at once, bisection in the sorted sums. It has no bias, so the goal is for `bcq`
  without one, which has two starting points. With a bias `bcq` searches more and has four. All use every core. torch
  runs once, `bcq` before and after it.
- **multi.** By default, without a joint search for all precisions. What nesting costs: [Nested planes](nested.md).
"""

_CPU = """\
y = W x with W of 4096 x 4096 and 11008 x 4096 random codes, groups of 128, as many threads as the machine has cores,
for torch as for BCQ. Weights are affine (F16 scales, packed zero points; 2.16 and 4.16 bits per weight) unless the row
says bcq, or table: codes that stand for the numbers of IQ4_NL. Every result is compared with the float64 product first
(relative error below 1e-5).

The products take turns, eight calls each; the fastest call of a turn counts, and ratios are taken turn by turn. The
figure is the median of the turns, with the lowest and the highest in brackets. *copies in turn*: every call
uses the next of 256 MB of copies of the weight, so that caches do not hold it; the other rows repeat one copy.

torch's products are `torch.mv` in fp32 and bf16, `linear` in bf16, and its int4 kernel for the CPU
(`_weight_int4pack_mm_for_cpu`, bf16 in and out, groups of 128). BCQ takes and returns fp32.

When other processes run, torch's threads wait for each other, and its times grow tenfold; so the figures were taken
with real-time priority: `chrt -r 20 make bench`.

Dot products and look-ups: [decision 24](../decisions/0024-dot-products-on-processors.md).

4096 x 4096 with AVX2 alone, for torch too (`NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+ssse3
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2`, `--quick`; {download}`cpu_kernels_avx2.json`), one weight again
and again: one vector 2.33x torch fp32 at 2 bits, 2.07x at 4, 1.28x for bcq, 1.40x for a table; 8 vectors 1.70x, 1.65x,
0.88x and 1.03x.

With AVX-512 but no VNNI (Skylake-SP, 2 cores; {download}`cpu_kernels_skylake.json`): one vector 5.7 to 7.7x torch fp32
at 2 bits, 3.2 to 4.0x at 4 bits (0.79 to 0.86x torch int4: missed), 3.1 to 3.8x for bcq.

The same on an ARM processor (Neoverse-N1, 2 cores; {download}`cpu_kernels_arm.json`): one vector 2.66x torch fp32 at 2
bits, 2.13x at 4 bits (one of four runs below 2x), 0.65x for bcq with 4 planes; 8 vectors 3.26x, 3.13x and 0.93x. In
plain instructions (`NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES=`) one vector 1.21x, 1.14x and 0.30x, where the goal is
1x. bcq takes a dot product per plane: its levels are no integers. torch has no fast bf16 there.
"""

_FORMAT = f"""\
{_ROUNDS}
Memory is the peak of a separate process as the kernel counts it.

- **Import.** Fresh processes, the clock read inside them around `import bcqfmt`, after `import numpy`, byte code
  compiled before. The package loads its modules when a name is first used, so the first row touches every public name.
  The run stops if this loads torch, numba, click, tqdm or transformers.
- **`validate --deep`.** A folder of random 4-bit weights of 4096 x 4096 (groups of 128, F16 scales, packed zeros) and
  bfloat16 embeddings. It is compared with one SHA-256 over the same files, read in pieces of 4 MiB by one thread, which
  is the floor: every byte has to be read and hashed once.
- **dequantize.** Compared with `(s[..., None].astype("f8") * (codes.astype("f8") - zp)).astype("f2")` on codes that are
  unpacked already (uint8, [out, G, g]), zero points in float64; results must have the same bits. One thread on both
  sides. Floor: 8.4 MB of planes, 0.3 MB of scales and zeros in, 33.6 MB of F16 out.
- **inspect.** `python -m bcqfmt inspect FOLDER` as a whole process, on a folder of sparse files made by
  `tests/benchmarks/sparse_folder.py`: headers, descriptors, index and manifest are real and are read and checked; the
  data are holes.
- **save.** A folder is opened and written again from its files, fsync included. The copy: `shutil.copyfile` and fsync.
- **Planes and headers.** Bytes read are counted by the reader and, independently, by the kernel (`/proc/self/io`).
  Headers near the limit of 25,000,000 bytes are real, the data are holes.
- **Bad inputs.** `tests/benchmarks/bad_inputs.py` makes every input and runs the command on it, one process each.
"""

_LAYERS = """\
Goals of another kind: `quantize --text --method gptq --bits 4` on SmolLM2-135M, 128 x 512 tokens ([What quantization
costs](quality.md)).

| where | measured | goal | |
|---|---|---|---|
| NVIDIA H200 | 80 s; on the GPU 0.7 GB | <= 2 minutes | met |
| two cores of a Xeon, 2.1 GHz, AVX-512 | about 9 minutes, 17.3 s a layer | <= 15 minutes | met |
| two cores of a Neoverse N1 | 867 s, 870 s with start and end of the process | <= 15 minutes | met |
| memory, Neoverse | 1.80 GB, the whole run | <= 2 GB, a layer (0.014 GB), its sums (0.038 GB) | met |
| memory, Xeon | 2.00 GB, three layers; 0.45 of it are libraries of a CUDA build | the same | met |

45 TFLOP are needed: inputs of linear layers, dense and quantized, 30, their products 15. `--token-weights loss` needs
twice as many. All is float32. On the Neoverse a layer takes 54 s of one core: 49 for inputs and products, 4.1 for the
rounding; the whole run 1,640 s of cores, 1.88 of 2 busy.
On the Xeon the command gives blocks from 4 MB on back to the system when they are free. That costs time: from 8 MB on
and with 1024 tokens at a time the whole run took 415 s, but 2.32 GB. From 1 MB on it is 20 s a layer and 1.96 GB.
Resident memory: its peak, on the Xeon sampled every 20 ms; other processes kept its other cores busy.
Training (`--train-scales 2`) takes 26 s more on the H200; memory 1.8 GB, on the GPU 3.0 GB.
"""

_MORE = {"quantizing": _LAYERS}
_HOW = {
    "format": _FORMAT,
    "conversion": _CONVERSION,
    "gguf": _GGUF,
    "scaling": _SCALING,
    "quantizing": _QUANTIZING,
    "cpu_kernels": _CPU,
}


def page(record: dict[str, Any]) -> str:
    """The Markdown text."""
    name = record["name"]
    goals = [row for row in record["results"] if row["met"] is not None]
    others = [row for row in record["results"] if row["met"] is None]
    if name in HIDDEN:
        others = [row for row in others if not row["what"].startswith(HIDDEN[name])]
    met = sum(row["met"] for row in goals)
    lines = [f"# {TITLES[name]}", "", f"{met} of {len(goals)} goals are met.", ""]
    lines += ["| what | measured | goal | |", "|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['measured']} | {row['goal']} | {row['verdict']} |" for row in goals]
    if others:
        lines += ["", "Without a goal:", "", "| what | measured |", "|---|---|"]
        lines += [f"| {row['what']} | {row['measured']} |" for row in others]
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    if name in _MORE:
        lines += ["", _MORE[name].rstrip()]
    lines += ["", "## How it is measured", "", _HOW[name]]
    lines += ["## How to repeat it", "", "```console", f"$ {record['command']}", "```", ""]
    lines.append(f"Measured on {record['date']}: {machine}. All samples are in {{download}}`{name}.json`.")
    return "\n".join(lines) + "\n"
