"""Where the host's time of one step goes, line by line: graphrt's own statements, timed in place.

    python3 -m benchmarks.gpu.lines [--least NS] [--json FILE]

Before every statement of the modules that a step goes through a stamp of the clock is put into
their source, as they are imported. Each row is the median, over many steps in short rounds, of the
time from one stamp to the next, without what a stamp itself takes: the statement, and the calls
into C that it makes. Stamps make the code between them slower than it is, the more the shorter it
is: rows tell where to look, and `benchmarks.gpu.overhead` what a whole step takes.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import CodeType, ModuleType
from typing import Any

MODULES = (
    "core.runner.runner",
    "core.runner.engine",
    "core.runner.executor",
    "core.inputs.buffers",
    "core.inputs.layout",
    "core.replay.handout",
    "cuda.ring.transport",
    "cuda.ring.slots",
)
STEP_BEGINS = -1
ROUNDS, STEPS, WARM_UPS = 101, 20, 12

_places: list[int] = []
_times: list[int] = []
_lines: list[tuple[str, int, str]] = []


def _stamp(place: int) -> None:
    _times.append(time.perf_counter_ns())
    _places.append(place)


class _Stamps(ast.NodeTransformer):
    """Puts a stamp before every statement of a function."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source.splitlines()
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        super().generic_visit(node)
        self._depth -= 1
        node.body = self._stamped(node.body)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if self._depth and isinstance(block, list) and isinstance(node, ast.stmt):
                setattr(node, name, self._stamped(block))
        return node

    def _stamped(self, block: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in block:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not isinstance(
                statement, ast.Nonlocal | ast.FunctionDef | ast.ClassDef | ast.Pass
            ):
                text = self._source[statement.lineno - 1].strip()
                _lines.append((self._module, statement.lineno, text))
                place = ast.Constant(len(_lines) - 1)
                call = ast.Call(ast.Name("_stamp_", ast.Load()), [place], [])
                found.append(ast.copy_location(ast.Expr(call), statement))
            found.append(statement)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        tree = _Stamps(fullname.rpartition(".")[2], source).visit(ast.parse(source))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_stamp_"] = _stamp
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.removeprefix("graphrt.") not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def forget() -> None:
    """Begin a new record."""
    _places.clear()
    _times.clear()


def cost_of_a_stamp() -> float:
    """Its own nanoseconds."""
    forget()
    for _ in range(2000):
        _stamp(STEP_BEGINS)
    return statistics.median(b - a for a, b in pairwise(_times))


def record(step: Callable[[], Any], synchronize: Callable[[], None]) -> int:
    """Run a step many times; returns how many."""
    for _ in range(WARM_UPS):
        step()
    forget()
    for _ in range(ROUNDS):
        synchronize()
        for _ in range(STEPS):
            _stamp(STEP_BEGINS)
            step()
    return ROUNDS * STEPS


def rows_of(steps: int, own: float) -> list[tuple[float, float, str, int, str]]:
    """Nanoseconds a step, how often a step, module, line and statement, in the order of a step."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in range(len(_places) - 1):
        found[_places[place], _places[place + 1]].append(_times[place + 1] - _times[place])
    order = {place: at for at, place in reversed(list(enumerate(_places[:400])))}
    rows = []
    for (place, _), times in sorted(found.items(), key=lambda each: order.get(each[0][0], 1 << 30)):
        often = len(times) / steps
        # The wait for the device between rounds is in none of them.
        if often >= 0.2:
            line = ("", 0, "the caller") if place == STEP_BEGINS else _lines[place]
            rows.append(((statistics.median(times) - own) * often, often, *line))
    return rows


def main() -> None:
    sys.meta_path.insert(0, _Finder())
    # Only now: these import graphrt.
    import torch

    from benchmarks.common import arguments, environment, finish, left_out, show, synchronizer
    from benchmarks.gpu.steps import LIVE, SIZE, call_runner
    from benchmarks.host_overhead import decode_runner, values
    from graphrt import Batch, GraphOptions

    parser = arguments(__doc__)
    parser.add_argument("--least", type=float, default=30.0, metavar="NS")
    options = parser.parse_args()
    left_out(options.device, ["inputs that graphs fetch: they are staged here"])
    torch.set_num_threads(1)
    runner = decode_runner(options.device, options=GraphOptions(inputs_in_graph=True))
    runner.capture()
    own, results = cost_of_a_stamp(), {}
    steps: dict[str, Callable[[], Any]] = {}
    for rows, kind in ((SIZE, "at a captured size"), (LIVE, "padded")):
        given = values(rows)
        on_device = {name: value.to(options.device) for name, value in given.items()}
        steps[f"5 host inputs, {kind}"] = partial(call_runner, runner, rows, given)
        steps[f"5 device inputs, {kind}"] = partial(call_runner, runner, rows, on_device)
        batch = Batch(rows, rows, 1)
        steps[f"slot, nothing written, {kind}"] = partial(runner, runner.slot(batch))
    in_place = dict(runner.inputs.layout(SIZE, SIZE).views)
    steps["5 inputs in place"] = partial(call_runner, runner, SIZE, in_place)
    for name, step in steps.items():
        count = record(step, synchronizer(options.device))
        lines = rows_of(count, own)
        table: list[list[Any]] = [
            [round(each[0]), f"{each[2]}:{each[3]}", each[4][:80]]
            for each in lines
            if abs(each[0]) >= options.least
        ]
        table.append([round(sum(each[0] for each in lines)), "", "all of it"])
        show(name, ["ns", "where", "statement"], table)
        results[name] = table
    finish("lines", options, environment(options.device), results)


if __name__ == "__main__":
    main()
