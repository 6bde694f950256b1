"""Small changes of a Python file, each of which a test should notice."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# What only says something, or only concerns who reads the types.
SILENT = ("warn", "debug", "info", "say", "told")


@dataclass(frozen=True)
class Mutant:
    """One change: the line as it was (`old`) and what it became (`new`), of a file of the tree."""

    file: str
    line: int
    function: str
    old: str
    new: str
    source: str
    nth: int = 1

    @property
    def name(self) -> str:
        """The same as long as the line is the same, wherever it has moved; `nth` tells apart what
        reads alike in one function."""
        which = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.file} {self.function}: {self.old} -> {self.new}{which}"


def mutants(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    text = (root / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    changes = []
    for node, function in _inside_of_functions(tree):
        for changed in _changes(node):
            old, new = _line(node), _line(changed)
            source = _replaced(text, node, changed)
            changes.append(Mutant(file, node.lineno, function, old, new, source))
    changes.sort(key=lambda mutant: mutant.line)
    alike: Counter[str] = Counter()
    for place, mutant in enumerate(changes):
        alike[mutant.name] += 1
        changes[place] = replace(mutant, nth=alike[mutant.name])
    return changes


def _line(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:160]


def _inside_of_functions(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    def walk(node: ast.AST, name: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}" if name else child.name
                # Not the decorators, the defaults and the annotations.
                for part in child.body:
                    if isinstance(child, ast.FunctionDef) and not _is_error(part):
                        yield from statement(part, inner)
                    else:
                        yield from walk(ast.Module([part], []), inner)
            else:
                yield from walk(child, name)

    def statement(part: ast.stmt, name: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            yield from walk(ast.Module([part], []), name)
            return
        yield part, name
        for child in ast.iter_child_nodes(part):
            if isinstance(child, ast.stmt):
                if not _is_error(child):
                    yield from statement(child, name)
            elif isinstance(child, ast.excepthandler):
                for inner in child.body:
                    if not _is_error(inner):
                        yield from statement(inner, name)
            else:
                yield from (
                    (node, name)
                    for node in ast.walk(child)
                    if isinstance(node, ast.expr) and hasattr(node, "lineno")
                )

    yield from walk(tree, "")


def _is_error(node: ast.stmt) -> bool:
    """What raises is text for the most part, and what it says is tested elsewhere."""
    return isinstance(node, ast.Raise)


def _changes(node: ast.stmt | ast.expr) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS.get(type(node.ops[0]))
        if other is not None:
            changed = copy.deepcopy(node)
            changed.ops = [other()]
            yield changed
    elif isinstance(node, ast.BoolOp):
        changed_bool = copy.deepcopy(node)
        changed_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed_bool
        for left_out in range(len(node.values)):
            fewer = copy.deepcopy(node)
            del fewer.values[left_out]
            yield fewer.values[0] if len(fewer.values) == 1 else fewer
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not isinstance(node.left, ast.JoinedStr) and not _is_type(node):
            changed_sum = copy.deepcopy(node)
            changed_sum.op = ARITHMETIC[type(node.op)]()
            yield changed_sum
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and _does_something(node):
        yield ast.Pass()
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield ast.Return(ast.Constant(None))


def _is_type(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.BitOr) and any(
        isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)
    )


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        if not isinstance(node.value, ast.Call):
            return False
        called = ast.unparse(node.value.func)
        return not any(word in called.split(".")[-1] for word in SILENT)
    # A local name that is not set is an error at once, which proves nothing.
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)


def _replaced(text: str, node: ast.stmt | ast.expr, changed: ast.AST) -> str:
    """The text with one node replaced, on the same lines."""
    lines = text.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    last = lines[node.end_lineno - 1]
    after = last[node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    new = ast.unparse(changed)
    new = f"({new})" if isinstance(changed, ast.expr) else new
    return (before + new.encode() + after).decode()
