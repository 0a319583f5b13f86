"""``x W^T`` by look-up, for any weight in the linear reading: checks and launches; the kernels are in `kernel`."""

from __future__ import annotations

from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.operands.device import DeviceOperand
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_product, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT, PROCESSORS

BATCH_LIMIT = 8  # vectors of one launch


def lut_gemv(operand: DeviceOperand, x: Any, *, out: Any = None) -> Any:
    """``x W^T`` by look-up, for x (batch, in) or (in) with batch 1..8, float16, bfloat16 or float32.

    ``out``: (batch, out) float16, bfloat16 or float32, by default a new array in the dtype of x; sums are float32.
    Same bits at every call.
    """
    device.require_cuda()
    if operand.layout != "lut-gemm":
        raise error("BCQ-E552", found=f"an operand in layout {operand.layout}", expected="lut-gemm")
    flat = len(device.describe(x).shape) == 1
    x, y = (a.reshape(1, -1) if flat and a is not None else a for a in (x, out))
    _, _, y, _ = check_product(operand.shape, x, y, BATCH_LIMIT, align=2)
    check_same_device(x=x, out=y, weight=operand.segments[0].planes)
    multiply(operand, x, y)
    return y.reshape(-1) if flat and out is None else y if out is None else out


def multiply(operand: DeviceOperand, x: Any, y: Any, addend: None = None) -> None:
    """The launches of :func:`lut_gemv` for arrays that were checked: x (batch, in), y (batch, out); no addend."""
    from . import kernel

    (rows, columns), batch, threads = operand.shape, len(x), kernel.THREADS
    kind, result = KINDS[device.describe(x).dtype], KINDS[device.describe(y).dtype]
    reordered = operand.perm is not None
    early = device.capability(device.gpu_of(operand.segments[0].planes)) >= (9, 0)
    tiles = sum(segment.tiles for segment in operand.segments)
    if tiles * batch * rows > LIMIT:
        raise error("BCQ-E554", found=f"{tiles * batch * rows} partial sums", expected=f"at most {LIMIT}")
    partial, first = device.empty_like(x, (tiles, batch, rows), "F32"), 0
    for segment in operand.segments:
        span = kernel.span_of(segment.width, segment.group_size)
        per_group = -(-min(segment.group_size, segment.width) // (kernel.CHUNK * span))
        # blocks with the same table share the rows: as many as the processors hold at once
        most = kernel.blocks_of(segment.bits, span) * PROCESSORS // (segment.tiles * batch)
        sharing = max(1, min(-(-rows // threads), most, 65535))
        kernel.gemv(segment.bits, span, kind, reordered, segment.numbers == "F16", early).launch(
            (segment.tiles, sharing, batch), threads,
            segment.planes, segment.first, segment.second, x, operand.perm if reordered else segment.planes, partial,
            rows, columns, segment.start, segment.width, segment.group_size, segment.groups, per_group, first,
            shared=kernel.SHARED,
        )  # fmt: skip
        first += segment.tiles
    outliers = operand.indptr is not None
    csr = (operand.indptr, operand.indices, operand.added) if outliers else (partial, partial, partial)
    wide = -(-rows * kernel.sharers_of(outliers) // threads)
    kernel.reduce(batch, kind, result, outliers, early).launch(
        (wide, batch), threads, partial, y, x, *csr, rows, columns, tiles, operand.count, early=early
    )
