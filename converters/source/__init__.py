"""A source folder as it is: its tensors and its quantization settings."""
