"""Products with weights on a GPU: which kernel, in which order, and every check before the launch."""

from __future__ import annotations

from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.bits import BitOperand, bit_gemv
from bcqfmt.kernels.mixed import mixed_gemv, takes
from bcqfmt.kernels.operands.device import DeviceOperand, DeviceSegment
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.launch import LIMIT, check_array, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS, PROCESSORS

from .matmul_weight import BATCH_LIMIT, USUAL, MatmulWeight, by_element, in_eights, path_of

__all__ = [
    "BATCH_LIMIT", "MatmulWeight", "dense_copy", "dequantize", "lut_gemv", "matmul", "path_of",
    "takes_addend",
]  # fmt: skip

_FLOATS = ("F16", "BF16", "F32")


def matmul(
    weight: MatmulWeight, x: Any, *, path: str | None = None, addend: Any = None, result: str | None = None
) -> Any:
    """``x W^T`` for x (..., in) float16, bfloat16 or float32 on a GPU; the result (..., out) has the dtype of x.

    ``path``: by default what :func:`path_of` says. ``addend`` (8, out) float32, eight times the same row, is added
    before the sum is rounded; only where :func:`takes_addend` says so. ``result``: another dtype for the result, only
    on the path "look-up".
    """
    found = device.describe(x)
    rows, columns = weight.operand.shape
    if not found.shape or found.shape[-1] != columns:
        raise error("BCQ-E552", found=f"x of shape {list(found.shape)}", expected=f"[..., {columns}]")
    lead, count = found.shape[:-1], found.size // columns
    if addend is not None:
        check_array("addend", addend, ("F32",), (BATCH_LIMIT, rows))
        check_same_device(x=x, addend=addend)
        if path is not None or not takes_addend(weight, count, found.dtype):
            raise error("BCQ-E552", found=f"an addend for {count} vectors", expected="a product that takes_addend")
    if result not in (None, found.dtype) and (path or path_of(weight, count, found.dtype)) != "look-up":
        raise error("BCQ-E552", found=f"a result of {result}", expected="the dtype of x, unless the path is look-up")
    if path is None:
        ready = weight.ready(count, found.dtype, addend is not None)
        # what the kernel does not take as it is goes the long way, on which it is put right or refused
        if ready is not None and found.device == ready.place and found.contiguous and found.address % 16 == 0:
            y = device.empty_like(x, (*lead, rows))
            ready.start(x, y, addend)
            return y
        path = path_of(weight, count, found.dtype)
    vectors = x.reshape(-1, columns)
    if count and path == "dequantize":
        check_same_device(x=x, weight=weight.exact.segments[0].planes)
        return (vectors @ dense_copy(weight, found.dtype).T).reshape(*lead, rows)
    y = device.empty_like(x, (count, rows), result or found.dtype)
    several = weight.several(found.dtype) if path == "bits" else 0
    fast = weight.bits if several else None
    pairs = takes(weight.mixed, found.dtype) if path == "mixed" else 0
    both = weight.mixed if pairs else None
    step = pairs or several or BATCH_LIMIT
    for start in range(0, count, step):
        part, out = vectors[start : start + step], y[start : start + step]
        if both is not None:
            mixed_gemv(both, _aligned(part), out)
        elif fast is None:
            lut_gemv(weight.look_up, part, out=out)
        else:
            _usual_gemv(fast, part, out, addend)
    return y.reshape(*lead, rows)


def takes_addend(weight: MatmulWeight, vectors: int, dtype: str) -> bool:
    """Whether :func:`matmul` takes an addend with that many vectors of ``dtype``: on the path "bits"."""
    return path_of(weight, vectors, dtype) == "bits"


def dense_copy(weight: MatmulWeight, dtype: str) -> Any:
    """The matrix (out, in) that many vectors of ``dtype`` are multiplied with.

    Of 16 bits: what a dense copy has when it is loaded in this type.
    """
    return dequantize(weight.exact, dtype, twice=dtype != "F32")


def _usual_gemv(operand: BitOperand, x: Any, out: Any, addend: Any) -> None:
    """The fast product of x (1..8, in) to ``out``, filled up to a number of vectors that it is compiled for."""
    count = len(x)
    size = next(size for size in USUAL if size >= count)
    if size == count:
        bit_gemv(operand, _aligned(x), out=out, addend=addend if addend is None else addend[:size])
        return
    more = device.empty_like(x, (size, operand.shape[1]))
    more[:count], more[count:] = x, 0
    out[:] = bit_gemv(operand, more, addend=addend if addend is None else addend[:size])[:count]


def _aligned(x: Any) -> Any:
    """x itself, or a copy that starts at a multiple of 16 bytes."""
    return x if device.describe(x).address % 16 == 0 else x + 0


def lut_gemv(operand: DeviceOperand, x: Any, *, out: Any = None, mu: int = 8, threads: int | None = None) -> Any:
    """``x W^T`` by look-up, for x (batch, in) or (in) with batch 1..8, float16, bfloat16 or float32.

    ``out``: (batch, out) float16, bfloat16 or float32, by default a new array in the dtype of x; sums are float32.
    ``mu``: columns of a table, 8 or 4. ``threads`` of a block, at most 256. Same bits at every call.
    """
    device.require_cuda()
    from bcqfmt.kernels.lut import kernel as cuda_kernels

    rows, columns = operand.shape
    if operand.layout != "lut-gemm":
        raise error("BCQ-E552", found=f"an operand in layout {operand.layout}", expected="lut-gemm")
    if mu not in (4, 8):
        raise error("BCQ-E552", found=f"mu={mu}", expected="4 or 8")
    flat = len(device.describe(x).shape) == 1
    x = x.reshape(1, -1) if flat else x
    seen = check_array("x", x, _FLOATS, (None, columns), 2)
    batch = seen.shape[0]
    if not 1 <= batch <= BATCH_LIMIT:
        raise error("BCQ-E552", found=f"{batch} vectors", expected=f"1..{BATCH_LIMIT}; matmul takes any number")
    y = device.empty_like(x, (batch, rows), seen.dtype) if out is None else out.reshape(1, -1) if flat else out
    result = check_array("out", y, _FLOATS, (batch, rows), 2).dtype
    check_same_device(x=x, out=y, weight=operand.segments[0].planes)
    block = _block(threads, cuda_kernels.THREADS)
    splits = [_splits(segment, rows, mu, batch, block) for segment in operand.segments]
    if sum(splits) * batch * rows > LIMIT:
        raise error("BCQ-E554", found=f"{sum(splits) * batch * rows} partial sums", expected=f"at most {LIMIT}")
    partial = device.empty_like(x, (sum(splits), batch, rows), "F32")
    kind = KINDS[seen.dtype]
    tall = -(-rows // block)
    for k, segment in enumerate(operand.segments):
        aligned, reordered = segment.group_size % mu == 0, operand.perm is not None
        chunks = cuda_kernels.chunks_of(segment.width, segment.group_size, mu)
        launched = cuda_kernels.gemv(segment.bits, mu, batch, kind, aligned, reordered)
        launched.launch(
            (tall, splits[k]), block,
            segment.planes, segment.first, segment.second, x, operand.perm if reordered else segment.planes, partial,
            rows, columns, segment.start, segment.width, segment.group_size, -(-segment.group_size // mu), chunks,
            -(-chunks // cuda_kernels.tables_of(mu, batch)), sum(splits[:k]),
            shared=cuda_kernels.shared_bytes(mu, batch),
        )  # fmt: skip
    outliers = operand.indptr is not None
    count = device.describe(operand.indices).size if outliers else 0
    csr = (operand.indptr, operand.indices, operand.added) if outliers else (partial, partial, partial)
    wide = -(-rows * (cuda_kernels.SHARERS if outliers else 1) // block)
    cuda_kernels.reduce(batch, kind, KINDS[result], outliers).launch(
        (wide, batch), block, partial, y, x, *csr, rows, columns, sum(splits), count
    )
    return y.reshape(-1) if flat and out is None else y if out is None else out


def _block(threads: int | None, limit: int) -> int:
    """Threads of a block: whole warps, as many as the kernels were compiled for by default."""
    if threads is None:
        return limit
    if threads % 32 or not 32 <= threads <= limit:
        raise error("BCQ-E552", found=f"{threads} threads", expected=f"a multiple of 32 up to {limit}")
    return threads


def _splits(segment: DeviceSegment, rows: int, mu: int, batch: int, threads: int) -> int:
    """Among how many blocks the tiles of a row are shared out: enough for four blocks a processor."""
    from bcqfmt.kernels.lut import kernel as cuda_kernels

    tiles = -(-cuda_kernels.chunks_of(segment.width, segment.group_size, mu) // cuda_kernels.tables_of(mu, batch))
    wanted = -(-4 * PROCESSORS // -(-rows // threads))
    return max(1, min(tiles, wanted, 65535))


def dequantize(
    operand: DeviceOperand, dtype: Any = None, *, out: Any = None, threads: int | None = None, twice: bool = False
) -> Any:
    """The dense matrix (out, in) in ``dtype`` (by default the logical one), the bits of the normative decoder.

    ``out``: where to write it, contiguous and 16-byte aligned. ``twice``: rounded to the logical dtype first and then
    to ``dtype``, as in a dense copy that is loaded in another type.
    """
    device.require_cuda()
    from bcqfmt.kernels.dequant import rows as dequant_rows
    from bcqfmt.kernels.dequant.kernel import decoding_of, rows_kernel
    from bcqfmt.kernels.dequant.reorder import reorder_columns
    from bcqfmt.kernels.dequant.values import PATCHES

    if operand.layout != "canonical":
        raise error("BCQ-E552", found=f"an operand in layout {operand.layout}", expected="canonical")
    name = operand.dtype if dtype is None else device.dtype_name(dtype)
    rows, columns = operand.shape
    planes = operand.segments[0].planes
    if out is None and rows * columns > LIMIT:
        raise error("BCQ-E554", found=f"{rows * columns} elements", expected=f"at most {LIMIT}")
    dense = device.empty_like(planes, operand.shape, name) if out is None else out
    check_array("out", dense, (name,), operand.shape, 16)
    check_same_device(out=dense, weight=planes)
    block = _block(threads, dequant_rows.THREADS)
    twice = twice and name != operand.dtype
    quick, together = in_words(operand, name), dequant_rows.rows_together(columns)
    fused = operand.perm is not None and quick == [True]  # put in order in the same launch
    for segment, fast in zip(operand.segments, quick, strict=True):
        if not fast:
            _elements(operand, segment, dense, name, 0, block, twice)
            continue
        decoding = decoding_of(segment, KINDS[operand.dtype], KINDS[name], twice, fused)
        warps = block // 32
        grid = (-(-rows // together),) if fused else (-(-rows // warps), -(-segment.words // 32))
        rows_kernel(decoding).launch(
            grid, block, segment.planes, segment.first, segment.second, dense, operand.stored if fused else dense, rows,
            columns, segment.start, segment.width, segment.words, segment.groups, segment.group_size // decoding.unit,
            together, shared=dequant_rows.shared_bytes(columns, together) if fused else dequant_rows.PIECE * warps,
        )  # fmt: skip
    if operand.perm is not None and all(quick) and not fused:
        reorder_columns().launch(
            (-(-rows // together),), block, dense, operand.stored, rows, columns, together,
            shared=2 * columns * together,
        )  # fmt: skip
    if operand.indptr is not None and device.describe(operand.indices).size:
        for segment in operand.segments:
            _elements(operand, segment, dense, name, PATCHES[operand.mode], block, twice)
    return dense


def in_words(operand: DeviceOperand, dtype: str) -> list[bool]:
    """Which segments the fast kernels take, which decode 32 columns at a time; all or none of a reordered weight."""
    if dtype not in ("F16", "BF16"):
        return [False] * len(operand.segments)
    if operand.perm is not None:
        return [not by_element(operand)] * len(operand.segments)
    return [s.words <= 32 * 65535 and in_eights(s, operand.columns) for s in operand.segments]


def _elements(
    operand: DeviceOperand, segment: DeviceSegment, dense: Any, name: str, patch: int, block: int, twice: bool
) -> None:  # fmt: skip
    from bcqfmt.kernels.dequant.elements import elements
    from bcqfmt.kernels.dequant.values import FORMULAS

    formula, numbers = FORMULAS[segment.formula], "f64" if segment.numbers == "F64" else "f32"
    reordered = operand.perm is not None
    order = operand.stored if reordered else segment.planes
    csr = (operand.indptr, operand.indices, operand.values) if patch else (segment.planes,) * 3
    count = device.describe(operand.indices).size if patch else 0
    wide = 1 if patch else -(-(operand.columns if reordered else segment.width) // block)
    tall = 65535 if patch else max(1, 32 * PROCESSORS // wide)  # several rows a thread: what they share is found once
    kinds = KINDS[operand.dtype], KINDS[name]
    elements(segment.bits, formula, numbers, *kinds, reordered, patch, twice).launch(
        (wide, min(operand.rows, tall)), 32 if patch else block,
        segment.planes, segment.first, segment.second, order, *csr, dense, operand.rows, operand.columns,
        segment.start, segment.width, segment.group_size, count,
    )  # fmt: skip
