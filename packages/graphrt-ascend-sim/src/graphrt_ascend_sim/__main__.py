"""`python -m graphrt_ascend_sim SCRIPT|-m MODULE [ARGUMENTS]`: run it on the simulator."""

from __future__ import annotations

import os
import runpy
import sys

from graphrt_ascend_sim.loading import start


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] == "-m" and len(arguments) == 1):
        sys.exit(__doc__)
    start()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


main()
