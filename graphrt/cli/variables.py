"""The variables of the environment that graphrt reads, and those that only look like one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

VARIABLES = {
    "GRAPHRT_ASCEND_HANG_TIMEOUT_S": "seconds after which a replay on an NPU counts as hung",
    "GRAPHRT_ASCEND_RESERVE_STREAMS": "streams of an NPU that captures leave free",
    "GRAPHRT_ASCEND_UPDATE_ORDER": "when tasks on an NPU are updated",
    "GRAPHRT_ASCEND_UPDATE_STRATEGY": "how tasks on an NPU are updated",
    "GRAPHRT_CACHE_DIR": "where compiled pieces are kept",
    "GRAPHRT_CHECK": "how much graphs are checked: off, capture, first, sample, always",
    "GRAPHRT_DISABLE_COMPILE_CACHE": "1 keeps no compiled pieces",
    "GRAPHRT_LOG": "prints the log: DEBUG, INFO, WARNING, ERROR",
    "GRAPHRT_MODE": "NONE turns all graphs off",
    "GRAPHRT_NATIVE": "0 leaves the step in C out",
    "GRAPHRT_PLATFORM": "the current platform",
    "GRAPHRT_PLUGINS": "the installed plugins that may be imported, by name; off: none",
    "GRAPHRT_SGLANG": "1 lets graphrt capture SGLang's graphs",
    "GRAPHRT_VLLM": "1 lets graphrt capture vLLM's graphs",
    "GRAPHRT_VLLM_CAPTURE": "while-serving captures most of vLLM's graphs beside its steps",
    "GRAPHRT_VLLM_CAPTURE_SHARE": "the share of the time that this may take",
    "GRAPHRT_VLLM_REPORT": "a file for the report of each process of vLLM",
    "GRAPHRT_VLLM_ASCEND": "1 lets graphrt capture vllm-ascend's graphs",
}
"""What each is for; `tests/test_cli.py` compares the names with the code."""
PREFIX = "GRAPHRT_"
OTHERS = ("GRAPHRT_SIM_", "GRAPHRT_TEST", "GRAPHRT_TORCH")
"""Prefixes of the variables that the simulated NPU, the tests and the builds read."""


def variables_set(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every `GRAPHRT_*` variable that is set: what it is for, or None and the nearest name."""
    variables = []
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        meaning = VARIABLES.get(name)
        if meaning is None and name.startswith(OTHERS):
            meaning = "read by the simulator, the tests or the builds"
        nearest = None
        if meaning is None:
            nearest = next(iter(difflib.get_close_matches(name, VARIABLES, n=1)), None)
        variables.append(
            {"name": name, "value": environ[name], "meaning": meaning, "nearest": nearest}
        )
    return variables
