"""``python -m bcqfmt``: the command line."""

from bcqfmt.cli.main import main

if __name__ == "__main__":
    main()
