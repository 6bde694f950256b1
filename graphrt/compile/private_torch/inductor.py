"""Private names of Inductor: its settings, and the functions that compile and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.compiler.config
from torch import fx

from graphrt.compile.private_torch.names import NAMES, private_attribute

_NO_KEY = "compiled code cannot be kept: use backend='eager'"
_NO_INDUCTOR = "pieces run eagerly, and the figures say why"
_CONFIGS = {
    name: NAMES.declare(f"torch._{name}.config.save_config_portable", without=_NO_KEY)
    for name in ("dynamo", "functorch", "inductor")
}
_INDUCTOR = NAMES.declare("torch._inductor.config", without=_NO_KEY)
_BACKENDS = NAMES.declare("torch._inductor.codegen.common", without=_NO_KEY)
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "_fuse_ddp_communication_passes",
)
"""Settings that no file can hold. Not every version has them all."""
# The whole path: the shorter one is the module of the same name.
_COMPILE = NAMES.declare(
    "torch._inductor.standalone_compile.standalone_compile", without=_NO_INDUCTOR
)
_TRACING = NAMES.declare("torch._guards.tracing", without=_NO_INDUCTOR)
_TRACING_CONTEXT = NAMES.declare("torch._guards.TracingContext", without=_NO_INDUCTOR)
_LOAD = NAMES.declare("torch._inductor.CompiledArtifact.load", without="pieces are compiled again")
_REGISTER = NAMES.declare(
    "torch._inductor.codegen.common.init_backend_registration", without=_NO_INDUCTOR
)
_SCHEDULING = NAMES.declare(
    "torch._inductor.codegen.common.get_scheduling_for_device", without=_NO_INDUCTOR
)
_CPP_COMPILER = NAMES.declare("torch._inductor.cpp_builder.get_cpp_compiler", without=_NO_INDUCTOR)
_HAS_TRITON = NAMES.declare("torch.utils._triton.has_triton", without=_NO_INDUCTOR)
_DIRECTORY = NAMES.declare(
    "torch._inductor.runtime.cache_dir_utils.temporary_cache_dir",
    without="pieces are compiled again, after a warning",
)

_DEFAULT_DIRECTORY = NAMES.declare(
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    without="TORCHINDUCTOR_CACHE_DIR has to be set",
)

SaveFormat = Literal["binary", "unpacked"]


class Artifact(Protocol):
    """Inductor's code of a graph; it returns a tuple."""

    def __call__(self, *args: Any) -> Any: ...

    def save(self, *, path: str, format: SaveFormat) -> None: ...


def compiler_settings() -> dict[str, Any]:
    """Every setting of Dynamo, AOTAutograd and Inductor that changes code, private ones too,
    "dynamo.NAME"; and passes and backends that users have added to Inductor's."""
    found = {
        f"{prefix}.{name}": value
        for prefix, save in _CONFIGS.items()
        for name, value in save.find()(ignore_private_configs=False).items()
        if not name.startswith(("_save_config", "_cache_config"))
    }
    passes = {name: getattr(_INDUCTOR.find(), name, None) for name in _PASSES}
    found.update((f"inductor.{name}", each) for name, each in passes.items() if each)
    backends = _BACKENDS.find()
    for table in ("custom_backend_passes", "custom_backend_codegen_configs"):
        for device, each in getattr(backends, table, {}).items():
            if each is not None:
                save = getattr(each, "save_config_portable", None)
                found[f"{table}.{device}"] = each if save is None else save()
    return found


def generates_code(device_type: str) -> bool:
    """Whether Inductor can compile for a device; imports it, and raises if it lacks a name."""
    for name in (_COMPILE, _CPP_COMPILER, _HAS_TRITON):
        name.find()
    _REGISTER.find()()
    return _SCHEDULING.find()(device_type) is not None


def find_cpp_compiler() -> None:
    """Raise whatever Inductor raises where there is no C++ compiler."""
    _CPP_COMPILER.find()()


def has_triton() -> bool:
    """Whether Triton is there for the current device."""
    return bool(_HAS_TRITON.find()())


def inductor_compile(
    graph: fx.GraphModule, inputs: Sequence[Any], *, static: bool, settings: Mapping[str, Any]
) -> Artifact:
    """Code for the shapes of a graph, or with `static` for those of `inputs`."""
    modes = (
        []
        if static
        else [private_attribute(i, "fake_mode", _NO_INDUCTOR) for i in inputs if _is_fake(i)]
    )
    # Inductor takes the fake mode from the graph's results. Without a tensor among them it makes
    # another mode, with symbols of its own.
    context = _TRACING.find()(_TRACING_CONTEXT.find()(modes[0])) if modes else nullcontext()
    shapes = "from_tracing_context" if modes else "from_graph"
    with context:
        artifact: Artifact = _COMPILE.find()(
            graph,
            list(inputs),
            dynamic_shapes="from_example_inputs" if static else shapes,
            options={"config_patches": settings},
        )
    return artifact


def _is_fake(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")


def load_artifact(path: Path, save_format: SaveFormat) -> Artifact:
    """The code that `Artifact.save` wrote."""
    artifact: Artifact = _LOAD.find()(path=str(path), format=save_format)
    return artifact


def compiler_caches_apart(tag: str) -> AbstractContextManager[Any]:
    """The compiler's own caches find code of the block under this tag only. They look code up by
    its graph, and take operators of one name for one, though their bodies differ."""
    config: Any = torch.compiler.config
    before = config.cache_key_tag
    block: AbstractContextManager[Any] = config.patch(cache_key_tag=f"{before} graphrt {tag}")
    return block


def compiler_directory(path: str) -> AbstractContextManager[Any]:
    """Inductor's caches are at `path` in the block, for the whole process."""
    block: AbstractContextManager[Any] = _DIRECTORY.find()(path)
    return block


def default_compiler_directory() -> str:
    """Where Inductor keeps its caches unless it is told, and C++ headers in any case."""
    return str(_DEFAULT_DIRECTORY.find()())
