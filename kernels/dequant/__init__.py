"""Weights decoded to a dense matrix on the GPU."""
