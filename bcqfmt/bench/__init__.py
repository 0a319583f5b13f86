"""Benchmarks of the kernels on a GPU, for `bcqfmt bench kernels`."""
