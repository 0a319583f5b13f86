"""Adapters for torch, transformers and vLLM, each a package of its own that is imported by name.

Importing this package needs none of them.
"""
