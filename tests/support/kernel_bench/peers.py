"""Times of other kernels for the same product: torch's float16 (cuBLAS), tinygemm, the published LUT-GEMM and Marlin.

Each gives median microseconds and its result (batch, rows).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from bcqfmt.bench import CYCLED, replayed

from .weights import Weight

__all__ = ["Peer", "cublas", "cublas_of", "marlin", "published", "tinygemm"]


class Peer(NamedTuple):
    """Microseconds and the result; None where the peer had another matrix."""

    microseconds: float
    y: Tensor | None


def cublas(rows: int, columns: int, batch: int, dtype: torch.dtype = torch.float16) -> float:
    """Microseconds of torch's product with any matrix."""
    dense = torch.randn(rows, columns, device="cuda", dtype=dtype)
    return cublas_of(dense, torch.randn(batch, columns, device="cuda", dtype=dtype)).microseconds


def cublas_of(dense: Tensor, x: Tensor) -> Peer:
    """torch's product with this matrix (rows, columns), x (batch, columns)."""
    count = max(2, min(16, CYCLED // (dense.numel() * dense.element_size()) + 1))
    weights = [dense, *(dense.clone() for _ in range(count - 1))]
    vectors = x[0] if len(x) == 1 else x.T.contiguous()
    taken = replayed(lambda i: torch.matmul(weights[i % count], vectors), 2 * count)
    return Peer(taken, torch.matmul(dense, vectors).reshape(len(dense), -1).T)


def tinygemm(weight: Weight, x: Tensor) -> Peer:
    """torch's own product with 4 bits, in bfloat16; one vector."""
    rows, columns = weight.shape
    count = max(2, min(32, CYCLED * 2 // (rows * columns) + 1))
    codes, pairs = weight.tinygemm()
    first = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    packed, g = [first, *(first.clone() for _ in range(count - 1))], weight.group_size
    vector = x.bfloat16()

    def call(i: int) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm(vector, packed[i % count], g, pairs)
        return y

    taken = replayed(call, 2 * count)
    return Peer(taken, call(0) if weight.formula == "affine" else None)


def marlin(library: str, rows: int, columns: int, x: Tensor) -> Peer:
    """Marlin with 4 random bits in groups of 128: what it multiplies does not change its time."""
    function, batch = ctypes.CDLL(library).marlin, len(x)
    count = max(2, min(16, CYCLED * 2 // (rows * columns) + 1))
    whole = torch.iinfo(torch.int32)
    words = [
        torch.randint(whole.min, whole.max, (columns // 16, 2 * rows), device="cuda", dtype=torch.int32)
        for _ in range(count)
    ]
    scale = torch.rand(columns // 128, rows, device="cuda").half()
    y, locks = x.new_empty(batch, rows), torch.zeros(rows, device="cuda", dtype=torch.int32)

    def call(i: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, words[i % count], y, scale, locks)]
        if function(*places, batch, rows, columns, 128, stream):
            raise ValueError(f"Marlin does not multiply {batch} vectors with {rows} x {columns}")

    return Peer(replayed(call, 2 * count), None)


def published(library: str, weight: Weight, x: Tensor) -> Peer:
    """The published kernel with its own defaults: tiles of 32 columns, results cleared before; one vector."""
    function = ctypes.CDLL(library).lutgemm_bias
    (rows, columns), q = weight.shape, weight.bits
    count = max(2, min(40, CYCLED * 8 // (rows * columns * q) + 1))
    words, alpha, bias = weight.lut_gemm()
    planes = [words, *(words.clone() for _ in range(count - 1))]
    y = torch.empty(1, rows, device="cuda", dtype=torch.float16)

    def call(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (y, planes[i % count], alpha, bias, x)]
        function(*places, rows, columns, q, weight.group_size, 32, ctypes.c_void_p(stream))

    return Peer(replayed(call, 2 * count), y)
