"""``x W^T`` on a GPU for any number of vectors: checks and launches; `matmul_weight` chooses the kernel."""

from __future__ import annotations

from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import KINDS

from .matmul_weight import BATCH_LIMIT, MatmulWeight, Path, Product, path_of

__all__ = ["BATCH_LIMIT", "MatmulWeight", "Path", "matmul", "path_of"]


def matmul(
    weight: MatmulWeight, x: Any, *, path: str | None = None, addend: Any = None, result: str | None = None
) -> Any:
    """``x W^T`` for x (..., in) float16, bfloat16 or float32 on a GPU; the result (..., out) has the dtype of x.

    ``path``: by default what :func:`path_of` says. ``addend`` (8, out) float32, eight times the same row, is added
    before the sum is rounded; only where :func:`path_of` gives "bits" or "gemm". ``result``: another dtype for the
    result, only on the path "look-up".
    """
    found = device.describe(x)
    rows, columns = weight.operand.shape
    if not found.shape or found.shape[-1] != columns:
        raise error("BCQ-E552", found=f"x of shape {list(found.shape)}", expected=f"[..., {columns}]")
    count, result = found.size // columns, result or found.dtype
    product = weight.product(count, found.dtype, path, addend is not None)
    if addend is not None and (path is not None or product.path not in ("bits", "gemm")):
        raise error("BCQ-E552", found=f"an addend for {count} vectors", expected="the path bits or gemm")
    if addend is not None:
        check_array("addend", addend, ("F32",), (BATCH_LIMIT, rows))
        check_same_device(x=x, addend=addend)
    if result != found.dtype and product.path != "look-up":
        raise error("BCQ-E552", found=f"a result of {result}", expected="the dtype of x, unless the path is look-up")
    here = found.device == product.place and (found.device >= 0 or device.simulated())
    if product.start is not None and here and found.contiguous and found.address % 16 == 0:
        y = device.empty_like(x, (*found.shape[:-1], rows))
        product.start(x, y, addend)
        return y
    if product.dense is not None:
        if not here:
            check_same_device(x=x, weight=product.array)
        return x @ product.dense().T
    if count == 0:
        return device.empty_like(x, (*found.shape[:-1], rows), result)
    return _in_parts(weight, product, x.reshape(-1, columns), addend, result).reshape(*found.shape[:-1], rows)


def _in_parts(weight: MatmulWeight, product: Product, x: Any, addend: Any, result: str) -> Any:
    """The product of x (count, in), at most ``product.step`` vectors in one launch."""
    check_array("x", x, tuple(KINDS), (None, None), 2)
    check_same_device(x=x, weight=product.array)
    assert product.multiply is not None
    y = device.empty_like(x, (len(x), weight.operand.shape[0]), result)
    for start in range(0, len(x), product.step):
        product.multiply(x[start : start + product.step], y[start : start + product.step], addend)
    return y
