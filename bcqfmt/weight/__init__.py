"""One weight in memory: its scheme, its parts, the normative decoder."""
