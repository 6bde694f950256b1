"""The table of seeded defects: `python -m tests.trust.defects` runs it and prints what was found.

Written down before the code that finds them. `expected` of each is what comes of it at the level
"capture"; at "always" nothing may be silent, or said too late.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter

from tests.trust import (
    ambient,
    attributes,
    clean,
    clean_tensors,
    closures,
    counters,
    host_reads,
    modules,
    outputs,
    pieces,
    rows,
    tensor_state,
    weights,
)
from tests.trust.scenario import Defect
from tests.trust.twins import LEVELS, Outcome, run

_GROUPS = (
    *(closures, attributes, counters, modules, weights, ambient, host_reads),
    *(rows, tensor_state, outputs, pieces, clean, clean_tensors),
)

DEFECTS: tuple[Defect, ...] = tuple(
    each for group in _GROUPS for each in vars(group).values() if isinstance(each, Defect)
)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen part of the table; returns 0, or 1 where something is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.defects", description=__doc__)
    parser.add_argument("names", nargs="*", help="only those whose name or group contains one")
    parser.add_argument(
        "--levels", default="off,capture,first,always", help="of " + ",".join(LEVELS)
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="one object a defect, a line each")
    parser.add_argument("--said", action="store_true", help="print what was said, too")
    chosen = parser.parse_args(arguments)
    levels = chosen.levels.split(",")
    table = [
        each
        for each in DEFECTS
        if chosen.device in each.devices
        and (not chosen.names or any(n in f"{each.name} {each.group}" for n in chosen.names))
    ]
    totals: dict[str, Counter[str]] = {level: Counter() for level in levels}
    unexpected = 0
    if not chosen.json:
        print(f"{'group':20} {'defect':48} {'expected':9}", *(f"{level:9}" for level in levels))
    for each in table:
        found = {level: run(each, level, chosen.device) for level in levels}
        wanted = each.expected_on(chosen.device)
        unexpected += "capture" in found and not as_expected(found["capture"], wanted)
        for level, outcome in found.items():
            totals[level][outcome.word] += 1
        if chosen.json:
            print(json.dumps(_plain(each, wanted, found)), flush=True)
            continue
        words = (f"{outcome.word:9}" for outcome in found.values())
        print(f"{each.group:20} {each.name:48} {wanted:9}", *words, flush=True)
        if chosen.said:
            for level, outcome in found.items():
                text = " ".join(outcome.said.split())[:300]
                print(f"  {level}: step {outcome.said_at}: {text}" if text else f"  {level}: -")
    if not chosen.json:
        for level, total in totals.items():
            print(f"{level}: {', '.join(f'{n} {word}' for word, n in sorted(total.items()))}")
        print(f"{len(table)} in all; {unexpected} not as expected at capture")
    return 1 if unexpected else 0


def as_expected(outcome: Outcome, wanted: str) -> bool:
    """Whether it came out as the table says; late may be in time by luck."""
    return outcome.word == wanted or (wanted, outcome.word) == ("late", "named")


def _plain(each: Defect, wanted: str, found: dict[str, Outcome]) -> dict[str, object]:
    return {
        "name": each.name,
        "group": each.group,
        "expected": wanted,
        "drifts": each.drifts,
        "outcomes": {level: dataclasses.asdict(outcome) for level, outcome in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
