"""The only place that imports numba's CPU compiler; converters and kernels use it.

`loops`: how a function is compiled. `intrinsics`: functions written in LLVM IR. `rounding`: the format's rounding in
compiled code. `threads`: threads that share work, and their memory. The core never imports this package: numba takes a
second to load.
"""
