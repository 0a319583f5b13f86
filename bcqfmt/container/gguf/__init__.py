"""GGUF files, read strictly: header, key values, tensor infos. What a file states is checked against its size."""
