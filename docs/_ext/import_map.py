"""The map of the package for docs/architecture.md, drawn from its import graph each time the site is built.

`docs/_generated/architecture.svg`: folders are boxes, in the rows that the import contracts in pyproject.toml give
them; arrows are the imports that the code really has, counted. An arrow that a chain of other arrows already implies is
left out; one that does not point downwards is red. `docs/_generated/folders.md`: every folder with the first sentence
of its docstring, its files and lines.
"""

import ast
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "bcqfmt"
GUTTER, GAP, PAD, HEAD = 46, 26, 20, 26  # between rows, between boxes of a row, inside a panel, its title
BOX_HEIGHT = 42
MARGIN = 30  # at both sides of a row: long arrows pass there

STYLE = """
svg{--paper:#ffffff;--ink:#1b1f24;--soft:#57606a;--line:#b4bcc6;--panel:#f6f8fa;--box:#ffffff;--arrow:#0b5fa5;--bad:#c62828;
font:13px system-ui,-apple-system,"Segoe UI",sans-serif}
@media (prefers-color-scheme:dark){svg{--paper:#0d1117;--ink:#e6e9ed;--soft:#9aa4af;--line:#4a525c;--panel:#161b22;
--box:#21262d;--arrow:#58a6ff;--bad:#ff7b72}}
text{fill:var(--ink);text-anchor:middle} .soft{fill:var(--soft);font-size:11px} .name{font-weight:600}
.panel{fill:var(--panel);stroke:var(--line)} .box{fill:var(--box);stroke:var(--line)}
.arrow{stroke:var(--arrow);fill:none;opacity:.75} .bad{stroke:var(--bad);opacity:1} .head{fill:var(--arrow)}
.count{font-size:10px;fill:var(--soft);stroke:var(--paper);stroke-width:3px;paint-order:stroke}
"""


@dataclass
class Node:
    """A box, or a panel with rows of boxes; x and y are those of its upper left corner."""

    name: str
    note: str
    rows: list[list["Node"]] = field(default_factory=list)
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = BOX_HEIGHT


# ---------------------------------------------------------------------------------------------------- the facts
def contracts() -> dict[str, list[list[str]]]:
    """For every container of an exhaustive `layers` contract its rows of names, top first."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return {
        container: [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
        for contract in listed
        if contract["type"] == "layers" and contract.get("exhaustive")
        for container in contract["containers"]
    }


def imports(graph: grimp.ImportGraph, container: str, names: set[str]) -> Counter[tuple[str, str]]:
    """(a, b) -> how many imports modules under ``container.a`` have of modules under ``container.b``."""
    counted: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for target in graph.find_modules_directly_imported_by(module):
            a, b = (_below(container, name) for name in (module, target))
            if a in names and b in names and a != b:
                counted[a, b] += 1
    return counted


def _below(container: str, module: str) -> str:
    return module.removeprefix(f"{container}.").split(".")[0] if module.startswith(f"{container}.") else ""


def reduced(edges: Counter[tuple[str, str]], row_of: dict[str, int]) -> dict[tuple[str, str], int]:
    """The edges that no chain of downward edges implies; those that do not point downwards are all kept."""
    below: dict[str, set[str]] = {name: set() for name in row_of}
    for a, b in edges:
        if row_of[a] < row_of[b]:
            below[a].add(b)

    def reaches(start: str, end: str) -> bool:
        return start == end or any(reaches(step, end) for step in below[start])

    return {(a, b): n for (a, b), n in edges.items() if not any(reaches(step, b) for step in below[a] - {b})}


def file_of(module: str) -> Path:
    """The file or folder of a module; converters/ and kernels/ are in the root."""
    place = ROOT.joinpath(*module.split("."))
    return place.resolve() if place.is_dir() else place.with_suffix(".py").resolve()


def sources(module: str) -> list[Path]:
    place = file_of(module)
    found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [path for path in found if "__pycache__" not in path.parts]


# ---------------------------------------------------------------------------------------------------- the picture
def node_of(module: str, rows: dict[str, list[list[str]]]) -> Node:
    """A box with the number of its files, or a panel where a contract orders what is in it."""
    name = module.rpartition(".")[2]
    files = sources(module)
    node = Node(name, f"{len(files)} files" if file_of(module).is_dir() else "")
    for row in rows.get(module, []):
        node.rows.append([node_of(f"{module}.{child}", rows) for child in row if not child.startswith("__")])
    node.rows = [row for row in node.rows if row]
    place(node)
    return node


def place(node: Node) -> None:
    """Sizes, and places of what is inside relative to the panel."""
    if not node.rows:
        node.width = max(80, 8.2 * len(node.name) + 18)
        return
    widths = [sum(child.width for child in row) + GAP * (len(row) - 1) for row in node.rows]
    node.width = max(widths) + 2 * (PAD + MARGIN)
    y: float = HEAD + PAD / 2
    for row, width in zip(node.rows, widths, strict=True):
        x = (node.width - width) / 2
        height = max(child.height for child in row)
        for child in row:
            child.x, child.y = x, y
            x += child.width + GAP
        y += height + GUTTER
    node.height = y - GUTTER + PAD


def drawn(node: Node, module: str, graph: grimp.ImportGraph, x: float, y: float, outer: bool = False) -> list[str]:
    """A node at (x, y) and all that is in it: the panel, its arrows, then its boxes on top of them."""
    middle = x + node.width / 2
    size = f'width="{node.width:.0f}" height="{node.height:.0f}" rx="7"'
    if not node.rows:
        lift = 0 if node.note else 6
        return [
            f'<rect class="box" x="{x:.0f}" y="{y:.0f}" {size}/>',
            f'<text class="name" x="{middle:.0f}" y="{y + 19 + lift:.0f}">{escape(node.name)}</text>',
            f'<text class="soft" x="{middle:.0f}" y="{y + 34:.0f}">{node.note}</text>',
        ]
    parts = [] if outer else [f'<rect class="panel" x="{x:.0f}" y="{y:.0f}" {size}/>']
    if not outer:
        parts.append(f'<text class="name" x="{middle:.0f}" y="{y + 19:.0f}">{escape(node.name)}/</text>')
    row_of = {child.name: i for i, row in enumerate(node.rows) for child in row}
    parts += arrows(node, row_of, reduced(imports(graph, module, set(row_of)), row_of), x, y)
    for row in node.rows:
        for child in row:
            parts += drawn(child, f"{module}.{child.name}", graph, x + child.x, y + child.y)
    return parts


def arrows(panel: Node, row_of: dict[str, int], edges: dict[tuple[str, str], int], x: float, y: float) -> list[str]:
    """Curves from the bottom of a box to the top of another; in between they pass through the gaps of rows."""
    nodes = {child.name: child for row in panel.rows for child in row}
    taken: Counter[tuple[float, str]] = Counter()
    down = sorted(edges, key=lambda edge: (row_of[edge[1]] - row_of[edge[0]], edge))
    outs = _ports(down, nodes, 0)
    ins = _ports(down, nodes, 1)
    parts = []
    for a, b in down:
        wrong = row_of[b] <= row_of[a]
        points = [(outs[a, b], nodes[a].y + nodes[a].height)]
        if not wrong:
            points.append((outs[a, b], max(child.y + child.height for child in panel.rows[row_of[a]])))
        for row in panel.rows[row_of[a] + 1 : row_of[b]]:
            share = outs[a, b] + (ins[a, b] - outs[a, b]) / 2
            gap = min(_gaps(row, panel.width), key=lambda at: abs(at - share) + 14 * taken[at, row[0].name])
            away = -7 if gap < row[0].x else 7  # arrows side by side in one gap; at the left end further out
            at = gap + away * taken[gap, row[0].name]
            taken[gap, row[0].name] += 1
            bottom = max(child.y + child.height for child in row)
            points += [(at, row[0].y), (at, bottom)]
        points.append((ins[a, b], nodes[b].y - 4))
        count = edges[a, b]
        style = "arrow bad" if wrong else "arrow"
        width = 1 + min(2.5, count / 14)
        title = f"{a} imports {b}: {count}"
        parts.append(
            f'<path class="{style}" stroke-width="{width:.1f}" marker-end="url(#tip)" d="{_curve(points, x, y)}">'
            f"<title>{escape(title)}</title></path>"
        )
        (fx, fy), (tx, ty) = points[-2:]
        parts.append(
            f'<text class="count" x="{x + (fx + 2 * tx) / 3:.0f}" y="{y + (fy + 2 * ty) / 3:.0f}">{count}</text>'
        )
    return parts


def _ports(edges: list[tuple[str, str]], nodes: dict[str, Node], end: int) -> dict[tuple[str, str], float]:
    """Where each edge leaves (end 0) or reaches (end 1) its box: side by side, in the order of the other ends."""
    found = {}
    for name, node in nodes.items():
        mine = [edge for edge in edges if edge[end] == name]
        mine.sort(key=lambda edge: nodes[edge[1 - end]].x + nodes[edge[1 - end]].width / 2)
        for i, edge in enumerate(mine):
            found[edge] = node.x + node.width * (i + 1) / (len(mine) + 1)
    return found


def _gaps(row: list[Node], width: float) -> list[float]:
    """Places between the boxes of a row, and at both ends of it."""
    inner = [(left.x + left.width + right.x) / 2 for left, right in pairwise(row)]
    return [max(8, row[0].x - 14), *inner, min(width - 8, row[-1].x + row[-1].width + 14)]


def _curve(points: list[tuple[float, float]], x: float, y: float) -> str:
    """Vertical where it begins, ends and passes a row."""
    path = [f"M{x + points[0][0]:.1f} {y + points[0][1]:.1f}"]
    for (fx, fy), (tx, ty) in pairwise(points):
        half = (fy + ty) / 2
        path.append(
            f"C{x + fx:.1f} {y + half:.1f} {x + tx:.1f} {y + half:.1f} {x + tx:.1f} {y + ty:.1f}"
            if fx != tx
            else f"L{x + tx:.1f} {y + ty:.1f}"
        )
    return "".join(path)


def picture(graph: grimp.ImportGraph) -> str:
    rows = contracts()
    top = node_of(PACKAGE, rows)
    unlisted = {module.split(".")[1] for module in graph.modules if module.count(".") == 1 and "__" not in module} - {
        child.name for row in top.rows for child in row
    }
    if unlisted:
        raise ExtensionError(f"no import contract lists {', '.join(sorted(unlisted))} (pyproject.toml)")
    width, height = top.width, top.height - HEAD
    box = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    tip = 'viewBox="0 0 8 8" refX="6" refY="4" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-labelledby="t">',
        '<title id="t">The folders of bcqfmt and their imports</title>',
        f"<style>{STYLE}</style>",
        f'<defs><marker id="tip" {tip} orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="var(--paper)"/>',
        *drawn(top, PACKAGE, graph, 0, -HEAD, outer=True),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------- the table
def table() -> str:
    """Every folder of the package: first sentence of its docstring, files, lines."""
    lines = ["| folder | what is in it | files | lines |", "|---|---|---|---|"]
    packages = (PACKAGE, f"{PACKAGE}.converters", f"{PACKAGE}.kernels")
    for folder in sorted({path.parent for package in packages for path in sources(package)}):
        own = list(folder.glob("*.py"))
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"(?<=\.)\s|\n\n", said)[0].replace("\n", " ").replace("|", r"\|")
        count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)
        lines.append(f"| `{folder.relative_to(ROOT).as_posix()}/` | {sentence} | {len(own)} | {count:,} |")
    return "\n".join(lines) + "\n"


def write_map(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    for name, text in {"architecture.svg": picture(graph), "folders.md": table()}.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_map)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
