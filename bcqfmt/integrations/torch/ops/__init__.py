"""Operators registered with torch, one file per family of kernels."""
