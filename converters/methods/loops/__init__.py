"""The compiled inner loops of the methods, one file per method: all that runs once per number of a weight.

They know numpy arrays and `bcqfmt.compiled` only, make no arrays of their own, and add in an order that depends on
neither threads nor blocks, so that results are the same on every machine.
"""
