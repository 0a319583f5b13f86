"""Loops that are written out before a kernel is compiled.

The compiler unrolls small loops by itself, large ones not, and then arrays meant for registers end up in memory.
``for i in static(N)`` is unrolled here, in the source: N is a constant expression of the kernel's enclosing scope. In
the simulator ``static`` is ``range``.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["static", "unrolled"]

static = range


def unrolled(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` with every ``static`` loop written out; its constants become globals of the new function."""
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    _drop_annotations(definition)
    module = ast.fix_missing_locations(_Unroll(scope).visit(tree))
    exec(compile(module, f"<{function.__name__}, unrolled>", "exec"), scope)
    made: Callable[..., None] = scope[function.__name__]
    return made


def _drop_annotations(definition: ast.FunctionDef) -> None:
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None


class _Unroll(ast.NodeTransformer):
    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope

    def visit_For(self, node: ast.For) -> Any:
        loop = node.iter
        if not (isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id == "static"):
            return self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        bounds = [eval(compile(ast.Expression(bound), "<bound>", "eval"), self.scope) for bound in loop.args]
        written: list[Any] = []
        for value in range(*bounds):
            for statement in node.body:
                placed = _Replace(node.target.id, value).visit(copy.deepcopy(statement))
                result = self.visit(placed)
                written.extend(result if isinstance(result, list) else [result])
        return written


class _Replace(ast.NodeTransformer):
    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Constant(self.value), node) if node.id == self.name else node
