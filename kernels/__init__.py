"""From weights to products: operands laid out for a device, and the code that multiplies with them.

This room is installed as `bcqfmt.kernels`. What a weight means is defined by the normative decoder in `weight.decode`;
every kernel is measured against it. Code here works on weights in memory, never on files, and never imports
`bcqfmt.converters`. Importing the room costs nothing: functions and modules are imported when they are first asked for,
those that need Numba, a GPU or its simulator only when something is launched.

::

    from bcqfmt.kernels import MatmulWeight, dequantize, lut_gemv, mixed_gemv, csr_outliers         # and `__all__`
    from bcqfmt.kernels import w4a4, rmsnorm_reorder_quant, quantize_reorder, decode_attention
    from bcqfmt.kernels.matmul import matmul                   # `bcqfmt.kernels.matmul` and `.bit_gemv` are modules
    from bcqfmt.kernels.bits import bit_gemv               # of the same name

==============================  =====================================================================================
`operands` `reference`          a checked weight as arrays, ``operand(weight)``; the float64 product to compare with.
                                `operands_lut_gemm`: the published kernel's own arrays, there and back
`matmul` `matmul_weight`        ``lut_gemv``, ``dequantize``, ``matmul`` on torch tensors: checks, choices, launches
`operands_device`               operands on a device, in the orders that kernels read
`cuda_lut_gemv` `cuda_dequant`  kernels for any weight; decoding 32 columns at a time: `dequant_values` `dequant_tables`
                                `dequant_words` `dequant_rows` `cuda_reorder`; `cuda_dequant_elements`: what these
                                refuse; `cuda_outliers`: a launch of their own
`bit_gemv`                      the fast product, on binary tensor cores: `bit_layout` `bit_shape` `bit_ring`
                                `bit_columns` `bit_prepare` `bit_steps` `cuda_bit_gemv`; for several vectors and groups
                                of 32 on integer tensor cores: `byte_shape` `byte_prepare` `cuda_byte_gemv`; for groups
                                of 8 and 16: `short_shape` `short_prepare` `cuda_short_gemv`; which of them:
                                `product_shape`; outliers in the same launch: `bit_outliers`, with `mixed`
                                `fused_outliers` `outlier_entries` `shared_vectors`
`mixed`                         2/4-bit weights with second-order scales and outliers: `mixed_*` `cuda_mixed_gemv`
`cuda_w4a4_launch`              Atom's W4A4 product with its operands and oracle: `cuda_w4a4` `cuda_w4a4_held`
                                `w4a4_shape` `w4a4_steps` `cuda_rmsnorm` `atom_operands` `atom_reference`
`cuda_kv_attention_launch`      attention over an INT4 cache: `cuda_kv_attention` `cuda_kv_attention_cache`
                                `atom_reference_kv`
`cpu`                           products and the normative decoder, compiled for the CPU: `cpu_*`
`launch` `device` `cubins`      how kernels are declared, compiled (`compiling`), kept and launched; where arrays live;
                                `limits`
`ptx` `simulator` `unroll`      instructions that Numba lacks (`ptx_*`) and their twins; the same kernels without a GPU
                                (`simulator_ptx`); loops written out before compiling
==============================  =====================================================================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcqfmt.kernels.atom.attention import KvCache, decode_attention, quantize_kv
    from bcqfmt.kernels.atom.operands import pack_w4
    from bcqfmt.kernels.atom.w4a4 import atom_to_device, quantize_reorder, rmsnorm, rmsnorm_reorder_quant, w4a4
    from bcqfmt.kernels.bits import bit_operand
    from bcqfmt.kernels.mixed import mixed_gemv, mixed_operand
    from bcqfmt.kernels.operands import operand
    from bcqfmt.kernels.operands.device import to_device

    from .matmul import MatmulWeight, dequantize, lut_gemv
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

_MODULES = {
    "KvCache": "atom.attention",
    "MatmulWeight": "matmul",
    "atom_to_device": "atom.w4a4",
    "bit_operand": "bits",
    "csr_outliers": "outliers",
    "decode_attention": "atom.attention",
    "dequantize": "matmul",
    "lut_gemv": "matmul",
    "mixed_gemv": "mixed",
    "mixed_operand": "mixed",
    "operand": "operands",
    "pack_w4": "atom.operands",
    "quantize_kv": "atom.attention",
    "quantize_reorder": "atom.w4a4",
    "rmsnorm": "atom.w4a4",
    "rmsnorm_reorder_quant": "atom.w4a4",
    "to_device": "operands.device",
    "w4a4": "atom.w4a4",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bcqfmt.kernels' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"bcqfmt.kernels.{_MODULES[name]}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("numba", "numba_cuda"):
            raise
        from bcqfmt.errors import error

        raise error("BCQ-E306", found="numba-cuda is not installed", hint="pip install 'bcqfmt[cuda]'") from None
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
