"""`python -m tests.threads`: the load of `load.py` at full size."""

from __future__ import annotations

import argparse
import sys

from tests.threads.load import BESIDE, KINDS, run


def main() -> int:
    """Run it; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.threads", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runners", nargs="*", choices=KINDS, default=[])
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=BESIDE)
    parser.add_argument("--switch", type=float, default=None, help="seconds a thread may run")
    arguments = parser.parse_args()
    loads = [arguments.runners] if arguments.runners else [["lazy"], ["full"], list(KINDS)]
    wrong = 0
    for kinds in loads:
        totals = run(
            arguments.steps,
            kinds,
            device=arguments.device,
            threads=arguments.threads,
            beside=arguments.beside,
            seed=arguments.seed,
            switch_s=arguments.switch,
        )
        print(f"{', '.join(kinds)}: {totals}", flush=True)
        wrong += sum(totals.wrong.values())
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
