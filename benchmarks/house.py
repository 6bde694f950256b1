"""How large the house is: code lines by mechanism, the largest functions, the classes of core.

    python3 -m benchmarks.house [--functions] [--classes] [--json FILE]
    python3 benchmarks/house.py --root OTHER      # of another tree

A code line is one that is not blank, not a comment and not part of a docstring. A mechanism is a
folder of `graphrt/core` or a package beside it; lines of `native/` count as `native`. Complexity
counts the branches of a function (McCabe's number): one, plus one for every `if`, loop, `except`,
conditional expression, comprehension, `assert`, `case` and each further operand of `and` or `or`.
An inner function counts by itself, and not at the function around it.
"""

from __future__ import annotations

import argparse
import ast
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MOST_COMPLEX, MOST_LINES = 15, 60
"""Of a function, but for kernels and tables."""
MOST_FIELDS = 12
"""Of a class: attributes that its methods set."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert,
             ast.comprehension, ast.match_case)  # fmt: skip


class Function(NamedTuple):
    where: str
    lines: int
    complexity: int


class Class(NamedTuple):
    where: str
    fields: int
    methods: int


def code_lines(path: Path) -> int:
    """Lines of `path` with code on them. A C file is read by its line comments alone."""
    if path.suffix != ".py":
        return _c_lines(path.read_text())
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for text in _texts_by_themselves(node):
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in ignored:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def _texts_by_themselves(node: ast.AST) -> Iterator[ast.expr]:
    """Docstrings, those behind an attribute too."""
    if isinstance(node, _DOCUMENTED):
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def _c_lines(text: str) -> int:
    count, inside = 0, False
    for line in text.splitlines():
        line = line.strip()
        if inside or line.startswith("/*"):
            inside = "*/" not in line
        elif line and not line.startswith("//"):
            count += 1
    return count


def functions(root: Path, path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _FUNCTIONS):
            own = list(_of_itself(node))
            complexity = 1 + sum(isinstance(inner, _BRANCHES) for inner in own)
            complexity += sum(
                len(inner.values) - 1 for inner in own if isinstance(inner, ast.BoolOp)
            )
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(f"{path.relative_to(root)}:{node.lineno} {node.name}", lines, complexity)


def _of_itself(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child
            yield from _of_itself(child)


def classes(root: Path, path: Path) -> Iterator[Class]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            fields = {
                target.attr
                for inner in ast.walk(node)
                if isinstance(inner, (ast.Assign, ast.AnnAssign))
                for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
                for target in ast.walk(target)
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            fields |= {
                statement.target.id
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            }
            methods = sum(isinstance(statement, _FUNCTIONS) for statement in node.body)
            yield Class(f"{path.relative_to(root)}:{node.lineno} {node.name}", len(fields), methods)


def mechanism_of(root: Path, path: Path) -> str:
    parts = path.relative_to(root).parts
    if parts[0] == "native":
        return "native"
    if parts[1:2] == ("core",):
        return f"core/{parts[2]}" if len(parts) > 3 else "core"
    return parts[1] if len(parts) > 2 else "surface"


def house(root: Path) -> dict[str, Any]:
    sources = [*sorted((root / "graphrt").rglob("*.py")), *sorted((root / "native").glob("*.[ch]"))]
    lines, files = Counter[str](), Counter[str]()
    for path in sources:
        mechanism = mechanism_of(root, path)
        lines[mechanism] += code_lines(path)
        files[mechanism] += 1
    python = [path for path in sources if path.suffix == ".py"]
    core = [path for path in python if "core" in path.relative_to(root).parts]
    return {
        "lines": dict(lines),
        "files": dict(files),
        "functions": sorted(
            (one for path in python for one in functions(root, path)),
            key=lambda one: (-one.complexity, -one.lines),
        ),
        "classes": sorted(
            (one for path in core for one in classes(root, path)), key=lambda one: -one.fields
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--functions", action="store_true", help="those above the budget")
    parser.add_argument("--classes", action="store_true", help="core's, by their fields")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    facts = house(options.root)
    core = 0
    for name, count in sorted(facts["lines"].items()):
        core += count if name.startswith("core") else 0
        print(f"{name:20}{count:8,}{facts['files'][name]:6} files")
    print(f"{'core in all':20}{core:8,}")
    print(f"{'all':20}{sum(facts['lines'].values()):8,}{sum(facts['files'].values()):6} files")
    large = [
        one for one in facts["functions"] if one.complexity > MOST_COMPLEX or one.lines > MOST_LINES
    ]
    wide = [one for one in facts["classes"] if one.fields > MOST_FIELDS]
    print(f"functions above complexity {MOST_COMPLEX} or {MOST_LINES} lines: {len(large)}")
    for one in large if options.functions else ():
        print(f"  {one.complexity:4}{one.lines:5}  {one.where}")
    print(f"classes of core: {len(facts['classes'])}, above {MOST_FIELDS} fields: {len(wide)}")
    for each in facts["classes"] if options.classes else ():
        print(f"  {each.fields:4}{each.methods:5}  {each.where}")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
