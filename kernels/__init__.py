"""From weights to products: operands laid out for a device, and the code that multiplies with them.

This room is installed as `bcqfmt.kernels`. It is empty in this release: what a weight means is defined by
the normative decoder in `bcqfmt.decode`, and the kernels will be measured against it. Code here works on
weights in memory, never on files, and never imports `bcqfmt.converters`.
"""
