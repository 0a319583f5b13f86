"""Kernels of a benchmark compiled before it, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from typing import Any

import torch

from bcqfmt.kernels.gemm.kernel import gemm_kernel
from bcqfmt.kernels.gemm.shape import GemmShape
from bcqfmt.kernels.matmul import matmul
from bcqfmt.kernels.runtime.cubins import code_of

from .chosen import chosen
from .weights import random_vectors

__all__ = ["Jobs", "choose", "compile_all"]

# shapes of `gemm`; of other products formula or table, bits, rows, columns, group size and vectors
Jobs = dict[GemmShape | tuple[Any, ...], None]


def choose(capability: str) -> None:
    """This process compiles for another GPU than it has, if one is named (``8.0``)."""
    if capability:
        os.environ["BCQFMT_CAPABILITY"] = capability


def compile_all(jobs: Jobs, capability: str = "") -> None:
    """All kernels are in the cache of compiled kernels, and with ``capability`` in that of the driver."""
    # what takes longest comes first: kernels for few vectors, then long stages and 3 bits
    ordered = sorted(
        jobs,
        key=lambda job: -job.depth * job.height * (1 + job.layout.bits % 2) if isinstance(job, GemmShape) else -1000,
    )
    workers = max(1, (os.cpu_count() or 2) - 1)
    with multiprocessing.get_context("spawn").Pool(workers, choose, (capability,)) as pool:
        pool.map(partial(_compile, capability=torch.cuda.get_device_capability()), ordered, chunksize=1)


def _compile(job: GemmShape | tuple[Any, ...], capability: tuple[int, int]) -> None:
    if isinstance(job, GemmShape):
        code_of(gemm_kernel(job), capability)
        return
    formula, q, rows, columns, g, count = job
    _weight, ready = chosen(formula, q, rows, columns, g)
    matmul(ready, random_vectors(count, columns))
    torch.cuda.synchronize()
