"""Sphinx settings. `make docs` builds the site with warnings as errors."""

import sys
from pathlib import Path

import bcqfmt

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "bcqfmt"
author = "The bcqfmt contributors"
project_copyright = author
version = release = bcqfmt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_code",  # docs/_ext: tables and help texts taken from the package, the links of the spec
    "import_map",  # docs/_ext: the picture of the architecture, drawn from the import graph
]
exclude_patterns = ["_build", "_generated"]
suppress_warnings = [
    "misc.highlighting_failure",  # the spec shows fragments of JSON that are not whole documents
]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
default_role = "code"  # `name` in a docstring is code

html_theme = "furo"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # what is copied can be pasted: commands without prompts and outputs
copybutton_prompt_is_regexp = True
html_title = f"bcqfmt {release}"
