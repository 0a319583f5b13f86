"""The torch operators in the simulator, where host tensors stand for device tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bcqfmt import BcqWeight
from bcqfmt.integrations.torch.embedding import rows_of
from bcqfmt.integrations.torch.ops import lut
from bcqfmt.kernels.dequant import dequantize
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.operands.device import to_device
from products import kernel_samples as ks

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def products(weight: BcqWeight, dtype: str) -> tuple[Any, Any, Any]:
    """x, ``lut_gemv`` and ``dequantize`` as float32 arrays, through the operators."""
    x = torch.from_numpy(ks.vectors(3, weight.spec.columns)).to(DTYPES[dtype])
    y = lut.lut_gemv(x, to_device(operand(weight), "lut-gemm", "cpu"))
    dense = lut.dequantize(to_device(operand(weight), "canonical", "cpu"), DTYPES[dtype])
    assert (y.dtype, dense.dtype) == (x.dtype, x.dtype)
    return x.float().numpy(), y.float().numpy(), dense.float().numpy()


def embedding_rows(weight: BcqWeight, ids: list[int]) -> Any:
    """Rows of an embedding, as on a GPU."""
    whole = to_device(operand(weight), "canonical", "cpu")
    return dequantize(rows_of(whole, torch.tensor(ids))).numpy()


def checked(weight: BcqWeight) -> dict[str, str]:
    """What torch says of both operators."""
    placed = to_device(operand(weight), "lut-gemm", "cpu")
    pieces = placed.segments
    numbers = ([s.width for s in pieces], [s.group_size for s in pieces])
    x = torch.ones(2, weight.spec.columns, dtype=torch.float16)
    first = torch.library.opcheck(
        torch.ops.bcqfmt.lut_gemv.default,
        (x, [s.planes for s in pieces], [s.first for s in pieces], [s.second for s in pieces], *numbers,
         placed.perm, placed.indptr, placed.indices, placed.added),
    )  # fmt: skip
    placed = to_device(operand(weight), "canonical", "cpu")
    pieces = placed.segments
    second = torch.library.opcheck(
        torch.ops.bcqfmt.dequantize.default,
        ([s.planes for s in pieces], [s.first for s in pieces], [s.second for s in pieces], *numbers,
         ",".join(s.formula for s in pieces), True, torch.float16, torch.bfloat16,
         placed.perm, placed.stored, placed.indptr, placed.indices, placed.values, placed.mode),
    )  # fmt: skip
    return {f"{i} {name}": said for i, found in enumerate((first, second)) for name, said in found.items()}


def traced(weight: BcqWeight) -> tuple[Any, Any]:
    """The product inside a graph that torch.export traced, and outside of it."""
    placed = to_device(operand(weight), "lut-gemm", "cpu")

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return lut.lut_gemv(x * 2, placed) + 1

    x = torch.ones(2, weight.spec.columns)
    program = torch.export.export(Layer(), (x,))
    names = [str(node.target) for node in program.graph.nodes]
    assert any("bcqfmt.lut_gemv" in name for name in names), names
    return program.module()(x).numpy(), Layer()(x).numpy()


def refused(which: str) -> None:
    """Tensors that do not fit one another."""
    placed = to_device(operand(ks.weight("bcq", 2, 6, 64, 32)), "lut-gemm", "cpu")
    (piece,) = placed.segments
    x = torch.ones(1, 64)
    planes, alpha, z, width, group = piece.planes, piece.first, piece.second, 64, 32
    if which == "short planes":
        planes = planes[..., :2]
    elif which == "wide planes":
        planes = planes.long()
    elif which == "short scales":
        alpha = alpha[:1]
    elif which == "wide scales":
        alpha = alpha.double()
    elif which == "transposed biases":
        z = z.T
    elif which == "no group size":
        group = 0
    elif which == "more columns":
        width = 96
    elif which == "strided scales":
        alpha = torch.stack([alpha, alpha], -1)[..., 0]
    elif which == "flat planes":
        planes = planes.reshape(-1)
    groups = [group, group] if which == "two group sizes" else [group]
    words = [] if which == "no planes" else [planes]
    torch.ops.bcqfmt.lut_gemv(x, words, [alpha], [z], [width], groups, None, None, None, None)


def same_as_numpy(weight: BcqWeight) -> bool:
    """Uploading to a host tensor changes no bit."""
    found = to_device(operand(weight), "canonical", "cpu").segments[0]
    own = operand(weight).segments[0]
    return bool(
        np.array_equal(found.planes.numpy().view(np.uint32), own.planes)
        and np.array_equal(found.first.numpy(), own.first)
    )
