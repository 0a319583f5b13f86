"""A page of docs/benchmarks from the figures of one run."""

from __future__ import annotations

from typing import Any

TITLES = {
    "format": "The format's core",
    "conversion": "Conversion",
    "scaling": "Large models",
    "quantizing": "Quantizing",
    "cpu_kernels": "Products on the CPU",
}

_CONVERSION = """## How it is measured

Things that are compared run in turn in one process, after one round to warm up; a ratio is taken within each round.
A figure is the median of the rounds, in brackets the lowest and the highest. All files are in the page cache.

**Compilation.** Import and first calls in a new process whose numba cache is empty, less the same with what it has left
there; each three times, medians. Python's own bytecode is there, as after an installation: a process that is not
counted comes first. By itself a first process took 2.1 to 4.0 s in nine runs, on a machine that others use as well.

**Packers.** One 4-bit layer of 11008 x 4096, two threads. The floor is `np.copyto` of as many bytes as go in and come
out. The peers' packers run in a Python of their own (BCQFMT_PEER_PYTHON) in the same rounds, where it has them: the
same layer, `pack_to_int32` from int8 codes, GPTQModel's `pack` from weights, scales and zeros.

**`convert`, `verify`, `restore`.** Random words in the GPTQ layout, four output shards, two workers, fsync included.
The copy is `cp -r --reflink=never` and `sync -f`. What the last round has left is removed before the clock starts, for
all of them alike. A conversion reads the source three times (to convert, to compare, to hash), packs every layer,
rebuilds its words from the new planes and compares them with the source, writes once, and hashes twice: the source's
files and the new ones. `verify` reads both folders, rebuilds and compares every file and hashes it once; `restore`
rebuilds, hashes and writes. All digests are hashlib's, which uses the processor's SHA instructions: one SHA-256 over
the source, in one thread, stands in the row for comparison.

**Where the time goes.** One thread, one layer of 22.5 MB, Neoverse-N1: one SHA-256 14 ms, packing 5 to 10, rebuilding 8
to 16 (the larger figures with other processes on the machine), reading from the page cache 3, comparing 2, writing 4
to 7. So the two digests are between a third and a half of a conversion.
"""

_SCALING = """## How it is measured

`tests/benchmarks/sparse_source.py` makes a GPTQ checkpoint with the names and shapes of a mixture of experts of 671
billion parameters. Headers, index and configuration are real; the data are holes, so that 353 GB take up 40 MB. All
headers are read and checked, every zero point is looked at, every tensor is placed. Processes as a whole, start-up
included. Memory is the peak of the process as the kernel counts it; it follows the number of tensors, about 1.7 kB for
each, and neither the number of files nor the size of the data. What a real disk adds is reading headers and zero
points (here 21 MB and 2.6 GB), once.

**One conversion, three ways.** Random words in the GPTQ layout, 8 output shards, fsync included; whole commands in
turn, after one round to warm up, all files in the page cache. All three make the same manifest, which is checked. The
machine is the same for all of them, with two cores: it shows what each way costs, not how it scales. `finalize` hashes
every shard again, which a run in one process and a run on Ray do not. Ray's processes and its driver share the two
cores with the work.
"""

_QUANTIZING = """## How it is measured

One weight of 4096 x 4096, normal numbers rounded to F16. Loops are compiled before the clock runs; what compiling costs
has rows of its own.

**rtn.** One thread; the variants run in turn, after one round to warm up. A figure is the median of the rounds, in
brackets the lowest and the highest. Input counts as F16, two bytes per weight.

**bcq.** `published_bcq.py` is the published algorithm for torch, written anew: greedy start, conjugate gradients on all
groups at once, bisection in the sorted sums. It has no bias, so the goal is that of `bcq` without one, which starts
from two places. With a bias `bcq` looks for more and starts from four. All of them get every core. torch runs once,
`bcq` before and after it.

**multi.** Mean squared error at p planes over that of p planes of their own: found by `bcq`, which starts from several
places, and without a bias also by the published algorithm, which does not get as far. The first two planes are those of
2-bit `bcq`, bit for bit, which bounds what the others can do; the smaller the groups, the more. How much at three
planes is known: a third plane cuts the sorted numbers of each of the four codes in two, so all the third planes that
can be best are tried, about a million per group, each with the scales of least squares. With a bias and groups of 128
even the best of them is above 1.15 times `bcq`, so that goal cannot be met with this seed. Asked for three planes
alone, `multi` finds that best; asked for four, it gives up as much of it as the fourth needs. More weights, and a bound
for four planes: `nested.md`.
"""

_CPU = """## How it is measured

y = W x, W of 4096 x 4096 and 11008 x 4096 random codes, groups of 128, as many threads as the machine has cores, for
torch as for BCQ. "affine" (F16 scales, packed zero points; 2.16 and 4.16 bit) unless the row says bcq. The result of
every weight is compared with the float64 product first (relative error below 1e-5).

Contenders take turns, eight calls each; of these the fastest counts, and a ratio is taken turn by turn. A figure is the
median of the turns, in brackets the lowest and the highest. "copies in turn": every call takes the next of 256 MB of
copies of the weight, so that a cache that is smaller than that does not hold it; the others repeat one copy.

torch's contenders are `torch.mv` in fp32 and bf16, `linear` in bf16, and its int4 kernel for the CPU
(`_weight_int4pack_mm_for_cpu`, bf16 in and out, groups of 128). BCQ takes and gives fp32. Goals: twice as fast as fp32
`mv`, and at least as fast as bf16 `mv` and int4.

Where other processes run, torch's two threads wait for each other through whole time slices of the scheduler, and its
times grow tenfold; those of BCQ do not. These figures were taken with real-time priority (`chrt -r 20 make bench ...`),
so that neither was disturbed.

Tables are of four columns: 16 sums fit into a register, and one instruction looks up 16 rows. With eight columns there
are half as many look-ups, in tables of 256 sums in memory; the best such product that was found takes 4 to 11 times as
long (`python tests/benchmarks/models/tables_of_eight.py`, both in turn, 2 and 4 bit, both shapes).
"""

_NOTES = """## How it is measured

Things that are compared run in turn in one process, after one round to warm up; a ratio is taken within each round.
A figure is the median of the rounds, in brackets the lowest and the highest. Memory is the peak of a process of its
own as the kernel counts it. All files are in the page cache.

**Import.** Fresh processes, the clock read inside them around `import bcqfmt`, after `import numpy`, byte code
compiled before. The package loads its modules when a name is first used, so the first row touches every public name.
The run stops if torch, numba, click, tqdm or transformers are loaded by it.

**`validate --deep`.** A folder of random 4-bit weights of 4096 x 4096 (groups of 128, F16 scales, packed zeros) and
bfloat16 embeddings. The comparison reads the same files in pieces of 4 MiB and feeds one SHA-256 in one thread. The
floor is one pass: every byte is read and hashed once. The row "held on one core" shows what checking content costs.

**dequantize.** The comparison is `(s[..., None].astype("f8") * (codes.astype("f8") - zp)).astype("f2")` on codes that
are unpacked already (uint8, [out, G, g]), zero points in float64. Bit equality with it is checked first. One thread
on both sides. Floor: 8.4 MB of planes, 0.3 MB of scales and zeros in, 33.6 MB of F16 out; the comparison moves the
33.6 MB and 16.8 MB of codes, and its float64 intermediates besides.

**inspect.** `python -m bcqfmt inspect FOLDER` as a whole process, on a folder of sparse files that
`tests/benchmarks/sparse_folder.py` makes: headers, descriptors, index and manifest are real, and all of them are read
and checked; the data are holes and are not touched. Floor: the bytes of headers, index and manifest, given in the
row.

**save.** A folder is opened and written again from its files, fsync included. Content is checked, then every byte is
hashed once on its way. The copy is `shutil.copyfile` and fsync.

**Planes and headers.** The bytes read are counted by the reader and, independently, by the kernel (`/proc/self/io`).
Headers near the limit of 25,000,000 bytes are real and the data are holes.

**Bad inputs.** `tests/benchmarks/bad_inputs.py` makes every input and runs the command on it, one process each.
"""


def page(record: dict[str, Any]) -> str:
    """The Markdown text."""
    lines = [f"# {record['title']}", "", f"Measured on {record['date']} with"]
    lines += ["", "```console", f"$ {record['command']}", "```", ""]
    lines.append("on this machine: " + ", ".join(f"{key} {value}" for key, value in record["machine"].items()) + ".")
    missed = sum(row["met"] is False for row in record["results"])
    goals = sum(row["met"] is not None for row in record["results"])
    lines += [
        "",
        f"{goals - missed} of {goals} goals are met. The samples are in `{record['name']}.json` next to this page.",
        "",
    ]
    lines += ["| what | measured | goal | verdict |", "|---|---|---|---|"]
    for row in record["results"]:
        lines.append(f"| {row['what']} | {row['measured']} | {row['goal'] or '-'} | {row['verdict']} |")
    notes = {"conversion": _CONVERSION, "quantizing": _QUANTIZING, "scaling": _SCALING, "cpu_kernels": _CPU}
    return "\n".join([*lines, "", notes.get(record["name"], _NOTES)])
