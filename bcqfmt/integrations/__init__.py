"""Bridges to other libraries: torch, transformers, vLLM; a bridge is imported by those who want it.

Importing this package costs nothing and needs nothing beyond the core.
"""
