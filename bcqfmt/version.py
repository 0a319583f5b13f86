"""The version of the package; the format has its own."""

__version__ = "0.1.0"
