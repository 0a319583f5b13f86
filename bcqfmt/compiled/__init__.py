"""The only door to numba's CPU compiler, for converters and kernels.

`loops`: how a function is compiled. `intrinsics`: functions written in LLVM IR. `rounding`: the format's rounding in
compiled code. `threads`: threads that share work, and their memory. The core never imports this package: numba takes a
second to load.
"""
