"""Change core line by line and see whether tests notice; with GRAPHRT_PLATFORM=ascend-sim, the
Ascend platform, with the mutants of `by_hand.py` first.

    python -m tests.mutants [--per-file N | --draw N] [--seed N] [--only TEXT ...] [--all-tests]
        [--json FILE]

A mutant that no test notices is a survivor; `survivors.json` says why those that are known do no
harm. Exits with 1 if there is another one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import hypothesis  # noqa: F401  Loaded once, before processes are forked.
import pytest  # noqa: F401
import torch

from tests.mutants.by_hand import by_hand
from tests.mutants.mutate import Mutant, mutants
from tests.mutants.run import (
    CHANGED,
    ELSEWHERE,
    REST,
    ROOT,
    SIMULATED,
    Result,
    asked_first,
    copied,
    failing,
    folder_of,
    result_of,
)

EXPLAINED = Path(__file__).with_name("survivors.json")


def files(folders: Iterable[str] = CHANGED) -> list[str]:
    """The files that are changed, of these folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    names = [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]
    return [name for name in dict.fromkeys(names) if not name.startswith(ELSEWHERE)]


def chosen(per_file: int, seed: int, only: Sequence[str] = ()) -> list[Mutant]:
    """So many mutants of each file, drawn at random; those drawn that have one of `only` in their
    name, or are named so, drawn or not."""
    mutants_chosen = [
        mutant
        for mutant in (by_hand(ROOT) if SIMULATED else [])
        if not only or any(text in mutant.name for text in only)
    ]
    for file in files():
        of_file = mutants(ROOT, file)
        drawn = random.Random(f"{seed} {file}").sample(of_file, min(per_file, len(of_file)))
        if only:
            named = [mutant for mutant in of_file if mutant.name in only and mutant not in drawn]
            drawn = [mutant for mutant in drawn if any(text in mutant.name for text in only)]
            drawn += named
        mutants_chosen += drawn
    return mutants_chosen


def drawn(count: int, seed: int, only: Sequence[str] = ()) -> list[Mutant]:
    """So many mutants, drawn at random from all of the files that have one of `only` in their name;
    long files give more of them than short ones."""
    named = [file for file in files() if not only or any(text in file for text in only)]
    return random.Random(seed).sample([each for f in named for each in mutants(ROOT, f)], count)


def explained() -> dict[str, str]:
    """Why a survivor does no harm, by the name of the mutant."""
    loaded: dict[str, str] = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--per-file", type=int, default=3, metavar="N")
    parser.add_argument("--draw", type=int, metavar="N", help="so many in all, of all files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="a part of its name, or the name")
    parser.add_argument("--all-tests", action="store_true", help="the other tests too, if needed")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.draw:
        todo = drawn(options.draw, options.seed, options.only)
    else:
        todo = chosen(options.per_file, options.seed, options.only)
    known, done = explained(), []
    with copied() as tree:
        for folder in dict.fromkeys(folder_of(mutant.file) for mutant in todo):
            tests = [*asked_first(folder), *(REST if options.all_tests else ())]
            by = failing(tree, tests, options.timeout * 5)
            if by:
                raise SystemExit(f"{folder}: fails without any mutant: {by}")
        for number, mutant in enumerate(todo, 1):
            if mutant.name in known:
                continue
            result = result_of(mutant, tree, thorough=options.all_tests, timeout_s=options.timeout)
            done.append(result)
            said = f"killed by {result.by}" if result.killed else "SURVIVED"
            print(f"[{number}/{len(todo)}] {mutant.name}: {said} ({result.seconds:.0f} s)")
            sys.stdout.flush()
            if options.json is not None:
                options.json.write_text(json.dumps(as_json(done), indent=1), encoding="utf-8")
    alive = [result for result in done if not result.killed]
    print(f"\n{len(done)} mutants, {len(done) - len(alive)} noticed, {len(alive)} not")
    for result in alive:
        print(f"{result.mutant.file}:{result.mutant.line}: {result.mutant.name}")
    raise SystemExit(bool(alive))


def as_json(results: list[Result]) -> list[dict[str, object]]:
    """The table of a run."""
    return [
        {
            "mutant": result.mutant.name,
            "line": result.mutant.line,
            "by": result.by,
            "seconds": round(result.seconds, 1),
        }
        for result in results
    ]


if __name__ == "__main__":
    start = time.monotonic()
    main()
