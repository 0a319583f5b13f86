"""From weights to products: operands laid out for a device, and the code that multiplies with them.

This room is installed as `bcqfmt.kernels`. What a weight means is defined by the normative decoder in `bcqfmt.decode`;
every kernel is measured against it. Code here works on weights in memory, never on files, and never imports
`bcqfmt.converters`. Importing the room costs nothing: its modules are imported by name, those that need Numba, a GPU or
its simulator only when something is launched.

==============================  =====================================================================================
`operands` `reference`          a checked weight as arrays, ``operand(weight)``; the float64 product to compare with.
                                `operands_lut_gemm`: the published kernel's own arrays, there and back
`matmul` `matmul_weight`        ``lut_gemv``, ``dequantize``, ``matmul`` on torch tensors: checks, choices, launches
`operands_device`               operands on a device, in the orders that kernels read
`cuda_lut_gemv` `cuda_dequant`  kernels for any weight; `cuda_dequant_wide`: 5 to 8 planes; `cuda_outliers`: a launch of
                                their own
`bit_gemv`                      the fast product, on binary tensor cores: `bit_layout` `bit_shape` `bit_ring`
                                `bit_columns` `bit_prepare` `bit_steps` `cuda_bit_gemv`; for several vectors and short
                                groups on integer tensor cores: `byte_shape` `byte_prepare` `cuda_byte_gemv`; outliers
                                in the same launch: `bit_outliers`, with `mixed` `fused_outliers` `outlier_entries`
                                `shared_vectors`
`mixed`                         2/4-bit weights with second-order scales and outliers: `mixed_*` `cuda_mixed_gemv`
`cuda_w4a4_launch`              Atom's W4A4 product with its operands and oracle: `cuda_w4a4` `cuda_w4a4_held`
                                `w4a4_shape` `w4a4_steps` `cuda_rmsnorm` `atom_operands` `atom_reference`
`cuda_kv_attention_launch`      attention over an INT4 cache: `cuda_kv_attention` `cuda_kv_attention_cache`
                                `atom_reference_kv`
`cpu`                           products and the normative decoder, compiled for the CPU: `cpu_*`
`launch` `device` `cubins`      how kernels are declared, compiled, kept and launched; where arrays live; `limits`
`ptx` `simulator` `unroll`      instructions that Numba lacks (`ptx_*`) and their twins; the same kernels without a GPU
                                (`simulator_ptx`); loops written out before compiling
==============================  =====================================================================================
"""
