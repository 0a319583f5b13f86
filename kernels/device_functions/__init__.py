"""Functions that several CUDA kernels share."""
