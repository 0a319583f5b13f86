"""Other people's layouts to BCQ and back, one layout per file, its quirks told at the top of the file.

This room is installed as `bcqfmt.converters`. It is empty in this release: the format, its reader, writer
and validator came first, and the converters (GPTQ, AWQ, compressed-tensors, dense sources) stand on them.
Code here may use everything in the core; it never imports `bcqfmt.kernels`.
"""
