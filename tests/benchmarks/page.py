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
all of them alike. A conversion reads the source twice (to convert, to hash), goes back from the new planes to the
source's words to compare them (strip by strip, while they are in the cache), writes once, and hashes three times: the
source's bytes, the new file's, and every weight's. A file's digest needs its bytes one after the other, with the
processor's SHA instructions; the other two can be made sixteen streams at a time where it has AVX-512. On a processor
with both, all go through one loop: 16 blocks of a file that is being written, and two blocks of each of eight files of
the source and eight weights. Whoever converts and writes never waits for digests. One thread takes what is there, from
the page cache, so however far it is behind, it takes no memory: what was written is mapped, the source is read. When
everything is written, everybody helps. A shard's record follows when its digests are there, about a gigabyte later at
most. Whoever converts gives way to that thread (a niceness of 5): a source's digests take longest of all. Of the
processor time that loop takes 46 %, digests without company 1 to 8 %, packing and the way back 14 %, copies
out of the page cache 12 %, into it 6 %, the rest of the file system and of memory 10 %, Python 8 %, numpy 2 % (one
profile, of another run than the table, of 5.2 core-seconds).

**How far half the speed of the copy is.** What each pass costs by itself in one thread, the best of many repetitions:
one block of all lanes and eight of the file 0.5 us; one digest 1.45 GB/s (hashlib), sixteen 2.9; reading from the page
cache 7 to 8 GB/s, mapping it 50, writing to it 4; packing a layer of 22.5 MB and going back 5 ms when other layers are
not in the way, 7 ms when source and planes come from memory. For 2.06 GB that is 2.0 core-seconds for all digests, 0.6
for reading twice, 0.1 for mapping twice, 0.6 for packing and the way back, 0.5 for writing; with 0.4 for Python 4.2
together, or 2.1 s on two cores that never wait. It takes 5.0 to 5.3 core-seconds in 2.7 to 2.9 s, beside a copy of 1.3
to 1.6 s: eight rounds in turn with the code before, which packed by way of memory and gave way to nobody. That one
takes 1.10 times as long and 1.10 times the processor time (medians of the six rounds that nobody else disturbed). Of
these six, four were at least half as fast as the copy, their median is 0.53 (0.49 before). The machine's processors,
memory and disk are used by others as well: two threads that only count lose 10 to 17 % of their time, at times half
of it, and the copy takes 1.3 to 2.6 s. So the verdict above is not certain. With the code as it is, the page was
measured six times and found 0.51, 0.55, 0.50, 0.53, 0.497 and 0.51 (median 0.51); the table is the last. Before it,
a thread made the next planes while the last ones were written: without it the same speed takes 70 MiB less. Three
runs earlier that evening found 0.49, 0.50 and 0.62. Digests and copies, without which nobody can do, are two thirds
of the time.

**What did not help.** Two files in one loop with sixteen lanes (1800 cycles for 32 blocks; with one file it is 2800 for
48): there are not so many lanes. One file and sixteen lanes in each of two threads: eight files of a source and the
weights that wait are streams enough for one such loop, so one core waited for the other. Lanes without a file as soon
as the source is behind (6 % slower, median of four rounds); files of the source in the place of the one that is written
(750 MB of files were then hashed alone). Leaving the last weights to those who write them: no difference that could be
told from the noise. A niceness of 10: conversions stand still (5 % slower than with 5). Tensors in pieces of 8 MB: more
of them wait, and nothing is in the cache (20 % more processor time). Reading smaller pieces of a layer, large pages:
the same. The way back alone, from planes to words that are far apart, in registers: 20 to 40 % slower than by way of a
tile. Planes written around the cache would save a fifth of packing, but then the way back would not begin with what
goes to the file. Other distances between rows, smaller rows, other distances of prefetching: the same. What helped
besides: a descriptor of its own for every file of the source that is hashed (reading locks the other one for
milliseconds), and one copy for all lanes of a strip where nothing lies between them (8 % of packing).
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
floor is one pass: every byte is read and hashed once for its file. The digests of the single weights are a second
hash over nearly the same bytes; it runs in a second thread while the first one hashes the file, so two cores are
busy. The row "held on one core" shows what it costs where there is only one.

**dequantize.** The comparison is `(s[..., None].astype("f8") * (codes.astype("f8") - zp)).astype("f2")` on codes that
are unpacked already (uint8, [out, G, g]), zero points in float64. Bit equality with it is checked first. One thread
on both sides. Floor: 8.4 MB of planes, 0.3 MB of scales and zeros in, 33.6 MB of F16 out; the comparison moves the
33.6 MB and 16.8 MB of codes, and its float64 intermediates besides.

**inspect.** `python -m bcqfmt inspect FOLDER` as a whole process, on a folder of sparse files that
`tests/benchmarks/sparse_folder.py` makes: headers, descriptors, index and manifest are real, and all of them are read
and checked; the data are holes and are not touched. Floor: the bytes of headers, index and manifest, given in the
row.

**save.** A folder is opened and written again from its files, fsync included. Content is checked, then every byte is
hashed twice (file and weight) on its way. The copy is `shutil.copyfile` and fsync.

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
        f"{goals - missed} of {goals} goals are met. The samples are in `{record['name']}.json` beside this page.",
        "",
    ]
    lines += ["| what | measured | goal | verdict |", "|---|---|---|---|"]
    for row in record["results"]:
        lines.append(f"| {row['what']} | {row['measured']} | {row['goal'] or '-'} | {row['verdict']} |")
    notes = {"conversion": _CONVERSION, "quantizing": _QUANTIZING, "scaling": _SCALING, "cpu_kernels": _CPU}
    return "\n".join([*lines, "", notes.get(record["name"], _NOTES)])
