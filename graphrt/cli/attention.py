"""`graphrt attention`: the attention backends with a known level, and what it depends on."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from graphrt.attention.levels.facts import KnownBackend, Level
from graphrt.attention.levels.known import FAMILIES
from graphrt.attention.levels.lookup import facts_of, known_backend, known_backends, level_of

LOWERED, TASK = "*", "+"


def print_attention(text: str | None, *, as_json: bool, console: Console | None = None) -> None:
    """Print all known backends, or one; raises `InvalidOptionError` if it is unknown.

    `text` is `name` or `name:fact=value,...`, whose level is then marked.
    """
    if as_json:
        data = [as_data(each) for each in known_backends()] if text is None else _one_as_data(text)
        print(json.dumps(data, indent=2))
        return
    console = console or Console()
    if text is None:
        _show_all(console)
    else:
        _show_one(text, console)


def as_data(backend: KnownBackend) -> dict[str, Any]:
    """A backend as plain data."""
    return {
        "name": backend.name,
        "aliases": list(backend.aliases),
        "source": backend.source,
        "task_update": backend.task_update,
        "levels": [
            {
                "support": level.support.name,
                "when": {condition.fact: condition.value for condition in level.when},
                "why": level.why,
                "conservative": level.conservative,
            }
            for level in backend.levels
        ],
    }


def find_level(text: str) -> tuple[KnownBackend, Level]:
    """The backend and level of `name` or `name:fact=value,...`; raises `InvalidOptionError`."""
    name, _, listed = text.partition(":")
    facts = dict(fact(each) for each in listed.split(",") if each.strip())
    return known_backend(name), level_of(name, **facts)


def fact(text: str) -> tuple[str, Any]:
    """The name and value of `fact=value`; a name alone is true. Other texts than booleans and
    numbers stay texts, which the caller refuses."""
    name, equals, value = (part.strip() for part in text.partition("="))
    booleans: dict[str, bool] = {"true": True, "false": False}
    word = value.lower() if equals else "true"
    return name.replace("-", "_"), int(word) if word.isdecimal() else booleans.get(word, value)


def _one_as_data(text: str) -> dict[str, Any]:
    backend, level = find_level(text)
    return as_data(backend) | {"level": backend.levels.index(level)}


def _show_all(console: Console) -> None:
    table = _table("Known attention backends")
    table.add_column("backend", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("when", overflow="fold")
    for family in FAMILIES.values():
        for backend in family:
            name = backend.name + (f" {TASK}" if backend.task_update else "")
            for level in backend.levels:
                table.add_row(name, _support(level), _when(backend, level))
                name = ""
        table.add_section()
    console.print(table)
    notes = [
        f"{LOWERED} chosen lower than what its kernels may allow",
        f"{TASK} lengths are host arguments: full graphs need them declared as tasks",
        "The first line that applies counts; `graphrt attention NAME` says why.",
    ]
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _show_one(text: str, console: Console) -> None:
    backend, chosen = find_level(text)
    lines = [f"{backend.name}, as in {backend.source}"]
    if backend.aliases:
        lines.append("Also called: " + ", ".join(backend.aliases))
    if backend.task_update:
        lines.append("Its lengths are host arguments: full graphs need them declared as tasks.")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("when: why", overflow="fold")
    for level in backend.levels:
        when = _when(backend, level)
        why = f"{when}: {level.why}" if when else level.why
        table.add_row(">" if level is chosen else "", _support(level), why)
    console.print(table)
    for fact in facts_of(backend):
        line = f"{fact.name}={str(fact.default).lower()} by default: {fact.meaning}"
        console.print(line, markup=False, highlight=False)
    if any(level.conservative for level in backend.levels):
        note = f"{LOWERED} chosen lower than what its kernels may allow"
        console.print(note, markup=False, highlight=False)


def _table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )


def _support(level: Level) -> str:
    return level.support.name + (LOWERED if level.conservative else "")


def _when(backend: KnownBackend, level: Level) -> str:
    if level.when:
        return ", ".join(map(str, level.when))
    return "else" if len(backend.levels) > 1 else ""
