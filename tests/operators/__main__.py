"""Try torch's operator samples:

python -m tests.operators [--device cpu|cuda] [--dtype float32 ...] [--only NAME] [--jobs N]

Exits with 1 if a replay is wrong, an error has no name, or the list in `refused.json` lacks what
was refused. `--write` makes that list anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.operators import listing
from tests.operators.samples import DTYPES, SAMPLES, cases, dtype_name
from tests.operators.table import Row
from tests.operators.trial import AT_STEP, EQUAL, INVALID, RANDOM, RAW, REFUSED, WRONG
from tests.operators.workers import tried

OUTCOMES = (EQUAL, REFUSED, AT_STEP, RANDOM, INVALID, WRONG, RAW)


def main() -> int:
    """Run as the arguments say; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    names = [dtype_name(dtype) for dtype in DTYPES]
    parser.add_argument("--dtype", nargs="*", default=names, choices=names)
    parser.add_argument("--only", default="", help="operators with this in their names")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator and dtype")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help=f"write {listing.FILE.name} anew")
    asked = parser.parse_args()
    if asked.write and asked.only:
        parser.error("--write makes the list of all operators anew: leave out --only")
    dtypes = tuple(getattr(torch, name) for name in asked.dtype)
    todo = cases(asked.device, dtypes, asked.only)
    rows: list[Row] = []
    started = time.monotonic()
    for done, found in enumerate(tried(todo, asked.samples, asked.jobs), 1):
        rows += found
        for row in found:
            for verdict in row.worst:
                said = f"{verdict.error} {verdict.operator} {verdict.why}"
                print(f"\r{verdict.outcome:6} {row}: {said}")
        if sys.stdout.isatty() or done % 100 == 0 or done == len(todo):
            seconds = time.monotonic() - started
            print(f"\r{done} of {len(todo)}, {seconds:.0f} s ", end="", flush=True)
    print()
    print("\n".join(table(rows)))
    bad = [row for row in rows if row.worst]
    if asked.write:
        listing.write(rows, asked.device)
        new = []
    else:
        new = listing.lacking(rows, asked.device)
        print("\n".join(f"not in {listing.FILE.name}: {line}" for line in new))
    return 1 if bad or new else 0


def table(rows: list[Row]) -> list[str]:
    """Samples by outcome and dtype, then by the way of calling."""
    lines = [f"{'samples':18}" + "".join(f"{name:>18}" for name in OUTCOMES)]
    for key in ("dtype", "variant"):
        for value in dict.fromkeys(getattr(row, key) for row in rows):
            counts: Counter[str] = Counter()
            for row in rows:
                if getattr(row, key) == value:
                    counts += row.counts
            lines.append(f"{value:18}" + "".join(f"{counts[name]:18}" for name in OUTCOMES))
        lines.append("")
    operators = {row.name for row in rows}
    lines.append(
        f"{len(operators)} operators, {len(rows)} rows, "
        f"{sum(len(row.verdicts) for row in rows)} samples; "
        f"replayed with the values of the capture only: {sum(row.stays for row in rows)} rows"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())
