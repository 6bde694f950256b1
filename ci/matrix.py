"""Reads ci/matrix.json, the one list of machines and versions that CI runs on.

    python ci/matrix.py             the enabled rows, as the matrix of a GitHub workflow
    python ci/matrix.py --table     every row, with why it does not run
    python ci/matrix.py --names     the enabled rows, for ci/rows_here.sh
    python ci/matrix.py NAME FIELD  one field of one row, for ci/run_row.sh

A row's `python` and `torch` may be empty: then the runner's own are used. Its `target` is what
make is called with, if not `test`. Its `cann` is the CANN that the NPU simulator says it is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

MATRIX = Path(__file__).with_name("matrix.json")
FIELDS = {"name": str, "runner": (str, list), "python": str, "torch": str, "enabled": bool}


def read_rows(path: Path = MATRIX) -> list[dict[str, Any]]:
    """All rows; exits with a message if one of them is not well formed."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        for key, kind in FIELDS.items():
            if not isinstance(row.get(key), kind):
                sys.exit(f"{path.name}: row {row.get('name')!r} needs {key!r}: {kind}")
        # Only a whole version is one that a run can be held to.
        if row["torch"] and not re.fullmatch(r"\d+\.\d+\.\d+", row["torch"]):
            sys.exit(f"{path.name}: row {row['name']!r} needs a torch like 2.13.0, or none")
        if not row["enabled"] and not row.get("reason"):
            sys.exit(f"{path.name}: row {row['name']!r} is not enabled and gives no reason")
    names = [row["name"] for row in rows]
    if len(set(names)) != len(names):
        sys.exit(f"{path.name}: two rows have one name")
    return rows


def workflow_matrix(rows: list[dict[str, Any]]) -> str:
    """What `fromJSON` in the workflow expects."""
    included = [{key: row[key] for key in FIELDS} for row in rows if row["enabled"]]
    return json.dumps({"include": included})


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        versions = f"python {row['python'] or '-':5} torch {row['torch'] or '-':7}"
        lines.append(f"{row['name']:22} {versions} {row.get('reason', 'runs')}")
    return "\n".join(lines)


def field(rows: list[dict[str, Any]], name: str, key: str) -> str:
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        sys.exit(f"no row {name!r}; there are: {', '.join(row['name'] for row in rows)}")
    value = row.get(key, "")
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str]) -> str:
    rows = read_rows()
    if not arguments:
        return workflow_matrix(rows)
    if arguments == ["--names"]:
        return "\n".join(row["name"] for row in rows if row["enabled"])
    if arguments == ["--table"]:
        return table(rows)
    if len(arguments) == 2:
        return field(rows, *arguments)
    sys.exit(__doc__)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
