"""`graphrt cache`: what the compile cache holds, and how to be rid of it."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graphrt.compile.cache.listing import StoredKey

cache_app = typer.Typer(
    help="List, show and remove compiled code kept for later starts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Directory = Annotated[
    Path | None, typer.Option(help="The cache; else GRAPHRT_CACHE_DIR or the user's own.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

_PIPE_WIDTH = 160
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@cache_app.command("ls")
def ls(directory: Directory = None, json: Json = False) -> None:
    """List the keys, the latest first."""
    from graphrt.compile.cache.entry import default_directory
    from graphrt.compile.cache.listing import stored_keys
    from graphrt.core.base.texts import size_text

    where = directory or default_directory()
    keys = stored_keys(where)
    if json:
        print(json_format.dumps([as_data(each) for each in keys], indent=2))
        return
    console = _console()
    table = _table("key", "age", "size", "backend", "torch", "device", "ranks", "pieces")
    for each in keys:
        data = as_data(each)
        versions = data["versions"]
        _row(
            table,
            each.name,
            age_text(data["age_s"]),
            size_text(data["size_bytes"]),
            data["backend"] or "?",
            versions.get("torch", "?"),
            versions.get("device", "?"),
            " ".join(each.ranks),
            str(data["pieces"]),
        )
    if keys:
        console.print(table)
    total = size_text(sum(each.size_bytes for each in keys))
    _say(console, f"{len(keys)} keys, {total}, in {where}")


@cache_app.command("show")
def show(
    key: Annotated[str, typer.Argument(help="A key, or how it begins.")],
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Show what a key was made of, and check its files; exits with 1 if one is damaged."""
    from graphrt.compile.cache.entry import default_directory
    from graphrt.compile.cache.listing import find_key

    entry = find_key(directory or default_directory(), key)
    data = as_data(entry) | {
        "groups": None if entry.key is None else entry.key.groups,
        "ranks": [
            {"rank": rank, "pieces": sizes, "damaged": entry.damaged(rank)}
            for rank, sizes in entry.ranks.items()
        ],
    }
    if json:
        print(json_format.dumps(data, indent=2))
    else:
        _show(data, _console())
    if any(each["damaged"] for each in data["ranks"]):
        raise typer.Exit(1)


@cache_app.command("why")
def why(
    key: Annotated[str, typer.Argument(help="A key, or how it begins; else the latest.")] = "",
    directory: Directory = None,
) -> None:
    """Tell how a key differs from the nearest one, and its last written piece from the nearest.

    Without a key: of the last start, unless that loaded all from the cache.
    """
    from graphrt.compile.cache.entry import default_directory
    from graphrt.compile.cache.listing import explain_miss, explain_pieces, find_key, stored_keys

    where, console = directory or default_directory(), _console()
    stored = stored_keys(where)
    if not stored and not key:
        _say(console, f'{where} holds no key: nothing was compiled, or with backend="eager"')
        return
    if not key:
        entry = max(stored, key=lambda each: max(each.created_s, each.loaded_s))
        if entry.loaded_s:
            _say(
                console, f"{entry.name}: the last start loaded all from the cache, nothing differed"
            )
            return
    else:
        entry = find_key(where, key)
    if entry.key is None:
        _say(console, f"What {entry.name} was made of cannot be read.")
        return
    nearest, *differences = explain_miss(where, entry.key, but=entry.name)
    _say(console, f"{entry.name}: {nearest}")
    for rank in ["", *entry.ranks]:
        lines = explain_pieces(entry, rank) if rank else differences
        for indent, line in enumerate(lines):
            _say(console, f"{'  ' if indent or not rank else ''}{line}")


@cache_app.command("rm")
def rm(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or how they begin.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All keys.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    directory: Directory = None,
) -> None:
    """Remove keys; what is loaded already goes on running."""
    from graphrt.compile.cache.entry import default_directory
    from graphrt.compile.cache.listing import find_key, remove, stored_keys
    from graphrt.core.base.errors import InvalidOptionError
    from graphrt.core.base.texts import printable, size_text

    where = directory or default_directory()
    if bool(keys) == every:
        raise InvalidOptionError(
            "which keys to remove is not clear",
            got=f"keys {keys or []} and all={every}",
            expected="keys, or --all",
            advice="graphrt cache ls",
        )
    listed = stored_keys(where) if every else [find_key(where, each) for each in keys or []]
    entries = {each.name: each for each in listed}
    for each in entries.values():
        print(f"{each.name}  {size_text(each.size_bytes)}")
    if entries and not yes:
        typer.confirm(f"Remove from {printable(str(where))}?", abort=True)
    remove(entries.values())
    print(f"{len(entries)} removed")


def as_data(stored: StoredKey) -> dict[str, Any]:
    """A key as plain data, without reading its pieces."""
    groups = {} if stored.key is None else stored.key.groups
    settings = groups.get("settings", {})
    return {
        "key": stored.name,
        "directory": str(stored.directory),
        "created_s": stored.created_s,
        "age_s": max(0.0, time.time() - stored.created_s),
        "size_bytes": stored.size_bytes,
        "backend": settings.get("backend"),
        "versions": groups.get("versions", {}),
        "pieces": stored.pieces,
        "ranks": list(stored.ranks),
    }


def age_text(age_s: float) -> str:
    """7300 as "2 h"."""
    for unit, seconds in _UNITS:
        if age_s >= seconds:
            return f"{age_s // seconds:.0f} {unit}"
    return "0 s"


def _show(data: dict[str, Any], console: Console) -> None:
    from graphrt.core.base.texts import size_text

    age, size = age_text(data["age_s"]), size_text(data["size_bytes"])
    _say(console, f"{data['key']}: {age} old, {size}, in {data['directory']}")
    groups = data["groups"]
    if groups is None:
        _say(console, "What it was made of cannot be read.")
    else:
        for group in ("versions", "settings", "sizes"):
            table = _table(group, "")
            for name, value in groups[group].items():
                _row(table, name, _value_text(value))
            console.print(table)
        _say(console, f"It calls {', '.join(groups['called']) or 'torch alone'},")
        _say(console, f"and {len(groups['compiler'])} settings of the compiler (--json)")
    for rank in data["ranks"]:
        _show_rank(rank, console)


def _show_rank(rank: dict[str, Any], console: Console) -> None:
    from graphrt.core.base.texts import size_text

    _say(console, f"\nRank {rank['rank']}")
    table = _table("piece", "size", "")
    for name, size in sorted(rank["pieces"].items()):
        _row(table, name, size_text(size), rank["damaged"].get(name, ""))
    if rank["pieces"]:
        console.print(table)


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json_format.dumps(value)


def _console() -> Console:
    from rich.console import Console

    # A pipe has no width, and the default of 80 columns would fold every cell.
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    from rich.text import Text

    from graphrt.core.base.texts import printable

    # As plain text: rich would read a list in a setting as markup, and lets names of files through
    # that rename a terminal's window.
    table.add_row(*(Text(printable(cell)) for cell in cells))


def _say(console: Console, line: str) -> None:
    from graphrt.core.base.texts import printable

    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
