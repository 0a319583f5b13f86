"""Options that a verb does not have: the one of another name that was meant."""

from __future__ import annotations

import click

# words for one thing, in other tools or in other verbs; which of them a verb has is its own business
_SAME = (
    ("--html", "--report", "--out", "--output", "--output-file", "--plot", "-o"),
    ("--context", "--seq", "--seqlen", "--seq-len", "--ctx-size", "--max-length", "--window"),
    ("--max-tokens", "--tokens", "--max-new-tokens", "--n-predict", "--limit"),
    ("--group-size", "--groups", "--groupsize", "--q-group-size", "--block-size"),
    ("--bits", "--wbits", "--w-bit", "--q", "--planes"),
    ("--lowest-bits", "--seed-precision", "--min-bits"),
    ("--workers", "--threads", "--jobs", "--num-workers", "-j"),
    ("--overwrite", "--force", "--yes", "-f", "-y"),
    ("--to", "--format", "--layout", "--from", "--type"),
    ("--text", "--dataset", "--corpus", "--file", "--data"),
    ("--reference", "--against", "--baseline", "--compare"),
    ("--tasks", "--task", "--benchmarks"),
    ("--task-folder", "--include-path"),
    ("--stats", "--calibration", "--imatrix", "--hessian"),
    ("--zero-point", "--zeros", "--zero-points"),
    ("--dtype", "--torch-dtype", "--precision"),
    ("--device", "--gpu", "--cuda", "--device-map"),
    ("--temperature", "--temp", "-t"),
    ("--prompt", "-p", "--input"),
    ("--deep", "--full", "--strict"),
    ("--version", "-v", "-V"),
    ("--debug", "--verbose", "-v"),
    ("--revision", "--branch", "--commit"),
    ("--resume", "--continue"),
    ("--exclude", "--ignore", "--skip"),
    ("-n", "--rows", "--samples", "--nsamples"),
)


def near_options(name: str, ctx: click.Context) -> list[str]:
    """The options of the verb that mean what ``name`` means elsewhere; empty without any."""
    mine = {word for param in ctx.command.get_params(ctx) if isinstance(param, click.Option) for word in param.opts}
    return [word for same in _SAME if name in same for word in same if word in mine]
