"""From weights to products: operands laid out for a device, and the code that multiplies with them.

This room is installed as `bcqfmt.kernels`. What a weight means is defined by the normative decoder in `bcqfmt.decode`;
every kernel is measured against it. Code here works on weights in memory, never on files, and never imports
`bcqfmt.converters`. Importing the room costs nothing: its modules are imported by name, those that need Numba, a GPU or
its simulator only when something is launched.

==============================  =====================================================================================
`operands`                      a checked weight as arrays: ``operand(weight)``; `operands_lut_gemm`: the published
                                kernel's own arrays, there and back
`reference`                     the float64 product
`matmul`                        ``lut_gemv``, ``dequantize``, ``matmul`` on torch tensors: checks, choices, launches
`operands_device`               operands on a device, in the orders that kernels read
`cuda_lut_gemv` `cuda_dequant`  kernels for any weight
`launch` `device`               how kernels are declared and launched; where arrays live
`ptx` and `simulator`           instructions that Numba lacks; the same kernels without a GPU
==============================  =====================================================================================
"""
