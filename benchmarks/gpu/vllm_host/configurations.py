"""What is compared: configurations of vLLM by name, captured sizes, and batches."""

import importlib.util
from typing import Any

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256]
BATCHES = (1, 3, 8, 37, 64)
TIMED = (1, 8, 64)
SERVING_STEPS = 1500
"""Steps of the model under load."""
PIECES = {"mode": 3, "backend": "eager"}
"""Split by Dynamo at attention, and not compiled: that is not what is compared, and takes long."""


def configurations() -> dict[str, dict[str, Any]]:
    """Name -> options."""
    found: dict[str, dict[str, Any]] = {
        "v2-full_and_piecewise-inductor": {
            "runner": "v2",
            "compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        },
        "v1-full_and_piecewise-profiled": {
            "runner": "v1",
            "profile": True,
            "compilation": {**PIECES, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        },
    }
    for runner in ("v2", "v1"):
        found[f"{runner}-piecewise"] = {
            "runner": runner,
            "compilation": {**PIECES, "cudagraph_mode": "PIECEWISE"},
        }
        found[f"{runner}-full_decode_only"] = {
            "runner": runner,
            "compilation": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
        found[f"{runner}-breakable"] = {
            "runner": runner,
            "compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
            "env": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        }
        found[f"{runner}-lora"] = {
            "runner": runner,
            "lora": True,
            "compilation": {**PIECES, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        }
    found["v1-inductor_partition"] = {
        "runner": "v1",
        "compilation": {"use_inductor_graph_partition": True, "cudagraph_mode": "PIECEWISE"},
    }
    has_numba = importlib.util.find_spec("numba") is not None
    ngram = {"method": "ngram" if has_numba else "ngram_gpu", "prompt_lookup_max": 3}
    for name, speculative in (("ngram", ngram), ("draft", {"method": "draft_model"})):
        found[f"v1-{name}"] = {
            "runner": "v1",
            "speculative": {"num_speculative_tokens": 3, **speculative},
            "repeating": name == "ngram",
            "compilation": {**PIECES, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        }
    for runner in ("v2", "v1"):
        for defect in ("none", "baked", "stale"):
            found[f"{runner}-tried-{defect}"] = {
                "runner": runner,
                "defect": defect,
                "compilation": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
                "env": {"GRAPHRT_CHECK": "first"},
            }
    mixed = {**PIECES, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    while_serving = {"GRAPHRT_VLLM_CAPTURE": "while-serving"}
    switches = {
        "vllm": {"GRAPHRT_VLLM": "0"},
        "upfront": {},
        "while": while_serving,
        "checked": {**while_serving, "GRAPHRT_CHECK": "first"},
        "eager": {"GRAPHRT_VLLM": "0"},
    }
    loads: dict[str, dict[str, Any]] = {
        "": {},
        "-lora": {"lora": True},
        "-draft": {"speculative": {"num_speculative_tokens": 3, "method": "draft_model"}},
        "-ngram": {"speculative": {"num_speculative_tokens": 3, **ngram}},
    }
    for runner, more in (*(("v1", more) for more in loads), ("v2", ""), ("v2", "-lora")):
        for kind, env in switches.items():
            options = {"runner": runner, "serving": kind, "env": env, "compilation": mixed}
            found[f"{runner}{more}-serving-{kind}"] = options | loads[more]
    found["v2-mode_none"] = {
        "runner": "v2",
        "off": True,
        "env": {"GRAPHRT_MODE": "NONE"},
        "compilation": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    return found
