"""Streams that run out at every count of them, in every mode, as one table.

    python -m tests.ascend.exhaustion_sweep [--first 4] [--last 200] [--modes MODE ...] [--deep]

On the simulator, with the environment of `make test-ascend`. 20 sizes and 8 layers. A row is one
count of free streams: full graphs and sets of pieces captured, graphs dropped, streams left, and
how many batches graphs served; it is there only if every batch equals eager bit for bit, nothing
leaks and every dropped graph says why. `--deep` gives queues the depth of the device's. Exits with
1 if a row is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.ascend.schedules import is_simulated, python

MODES = ("FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SHALLOW = {"GRAPHRT_SIM_QUEUE_DEPTH": "64"}
A_PROCESS = 50
"""Counts that one process goes through, with one runner."""


def rows(mode: str, counts: Sequence[int], *, deep: bool) -> list[str]:
    """The rows of one mode, from a process of their own; raises what it died of."""
    code = f"import exhaustion\nfor row in exhaustion.rows({mode!r}, {list(counts)!r}): print(row)"
    environment = None if deep else SHALLOW
    out = python(code, streams=300, timeout_s=1800, environment=environment)
    return [line for line in out.splitlines() if line.startswith(f"{mode} |")]


def main() -> int:
    """Run them; returns how many rows are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=4)
    parser.add_argument("--last", type=int, default=200)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args()
    import graphrt

    graphrt.get_platform("ascend-sim")
    if not is_simulated():
        sys.exit("needs graphrt-ascend-sim")
    begin, right, missing = time.monotonic(), 0, 0
    print("mode | free | full | pieces | dropped | left | served | batches")
    for mode in options.modes:
        for start in range(options.first, options.last + 1, A_PROCESS):
            counts = range(start, min(start + A_PROCESS, options.last + 1))
            try:
                told = rows(mode, counts, deep=options.deep)
            except AssertionError as error:
                told = [line for line in str(error).splitlines() if line.startswith(f"{mode} |")]
                print(error)
            print("\n".join(told), flush=True)
            right, missing = right + len(told), missing + len(counts) - len(told)
    seconds = time.monotonic() - begin
    print(f"{right} rows right, {missing} missing, in {seconds:.0f} s")
    return missing


if __name__ == "__main__":
    sys.exit(min(main(), 1))
