"""The command line: `main` holds the group and the exit codes, then one file per verb.

This is the only room that imports click, and the only one that prints.
"""
