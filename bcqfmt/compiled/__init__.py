"""The only door to numba's CPU compiler for converters and kernels: loops, rounding, threads."""
