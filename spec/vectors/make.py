"""Makes the test vectors of the BCQ format: `python spec/vectors/make.py [--check | --example] [--out DIR]`.

Needs the standard library and ../decoder.py. The same bytes come out on every machine.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the generator in this folder, from any working folder."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from maker.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
