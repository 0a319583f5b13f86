"""Layouts of other tools, one per file, both directions."""
