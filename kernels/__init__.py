"""From weights to products: operands laid out for a device, and the code that multiplies with them.

Installed as `bcqfmt.kernels`. What a weight means is defined by the normative decoder in `weight.decode`; every kernel
is measured against it. Code here works on weights in memory, never on files, and never imports `bcqfmt.converters`.
Importing the package is cheap: functions and modules are imported at their first use, and Numba and a GPU are
needed only when something is launched.

::

    from bcqfmt.kernels import MatmulWeight, dequantize, lut_gemv, mixed_gemv, csr_outliers         # and `__all__`
    from bcqfmt.kernels import w4a4, rmsnorm_reorder_quant, quantize_reorder, decode_attention
    from bcqfmt.kernels.matmul import matmul                   # `bcqfmt.kernels.matmul` is the module of the same name
    from bcqfmt.kernels.bits import bit_gemv

====================  ===============================================================================================
`matmul`              ``x W^T`` for any number of vectors; `matmul_weight`: which kernel does it
`bits`                the fast product for very few vectors, on binary or integer tensor cores
`gemm`                the product of one to thousands of vectors: codes become numbers on their way into tensor cores
`mixed`               the product with 2/4-bit weights, second-order scales and outliers
`lut`                 the product by look-up, for any weight
`dequant`             the dense matrix of any weight, the same bits as the normative decoder
`atom`                W4A4 products, quantized activations, attention over an INT4 cache
`cpu`                 products and the normative decoder, compiled for the CPU
`outliers`            ``y += S x`` for CSR outliers, as a separate launch
`device_functions`    what several kernels inline: numbers, vectors, outliers, the ring of buffers
`operands`            a checked weight as arrays, ``operand(weight)``, and those arrays on a device
`ptx`                 instructions that Numba lacks
`runtime`             how kernels are declared, compiled, cached, checked and launched; where arrays live
====================  ===============================================================================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcqfmt.kernels.atom.attention import KvCache, decode_attention, quantize_kv
    from bcqfmt.kernels.atom.operands import pack_w4
    from bcqfmt.kernels.atom.w4a4 import atom_to_device, quantize_reorder, rmsnorm, rmsnorm_reorder_quant, w4a4
    from bcqfmt.kernels.bits import bit_operand
    from bcqfmt.kernels.dequant import dequantize
    from bcqfmt.kernels.lut import lut_gemv
    from bcqfmt.kernels.mixed import mixed_gemv, mixed_operand
    from bcqfmt.kernels.operands import operand
    from bcqfmt.kernels.operands.device import to_device

    from .matmul import MatmulWeight
    from .outliers import csr_outliers

__all__ = [
    "KvCache",
    "MatmulWeight",
    "atom_to_device",
    "bit_operand",
    "csr_outliers",
    "decode_attention",
    "dequantize",
    "lut_gemv",
    "mixed_gemv",
    "mixed_operand",
    "operand",
    "pack_w4",
    "quantize_kv",
    "quantize_reorder",
    "rmsnorm",
    "rmsnorm_reorder_quant",
    "to_device",
    "w4a4",
]

_NAMES = {
    "atom.attention": ("KvCache", "decode_attention", "quantize_kv"),
    "atom.operands": ("pack_w4",),
    "atom.w4a4": ("atom_to_device", "quantize_reorder", "rmsnorm", "rmsnorm_reorder_quant", "w4a4"),
    "bits": ("bit_operand",),
    "dequant": ("dequantize",),
    "lut": ("lut_gemv",),
    "matmul": ("MatmulWeight",),
    "mixed": ("mixed_gemv", "mixed_operand"),
    "operands": ("operand",),
    "operands.device": ("to_device",),
    "outliers": ("csr_outliers",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bcqfmt.kernels' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"bcqfmt.kernels.{_MODULES[name]}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("numba", "numba_cuda"):
            raise
        from bcqfmt.errors import error
        from bcqfmt.version import pip_install

        raise error("BCQ-E306", found="numba-cuda is not installed", hint=pip_install("cuda")) from None
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
