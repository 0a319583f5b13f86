"""Bytes on disk: the safetensors header, element types, files, durable writes, digests."""
