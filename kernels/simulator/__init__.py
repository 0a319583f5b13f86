"""The same kernels without a GPU: one block in Python, and what PTX instructions do."""
