"""vLLM's graphs, by graphrt: `GRAPHRT_VLLM=1` and nothing else. See `docs/how-to/vllm.md`.

vLLM loads `platform` and `install` by its entry points, the first while it finds out what it runs
on: nothing of vLLM is imported with this package, and without the variable not at all.
"""

from __future__ import annotations

from typing import Any

from graphrt import RunnerReport
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.installing import asked, install_into_vllm, uninstall
from graphrt.hosts.vllm.platform import platform_type, serves
from graphrt.hosts.vllm.wrapper import wrapper_type

__all__ = [
    "install",
    "platform",
    "platform_type",
    "report",
    "uninstall",
    "weights_changed",
    "wrapper_type",
]


def platform() -> str | None:
    """The path of vLLM's platform with graphrt in it; None unless GRAPHRT_VLLM=1 and vLLM, of a
    version that is served, finds NVIDIA GPUs. (Entry point of `vllm.platform_plugins`.)"""
    return f"{__name__}.GraphrtCudaPlatform" if asked() and serves() else None


def install() -> None:
    """Let graphrt capture and replay what vLLM captures, in this process, if GRAPHRT_VLLM=1.

    (Entry point of `vllm.general_plugins`, which vLLM calls in each process before it loads a
    model; called again it changes nothing.) Raises `UnsupportedHostError` for a vLLM of another
    version, for one without the names that graphrt replaces, and off NVIDIA GPUs.
    """
    if asked():
        install_into_vllm()


def report() -> RunnerReport:
    """The graphs that vLLM has captured in this process, with their steps, seconds and bytes, and
    how many steps ran eagerly. See `graphrt.hosts.table` for its limits."""
    return state.report()


def weights_changed(worker: Any = None) -> int:
    """Compare the weights of vLLM's models in this process with where graphs read them; returns how
    many tensors have moved. If some have, all graphs are destroyed: steps run eagerly until
    `worker.model_runner.capture_model()` is called. For hosts that write weights themselves, also
    as `llm.collective_rpc(weights_changed)`; `reload_weights` does the same."""
    return state.weights.changed("the host")


def __getattr__(name: str) -> Any:
    # vLLM resolves both by their dotted path.
    if name == "GraphrtCudaPlatform":
        from vllm.platforms.cuda import CudaPlatform

        return platform_type(CudaPlatform)
    if name == "GraphrtWrapper":
        return wrapper_type()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
