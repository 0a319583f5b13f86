"""Blocks of GGUF: their fields, exactly and back, and their values."""
