"""Verbs about this machine and this program, which need no checkpoint: one file each."""
