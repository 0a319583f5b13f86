"""The command line: `main` is the program with its exit codes, `verbs` has one file per verb, the rest is shared.

Nothing else in the package imports click or prints.
"""
