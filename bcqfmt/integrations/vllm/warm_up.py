"""Everything that the products of a layer need, made while vLLM loads a model: nothing is left for a request.

vLLM measures how much memory is free, after loading, for its cache of keys and values. What a product makes when it
first runs (the layout of a kernel, its machine code) has to be there by then. So every product is run once, for every
number of vectors that chooses another kernel. Machine code is cached on disk (`bcqfmt.kernels.runtime.cubins`); of
several workers that start at the same time one compiles, and the others read what it has written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.config.vllm import get_current_vllm_config_or_none

from bcqfmt.integrations.torch.embedding import BcqEmbedding
from bcqfmt.integrations.torch.layers import BcqModule
from bcqfmt.kernels.gemm import least_part
from bcqfmt.kernels.gemm.shape import WIDTH_STEP
from bcqfmt.kernels.runtime.cubins import cache_folder
from bcqfmt.system import lock_file

_EACH = 64  # up to this many vectors, every number may have a kernel of its own
_log = logging.getLogger(__name__)
_seen: set[tuple[object, ...]] = set()  # what was compiled in this process


def vector_counts(largest: int, shape: tuple[int, int]) -> list[int]:
    """Numbers of vectors that use every kernel of 1..largest for a matrix (out, in).

    Each up to 64, multiples of 16, the largest. Twice the least part and more are multiplied in parts.
    """
    most = min(largest, 2 * least_part(shape) - 1)
    each, further = range(1, min(most, _EACH) + 1), range(_EACH + WIDTH_STEP, most, WIDTH_STEP)
    return [*each, *further, *([most] if most > _EACH else [])]


def warm_up(piece: BcqModule, dtype: torch.dtype, device: torch.device, bias: Tensor | None = None) -> None:
    """Run the products of a layer with vectors of ``dtype``; of layers that are alike the first compiles for all."""
    known = get_current_vllm_config_or_none()
    largest = 1 if known is None else int(known.scheduler_config.max_num_batched_tokens)
    shape = piece.spec.out, piece.spec.columns
    counts = sorted({*vector_counts(largest, shape), piece.spec.columns})  # MLA multiplies with the unit matrix
    key = (piece.text, dtype, str(device), bias is None, largest)
    if key in _seen:  # compiled already: a few numbers are enough to make every layout
        counts = [count for count in counts if count in (1, 2, 4, 8, 16, 32, 64, counts[-1])]
    with torch.no_grad(), _alone() if device.type == "cuda" else contextlib.nullcontext():
        x = torch.zeros(counts[-1], piece.spec.columns, dtype=dtype, device=device)
        for count in counts:
            piece.product(x[:count], bias)
        if key not in _seen:
            _warn_if_slow(piece, dtype, min(counts[-1], _EACH if device.type == "cuda" else 1))
        if device.type == "cuda":
            piece.release(dtype, counts)
    _seen.add(key)


def _warn_if_slow(piece: BcqModule, dtype: torch.dtype, count: int) -> None:
    """A warning if products of ``count`` vectors decode the whole matrix; most weights have a fast kernel for them."""
    path = piece.path(count, dtype)
    if path.kernel in ("dequantize", "values"):
        _log.warning("%s: products of %d vectors decode the whole matrix, which is slow: %s", piece, count, path.why)


def warm_up_rows(piece: BcqEmbedding, device: torch.device) -> None:
    """Decode a row of an embedding: the kernel is the same for any number of them."""
    with torch.no_grad(), _alone() if device.type == "cuda" else contextlib.nullcontext():
        piece(torch.zeros(1, dtype=torch.int64, device=device))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While no other process is in here; at once where the cache of compiled kernels cannot be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            lock_file(stack.enter_context((folder / "warm-up.lock").open("a")).fileno(), wait=True)
        yield
