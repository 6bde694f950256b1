"""Mutants of the Ascend platform that no rule makes: one thing that the protocol needs left out."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.mutants.mutate import Mutant

CHANGES = Path(__file__).with_name("by_hand.json")
"""Of each the file, what it is, the text as it is (found once) and what it becomes."""


def by_hand(root: Path) -> list[Mutant]:
    """These mutants, in order.

    Raises `ValueError` where a text is not found exactly once: the line was changed, and its mutant
    has to be too.
    """
    mutants = []
    for change in json.loads(CHANGES.read_text(encoding="utf-8")):
        file, what, old, new = (change[key] for key in ("file", "what", "old", "new"))
        text = (root / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{file}: {what}: found {text.count(old)} times: {old!r}")
        source = text.replace(old, new)
        ast.parse(source)
        line = text[: text.index(old)].count("\n") + 1
        mutants.append(Mutant(file, line, what, _short(old), _short(new), source))
    return mutants


def _short(text: str) -> str:
    return " ".join(text.split())[:80] or "nothing"
