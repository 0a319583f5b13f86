"""What `make.py` is made of: writers of bytes, the catalogue of vectors, the index."""
