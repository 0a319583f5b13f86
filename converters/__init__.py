"""Other people's layouts to BCQ and back, one layout per file, its quirks told at the top of the file.

This room is installed as `bcqfmt.converters`. A source goes through `checkpoint` (what lies in the folder), `registry`
(which layout it is), a layout (`gptq`, `awq`, `compressed_tensors`, `hqq`, `anybcq`), `pipeline` and `finalize`. It
comes back through `rebuild` and `restore`, and goes elsewhere through `export`. Code here may use everything in the
core; it never imports `bcqfmt.kernels`.
"""
