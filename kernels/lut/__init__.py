"""``x W^T`` by look-up, for any weight in the linear reading: checks and launches; the kernels are in `kernel`."""

from __future__ import annotations

from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.operands.device import DeviceOperand
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT, PROCESSORS

__all__ = ["BATCH_LIMIT", "lut_gemv", "multiply"]

BATCH_LIMIT = 8  # vectors of one launch


def lut_gemv(operand: DeviceOperand, x: Any, *, out: Any = None) -> Any:
    """``x W^T`` by look-up, for x (batch, in) or (in) with batch 1..8, float16, bfloat16 or float32.

    ``out``: (batch, out) float16, bfloat16 or float32, by default a new array in the dtype of x; sums are float32.
    Same bits at every call.
    """
    device.require_cuda()
    rows, columns = operand.shape
    if operand.layout != "lut-gemm":
        raise error("BCQ-E552", found=f"an operand in layout {operand.layout}", expected="lut-gemm")
    flat = len(device.describe(x).shape) == 1
    x = x.reshape(1, -1) if flat else x
    seen = check_array("x", x, tuple(KINDS), (None, columns), 2)
    batch = seen.shape[0]
    if not 1 <= batch <= BATCH_LIMIT:
        raise error("BCQ-E552", found=f"{batch} vectors", expected=f"1..{BATCH_LIMIT}; matmul takes any number")
    y = device.empty_like(x, (batch, rows), seen.dtype) if out is None else out.reshape(1, -1) if flat else out
    check_array("out", y, tuple(KINDS), (batch, rows), 2)
    check_same_device(x=x, out=y, weight=operand.segments[0].planes)
    multiply(operand, x, y)
    return y.reshape(-1) if flat and out is None else y if out is None else out


def multiply(operand: DeviceOperand, x: Any, y: Any, addend: None = None) -> None:
    """The launches of :func:`lut_gemv` for arrays that were checked: x (batch, in), y (batch, out); no addend."""
    from . import kernel

    (rows, columns), batch, threads = operand.shape, len(x), kernel.THREADS
    kind, result = KINDS[device.describe(x).dtype], KINDS[device.describe(y).dtype]
    tall, reordered = -(-rows // threads), operand.perm is not None
    # the tiles of a row are shared out among blocks: enough of them for four blocks a processor
    per_group = [-(-segment.group_size // kernel.CHUNK) for segment in operand.segments]
    chunks = [segment.groups * count for segment, count in zip(operand.segments, per_group, strict=True)]
    tiles = [-(-count // kernel.tables_of(batch)) for count in chunks]
    splits = [max(1, min(count, -(-4 * PROCESSORS // tall), 65535)) for count in tiles]
    if sum(splits) * batch * rows > LIMIT:
        raise error("BCQ-E554", found=f"{sum(splits) * batch * rows} partial sums", expected=f"at most {LIMIT}")
    partial = device.empty_like(x, (sum(splits), batch, rows), "F32")
    for k, segment in enumerate(operand.segments):
        kernel.gemv(segment.bits, batch, kind, segment.group_size % kernel.CHUNK == 0, reordered).launch(
            (tall, splits[k]), threads,
            segment.planes, segment.first, segment.second, x, operand.perm if reordered else segment.planes, partial,
            rows, columns, segment.start, segment.width, segment.group_size, per_group[k], chunks[k], tiles[k],
            sum(splits[:k]), shared=kernel.shared_bytes(batch),
        )  # fmt: skip
    outliers = operand.indptr is not None
    csr = (operand.indptr, operand.indices, operand.added) if outliers else (partial, partial, partial)
    wide = -(-rows * (kernel.SHARERS if outliers else 1) // threads)
    kernel.reduce(batch, kind, result, outliers).launch(
        (wide, batch), threads, partial, y, x, *csr, rows, columns, sum(splits), operand.count
    )
