"""Putting graphrt into a vllm-ascend that is installed, and taking it out again.

A version is served if its names are of the kinds that graphrt knows: see `_differences`. A graph of
theirs that waits for its updates in another way is refused when it is captured: see
`graphrt.hosts.vllm_ascend.wrapper`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from graphrt.ascend.driver.library import has_value_wait
from graphrt.core.base.errors import UnsupportedHostError
from graphrt.hosts.engine import Replaced, switched_on
from graphrt.hosts.names import missing_arguments, missing_names
from graphrt.hosts.vllm_ascend.engine import Engine
from graphrt.hosts.vllm_ascend.missing import refusing_first
from graphrt.hosts.vllm_ascend.params import GraphParams
from graphrt.hosts.vllm_ascend.updating import updated_by
from graphrt.hosts.vllm_ascend.wrapper import ACLGraphWrapper

MODULE = "vllm_ascend.compilation.acl_graph"
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
    (MODULE, "update_full_graph_params"): (
        "attn_backend",
        "update_stream",
        "forward_context",
        "num_tokens",
    ),
}

SWITCH = "GRAPHRT_VLLM_ASCEND"

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
    differences = list(_differences(module))
    if differences:
        raise UnsupportedHostError(
            f"vllm-ascend {version} is not as graphrt knows it",
            got="; ".join(differences),
            expected="the names, arguments and fields of vllm-ascend 0.23 to 0.27.1",
            advice="install one of these, or leave graphrt out",
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
    npu = torch.npu  # type: ignore[attr-defined]
    with _replaced.all_or_none():
        for name, value in replacements.items():
            _replaced.rebind(name, getattr(module, name), value)
        for owner in (npu, npu.Stream, npu.Event):
            _replaced.replace(owner, "synchronize", refusing_first(owner.synchronize))
        # It waits for the device too, and keeps Python's other threads from ending the graph.
        _replaced.replace(npu, "empty_cache", refusing_first(npu.empty_cache))


def uninstall() -> None:
    """Give vllm-ascend its own graphs back; wrappers that exist already stay graphrt's."""
    _replaced.put_back()


def install_if_asked() -> None:
    """`install()` if the variable GRAPHRT_VLLM_ASCEND is 1: vLLM calls it in each of its processes,
    as the plugin `graphrt_vllm_ascend`."""
    if switched_on(SWITCH):
        install()


def _differences(module: Any) -> Iterator[str]:
    """How vllm-ascend's names differ from those that graphrt serves. Arguments and methods of its
    wrapper that graphrt's lacks are told too: an engine that uses them updates in another way."""
    missing = missing_names({MODULE: (*REPLACED, *READ, *GETTERS)})
    lacking = [f"no {each}" for each in (*missing, *missing_arguments(ARGUMENTS))]
    yield from lacking
    if lacking:
        return
    theirs, ours = module.ACLGraphWrapper, ACLGraphWrapper
    taken, served = (set(inspect.signature(each).parameters) for each in (theirs, ours))
    yield from (f"argument {each!r} of ACLGraphWrapper" for each in sorted(taken ^ served))
    methods = (name for name, value in vars(theirs).items() if inspect.isroutine(value))
    yield from (f"ACLGraphWrapper.{each}()" for each in methods if not hasattr(ours, each))
    fields, known = (
        tuple(inspect.signature(each).parameters) for each in (module.GraphParams, GraphParams)
    )
    if fields != known:
        yield f"GraphParams{fields}"


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-ascend")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedHostError(
            "vllm-ascend is not installed",
            expected="vllm-ascend 0.23 or newer",
            advice="pip install vllm-ascend",
        ) from error
