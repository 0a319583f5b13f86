"""Atom's W4A4 products and attention over an INT4 cache."""
