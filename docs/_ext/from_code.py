"""What the pages take from the code: the table of codes, the help of every verb, the public names.

Before the sources are read, `docs/_generated/*.md` is written from the installed package, and the pages
include it: a page cannot say anything else than the code does. The spec is included from its own folder,
with the links to its neighbours turned so that they work from the site.
"""

import inspect
import re
from pathlib import Path

import click
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.codes import CODES

HELP_WIDTH = 88
LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?![a-z]+:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def codes_table() -> str:
    lines = ["| code | exit | severity | what it says | what to do |", "|---|---|---|---|---|"]
    for name, code in sorted(CODES.items()):
        cells = [
            f"[`{name}`]{{#{name.lower()}}}",
            str(code.exit),
            cell(getattr(code.severity, "value", code.severity)),
            cell(code.title),
            cell(code.hint),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(text: object) -> str:
    """Text as it is, `code` as code, safe inside one cell of a Markdown table."""
    pieces = re.split(r"(`[^`]+`)", " ".join(str(text or "").split()))
    pieces[::2] = [re.sub(r"([\\<>*_`\[\]$])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces).replace("|", r"\|")


def verbs() -> str:
    """The help of the program and of every verb, with the settings that each of them has when it runs."""
    top = context_of(cli, "bcqfmt")
    parts = ["## `bcqfmt`\n", fenced(cli.get_help(top))]
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        if command is not None and not command.hidden:
            text = command.get_help(context_of(command, name, top))
            hidden = [option for option in options(command) if option not in text]
            if hidden:
                raise ExtensionError(f"the help of `bcqfmt {name}` does not show {', '.join(hidden)}")
            parts += [f"## `bcqfmt {name}`\n", fenced(text)]
    return "\n".join(parts)


def options(command: click.Command) -> list[str]:
    """Every way of writing every option that is not hidden."""
    return [
        written
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        for written in (*param.opts, *param.secondary_opts)
    ]


def context_of(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    settings = {**command.context_settings, "terminal_width": HELP_WIDTH, "max_content_width": HELP_WIDTH}
    return click.Context(command, info_name=name, parent=parent, **settings)


def fenced(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````\n"


def public_names() -> str:
    """One autodoc directive per name of `bcqfmt.__all__`, functions first, then classes, then errors."""
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Values": []}
    for name in sorted(bcqfmt.__all__):
        value = getattr(bcqfmt, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            groups["Errors"].append(f".. autoexception:: bcqfmt.{name}\n   :show-inheritance:\n   :members:\n")
        elif inspect.isclass(value):
            groups["Classes"].append(f".. autoclass:: bcqfmt.{name}\n   :members:\n")
        elif callable(value):
            groups["Functions"].append(f".. autofunction:: bcqfmt.{name}\n")
        elif not inspect.ismodule(value):
            groups["Values"].append(f".. py:data:: bcqfmt.{name}\n")
    parts = [
        f"## {title}\n\n```{{eval-rst}}\n" + "\n".join(entries) + "```\n"
        for title, entries in groups.items()
        if entries
    ]
    return "\n".join(parts)


def write_generated(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    for name, text in {"codes.md": codes_table(), "verbs.md": verbs(), "names.md": public_names()}.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def turn_links(app: Sphinx, relative_path: Path, parent_docname: str, content: list[str]) -> None:
    """Links of an included file point into its own folder: make them work from the page that includes it."""
    folder = (Path(app.srcdir) / relative_path).resolve().parent
    srcdir = Path(app.srcdir).resolve()
    if folder.is_relative_to(srcdir):
        return

    def turned(match: re.Match[str]) -> str:
        text, target = match["text"], (folder / match["target"]).resolve()
        if target.is_relative_to(srcdir):  # a page of the site
            return f"[{text}](/{target.relative_to(srcdir).as_posix()}{match['anchor'] or ''})"
        if target.is_dir() or (target.is_file() and target.suffix == ".md"):
            return text  # there, but the site has no page for it
        if target.is_file():  # becomes a download
            return f"[{text}]({relative_path.parent.as_posix()}/{match['target']})"
        return match[0]  # not there: Sphinx says so, and the build fails

    content[0] = LINK.sub(turned, content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_generated)
    app.connect("include-read", turn_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
