"""The version of the package (the format has its own), and what its extras ask for."""

import re

__version__ = "0.1.0"


def pip_install(extra: str) -> str:
    """The command that installs what an extra asks for. It names the packages: no index has bcqfmt yet."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        asked = requires("bcqfmt") or []
    except PackageNotFoundError:  # run from a folder, not installed
        asked = []
    found = [re.fullmatch(r"(.+?)\s*;\s*extra == ['\"](.+)['\"]", line) for line in asked]
    wanted = [f"'{match[1]}'" for match in found if match is not None and match[2] == extra]
    return f"pip install {' '.join(wanted)}" if wanted else f"pip install '.[{extra}]'"
