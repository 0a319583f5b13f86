"""Bridges to other libraries, one file each; a bridge imports its library only inside its functions.

Importing this package costs nothing and needs nothing beyond the core. It holds no model classes yet: layers
for torch, transformers and vLLM come after the kernels.
"""
