"""Putting graphrt into a vllm-ascend that is installed, and taking it out again.

Everything that depends on the version of vllm-ascend is the tables at the top. Newer versions are
served if they have these names, arguments and fields. A graph of theirs that waits for its updates
in another way is refused when it is captured: see `graphrt.hosts.vllm_ascend.wrapper`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import Any

from graphrt.ascend.driver.library import has_value_wait
from graphrt.core.base.errors import UnsupportedHostError
from graphrt.hosts.engine import Replaced, switched_on
from graphrt.hosts.names import missing_arguments, missing_names
from graphrt.hosts.vllm_ascend.engine import Engine
from graphrt.hosts.vllm_ascend.params import GraphParams
from graphrt.hosts.vllm_ascend.updating import updated_by
from graphrt.hosts.vllm_ascend.wrapper import ACLGraphWrapper

MODULE = "vllm_ascend.compilation.acl_graph"
OLDEST = (0, 23)
"""The oldest vllm-ascend whose names, below, were looked at."""

REPLACED = ("ACLGraphWrapper", "GraphParams", "update_full_graph_params")
READ = (
    "CUDAGraphOptions",
    "_acl_graph_wrappers",
    "compilation_counter",
    "current_platform",
    "envs",
    "get_forward_context",
    "logger",
    "validate_cudagraph_capturing_enabled",
)
GETTERS = ("get_graph_params", "get_draft_graph_params", "get_draft_graph_prefill_params")
ARGUMENTS = {
    (MODULE, "ACLGraphWrapper.__init__"): (
        "runnable",
        "vllm_config",
        "runtime_mode",
        "cudagraph_options",
        "use_eagle",
        "enable_enpu",
    ),
    (MODULE, "update_full_graph_params"): (
        "attn_backend",
        "update_stream",
        "forward_context",
        "num_tokens",
    ),
}
FIELDS = ("events", "workspaces", "handles", "attn_params")
"""Of `GraphParams`."""

SWITCH = "GRAPHRT_VLLM_ASCEND"

_OLDEST_TEXT = ".".join(map(str, OLDEST))

_replaced = Replaced("vllm_ascend")


def install() -> None:
    """Let graphrt capture and replay what vllm-ascend captures, in this process.

    To be called in each worker before the model is loaded. Raises `UnsupportedHostError` where
    vllm-ascend is missing, of a version that is not known, or has graphs already.
    """
    if _replaced:
        return
    version = _version()
    module = importlib.import_module(MODULE)
    names = {MODULE: (*REPLACED, *READ, *GETTERS)}
    missing = [*missing_names(names), *missing_arguments(ARGUMENTS)]
    fields = tuple(inspect.signature(module.GraphParams).parameters) if not missing else FIELDS
    if missing or fields != FIELDS:
        raise UnsupportedHostError(
            f"vllm-ascend {version} is not as graphrt knows it",
            got=", ".join(f"no {each}" for each in missing) or f"GraphParams{fields}",
            expected=f"the names of vllm-ascend {_OLDEST_TEXT}, and GraphParams{FIELDS}",
            advice="install an older one, or leave graphrt out",
        )
    if not has_value_wait():
        # vllm-ascend's own graphs lack that wait too: see `Groups` in graphrt/ascend/update.
        raise UnsupportedHostError(
            "without a value wait of CANN a graph of the engine does not wait for its updates",
            expected="a CANN with aclrtValueWait",
            advice="install a newer CANN",
        )
    begun = [name for name in GETTERS if getattr(module, name)() is not None]
    if begun or len(module._acl_graph_wrappers):
        raise UnsupportedHostError(
            "the engine has wrapped a model already, or begun to capture",
            got=", ".join(begun) or f"{len(module._acl_graph_wrappers)} wrappers",
            expected="install() before the engine loads its model",
            advice="GRAPHRT_VLLM_ASCEND=1 where the process starts, or install() right after the "
            "import",
        )
    engine = Engine(module)
    replacements: dict[str, Any] = {
        "ACLGraphWrapper": type("ACLGraphWrapper", (ACLGraphWrapper,), {"engine": engine}),
        "GraphParams": GraphParams,
        "update_full_graph_params": updated_by(engine, module.update_full_graph_params),
    }
    with _replaced.all_or_none():
        for name, value in replacements.items():
            _replaced.rebind(name, getattr(module, name), value)


def uninstall() -> None:
    """Give vllm-ascend its own graphs back; wrappers that exist already stay graphrt's."""
    _replaced.put_back()


def install_if_asked() -> None:
    """`install()` if the variable GRAPHRT_VLLM_ASCEND is 1: vLLM calls it in each of its processes,
    as the plugin `graphrt_vllm_ascend`."""
    if switched_on(SWITCH):
        install()


def _version() -> str:
    try:
        version = importlib.metadata.version("vllm-ascend")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedHostError(
            "vllm-ascend is not installed",
            expected=f"vllm-ascend {_OLDEST_TEXT} or newer",
            advice="pip install vllm-ascend",
        ) from error
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise UnsupportedHostError(
            "graphrt does not know this version of vllm-ascend",
            got=version,
            expected=f"{_OLDEST_TEXT} or newer",
            advice="install one of these, or leave graphrt out",
        )
    return version
