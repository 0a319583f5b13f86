"""Loops that are written out before a kernel is compiled.

The compiler unrolls small loops by itself, large ones not, and then arrays meant for registers end up in memory.
``for i in static(N)`` is unrolled here, in the source: N is a constant expression of the kernel's enclosing scope. In
the simulator ``static`` is ``range``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any

static = range


def unrolled(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` with every ``static`` loop written out; its constants become globals of the new function."""
    code = function.__code__
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    scope = {**function.__globals__, **dict(zip(code.co_freevars, cells, strict=True))}
    tree, used = _parsed(code)
    exec(compile(_Writer(scope, used).written(tree, {}), f"<{function.__name__}, unrolled>", "exec"), scope)
    made: Callable[..., None] = scope[function.__name__]
    return made


@functools.cache
def _parsed(code: CodeType) -> tuple[ast.Module, dict[ast.AST, set[str]]]:
    """A function without decorators and annotations, and the names below every node; not to be changed."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]  # inspect.getsource looks into all modules
    tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    used: dict[ast.AST, set[str]] = {}

    def names(node: ast.AST) -> set[str]:
        found = {node.id} if isinstance(node, ast.Name) else set()
        used[node] = found.union(*map(names, ast.iter_child_nodes(node)))
        return used[node]

    names(tree)
    return tree, used


class _Writer:
    """Copies a tree with loops written out. What has nothing to write out or to replace is not copied."""

    def __init__(self, scope: dict[str, Any], used: dict[ast.AST, set[str]]) -> None:
        self._scope, self._used = scope, used

    def written(self, node: Any, values: dict[str, int]) -> Any:
        """The node with these values for these names; for a ``static`` loop a list of statements."""
        names = self._used[node]
        if "static" not in names and names.isdisjoint(values):
            return node
        if isinstance(node, ast.Name):
            return ast.copy_location(ast.Constant(values[node.id]), node) if node.id in values else node
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            loop = node.iter
            if isinstance(loop.func, ast.Name) and loop.func.id == "static":
                assert isinstance(node.target, ast.Name)
                bounds = [self._bound(self.written(bound, values)) for bound in loop.args]
                turns = ({**values, node.target.id: value} for value in range(*bounds))
                return [made for turn in turns for made in self._all(node.body, turn)]
        changed = type(node)()
        changed.__dict__.update(node.__dict__)
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                setattr(changed, field, self.written(value, values))
            elif isinstance(value, list):
                setattr(changed, field, self._all(value, values))
        return changed

    def _all(self, items: list[Any], values: dict[str, int]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            made = self.written(item, values) if isinstance(item, ast.AST) else item
            found += made if isinstance(made, list) else [made]
        return found

    def _bound(self, bound: ast.expr) -> int:
        found: int = eval(compile(ast.Expression(bound), "<bound>", "eval"), self._scope)
        return found
