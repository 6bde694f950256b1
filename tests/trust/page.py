"""The table of defects.md, by group of seeded defects: `python -m tests.trust.page --write`.

It is made from what each defect is expected to give at the level "capture", which
`test_defects.py` compares with what it gives. docs/concepts/trust.md has its last row in words.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.trust.defects import DEFECTS
from tests.trust.scenario import Defect

PAGE = Path(__file__).resolve().parent / "defects.md"
_TITLE = """# Seeded defects, at the level "capture"

Made by `python -m tests.trust.page --write`. docs/concepts/trust.md says what the columns mean.

"""

GROUPS = {
    "closure": "a number, list, function or tensor replaced",
    "global": "the same",
    "default argument": "the same",
    "environment": "a variable, a number that another thread has or changes",
    "attribute": "a number, flag, text or tensor changes",
    "class attribute": "the same, a method of a class patched",
    "replaced method": "`model.forward = ...`, a method of one instance",
    "counter": "calls counted in Python decide: a position in a cache",
    "cache": "results or tables kept by shape, by a setting or for ever",
    "hook": "registered, removed, or with a memory",
    "train and eval": "`train()` after capture",
    "replaced part": "a submodule or layer replaced, appended, in another order",
    "moved weight": "`load_state_dict(assign=True)`, `.data =`, `.to()`, `set_()`, weights untied",
    "parametrized weight": "weight norm removed, a parametrization added, a scale in Python",
    "autocast": "on, off, or another dtype",
    "default dtype": "changed",
    "numerics": "deterministic algorithms, TF32",
    "random": "seeds and generators made in the forward, `random`, NumPy, the clock",
    "thread": "operators of another thread, a forward that asks for its thread",
    "host read": "`item()`, branches, masks, NumPy, `ctypes`",
    "operator": "Python state or hidden writes in custom operators and autograd functions",
    "rows mixed": "mean, softmax, sort, last row, batch norm ... over padding too",
    "index padding": "padding of an index input that points at a live row",
    "state": "tensors that the forward advances, undeclared",
    "output": "state, numbers, or another structure later",
    "metadata": "a step's metadata, or a host's tensor that is new at each step",
    "pieces": "the same in pieces and between them",
    "kinds": "what only one kind of batch does, lazy captures",
    "compiled": "compiled modules",
    "clean": "no mistake: counters, logging, lazy tables, dropout, declared mixing ...",
}
"""What the programs of each group do, in the order of the page."""

MISTAKES = [each for each in DEFECTS if not each.clean]

_HEAD = ("mistake", "programs", "right or named", "late", "not by default", "otherwise on CUDA")


def table() -> str:
    """The rows of the page, as Markdown."""
    lines = [
        f"| {' | '.join(_HEAD)} |",
        "|---" * len(_HEAD) + "|",
    ]
    for group, text in GROUPS.items():
        cells = _cells([each for each in DEFECTS if each.group == group])
        lines.append(f"| {group}: {text} | {cells} | {_on_cuda(group)} |")
    lines.append(f"| **all but clean** | {_cells(MISTAKES)} | |")
    return "\n".join(lines) + "\n"


def counts(defects: list[Defect]) -> tuple[int, int, int, int]:
    """How many there are: all, right or named, late, not found by default."""
    words = Counter(each.expected for each in defects)
    return len(defects), words["right"] + words["named"], words["late"], words["silent"]


def _cells(defects: list[Defect]) -> str:
    return " | ".join(str(number or "") for number in counts(defects))


def _on_cuda(group: str) -> str:
    words = {"silent": "not by default"}
    parts = []
    for each in DEFECTS:
        # The page is one for all Pythons, so it leaves out what is told on some.
        there = each.on_cuda or each.expected
        if each.group == group and "cuda" in each.devices and there != each.expected:
            parts.append(f"{each.name}: {words.get(there, there)}")
    for device, others in (("cuda", "not tried"), ("cpu", "only there")):
        count = sum(each.group == group and device not in each.devices for each in DEFECTS)
        parts += [f"{count} {others}"] if count else []
    return "; ".join(parts)


def page() -> str:
    """The text of defects.md."""
    return _TITLE + table()


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"as tests/trust/{PAGE.name}")
    if parser.parse_args(arguments).write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
