"""Wrong decoders: spec/decoder.py with one small mistake each, made from its syntax tree or written by hand.

A mutant is named by its function, the source text of the place and what stands there instead, never by a line: the
names survive when other parts of the decoder change.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from wrong_decoders.mistakes import HELPERS, MISTAKES

Change = tuple[str, Callable[[Any], ast.AST | None]]  # what stands there instead, and how; None takes a statement away
# The command line, the text of messages, and what stands for a number beyond every limit are no part of the format.
NOT_JUDGED = {"main", "Refused", "parse_integer"}

COMPARED: dict[type, list[type]] = {
    ast.Lt: [ast.LtE], ast.LtE: [ast.Lt], ast.Gt: [ast.GtE], ast.GtE: [ast.Gt],
    ast.Eq: [ast.LtE, ast.GtE], ast.NotEq: [ast.Eq], ast.In: [ast.NotIn], ast.NotIn: [ast.In],
    ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
}  # fmt: skip
COMPUTED: dict[type, list[type]] = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Add], ast.FloorDiv: [ast.Mult], ast.Mod: [ast.FloorDiv],
    ast.LShift: [ast.RShift], ast.RShift: [ast.LShift], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd],
    ast.Pow: [ast.Mult],
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
    ast.FloorDiv: "//", ast.Mod: "%", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
    ast.Pow: "**", ast.And: "and", ast.Or: "or",
}  # fmt: skip
DROPPED_CALLS = {"sorted": 0, "rounded": 0, "set": 0}  # the argument that is left
DROPPED_METHODS = {"strip", "lstrip", "casefold", "removeprefix", "resolve", "encode"}
CUTS = {"without the first": "[1:]", "without the last": "[:-1]"}


@dataclass(frozen=True)
class Mutant:
    """One mistake, and how to make the statements of the module that hold it."""

    name: str
    function: str  # "" where all functions may feel it
    valued: bool  # takes part in a value
    make: Callable[[], list[ast.stmt]]


def mutants(source: str) -> list[Mutant]:
    """All of them: those by hand, then the others in the order of the source."""
    tree, lines = ast.parse(source), source.encode().splitlines()
    valued = _reached_from(tree, "decode")
    floating = {
        s.name for s in tree.body if isinstance(s, ast.FunctionDef) and s.returns and "float" in ast.unparse(s.returns)
    }
    found = [
        Mutant(
            f"{function}: {name}", function, function in valued, _by_hand(_function(tree, function), lines, old, new)
        )
        for function, changes in MISTAKES.items()
        for old, mistakes in changes
        for name, new in mistakes.items()
    ]
    seen: Counter[str] = Counter()
    for number, statement in enumerate(tree.body):
        title = _title(statement)
        if title is None or title in NOT_JUDGED:
            continue
        index_names = _index_names(statement) if title in valued & floating else None
        function = title if isinstance(statement, ast.FunctionDef) else ""
        later = [] if function else tree.body[number + 1 :]  # a constant: all that may have used it
        for place, node in enumerate(_walk(statement)):
            for label, change in [*_changes(node, title in valued), *_narrowed(node, index_names)]:
                text = _text(lines, node)
                name = f"{title}: {text if len(text) <= 90 else text[:87] + '...'} -> {label}"
                seen[name] += 1
                name += f" (#{seen[name]})" if seen[name] > 1 else ""
                make = partial(_changed, statement, place, change, later)
                found.append(Mutant(name, function, not function or title in valued, make))
    return found


@contextlib.contextmanager
def planted(mutant: Mutant, module: ModuleType) -> Iterator[None]:
    """The module with that mistake."""
    code = compile(ast.fix_missing_locations(ast.Module(mutant.make(), [])), "mutant of decoder.py", "exec")
    saved = dict(module.__dict__)
    try:
        exec(code, module.__dict__)
        yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(saved)


def _by_hand(function: ast.FunctionDef, lines: list[bytes], old: str, new: str) -> Callable[[], list[ast.stmt]]:
    text = b"\n".join(lines[function.lineno - 1 : function.end_lineno]).decode() + "\n"
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {function.name}"
    return lambda: ast.parse(HELPERS + text.replace(old, new)).body


def _changed(
    statement: ast.stmt, place: int, change: Callable[[Any], ast.AST | None], later: list[ast.stmt]
) -> list[ast.stmt]:
    made = copy.deepcopy(statement)
    node = list(_walk(made))[place]
    return [_Replace(node, change(node)).visit(made), *later]


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == name)


def _text(lines: list[bytes], node: Any) -> str:
    """The source of a node in one line; ast.get_source_segment does the same, but reads the whole file each time."""
    if isinstance(node, ast.For | ast.comprehension):
        return f"for {_text(lines, node.target)} in {_text(lines, node.iter)}"
    rows = lines[node.lineno - 1 : node.end_lineno]
    rows[-1] = rows[-1][: node.end_col_offset]
    rows[0] = rows[0][node.col_offset :]
    return " ".join(b" ".join(rows).decode().split())


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, new: ast.AST | None) -> None:
        self.node, self.new = node, new if new is not None else ast.Pass()

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.node else self.generic_visit(node)


def _title(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return None if isinstance(statement.value, ast.Subscript) else statement.targets[0].id  # not names of types
    return None


def _reached_from(tree: ast.Module, start: str) -> set[str]:
    """The functions that a function calls, and those that they call: what decides a value."""
    bodies = {s.name: s for s in tree.body if isinstance(s, ast.FunctionDef)}
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            waiting += [node.id for node in ast.walk(bodies[name]) if isinstance(node, ast.Name)]
    return reached


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without types, documentation, decorators and texts with values in them."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "ctx"):
            continue
        for child in value if isinstance(value, list) else [value]:
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            strict = isinstance(child, ast.keyword) and child.arg == "strict"  # zip's own check, never met
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr) and not text and not strict:
                yield from _walk(child)


def _changes(node: ast.AST, valued: bool) -> Iterator[Change]:
    """The mistakes that can be made at one node; `valued`: in a function that takes part in a value."""
    if isinstance(node, ast.Compare):
        yield from _compared(node)
    elif isinstance(node, ast.BinOp):
        yield from _computed(node)
    elif isinstance(node, ast.AugAssign):
        for other in COMPUTED.get(type(node.op), []):
            yield f"{SIGNS[other]}=", lambda n, o=other: ast.AugAssign(n.target, o(), n.value)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield SIGNS[other], lambda n: ast.BoolOp(other(), n.values)
        for i in range(len(node.values)):
            rest = ast.BoolOp if len(node.values) > 2 else lambda _, values: values[0]
            yield f"without part {i + 1}", lambda n, i=i, rest=rest: rest(n.op, n.values[:i] + n.values[i + 1 :])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", lambda n: n.operand
    elif isinstance(node, ast.IfExp):
        yield "always the first", lambda n: n.body
        yield "always the second", lambda n: n.orelse
    elif isinstance(node, ast.If):
        yield "never", lambda n: ast.If(ast.Constant(False), n.body, n.orelse)
    elif isinstance(node, ast.Raise | ast.Continue | ast.Expr):
        yield "nothing", lambda _: None
    elif isinstance(node, ast.Call):
        yield from _called(node)
    elif isinstance(node, ast.For | ast.comprehension):
        yield from _repeated(node, valued)
    elif isinstance(node, ast.Subscript) and valued:
        yield from _indexed(node)
    elif isinstance(node, ast.Set | ast.Tuple | ast.List) and not isinstance(getattr(node, "ctx", None), ast.Store):
        for i, element in enumerate(node.elts if len(node.elts) > 1 else []):
            if isinstance(element, ast.Constant):
                yield f"without {element.value!r}", lambda n, i=i: _without(n, i)


def _without(node: Any, at: int) -> ast.AST:
    made: ast.AST = copy.copy(node)
    made.elts = node.elts[:at] + node.elts[at + 1 :]  # type: ignore[attr-defined]
    return made


def _compared(node: ast.Compare) -> Iterator[Change]:
    texts = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in node.comparators)
    for i, sign in enumerate(node.ops):
        for other in [ast.NotEq] if texts and isinstance(sign, ast.Eq) else COMPARED[type(sign)]:
            label = f"{SIGNS[other]}" + (f" at {i + 1}" if len(node.ops) > 1 else "")
            yield label, lambda n, i=i, o=other: ast.Compare(n.left, [*n.ops[:i], o(), *n.ops[i + 1 :]], n.comparators)


def _computed(node: ast.BinOp) -> Iterator[Change]:
    for other in COMPUTED.get(type(node.op), []):  # `/` joins paths
        yield SIGNS[other], lambda n, o=other: ast.BinOp(n.left, o(), n.right)
    if isinstance(node.op, ast.FloorDiv):
        yield "rounded up", lambda n: _expression("-(-A // B)", A=n.left, B=n.right)


def _narrowed(node: ast.AST, index_names: set[str] | None) -> Iterator[Change]:
    """A floating-point operation in binary32 instead of binary64."""
    if index_names is None or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        return
    whole = all(n.id in index_names for n in ast.walk(node) if isinstance(n, ast.Name))
    if not whole or any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(node)):
        yield "in binary32", lambda n: _expression("rounded(X, 'F32')", X=n)


def _index_names(statement: ast.AST) -> set[str]:
    """The names that occur in indices and ranges: integers."""
    places = [n.slice for n in ast.walk(statement) if isinstance(n, ast.Subscript)]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "ceil_div"):
            places += node.args
    return {n.id for place in places for n in ast.walk(place) if isinstance(n, ast.Name)}


def _constants(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield str(not value), lambda n: ast.Constant(not n.value)
    elif isinstance(value, int):
        for step in (-1, 1):
            yield str(value + step), lambda n, step=step: ast.Constant(n.value + step)
    elif isinstance(value, float):
        for new in (-value, value + 1.0):
            yield str(new), lambda _, new=new: ast.Constant(new)


def _called(node: ast.Call) -> Iterator[Change]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in DROPPED_CALLS and node.args:
        keep = ast.Name("list", ast.Load())
        yield "as it is", lambda n: n.args[0] if name == "rounded" else ast.Call(keep, n.args[:1], [])
    elif name in ("min", "max"):
        for i in range(len(node.args) if len(node.args) > 1 else 0):
            yield f"argument {i + 1}", lambda n, i=i: n.args[i]
        other = "min" if name == "max" else "max"
        yield other, lambda n: ast.Call(ast.Name(other, ast.Load()), n.args, n.keywords)
    elif name in ("all", "any"):
        other = "any" if name == "all" else "all"
        yield other, lambda n: ast.Call(ast.Name(other, ast.Load()), n.args, n.keywords)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_METHODS:
        yield "as it is", lambda n: n.func.value


def _repeated(node: ast.For | ast.comprehension, valued: bool) -> Iterator[Change]:
    cuts = CUTS | ({"backwards": "[::-1]"} if valued else {})
    for label, cut in cuts.items():

        def change(n: Any, cut: str = cut) -> ast.AST:
            made: Any = copy.copy(n)
            made.iter = _expression(f"list(X){cut}", X=n.iter)
            return made  # type: ignore[no-any-return]

        yield label, change


def _indexed(node: ast.Subscript) -> Iterator[Change]:
    if not isinstance(node.ctx, ast.Load):
        return
    if isinstance(node.slice, ast.Slice):
        for side in ("lower", "upper"):
            if not isinstance(getattr(node.slice, side), ast.Constant | None):
                yield f"{side} end + 1", lambda n, side=side: _moved(n, side)
    elif not isinstance(node.slice, ast.Constant | ast.UnaryOp):
        yield "one further", lambda n: _expression("X[I + 1]", X=n.value, I=n.slice)
        yield "one before", lambda n: _expression("X[I - 1]", X=n.value, I=n.slice)


def _moved(node: Any, side: str) -> ast.AST:
    made = copy.deepcopy(node)
    setattr(made.slice, side, _expression("X + 1", X=getattr(node.slice, side)))
    return made  # type: ignore[no-any-return]


def _expression(text: str, **names: ast.AST) -> ast.AST:
    """A parsed text in which names stand for nodes."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(names.get(node.id, node))

    tree = ast.parse(text, mode="eval")
    return Fill().visit(tree).body  # type: ignore[no-any-return]
