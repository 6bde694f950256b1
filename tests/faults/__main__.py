"""`python -m tests.faults [--platform cpu|ascend-sim|cuda] [--only NAME]`: the table of faults."""

from __future__ import annotations

import argparse
import sys
import time

from tests.faults.harness import HEAD, Harness, row
from tests.faults.platforms import maker_of, scenarios_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--platform", default="cpu", choices=("cpu", "ascend-sim", "cuda"))
    parser.add_argument("--only", action="append", metavar="NAME")
    arguments = parser.parse_args()
    make, known = maker_of(arguments.platform), scenarios_of(arguments.platform)
    wrong, count, started = 0, 0, time.perf_counter()
    print(HEAD)
    for name in arguments.only or known:
        harness = Harness(known[name], make)
        findings = []
        for fault in harness.faults():
            findings.append(harness.inject(fault))
            if findings[-1].wrong:
                print(f"{name}: {findings[-1]}", flush=True)
        for kind, places in harness.baseline.seen.items():
            print(row(name, kind, places, findings), flush=True)
        wrong += sum(bool(each.wrong) for each in findings)
        count += len(findings)
    print(f"\n{count} faults in {time.perf_counter() - started:.0f} s, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
