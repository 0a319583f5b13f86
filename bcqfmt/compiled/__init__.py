"""The only door to numba's CPU compiler, for converters and kernels.

`loops`: how a function is compiled. `intrinsics`: functions written in LLVM IR. `rounding`: the rounding of the format,
compiled. `threads`: threads that share work, and their memory. The core never imports this package: numba takes a
second to load.
"""
