"""`python -m tests.faults [--platform cpu|ascend-sim|cuda] [--only NAME]`: the table of faults."""

from __future__ import annotations

import argparse
import sys
import time

from tests.faults.harness import Harness, Table
from tests.faults.platforms import maker_of, scenarios_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--platform", default="cpu", choices=("cpu", "ascend-sim", "cuda"))
    parser.add_argument("--only", action="append", metavar="NAME")
    arguments = parser.parse_args()
    make, known = maker_of(arguments.platform), scenarios_of(arguments.platform)
    table, started, count, shown = Table(), time.perf_counter(), 0, 0
    for name in arguments.only or known:
        harness = Harness(known[name], make)
        table.places.update({(name, kind): n for kind, n in harness.baseline.seen.items()})
        for fault in harness.faults():
            table.note(name, harness.inject(fault))
            count += 1
        lines = table.wrong[shown:]
        shown += len(lines)
        print("\n".join(lines), file=sys.stderr)
        print(f"{name}: {sum(harness.baseline.seen.values())} places", file=sys.stderr, flush=True)
    print("\n".join(table.lines()))
    print(f"\n{count} faults in {time.perf_counter() - started:.0f} s, {len(table.wrong)} wrong")
    print("\n".join(table.wrong))
    return bool(table.wrong)


if __name__ == "__main__":
    sys.exit(main())
